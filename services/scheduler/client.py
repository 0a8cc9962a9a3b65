"""A client of SchedulerService: dataclasses in and out, a token on every call, deadlines on all but the watches."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.common.errors import ConfigError
from services.common.grpc import DEFAULT_DEADLINE_S, channel, error_from_status
from services.common.types import CellRole, CellRoute, RouteTable
from services.common.wire import KIND_FROM_PB, ROLE_FROM_PB, ROLE_TO_PB, STATE_FROM_PB
from services.pb import scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.types import CellView, ClusterState, LoggedDecision, LoggedEvent, PolicyView, RunView


class SchedulerClient:
    """Talks to one job's scheduler. ``job_id`` may stay empty: then it is the job of the server at ``address``.

    Errors: ``AccessError`` (token), ``NotFoundError`` (another job, an unknown cell), ``ConfigError`` (bad numbers),
    ``RefusedError`` (would break an invariant; nothing was changed), ``MachineError`` (no answer, lost connection).
    """

    def __init__(self, address: str, token: str, job_id: str = "", deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self._job_id = job_id
        self._channel = channel(address, token, deadline_s)
        self._stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)

    async def cluster_state(self) -> ClusterState:
        request = scheduler_pb2.GetClusterStateRequest(job_id=self._job_id)
        answer = await _call(self._stub.GetClusterState(request))
        return ClusterState(
            job_id=answer.job_id,
            status=answer.status,
            step=answer.step,
            steps_target=answer.steps_target,
            version=answer.version,
            dispatched=answer.dispatched,
            started=answer.started,
            ended=answer.ended,
            water_level=answer.water_level,
            ready_groups=answer.ready_groups,
            outstanding_groups=answer.outstanding_groups,
            lost_groups=answer.lost_groups,
            queued_runs=answer.queued_runs,
            running_runs=answer.running_runs,
            policy=_policy(answer.policy),
            reason=answer.reason,
            cells=tuple(_cell(cell) for cell in answer.cells),
        )

    async def list_runs(self, *, live_only: bool = False, limit: int = 0) -> list[RunView]:
        """Newest groups first."""
        request = scheduler_pb2.ListRunsRequest(job_id=self._job_id, live_only=live_only, limit=limit)
        return [_run(run) for run in (await _call(self._stub.ListRuns(request))).runs]

    async def decisions(self, limit: int = 0) -> list[LoggedDecision]:
        """The newest decisions, oldest first."""
        request = scheduler_pb2.GetDecisionsRequest(job_id=self._job_id, limit=limit)
        return [_decision(decision) for decision in (await _call(self._stub.GetDecisions(request))).decisions]

    async def cancel(self, reason: str) -> None:
        """End the job in good order: what was trained is saved."""
        await _call(self._stub.CancelJob(scheduler_pb2.CancelJobRequest(job_id=self._job_id, reason=reason)))

    async def drain_cell(self, cell_id: str) -> None:
        """Let a cell be quiet, without runs and without training, until it is undrained."""
        await _call(self._stub.DrainCell(scheduler_pb2.DrainCellRequest(job_id=self._job_id, cell_id=cell_id)))

    async def undrain_cell(self, cell_id: str) -> None:
        """Give a drained cell back to the job."""
        await _call(self._stub.UndrainCell(scheduler_pb2.UndrainCellRequest(job_id=self._job_id, cell_id=cell_id)))

    async def switch_cell(self, cell_id: str, role: CellRole) -> None:
        """Move a cell now, to ``TRAIN`` or ``ROLLOUT``. One that moved to rollout stays until the burst ends."""
        request = scheduler_pb2.SwitchCellRequest(job_id=self._job_id, cell_id=cell_id, role=ROLE_TO_PB[role])
        await _call(self._stub.SwitchCell(request))

    async def set_policy(
        self, *, carry_over_steps: float | None = None, steps_per_burst: int | None = None, mode: str | None = None
    ) -> int:
        """Change phi, mu or the mode (None: as it is); returns the step of the burst boundary from which it holds."""
        try:
            request = scheduler_pb2.SetPolicyRequest(
                job_id=self._job_id, carry_over_steps=carry_over_steps, steps_per_burst=steps_per_burst, mode=mode
            )
        except ValueError as error:
            raise ConfigError(f"cannot be sent: {error}.", "steps_per_burst is a number of 32 bits.") from error
        from_step: int = (await _call(self._stub.SetPolicy(request))).from_step
        return from_step

    async def watch_events(self, after_sequence: int = 0) -> AsyncIterator[LoggedEvent]:
        """Events behind ``after_sequence``, then new ones; ends with the job. (Kind ``EventsSkipped``: see the log.)"""
        request = scheduler_pb2.WatchEventsRequest(job_id=self._job_id, after_sequence=after_sequence)
        async for event in _stream(self._stub.WatchEvents(request)):
            decisions = tuple(_decision(decision) for decision in event.decisions)
            yield LoggedEvent(event.sequence, event.at_s, event.kind, json.loads(event.payload_json), decisions)

    async def watch_routes(self) -> AsyncIterator[RouteTable]:
        """The current route table, then newer ones (epochs rise, some may be left out); ends with the job."""
        request = scheduler_pb2.WatchRoutesRequest(job_id=self._job_id)
        async for table in _stream(self._stub.WatchRoutes(request)):
            yield RouteTable(
                epoch=table.epoch,
                cells=tuple(
                    CellRoute(
                        route.cell_id, route.actor_name, STATE_FROM_PB[route.state], route.version, route.free_slots
                    )
                    for route in table.cells
                ),
                affinity=tuple(table.affinity.items()),
            )

    async def close(self) -> None:
        await self._channel.close()


async def _call(call: Any) -> Any:
    try:
        return await call
    except grpc.RpcError as error:
        raise error_from_status(error) from error


async def _stream(call: Any) -> AsyncIterator[Any]:
    try:
        async for message in call:
            yield message
    except grpc.RpcError as error:
        raise error_from_status(error) from error


def _cell(cell: scheduler_pb2.Cell) -> CellView:
    return CellView(
        cell.cell_id,
        ROLE_FROM_PB[cell.role],
        STATE_FROM_PB[cell.state],
        cell.version,
        cell.slots,
        cell.num_runs,
        KIND_FROM_PB[cell.kind],
        cell.draining,
        cell.reason,
    )


def _policy(policy: scheduler_pb2.Policy) -> PolicyView:
    pending = {field.name: value for field, value in policy.pending.ListFields() if field.name != "from_step"}
    return PolicyView(
        mode=policy.mode,
        streaming=policy.streaming,
        rule=policy.rule,
        train_cells=policy.train_cells,
        carry_over_steps=policy.carry_over_steps,
        steps_per_burst=policy.steps_per_burst,
        pending=pending,
        pending_from_step=policy.pending.from_step if policy.HasField("pending") else None,
    )


def _run(run: scheduler_pb2.Run) -> RunView:
    return RunView(
        run_id=run.run_id,
        group_id=run.group_id,
        task_name=run.task_name,
        attempt=run.attempt,
        status=run.status,
        reward=run.reward if run.HasField("reward") else None,
        cell_id=run.cell_id,
        version=run.version,
        is_eval=run.is_eval,
    )


def _decision(decision: scheduler_pb2.Decision) -> LoggedDecision:
    return LoggedDecision(
        decision.sequence, decision.at_s, decision.action, json.loads(decision.payload_json), decision.reason
    )
