"""The runs of a running job, read over gRPC by a user's command."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from services.common.errors import AccessError, MachineError
from services.job.access import DEADLINE_S, Access
from services.trajectory.client import TrajectoryClient
from services.trajectory.encoding import CallRow
from services.trajectory.export import GroupFacts, ScoreFacts
from services.trajectory.store import RunFilter
from services.trajectory.types import RunSummary

_T = TypeVar("_T")


class RemoteSource:
    """A ``RunSource`` over gRPC, for code that is not asynchronous. One connection for as long as it is open."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._runner = asyncio.Runner()
        self._groups: dict[str, GroupFacts] = {}
        self._scores: dict[str, ScoreFacts] = {}

    def __enter__(self) -> Self:
        self._client = self._runner.run(self._connect())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    @property
    def job_id(self) -> str:
        return self._client.job_id

    def list_runs(self, filters: RunFilter) -> list[RunSummary]:
        async def collect() -> list[RunSummary]:
            return [run async for run in self._client.summaries(filters)]

        return self._ask(collect())

    def read_calls(self, run_id: str, attempt: int | None = None) -> tuple[RunSummary, Sequence[CallRow]]:
        async def collect() -> tuple[RunSummary, list[CallRow]]:
            summary, group, score = await self._client.run(run_id)
            self._groups, self._scores = {summary.group_id: group}, {run_id: score}
            wanted = summary.attempt if attempt is None else attempt
            return summary, [row async for row in self._client.calls(run_id, wanted)]

        return self._ask(collect())

    def group(self, group_id: str) -> GroupFacts:
        """The group of the run that was read last."""
        return self._groups.get(group_id, GroupFacts())

    def score(self, run: RunSummary) -> ScoreFacts:
        """That of the run that was read last."""
        return self._scores.get(run.run_id, ScoreFacts())

    async def _connect(self) -> TrajectoryClient:
        access = self._access
        return TrajectoryClient(access.address, access.token, access.job_id, DEADLINE_S)

    def _ask(self, question: Coroutine[Any, Any, _T]) -> _T:
        try:
            return self._runner.run(question)
        except MachineError as error:
            raise self._access.unreachable(error.message) from error
        except AccessError as error:
            hint = "Was it taken from TIDEGATE_TOKEN, or is it another job's?"
            raise AccessError(f"{self._access.address} refused the token.", hint) from error
