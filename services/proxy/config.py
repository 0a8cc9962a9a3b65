"""Configuration of the proxy."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.common.errors import ConfigError
from services.proxy.parsing.choice import check_parser_names


class ProxyConfig(BaseModel):
    """The model server that the harnesses see."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    """Address to bind. A public one needs ``admin_token``."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port; 0 takes a free one."""
    num_replicas: int = Field(default=1, ge=1)
    """Copies of the proxy; any of them can take any call."""
    max_body_bytes: int = Field(default=64 << 20, ge=1024)
    """Larger requests are refused (413)."""
    keep_alive_s: float = Field(default=15, gt=0)
    """A stream that is silent for so long carries a comment, so that nothing on the way gives it up."""
    call_timeout_s: float = Field(default=600, gt=0)
    """A call that no cell could finish by then fails (503 with retry-after)."""
    max_ongoing_calls: int = Field(default=2048, ge=1)
    """Requests that one replica serves at once; further ones are refused (429 with retry-after)."""
    body_timeout_s: float = Field(default=60, gt=0)
    """A request whose body is not there after this long is refused (408); where its head is not, its connection is
    closed."""
    send_timeout_s: float = Field(default=60, gt=0)
    """A client that takes nothing of its answer for this long is disconnected, and its call aborted."""
    tool_parser: str = "auto"
    """How the model writes tool calls: the name of one of vLLM's tool parsers, 'none', or 'auto' to choose by the
    model's chat template and type."""
    reasoning_parser: str = "auto"
    """The same for its reasoning."""
    admin_token: str = ""
    """Must be set, and not to a known default, before ``host`` may be anything but a loopback address."""
    tls_cert: str = ""
    """PEM file with the certificate and its chain: the proxy then speaks https only. A relative path starts at the
    configuration file."""
    tls_key: str = ""
    """PEM file with the certificate's private key, without a password."""
    public_url: str = ""
    """How harnesses reach the proxy, where a load balancer or another name stands before it; empty:
    ``http://host:port`` (``https`` with ``tls_cert``), for a host of 0.0.0.0 with the address of the job's node."""

    @model_validator(mode="after")
    def _parsers_exist(self) -> ProxyConfig:
        check_parser_names(self.tool_parser, self.reasoning_parser)
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> ProxyConfig:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key go together: set both or neither")
        return self

    @model_validator(mode="after")
    def _public_url_is_one(self) -> ProxyConfig:
        if self.public_url and not is_base_url(self.public_url):
            raise ValueError(
                f"public_url {self.public_url!r} is no base URL: write http:// or https://, the host, a port where it "
                "is another than the usual one, and no query"
            )
        return self


_KNOWN_TOKENS = frozenset(
    {"admin", "changeme", "change-me", "default", "password", "secret", "test", "tidegate", "token", "123456"}
)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach an address. An unknown host name counts as public."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_base_url(url: str) -> bool:
    """Whether a path can be put behind a text so that an HTTP client finds it."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    is_plain = not parts.query and not parts.fragment and not any(character.isspace() for character in url)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and is_plain


def refuse_public_bind(config: ProxyConfig) -> None:
    """Raises ``ConfigError`` if the proxy would listen publicly with no token or a known default one."""
    refuse_weak_token("proxy.host", config.host, "proxy.admin_token", config.admin_token)


def refuse_weak_token(host_key: str, host: str, token_key: str, token: str) -> None:
    """Raises ``ConfigError`` if an address is public and its token is empty or a known default. The keys are those
    of the configuration."""
    token = token.strip()
    if is_loopback(host) or (token and token.lower() not in _KNOWN_TOKENS):
        return
    found = f"a known default {token_key}" if token else f"no {token_key}"
    raise ConfigError(
        f"{host_key} {host!r} is reachable from other machines, and there is {found}.",
        f"Set {token_key} to a long random string, or {host_key} to 127.0.0.1.",
    )
