"""SchedulerService over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.errors import AccessError, ConfigError, MachineError, NotFoundError, RefusedError
from services.common.grpc import channel
from services.common.types import CellKind, CellRole, CellState
from services.pb import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.actions import StartRun
from services.scheduler.actor import JobScheduler
from services.scheduler.client import SchedulerClient
from services.scheduler.events import CellJoined
from tests.unit.scheduler.live import IdealPerformer
from tests.unit.scheduler.long_runs import LongRuns
from tests.unit.scheduler.world import options
from tests.waiting import until

TOKEN = "token-of-this-test"


class Server:
    """A scheduler whose first step is held until ``performer.hold`` is set."""

    def __init__(self, performer: IdealPerformer | None = None, **changes: Any) -> None:
        self.performer = performer or IdealPerformer()
        self.performer.hold.clear()
        self.scheduler = JobScheduler(options(**{"steps": 2, **changes}), self.performer, grpc_token=TOKEN)

    async def start(self) -> None:
        self.address = await self.scheduler.start()

    async def join(self) -> None:
        await self.scheduler.post(CellJoined("cell-0", 4, CellKind.CORE))
        await self.scheduler.post(CellJoined("cell-1", 4))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    await made.start()
    yield made
    await made.scheduler.close()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[SchedulerClient]:
    made = SchedulerClient(server.address, TOKEN, "job")
    yield made
    await made.close()


@pytest.fixture
async def busy() -> AsyncIterator[tuple[Server, LongRuns, SchedulerClient]]:
    """A job whose runs fill both of its cells (8 slots for 12 runs), until they are told to end."""
    performer = LongRuns()
    made = Server(performer, steps=40, carry_over_steps=2.0)
    await made.start()
    await made.join()
    await until(lambda: len(performer.running) == 8)
    client = SchedulerClient(made.address, TOKEN, "job")
    yield made, performer, client
    await client.close()
    await made.scheduler.close()


async def until_training(client: SchedulerClient) -> None:
    async with asyncio.timeout(30):
        async for event in client.watch_events():
            if any(decision.action == "TrainStep" for decision in event.decisions):
                return


async def test_a_call_with_the_wrong_token_is_refused(server) -> None:
    stranger = SchedulerClient(server.address, "another-token")
    with pytest.raises(AccessError, match="token"):
        await stranger.cluster_state()
    with pytest.raises(AccessError, match="token"):
        await anext(stranger.watch_routes())
    await stranger.close()


async def test_a_call_without_a_token_is_refused(server) -> None:
    async with grpc.aio.insecure_channel(server.address) as plain:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(plain)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetClusterState(scheduler_pb2.GetClusterStateRequest(), timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_and_reflection_need_no_token(server) -> None:
    name = "tidegate.v1.SchedulerService"
    async with grpc.aio.insecure_channel(server.address) as plain:
        health = health_pb2_grpc.HealthStub(plain)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(plain)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for response in reflection.ServerReflectionInfo(iter([request]), timeout=10):
            assert name in {service.name for service in response.list_services_response.service}
            break


async def test_cluster_state_shows_cells_counters_and_step(server, client) -> None:
    await server.join()
    await until_training(client)
    state = await client.cluster_state()
    assert (state.job_id, state.status, state.step, state.steps_target, state.version) == ("job", "running", 0, 2, 0)
    assert state.water_level == state.dispatched - state.ended == 0
    assert state.dispatched == 8
    core, satellite = state.cells
    assert (core.kind, core.role) == (CellKind.CORE, CellRole.TRAIN)
    assert (satellite.kind, satellite.state, satellite.version) == (CellKind.SATELLITE, CellState.SERVING, 0)
    policy = state.policy
    assert (policy.mode, policy.rule, policy.streaming, policy.train_cells) == ("elastic", "paper", False, 1)
    assert (policy.carry_over_steps, policy.steps_per_burst, policy.pending) == (1.0, 1, {})


async def test_runs_are_listed_with_outcome_and_reward(server, client) -> None:
    await server.join()
    await until_training(client)
    runs = await client.list_runs()
    assert len(runs) == 8
    assert {(run.status, run.reward) for run in runs} == {("finished", 1.0)}
    assert len(await client.list_runs(limit=3)) == 3
    assert await client.list_runs(live_only=True) == []


async def test_decisions_carry_reasons_with_numbers(server, client) -> None:
    await server.join()
    await until_training(client)
    decisions = await client.decisions()
    switch = next(decision for decision in decisions if decision.action == "SwitchCell")
    assert switch.reason.startswith("core leaves rollout: w=")
    assert "<= C_R - C_core = 4 and 2 groups are ready of the 2 that it needs" in switch.reason
    assert switch.payload["cell_id"] == "cell-0"
    assert await client.decisions(limit=1) == decisions[-1:]


async def test_another_job_is_not_found(server) -> None:
    stranger = SchedulerClient(server.address, TOKEN, "another-job")
    for call in (
        stranger.cluster_state(),
        stranger.list_runs(),
        stranger.decisions(),
        stranger.cancel(""),
        stranger.drain_cell("cell-1"),
        stranger.undrain_cell("cell-1"),
        stranger.switch_cell("cell-1", CellRole.TRAIN),
        stranger.set_policy(steps_per_burst=1),
    ):
        with pytest.raises(NotFoundError, match="another-job"):
            await call
    with pytest.raises(NotFoundError, match="another-job"):
        await anext(stranger.watch_events())
    await stranger.close()


async def test_negative_numbers_are_refused(server, client) -> None:
    with pytest.raises(ConfigError, match="limit=-1"):
        await client.list_runs(limit=-1)
    with pytest.raises(ConfigError, match="after_sequence=-5"):
        await anext(client.watch_events(-5))


async def test_a_call_ends_at_its_deadline(server) -> None:
    async with channel(server.address, TOKEN) as open_channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(open_channel)
        watch = stub.WatchEvents(scheduler_pb2.WatchEventsRequest(job_id="job"), timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in watch:
                pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_server_that_is_gone_is_a_machine_error(server) -> None:
    await server.scheduler.close()
    client = SchedulerClient(server.address, TOKEN, deadline_s=5)
    with pytest.raises(MachineError, match="still running"):
        await client.cluster_state()
    await client.close()


async def test_route_watchers_get_rising_epochs_until_the_job_ends(server, client) -> None:
    watches = [asyncio.create_task(_all_routes(client)) for _ in range(3)]
    await server.join()
    server.performer.hold.set()
    async with asyncio.timeout(30):
        histories = await asyncio.gather(*watches)
    for tables in histories:
        epochs = [table.epoch for table in tables]
        assert epochs == sorted(set(epochs))
        routes = {(route.cell_id, route.actor_name) for table in tables for route in table.cells}
        assert {("cell-1", "job/cell-1/rollout")} <= routes
        assert routes <= {("cell-0", "job/cell-0/rollout"), ("cell-1", "job/cell-1/rollout")}
    assert len({tables[-1].epoch for tables in histories}) == 1, "all watchers end with the newest table"


async def test_event_watchers_get_every_event_in_order(server, client) -> None:
    watch = asyncio.create_task(_all_events(client))
    await server.join()
    server.performer.hold.set()
    async with asyncio.timeout(30):
        events = await watch
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert events[0].kind == "JobStarted"
    assert any(decision.action == "FinishJob" for decision in events[-1].decisions)


async def test_cancel_job_ends_the_job(server, client) -> None:
    await server.join()
    await until_training(client)
    await client.cancel("the user had enough")
    server.performer.hold.set()
    status = await server.scheduler.wait_done(30)
    assert (status["status"], status["reason"]) == ("cancelled", "the user had enough")


async def test_the_runs_of_a_drained_cell_go_on_elsewhere(busy) -> None:
    _, performer, client = busy
    before = {run.run_id for run in await client.list_runs(live_only=True) if run.cell_id == "cell-1"}
    assert len(before) == 4
    await client.drain_cell("cell-1")
    core, satellite = (await client.cluster_state()).cells
    assert (satellite.is_draining, satellite.num_runs, satellite.state) == (True, 0, CellState.SERVING)
    assert core.num_runs == 8
    runs = [run for run in await client.list_runs(live_only=True) if run.status == "running"]
    assert before < {run.run_id for run in runs}, "no run was ended"
    assert {(run.cell_id, run.attempt) for run in runs} == {("cell-0", 0)}
    table = await anext(client.watch_routes())
    assert [route.cell_id for route in table.cells] == ["cell-0"]
    assert set(dict(table.affinity)) == {run_id for run_id, _ in performer.running}


async def test_an_undrained_cell_serves_again_after_an_update(busy) -> None:
    server, performer, client = busy

    def cell_1() -> dict[str, Any]:
        return server.scheduler.snapshot()["cells"][1]

    def ends_runs_until(condition: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: performer.end_runs() or condition()

    await client.drain_cell("cell-1")
    performer.hold.set()
    await until(ends_runs_until(lambda: server.scheduler.snapshot()["version"] >= 1))
    assert cell_1()["num_runs"] == 0
    assert not any(action.cell_id == "cell-1" for action in performer.did(StartRun)[8:]), "a drained cell gets no runs"
    await client.undrain_cell("cell-1")
    await until(ends_runs_until(lambda: cell_1()["num_runs"] > 0))
    _, satellite = (await client.cluster_state()).cells
    assert (satellite.is_draining, satellite.state) == (False, CellState.SERVING)
    assert satellite.version >= 1


async def test_the_core_is_not_drained(busy) -> None:
    _, _, client = busy
    with pytest.raises(RefusedError, match="cell-0 is the core"):
        await client.drain_cell("cell-0")
    assert not (await client.cluster_state()).cells[0].is_draining


async def test_a_manual_switch_that_breaks_eq_5_is_refused_with_the_numbers(busy) -> None:
    _, _, client = busy
    with pytest.raises(
        RefusedError, match=r"cell-0 cannot go to train: w=12 > C_R - C_core = 4 and 0 groups are ready"
    ):
        await client.switch_cell("cell-0", CellRole.TRAIN)
    with pytest.raises(RefusedError, match="fixed order, cell-0 is next"):
        await client.switch_cell("cell-1", CellRole.TRAIN)
    state = await client.cluster_state()
    assert {cell.role for cell in state.cells} == {CellRole.ROLLOUT}
    assert not any(decision.action == "SwitchCell" for decision in await client.decisions())


async def test_a_manual_switch_is_performed_and_shows_its_reason(server, client) -> None:
    await server.join()
    cells = server.scheduler.snapshot
    await until(lambda: [cell["role"] for cell in cells()["cells"]] == [CellRole.TRAIN, CellRole.TRAIN])
    await client.switch_cell("cell-1", CellRole.ROLLOUT)
    await until(lambda: cells()["cells"][1]["role"] is CellRole.ROLLOUT)
    newest = [decision for decision in await client.decisions() if decision.action == "SwitchCell"][-1]
    assert (newest.payload["cell_id"], newest.payload["role"]) == ("cell-1", "rollout")
    assert "a user wants it" in newest.reason


async def test_a_policy_holds_from_the_next_burst_boundary_on(busy) -> None:
    server, performer, client = busy
    assert await client.set_policy(carry_over_steps=0.0) == 1
    policy = (await client.cluster_state()).policy
    assert (policy.mode, policy.carry_over_steps, policy.steps_per_burst) == ("elastic", 2.0, 1)
    assert (policy.pending, policy.pending_from_step) == ({"carry_over_steps": 0.0}, 1)
    assert (await client.cluster_state()).outstanding_groups == 6, "nothing changes inside the burst"
    performer.hold.set()
    await until(lambda: performer.end_runs() or server.scheduler.snapshot()["version"] >= 1)
    policy = (await client.cluster_state()).policy
    assert (policy.carry_over_steps, policy.pending, policy.pending_from_step) == (0.0, {}, None)


async def test_a_second_request_adds_to_the_policy_that_is_pending(busy) -> None:
    _, _, client = busy
    await client.set_policy(carry_over_steps=0.5)
    await client.set_policy(steps_per_burst=2, mode="colocate")
    policy = (await client.cluster_state()).policy
    assert policy.pending == {"mode": "colocate", "carry_over_steps": 0.5, "steps_per_burst": 2}


async def test_requests_stand_in_the_event_log_with_what_followed(busy) -> None:
    _, _, client = busy
    await client.set_policy(steps_per_burst=2)
    await client.drain_cell("cell-1")
    kinds: dict[str, Any] = {}
    async with asyncio.timeout(30):
        async for event in client.watch_events():
            kinds[event.kind] = event.payload
            if event.kind == "DrainRequested":
                break
    assert kinds["DrainRequested"]["cell_id"] == "cell-1"
    assert kinds["PolicyRequested"]["steps_per_burst"] == 2


async def test_requests_of_a_job_that_ends_are_refused(busy) -> None:
    _, _, client = busy
    await client.cancel("enough")
    for call in (client.drain_cell("cell-1"), client.set_policy(mode="async")):
        with pytest.raises(RefusedError, match="enough"):
            await call


MALFORMED = [
    ("DrainCell", {"cell_id": ""}, "cell_id is empty"),
    ("UndrainCell", {"cell_id": ""}, "cell_id is empty"),
    ("SwitchCell", {"cell_id": "", "role": common_pb2.CELL_ROLE_TRAIN}, "cell_id is empty"),
    ("SwitchCell", {"cell_id": "cell-1"}, "role unspecified. Send CELL_ROLE_TRAIN or CELL_ROLE_ROLLOUT"),
    ("SwitchCell", {"cell_id": "cell-1", "role": common_pb2.CELL_ROLE_TO_TRAIN}, "role to_train. Send CELL_ROLE_TRAIN"),
    ("SwitchCell", {"cell_id": "cell-1", "role": common_pb2.CELL_ROLE_DOWN}, "role down. Send"),
    ("SwitchCell", {"cell_id": "cell-1", "role": 77}, "role 77. Send"),
    ("SetPolicy", {}, "nothing to set"),
    ("SetPolicy", {"carry_over_steps": -0.5}, "is -0.5. Give a number of steps, 0 or more"),
    ("SetPolicy", {"carry_over_steps": math.nan}, "is nan. Give a number of steps, 0 or more"),
    ("SetPolicy", {"carry_over_steps": math.inf}, "is inf. Give a number of steps, 0 or more"),
    ("SetPolicy", {"carry_over_steps": 1e300}, "max_staleness_steps=8 is below"),
    ("SetPolicy", {"steps_per_burst": 0}, "is 0. Give a number of steps, 1 or more"),
    ("SetPolicy", {"steps_per_burst": -3}, "is -3. Give a number of steps, 1 or more"),
    ("SetPolicy", {"steps_per_burst": 2**31 - 1}, "max_staleness_steps=8 is below"),
    ("SetPolicy", {"mode": "elastik"}, "no policy mode 'elastik'. Modes are async, colocate, elastic"),
    ("SetPolicy", {"mode": ""}, "no policy mode ''"),
    ("GetDecisions", {"limit": -1}, "limit=-1 is negative"),
    ("ListRuns", {"limit": -1}, "limit=-1 is negative"),
]


@pytest.mark.parametrize(("method", "fields", "says"), MALFORMED)
async def test_a_malformed_request_is_an_invalid_argument_that_says_what_would_be_right(
    server, method: str, fields: dict[str, Any], says: str
) -> None:
    await _join_and_wait(server)
    code, details = await _refused(server, method, fields)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert says in details


@pytest.mark.parametrize("method", ["DrainCell", "UndrainCell", "SwitchCell"])
async def test_an_unknown_cell_is_not_found_and_the_known_ones_are_named(server, method: str) -> None:
    await _join_and_wait(server)
    fields = {"cell_id": "cell-9"} | ({"role": common_pb2.CELL_ROLE_TRAIN} if method == "SwitchCell" else {})
    code, details = await _refused(server, method, fields)
    assert code is grpc.StatusCode.NOT_FOUND
    assert "cell-9" in details
    assert "cell-0, cell-1" in details


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("DrainCell", {"cell_id": "cell-0"}),
        ("UndrainCell", {"cell_id": "cell-1"}),
        ("SwitchCell", {"cell_id": "cell-1", "role": common_pb2.CELL_ROLE_ROLLOUT}),
    ],
)
async def test_a_request_that_breaks_an_invariant_is_a_failed_precondition(busy, method: str, fields) -> None:
    server, _, _ = busy
    before = server.scheduler.snapshot()
    code, details = await _refused(server, method, fields)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details
    assert server.scheduler.snapshot() == before


@pytest.mark.parametrize("method", ["DrainCell", "UndrainCell", "SwitchCell", "SetPolicy"])
async def test_requests_need_the_token(server, method: str) -> None:
    code, details = await _refused(server, method, {}, token="another-token")
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "another-token" not in details


async def test_a_number_that_no_message_holds_is_refused_by_the_client(client) -> None:
    with pytest.raises(ConfigError, match="32 bits"):
        await client.set_policy(steps_per_burst=2**40)


async def _join_and_wait(server: Server) -> None:
    await server.join()
    await until(lambda: len(server.scheduler.snapshot()["cells"]) == 2)


async def _refused(
    server: Server, method: str, fields: dict[str, Any], token: str = TOKEN
) -> tuple[grpc.StatusCode, str]:
    """Code and details of a call that has to fail."""
    async with channel(server.address, token) as open_channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(open_channel)
        request = getattr(scheduler_pb2, f"{method}Request")(job_id="job", **fields)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stub, method)(request)
    return caught.value.code(), caught.value.details() or ""


async def _all_routes(client: SchedulerClient) -> list:
    return [table async for table in client.watch_routes()]


async def _all_events(client: SchedulerClient) -> list:
    return [event async for event in client.watch_events()]
