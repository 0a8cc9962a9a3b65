from __future__ import annotations

import pytest

from services.common.errors import ConfigError
from services.proxy.config import ProxyConfig, refuse_public_bind


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    refuse_public_bind(ProxyConfig(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gpu-node-3", ""])
@pytest.mark.parametrize("token", ["", "  ", "admin", "changeme", "Tidegate", "password", "secret"])
def test_public_bind_with_a_default_secret_is_refused(host: str, token: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_public_bind(ProxyConfig(host=host, admin_token=token))
    assert "admin_token" in caught.value.hint


def test_public_bind_with_a_real_token_is_accepted() -> None:
    refuse_public_bind(ProxyConfig(host="0.0.0.0", admin_token="b7e0c1f2a9"))


@pytest.mark.parametrize("url", ["http://proxy", "https://proxy.example:8443/models/", "http://[fd00::1]:7070"])
def test_a_public_url_may_have_a_port_and_a_path(url: str) -> None:
    assert ProxyConfig(public_url=url).public_url == url


@pytest.mark.parametrize(
    "url",
    [
        "proxy",
        "proxy:8080",
        "ftp://proxy",
        "http://",
        "http://proxy:x",
        "http://proxy:70000",
        "http://proxy?a=1",
        "http://a b",
    ],
)
def test_a_public_url_that_harnesses_could_not_use_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is no base URL"):
        ProxyConfig(public_url=url)
