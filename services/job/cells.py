"""Watches the rollout sides of a job's cells: brings them up, tells when they die and come back, has their clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from services.common.errors import EngineError, TidegateError
from services.common.ids import CellId
from services.common.remote import one_line
from services.common.types import CellKind, CellState
from services.rollout.client import CellClient
from services.rollout.types import CellStatus, UpdateResult
from services.scheduler.events import CellJoined, CellLost, CellReported, Event
from services.trainer.types import WeightManifest

Emit = Callable[[Event], None]

POLL_S = 1.0
RESTART_PAUSE_S = 2.0
START_MARGIN_S = 60.0  # what a cell needs besides its engine: a process, imports, its first answer
POLL_TIMEOUT_S = 60.0
_RESTART_TIMEOUT_S = 120.0
_MAX_FAILED_STARTS = 3


class Cells:
    """The rollout sides of a job's cells. ``kind_of`` says what a cell is when it joins; ``lost`` hears of its end."""

    def __init__(
        self,
        actors: Mapping[CellId, Any],
        grpc_token: str,
        start_timeout_s: float,
        kind_of: Callable[[CellId], CellKind],
        lost: Callable[[CellId], None],
    ) -> None:
        self._actors = dict(actors)
        self._token = grpc_token
        self._start_timeout_s = start_timeout_s + START_MARGIN_S
        self._kind_of = kind_of
        self._lost = lost
        self._clients: dict[str, CellClient] = {}
        self._looked_at = {cell_id: asyncio.Event() for cell_id in self._actors}
        """Set once it is known whether a cell is up."""
        self._is_recovered = False
        self._known: set[str] = set()
        """Cells that were up when the scheduler's process died, until they were looked at."""
        self._num_updates: Counter[str] = Counter()
        """Weight updates that were begun or have ended: what a cell says of itself in between is old."""

    def recover(self, cell_ids: Collection[str]) -> None:
        """The job goes on: these cells were up, and any other may be, too."""
        self._is_recovered, self._known = True, set(cell_ids)

    async def attend(self, emit: Emit) -> None:
        """Watch every cell until cancelled: bring it up, notice its death, bring it up again."""
        await asyncio.gather(*(self._attend_cell(cell_id, emit) for cell_id in self._actors))

    async def client(self, cell_id: str) -> CellClient:
        """Waits until the cell was looked at. Raises ``EngineError`` for a cell that never came up."""
        await self._looked_at[CellId(cell_id)].wait()
        if cell_id not in self._clients:
            raise EngineError(f"{cell_id} is not up.", "See its log for the reason.")
        return self._clients[cell_id]

    async def update(self, cell_id: str, manifest: WeightManifest, timeout_s: float) -> UpdateResult:
        """Have a cell take in new weights."""
        client = await self.client(cell_id)
        self._num_updates[cell_id] += 1
        try:
            return await client.publish(manifest, timeout_s)
        finally:
            self._num_updates[cell_id] += 1

    async def _attend_cell(self, cell_id: CellId, emit: Emit) -> None:
        actor = self._actors[cell_id]
        joined = self._is_recovered
        num_failed_starts = 0  # since it was up last
        while True:
            try:
                num_failed_starts += 1
                address, status = await self._start(actor)
                if old := self._clients.pop(cell_id, None):
                    await old.close()
                self._clients[cell_id] = CellClient(address, self._token)
                joined, num_failed_starts = True, 0
                emit(self._first_word(cell_id, status))
                self._looked_at[cell_id].set()
                await self._poll(cell_id, status.slots, emit)
            except (RayError, TidegateError, TimeoutError) as error:
                self._known.discard(cell_id)
                self._lost(cell_id)
                emit(CellLost(cell_id, one_line(error), may_return=joined))
                if not joined:
                    self._looked_at[cell_id].set()
                    return  # what never came up stays lost
                is_dead = isinstance(error, RayActorError) and not await comes_back(actor)
                if is_dead or num_failed_starts >= _MAX_FAILED_STARTS:
                    emit(CellLost(cell_id, f"{one_line(error)} (it does not come up again)"))
                    self._looked_at[cell_id].set()
                    return
                await asyncio.sleep(RESTART_PAUSE_S)

    async def _start(self, actor: Any) -> tuple[str, CellStatus]:
        """A cell's gRPC address and first status. Raises ``EngineError`` at a deadline behind the engine's own."""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                return await actor.start.remote(), await actor.status.remote()
        except TimeoutError:
            raise EngineError(
                f"the cell was not up after {self._start_timeout_s:g} s.",
                "Does the cluster have what rollout.cells.cpus_per_cell and gpus_per_cell ask for? Else raise "
                "rollout.engine.start_timeout_s.",
            ) from None

    def _first_word(self, cell_id: CellId, status: CellStatus) -> Event:
        """What a cell that is up now means to the core: one that was up before only reports itself."""
        was_up = cell_id in self._known
        self._known.discard(cell_id)
        if was_up and status.version >= 0:
            return _report(status)
        if was_up:
            self._lost(cell_id)
        return CellJoined(cell_id, status.slots, self._kind_of(cell_id))

    async def _poll(self, cell_id: CellId, slots: int, emit: Emit) -> None:
        """Look at a cell until it fails; tell when its slots have changed."""
        while True:
            await asyncio.sleep(POLL_S)
            num_updates = self._num_updates[cell_id]
            status = await self._look_at(self._actors[cell_id])
            is_settled = num_updates % 2 == 0 and num_updates == self._num_updates[cell_id]
            if status.slots != slots and is_settled and status.version >= 0:
                slots = status.slots
                emit(_report(status))

    async def _look_at(self, actor: Any) -> CellStatus:
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                status: CellStatus = await actor.status.remote()
                return status
        except TimeoutError:
            raise EngineError(
                f"the cell gave no answer within {POLL_TIMEOUT_S:g} s.", "It is taken back when it answers."
            ) from None


def _report(status: CellStatus) -> CellReported:
    serves = status.state is CellState.SERVING
    return CellReported(status.cell_id, status.slots, status.version if serves else -1)


async def comes_back(actor: Any) -> bool:
    """Wait until Ray has made an actor again; False if it does not (its restarts are used up)."""
    try:
        async with asyncio.timeout(_RESTART_TIMEOUT_S):
            while True:
                try:
                    await actor.__ray_ready__.remote()
                    return True
                except ActorUnavailableError:  # while it restarts, Ray refuses what may not run twice
                    await asyncio.sleep(POLL_S)
    except (RayError, TimeoutError):
        return False
