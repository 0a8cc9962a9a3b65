"""SchedulerService: translates between protobuf and the scheduler's own types, and nothing else."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import grpc

from services.common.errors import ConfigError
from services.common.grpc import errors_as_status, serve, stream_errors_as_status
from services.common.types import CellRole, RouteTable
from services.common.wire import KIND_TO_PB, ROLE_FROM_PB, ROLE_TO_PB, STATE_TO_PB
from services.pb import scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.events import DrainRequested, PolicyRequested, Request, SwitchRequested, UndrainRequested
from services.scheduler.options import PolicyMode
from services.scheduler.types import LoggedDecision, LoggedEvent, RunView

SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name

NUM_RUNS_BY_DEFAULT = 200
"""Runs or decisions in an answer when the request names no limit."""


class Scheduler(Protocol):
    """What the servicer needs of the scheduler. ``check_job`` raises ``NotFoundError`` for another job's id."""

    def check_job(self, job_id: str) -> None: ...
    def snapshot(self) -> dict[str, Any]: ...
    def runs(self, *, live_only: bool, limit: int) -> list[RunView]: ...
    def decisions(self, limit: int) -> list[LoggedDecision]: ...
    def watch_events(self, after_sequence: int) -> AsyncIterator[LoggedEvent]: ...
    def watch_routes(self) -> AsyncIterator[RouteTable]: ...
    async def cancel(self, reason: str) -> None: ...
    async def request(self, request: Request) -> int: ...


async def serve_scheduler(
    scheduler: Scheduler,
    *,
    host: str,
    port: int,
    token: str,
    others: Sequence[tuple[Callable[[grpc.aio.Server], None], str]] = (),
) -> tuple[grpc.aio.Server, str]:
    """Serve one job's scheduler; returns the server with its address.

    ``others``: services that the same server has too, each as what adds it and its name.
    """
    add = functools.partial(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, SchedulerServicer(scheduler))
    adds: list[Callable[[grpc.aio.Server], None]] = [add, *(one for one, _ in others)]
    names = [SERVICE_NAME, *(name for _, name in others)]
    return await serve(adds, names, host=host, port=port, token=token)


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """The gRPC face of a job's scheduler. An empty job id means the job of this server."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @errors_as_status
    async def GetClusterState(self, request: Any, context: Any) -> scheduler_pb2.GetClusterStateResponse:  # noqa: N802
        self._scheduler.check_job(request.job_id)
        return cluster_state_to_pb(self._scheduler.snapshot())

    @errors_as_status
    async def ListRuns(self, request: Any, context: Any) -> scheduler_pb2.ListRunsResponse:  # noqa: N802
        self._scheduler.check_job(request.job_id)
        runs = self._scheduler.runs(live_only=request.live_only, limit=_limit(request.limit))
        return scheduler_pb2.ListRunsResponse(runs=[run_to_pb(run) for run in runs])

    @errors_as_status
    async def GetDecisions(self, request: Any, context: Any) -> scheduler_pb2.GetDecisionsResponse:  # noqa: N802
        self._scheduler.check_job(request.job_id)
        decisions = self._scheduler.decisions(_limit(request.limit))
        return scheduler_pb2.GetDecisionsResponse(decisions=[decision_to_pb(decision) for decision in decisions])

    @errors_as_status
    async def CancelJob(self, request: Any, context: Any) -> scheduler_pb2.CancelJobResponse:  # noqa: N802
        self._scheduler.check_job(request.job_id)
        await self._scheduler.cancel(request.reason or "cancelled through gRPC")
        return scheduler_pb2.CancelJobResponse()

    @errors_as_status
    async def DrainCell(self, request: Any, context: Any) -> scheduler_pb2.DrainCellResponse:  # noqa: N802
        self._scheduler.check_job(request.job_id)
        await self._scheduler.request(DrainRequested(_cell_id(request.cell_id)))
        return scheduler_pb2.DrainCellResponse()

    @errors_as_status
    async def UndrainCell(self, request: Any, context: Any) -> scheduler_pb2.UndrainCellResponse:  # noqa: N802
        self._scheduler.check_job(request.job_id)
        await self._scheduler.request(UndrainRequested(_cell_id(request.cell_id)))
        return scheduler_pb2.UndrainCellResponse()

    @errors_as_status
    async def SwitchCell(self, request: Any, context: Any) -> scheduler_pb2.SwitchCellResponse:  # noqa: N802
        self._scheduler.check_job(request.job_id)
        await self._scheduler.request(SwitchRequested(_cell_id(request.cell_id), _target_role(request.role)))
        return scheduler_pb2.SwitchCellResponse()

    @errors_as_status
    async def SetPolicy(self, request: Any, context: Any) -> scheduler_pb2.SetPolicyResponse:  # noqa: N802
        self._scheduler.check_job(request.job_id)
        from_step = await self._scheduler.request(policy_from_pb(request))
        return scheduler_pb2.SetPolicyResponse(from_step=from_step)

    @stream_errors_as_status
    async def WatchEvents(self, request: Any, context: Any) -> AsyncIterator[scheduler_pb2.Event]:  # noqa: N802
        self._scheduler.check_job(request.job_id)
        if request.after_sequence < 0:
            raise ConfigError(f"after_sequence={request.after_sequence} is negative.", "0 starts with the oldest kept.")
        async for event in self._scheduler.watch_events(request.after_sequence):
            yield event_to_pb(event)

    @stream_errors_as_status
    async def WatchRoutes(self, request: Any, context: Any) -> AsyncIterator[scheduler_pb2.RouteTable]:  # noqa: N802
        self._scheduler.check_job(request.job_id)
        async for table in self._scheduler.watch_routes():
            yield routes_to_pb(table)


def _limit(limit: int) -> int:
    if limit < 0:
        raise ConfigError(f"limit={limit} is negative.", f"0 means {NUM_RUNS_BY_DEFAULT}.")
    return limit or NUM_RUNS_BY_DEFAULT


def _cell_id(cell_id: str) -> str:
    if not cell_id:
        raise ConfigError("cell_id is empty.", "Name one of the cells that GetClusterState lists, as cell-1.")
    return cell_id


def _target_role(number: int) -> CellRole:
    role = ROLE_FROM_PB.get(number)
    if role not in (CellRole.TRAIN, CellRole.ROLLOUT):
        given = "unspecified" if number == 0 else role or number
        raise ConfigError(f"a cell cannot be switched to role {given}.", "Send CELL_ROLE_TRAIN or CELL_ROLE_ROLLOUT.")
    return role


def policy_from_pb(request: scheduler_pb2.SetPolicyRequest) -> PolicyRequested:
    modes = [str(mode) for mode in PolicyMode]
    if request.HasField("mode") and request.mode not in modes:
        raise ConfigError(f"no policy mode {request.mode!r}.", f"Modes are {', '.join(modes)}.")
    policy = PolicyRequested(
        carry_over_steps=request.carry_over_steps if request.HasField("carry_over_steps") else None,
        steps_per_burst=request.steps_per_burst if request.HasField("steps_per_burst") else None,
        mode=PolicyMode(request.mode) if request.HasField("mode") else None,
    )
    if policy == PolicyRequested():
        raise ConfigError("nothing to set.", "Set carry_over_steps (phi), steps_per_burst (mu) or mode.")
    return policy


def policy_to_pb(policy: dict[str, Any]) -> scheduler_pb2.Policy:
    numbers = {name: value for name, value in policy.items() if not name.startswith("pending")}
    message = scheduler_pb2.Policy(**numbers)
    if policy["pending"]:
        message.pending.CopyFrom(
            scheduler_pb2.PendingPolicy(from_step=policy["pending_from_step"], **policy["pending"])
        )
    return message


def cluster_state_to_pb(snapshot: dict[str, Any]) -> scheduler_pb2.GetClusterStateResponse:
    return scheduler_pb2.GetClusterStateResponse(
        job_id=snapshot["job_id"],
        status=snapshot["status"],
        step=snapshot["step"],
        steps_target=snapshot["steps_target"],
        version=snapshot["version"],
        dispatched=snapshot["dispatched"],
        started=snapshot["started"],
        ended=snapshot["ended"],
        ready_groups=snapshot["ready_groups"],
        outstanding_groups=snapshot["outstanding_groups"],
        water_level=snapshot["water_level"],
        lost_groups=snapshot["lost_groups"],
        queued_runs=snapshot["queued_runs"],
        running_runs=snapshot["active_runs"],
        reason=snapshot["reason"],
        policy=policy_to_pb(snapshot["policy"]),
        cells=[
            scheduler_pb2.Cell(
                cell_id=cell["cell_id"],
                role=ROLE_TO_PB[cell["role"]],
                state=STATE_TO_PB[cell["state"]],
                version=cell["version"],
                slots=cell["slots"],
                num_runs=cell["num_runs"],
                kind=KIND_TO_PB[cell["kind"]],
                draining=cell["is_draining"],
                reason=cell["reason"],
            )
            for cell in snapshot["cells"]
        ],
    )


def run_to_pb(run: RunView) -> scheduler_pb2.Run:
    return scheduler_pb2.Run(
        run_id=run.run_id,
        group_id=run.group_id,
        task_name=run.task_name,
        attempt=run.attempt,
        status=run.status,
        reward=run.reward,
        cell_id=run.cell_id,
        version=run.version,
        is_eval=run.is_eval,
    )


def decision_to_pb(decision: LoggedDecision) -> scheduler_pb2.Decision:
    return scheduler_pb2.Decision(
        sequence=decision.sequence,
        at_s=decision.at_s,
        action=decision.action,
        payload_json=json.dumps(decision.payload),
        reason=decision.reason,
    )


def event_to_pb(event: LoggedEvent) -> scheduler_pb2.Event:
    return scheduler_pb2.Event(
        sequence=event.sequence,
        at_s=event.at_s,
        kind=event.kind,
        payload_json=json.dumps(event.payload),
        decisions=[decision_to_pb(decision) for decision in event.decisions],
    )


def routes_to_pb(table: RouteTable) -> scheduler_pb2.RouteTable:
    return scheduler_pb2.RouteTable(
        epoch=table.epoch,
        cells=[
            scheduler_pb2.CellRoute(
                cell_id=route.cell_id,
                actor_name=route.actor_name,
                state=STATE_TO_PB[route.state],
                version=route.version,
                free_slots=route.free_slots,
            )
            for route in table.cells
        ],
        affinity=dict(table.affinity),
    )
