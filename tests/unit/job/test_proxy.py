from __future__ import annotations

import time
from pathlib import Path

import pytest

from services.common.errors import JobError, MachineError
from services.common.ids import JobId
from services.job import proxy
from services.job.proxy import ProxyPlace, await_answer, reserved_place, serve_running
from services.proxy.app import create_app
from services.proxy.backends import Routes
from services.proxy.config import ProxyConfig
from services.proxy.listener import HttpListener, reserve_port
from services.proxy.parsing import PlainParser
from tests.unit.proxy.certificates import self_signed
from tests.unit.proxy.fakes import FakeBackends, FakeCell, FakeShard

JOB = JobId("job-1")


@pytest.mark.parametrize(
    ("config", "harness_url", "own_url"),
    [
        ({}, "http://127.0.0.1:7000", "http://127.0.0.1:7000"),
        ({"host": "0.0.0.0"}, "http://10.0.0.5:7000", "http://127.0.0.1:7000"),
        ({"host": "10.0.0.9"}, "http://10.0.0.9:7000", "http://10.0.0.9:7000"),
        ({"tls_cert": "c", "tls_key": "k"}, "https://127.0.0.1:7000", "https://127.0.0.1:7000"),
        ({"public_url": "https://models.example/x/"}, "https://models.example/x", "http://127.0.0.1:7000"),
    ],
)
def test_harnesses_and_the_job_itself_are_given_addresses_that_they_reach(
    config: dict[str, str], harness_url: str, own_url: str
) -> None:
    place = ProxyPlace(ProxyConfig(port=7000, **config), "10.0.0.5")  # type: ignore[arg-type]
    assert (place.harness_url, place.own_url) == (harness_url, own_url)


class Cluster:
    """What Ray tells of the nodes."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    def nodes(self) -> list[dict[str, object]]:
        return [
            {"NodeID": f"node-{index}", "NodeManagerAddress": address, "Alive": True}
            for index, address in enumerate(self.addresses)
        ]

    def get_runtime_context(self) -> Cluster:
        return self

    def get_node_id(self) -> str:
        return "node-0"


def test_a_port_is_held_for_as_long_as_the_job_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "ray", Cluster("127.0.0.1"))
    with reserved_place(ProxyConfig()) as place:
        port = place.config.port
        assert port > 0
        with pytest.raises(MachineError, match=r"proxy\.port"), reserved_place(ProxyConfig(port=port)):
            pass
    with reserved_place(ProxyConfig(port=port)) as again:
        assert again.config.port == port


def test_a_loopback_address_for_runs_on_other_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "ray", Cluster("10.0.0.5", "10.0.0.6"))
    with pytest.raises(MachineError, match=r"all 2 of the cluster.*proxy\.public_url"), reserved_place(ProxyConfig()):
        pass
    with reserved_place(ProxyConfig(public_url="http://balancer")) as place:
        assert place.harness_url == "http://balancer"
    with reserved_place(ProxyConfig(host="0.0.0.0")) as place:
        assert place.harness_url == f"http://10.0.0.5:{place.config.port}"


class Serve:
    """Ray Serve, with the applications of a cluster."""

    def __init__(self, *names: str) -> None:
        self.applications = dict.fromkeys(names)
        self.started_with: list[str] = []
        self.is_shut_down = False

    def status(self) -> Serve:
        return self

    def start(self, *, proxy_location: str) -> None:
        self.started_with.append(proxy_location)

    def delete(self, name: str) -> None:
        del self.applications[name]

    def shutdown(self) -> None:
        self.is_shut_down = True


def test_proxies_whose_job_was_killed_are_deleted_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_actor(name: str, _namespace: str) -> object:
        if name != "living/scheduler":
            raise ValueError(name)
        return object()

    serve, cluster = Serve("tidegate-living", "tidegate-killed", "somebody-elses"), Cluster("127.0.0.1")
    cluster.get_actor = get_actor  # type: ignore[attr-defined]
    monkeypatch.setattr(proxy, "serve", serve)
    monkeypatch.setattr(proxy, "ray", cluster)
    with serve_running(own_cluster=False):
        assert list(serve.applications) == ["tidegate-living", "somebody-elses"]
        assert serve.started_with == ["Disabled"]
    assert not serve.is_shut_down


@pytest.mark.parametrize(("own_cluster", "is_shut_down"), [(False, True), (True, False)])
def test_the_last_job_of_a_shared_cluster_shuts_serve_down(
    own_cluster: bool, is_shut_down: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = Serve()
    monkeypatch.setattr(proxy, "serve", serve)
    with serve_running(own_cluster=own_cluster):
        pass
    assert serve.is_shut_down == is_shut_down


@pytest.mark.parametrize("tls", [False, True])
def test_a_proxy_is_up_when_it_answers_for_this_job_and_knows_its_routes(tls: bool, tmp_path: Path) -> None:
    cert, key = (str(path) for path in self_signed(tmp_path)) if tls else ("", "")
    backends = FakeBackends(FakeShard(), a=FakeCell())
    table = backends.routes.table
    backends._routes = Routes()
    with reserve_port("127.0.0.1", 0) as placeholder:
        config = ProxyConfig(port=placeholder.getsockname()[1], tls_cert=cert, tls_key=key)
        place = ProxyPlace(config, "127.0.0.1")
        with pytest.raises(JobError, match="ConnectError"):
            await_answer(JOB, place, time.monotonic())
        listener = HttpListener(create_app(JOB, config, "m", backends, PlainParser()), config)
        listener.start()
        try:
            with pytest.raises(JobError, match="does not know the scheduler's routes yet"):
                await_answer(JOB, place, time.monotonic())
            backends.routes.offer(table)
            await_answer(JOB, place, time.monotonic() + 20)
            with pytest.raises(JobError, match="belongs to another job"):
                await_answer(JobId("job-2"), place, time.monotonic())
        finally:
            listener.stop()
