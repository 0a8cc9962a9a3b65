from __future__ import annotations

import socket

import pytest

from services.common.errors import MachineError
from services.job.cluster import check_port, check_resources, cluster_address, free_port, ray_cluster
from services.job.config import JobConfig, RayConfig


def job(**sections: object) -> JobConfig:
    return JobConfig.model_validate({"tasks": {"train": "t"}, **sections})


def test_a_job_that_asks_for_more_than_its_cluster_offers_is_refused() -> None:
    config = job(rollout={"cells": {"gpus_per_cell": 1}})
    with pytest.raises(MachineError, match="asks for 2 GPUs, and the cluster offers 0"):
        check_resources(config, {"CPU": 4.0})
    check_resources(config, {"CPU": 4.0, "GPU": 2.0})
    with pytest.raises(MachineError, match=r"asks for 8\.5 CPUs"):
        check_resources(job(rollout={"cells": {"cpus_per_cell": 4}}), {"CPU": 4.0})


def test_a_default_job_fits_the_smallest_cluster() -> None:
    check_resources(job(), {"CPU": 4.0})


def test_a_taken_port_is_named_with_its_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=rf"proxy\.port: 127\.0\.0\.1:{port}"):
            check_port("127.0.0.1", port, "proxy.host", "proxy.port")
    check_port("127.0.0.1", free_port(), "proxy.host", "proxy.port")
    check_port("127.0.0.1", 0, "proxy.host", "proxy.port")


@pytest.mark.parametrize("port", [0, 7000])
def test_an_address_of_another_machine_is_named_with_its_key(port: int) -> None:
    with pytest.raises(MachineError, match=r"proxy\.host: cannot listen on 192\.0\.2\.1"):
        check_port("192.0.2.1", port, "proxy.host", "proxy.port")


def test_a_job_joins_the_cluster_that_is_configured_or_surrounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cluster_address(RayConfig()) == ""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert cluster_address(RayConfig()) == "127.0.0.1:6379"
    assert cluster_address(RayConfig(address="10.0.0.1:6379")) == "10.0.0.1:6379"


def test_ray_that_does_not_start_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("services.job.cluster.ray.init", fail)
    with (
        pytest.raises(MachineError, match=r"cannot start Ray: .*during startup\. Free memory") as error,
        ray_cluster(RayConfig()),
    ):
        pass
    assert "try again" in error.value.hint
