"""Starting or joining Ray, and free ports; leaving without a trace."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

from services.common.errors import MachineError
from services.common.names import RAY_NAMESPACE
from services.job.config import JobConfig, RayConfig, training_cells
from services.job.process import signals_interrupt
from services.proxy.listener import cannot_listen

_WORKER_ENV = {
    "OMP_NUM_THREADS": "1",  # several processes share the cores; each sets its own number after its start
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_TRAIN_V2_ENABLED": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_DRIVER_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",  # a job's terminal shows the job; the replicas' logs are files
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # the actors of a job start together; more at once than cores is meant, not a mistake to warn of
    "RAY_worker_maximum_startup_concurrency": "16",
}


@contextlib.contextmanager
def ray_cluster(config: RayConfig) -> Iterator[bool]:
    """Join a cluster or start one; yields whether it was started here. Shuts down only what it started."""
    os.environ.update({key: value for key, value in _DRIVER_ENV.items() if key not in os.environ})
    address = cluster_address(config)
    runtime_env = {"env_vars": _WORKER_ENV}
    try:
        if address:
            ray.init(
                address=address,
                namespace=RAY_NAMESPACE,
                runtime_env=runtime_env,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        else:
            _start_local(config, runtime_env)
    except Exception as error:  # a node that was not up after Ray's 30 s is a bare Exception
        hint = (
            f"Is the cluster at {address} up, and of the same Ray version?"
            if address
            else "Free memory, disk or ports, or set ray.temp_dir to a folder with room; on a busy machine, try again."
        )
        reason = str(error).strip().rstrip(".")
        raise MachineError(f"cannot {'join' if address else 'start'} Ray: {reason}.", hint) from error
    try:
        with signals_interrupt():  # again: Ray took SIGTERM for itself
            yield not address
    finally:
        ray.shutdown()


def _start_local(config: RayConfig, runtime_env: dict[str, Any]) -> None:
    """Start a cluster on this machine. Ray gives a node 30 s, which a busy machine can miss once."""
    for is_last in (False, True):
        try:
            ray.init(
                address="local",
                namespace=RAY_NAMESPACE,
                runtime_env=runtime_env,
                num_cpus=config.num_cpus or max(4, os.cpu_count() or 1),
                object_store_memory=config.object_store_bytes,
                include_dashboard=config.dashboard,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(Path(config.temp_dir).expanduser().resolve()) if config.temp_dir else None,
            )
        except Exception as error:
            ray.shutdown()
            if is_last or "timed out" not in str(error).lower():
                raise
        else:
            return


def cluster_address(config: RayConfig) -> str:
    """The cluster that a job joins; empty: it starts one."""
    return config.address or os.environ.get("RAY_ADDRESS", "")


def check_resources(config: JobConfig, offered: Mapping[str, float]) -> None:
    """Raise ``MachineError`` if a cluster that does not grow lacks what the job's actors ask for: they would wait
    for ever. ``offered``: Ray's resources by name; nothing is known of an empty one."""
    cells, trainer = config.rollout.cells, config.trainer
    num_ranks = len(training_cells(config)) * trainer.num_workers
    needed = {
        "CPU": cells.num_cells * cells.cpus_per_cell + num_ranks * trainer.cpus_per_worker,
        "GPU": cells.num_cells * cells.gpus_per_cell + num_ranks * trainer.gpus_per_worker,
    }
    for name, number in needed.items():
        if offered and number > offered.get(name, 0) + 1e-6:
            raise MachineError(
                f"the job asks for {number:g} {name}s, and the cluster offers {offered.get(name, 0):g}.",
                f"Lower rollout.cells.num_cells, {name.lower()}s_per_cell or trainer.{name.lower()}s_per_worker, raise "
                "ray.num_cpus, or join a larger cluster with ray.address.",
            )


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int, host_key: str, port_key: str) -> None:
    """Raise ``MachineError`` if this machine cannot listen on what the configuration names; any port may be 0."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise cannot_listen(host, port, error, host_key, port_key) from None
