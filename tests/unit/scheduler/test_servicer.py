"""SchedulerService over real gRPC on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.errors import AccessError, ConfigError, MachineError, NotFoundError
from services.common.grpc import channel
from services.common.types import CellKind, CellRole, CellState
from services.pb import scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.actor import JobScheduler
from services.scheduler.client import SchedulerClient
from services.scheduler.events import CellJoined
from tests.unit.scheduler.live import IdealPerformer
from tests.unit.scheduler.world import options

TOKEN = "token-of-this-test"


class Server:
    """A scheduler whose first step is held until ``performer.hold`` is set."""

    def __init__(self) -> None:
        self.performer = IdealPerformer()
        self.performer.hold.clear()
        self.scheduler = JobScheduler(options(steps=2), self.performer, grpc_token=TOKEN)

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
    assert (satellite.role, satellite.state, satellite.version) == (CellRole.ROLLOUT, CellState.SERVING, 0)


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
    [switch] = [decision for decision in decisions if decision.action == "SwitchCell"]
    assert switch.reason.startswith("core leaves rollout: w=")
    assert "<= C_R - C_core = 4 and 2 of 2 groups are ready" in switch.reason
    assert switch.payload["cell_id"] == "cell-0"
    assert await client.decisions(limit=1) == decisions[-1:]


async def test_another_job_is_not_found(server) -> None:
    stranger = SchedulerClient(server.address, TOKEN, "another-job")
    for call in (stranger.cluster_state(), stranger.list_runs(), stranger.decisions(), stranger.cancel("")):
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


async def test_methods_that_are_not_served_say_so(server) -> None:
    async with channel(server.address, TOKEN) as open_channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(open_channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.DrainCell(scheduler_pb2.DrainCellRequest(job_id="job", cell_id="cell-1"))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


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


async def _all_routes(client: SchedulerClient) -> list:
    return [table async for table in client.watch_routes()]


async def _all_events(client: SchedulerClient) -> list:
    return [event async for event in client.watch_events()]
