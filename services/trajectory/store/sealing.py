"""Sealing: the calls of an ended attempt move from their rows into one object.

The object is durable before the rows are emptied, in one transaction that also names it. A process that is killed in
between leaves an object that nothing refers to; it is deleted when the shard's store is opened again. All of this runs
in a thread of its own: it holds up no call, and neither does an object store that is away: then sealing is tried again.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import sqlalchemy as sa

from services.common.errors import TidegateError
from services.trajectory.encoding import payload_of
from services.trajectory.store.group_commit import GroupCommit
from services.trajectory.store.objects import ObjectStore, object_of
from services.trajectory.store.reading import refs_in_use, unsealed_attempts, within
from services.trajectory.store.schema import attempts, calls
from services.trajectory.store.types import Scope

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 300.0


@dataclass
class _Task:
    work: Callable[[], bool]
    future: Future[bool] = field(default_factory=Future)


class Sealer:
    """A thread that moves calls into objects and deletes objects."""

    def __init__(
        self,
        commits: GroupCommit,
        reading: Callable[[], AbstractContextManager[sa.Connection]],
        scope: Scope,
        objects: ObjectStore,
        name: str,
        on_event: Callable[[str, float], None] = lambda series, value: None,
        first_retry_s: float = _FIRST_RETRY_S,
    ) -> None:
        """``on_event`` hears of metrics: sealed bytes, failures."""
        self._commits = commits
        self._reading = reading
        self._scope = scope
        self._objects = objects
        self._count = on_event
        self._first_retry_s = first_retry_s
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._delayed: list[_Task] = []
        self._retry_in_s = first_retry_s
        self._retry_at_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._submit(self._sweep)
        self._thread.start()

    def seal(self, run_id: str, attempt: int) -> Future[bool]:
        """Move the calls of an ended attempt into an object; True once that is done, False if there was nothing to do.

        The future stays open while the object store is away; it is cancelled when the store is closed.
        """
        return self._submit(lambda: self._seal(run_id, attempt))

    def delete(self, refs: list[str]) -> None:
        """Delete objects that nothing refers to any more."""
        if refs:
            self._submit(lambda: self._delete(refs))

    def close(self) -> None:
        """Do what is waiting, unless the object store is away: the next opening of the store does the rest."""
        self._queue.put(None)
        self._thread.join()
        for task in self._delayed:
            task.future.cancel()

    def _submit(self, work: Callable[[], bool]) -> Future[bool]:
        task = _Task(work)
        self._queue.put(task)
        return task.future

    def _run(self) -> None:
        while True:
            try:
                wait_s = max(0.0, self._retry_at_s - time.monotonic()) if self._delayed else None
                task = self._queue.get(timeout=wait_s)
            except queue.Empty:
                delayed, self._delayed = self._delayed, []
                for one in delayed:
                    self._try(one)
                continue
            if task is None:
                return
            self._try(task)

    def _try(self, task: _Task) -> None:
        if self._delayed:  # it would fail as the one before it did
            self._delayed.append(task)
            return
        if task.future.cancelled():
            return
        try:
            done = task.work()
        except TidegateError as error:
            logger.warning("%s Sealing is tried again in %.0f s.", error, self._retry_in_s)
            self._count("tidegate_store_seal_failures_total", 1)
            self._delayed.append(task)
            self._retry_at_s = time.monotonic() + self._retry_in_s
            self._retry_in_s = min(2 * self._retry_in_s, _LAST_RETRY_S)
        except Exception as error:
            logger.exception("sealing failed")
            self._count("tidegate_store_seal_failures_total", 1)
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                task.future.set_exception(error)
        else:
            self._retry_in_s = self._first_retry_s
            with contextlib.suppress(InvalidStateError):
                task.future.set_result(done)

    def _seal(self, run_id: str, attempt: int) -> bool:
        of_attempt = (*within(self._scope, calls), calls.c.run_id == run_id, calls.c.attempt == attempt)
        with self._reading() as db:
            if _is_sealed(db, self._scope, run_id, attempt):
                return False
            rows = db.execute(sa.select(calls).where(*of_attempt).order_by(calls.c.seq)).mappings().all()
        if not rows:
            return False
        data = object_of({row["call_id"]: payload_of(row) for row in rows})
        ref = self._objects.new_ref(f"{run_id}-a{attempt}")
        self._objects.write(ref, data)
        seen = (len(rows), rows[-1]["seq"])

        def refer() -> bool:
            return _refer(self._commits.connection, self._scope, run_id, attempt, seen, ref, len(data))

        if not self._commits.submit(refer).result():  # the attempt changed meanwhile, or its group was replaced
            self._objects.delete(ref)
            return False
        self._count("tidegate_store_sealed_bytes_total", len(data))
        return True

    def _delete(self, refs: list[str]) -> bool:
        for ref in refs:
            self._objects.delete(ref)
        return True

    def _sweep(self) -> bool:
        """Delete what a killed process left, and take up what it left to be sealed."""
        found = self._objects.refs()
        with self._reading() as db:
            in_use = refs_in_use(db, self._scope)
            waiting = unsealed_attempts(db, self._scope)
        orphans = [ref for ref in found if ref not in in_use]
        for ref in orphans:
            self._objects.delete(ref)
        if orphans:
            logger.info("deleted %d objects that a process left behind when it was killed", len(orphans))
        for run_id, attempt in waiting:
            self.seal(run_id, attempt)
        return True


def _is_sealed(db: sa.Connection, scope: Scope, run_id: str, attempt: int) -> bool:
    """Whether an attempt is sealed already, or goes on."""
    query = sa.select(attempts.c.object_ref, attempts.c.result).where(
        *within(scope, attempts), attempts.c.run_id == run_id, attempts.c.attempt == attempt
    )
    found = db.execute(query).one_or_none()
    return found is None or found.object_ref is not None or found.result is None


def _refer(
    db: sa.Connection, scope: Scope, run_id: str, attempt: int, seen: tuple[int, int], ref: str, size_bytes: int
) -> bool:
    """Empty the rows of an attempt's calls and name the object that has them. False if they are not the ones seen."""
    of_calls = (*within(scope, calls), calls.c.run_id == run_id, calls.c.attempt == attempt)
    of_attempt = (*within(scope, attempts), attempts.c.run_id == run_id, attempts.c.attempt == attempt)
    found = db.execute(sa.select(sa.func.count(), sa.func.max(calls.c.seq)).where(*of_calls)).one()
    if tuple(found) != seen or _is_sealed(db, scope, run_id, attempt):
        return False
    db.execute(sa.update(attempts).where(*of_attempt).values(object_ref=ref, size_bytes=size_bytes))
    payload = dict.fromkeys(("prompt", "output", "logprobs", "request", "rest"))
    db.execute(sa.update(calls).where(*of_calls).values(payload))
    return True
