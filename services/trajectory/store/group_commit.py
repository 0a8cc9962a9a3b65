"""Group commit: operations from any thread share transactions, each in a savepoint of its own.

One thread takes operations from a queue and runs them in a transaction. It commits as soon as nothing more is waiting,
and at the latest after the interval; meanwhile the next operations gather. So a single operation waits for nobody, and
many share one flush of the disk. Futures are resolved when the commit that holds their operation is durable.

An operation's own error undoes that operation only. Where a connection breaks before the commit was asked for, nothing
was committed: the operations are run once more on a new connection. Where it breaks in the commit itself, the database
is asked what became of it; only if it does not know do the operations fail.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from services.common.errors import MachineError
from services.trajectory.store.dialect import ends_transaction, first_line, is_committed, transaction_name

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass
class _Operation(Generic[_T]):
    work: Callable[[], _T]
    future: Future[_T] = field(default_factory=Future)
    value: _T | None = None
    error: BaseException | None = None
    after: list[Callable[[], None]] = field(default_factory=list)
    """What is to be done once it is committed."""


class _BrokenError(Exception):
    """The transaction cannot go on."""

    def __init__(self, transaction: str | None = None) -> None:
        super().__init__(transaction)
        self.transaction = transaction
        """Its name, if it may have been committed."""


class GroupCommit:
    """A thread that writes through one connection."""

    def __init__(
        self,
        open_connection: Callable[[], sa.Connection],
        interval_s: float,
        name: str,
        on_commit: Callable[[float, int], None] = lambda seconds, num_operations: None,
    ) -> None:
        """``open_connection`` is called in the thread, again whenever a connection was lost.

        ``on_commit`` hears of each commit: its seconds and the operations in it.
        """
        self._open_connection = open_connection
        self._interval_s = interval_s
        self._on_commit = on_commit
        self._queue: queue.SimpleQueue[_Operation[Any] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        self._connection: sa.Connection | None = None
        self._current: _Operation[Any] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Run ``work`` in a commit. It may use ``connection`` and ``after_commit``."""
        operation = _Operation(work)
        with self._closing:
            if self._is_closed:
                raise MachineError("the store is closed.", "Its shard has ended.")
            self._queue.put(operation)
        return operation.future

    @property
    def is_inside(self) -> bool:
        """Whether the caller is an operation."""
        return threading.current_thread() is self._thread

    @property
    def connection(self) -> sa.Connection:
        """For operations: the connection, inside the transaction."""
        if not self.is_inside or self._connection is None:
            raise AssertionError("only operations have the connection")
        return self._connection

    def after_commit(self, action: Callable[[], None]) -> None:
        """For operations: do something once the operation is durable."""
        if self._current is not None:
            self._current.after.append(action)

    def close(self) -> None:
        """Finish what was submitted, then let go of the connection. Closing twice changes nothing."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (operation := self._queue.get()) is not None:
            batch: list[_Operation[Any]] = []
            try:
                self._commit(operation, batch)
            except BaseException as error:
                self._drop_connection()
                failure = error if isinstance(error, MachineError) else _failure(error)
                for one in batch:
                    one.future.set_exception(one.error or failure)
            else:
                _resolve(batch)
            del operation, batch  # what they hold is not kept alive while the queue is empty
        self._drop_connection()

    def _commit(self, first: _Operation[Any], batch: list[_Operation[Any]]) -> None:
        """Run and commit ``first`` and what follows it; ``batch`` gets all operations that were taken."""
        started_s = time.monotonic()
        if first.future.set_running_or_notify_cancel():
            batch.append(first)
        for is_last_try in (False, True):
            try:
                self._transact(batch, started_s + self._interval_s)
            except _BrokenError as error:
                self._drop_connection()
                if error.transaction is not None:
                    is_committed = self._is_committed(error.transaction, batch)
                    if is_committed:
                        break
                    if is_committed is None:
                        raise _failure(error.__cause__ or error, _UNKNOWN) from error.__cause__
                if is_last_try:
                    raise error.__cause__ or error from None
            else:
                break
        try:
            self._on_commit(time.monotonic() - started_s, len(batch))
        except Exception:
            logger.exception("a commit could not be counted")

    def _transact(self, batch: list[_Operation[Any]], deadline_s: float) -> None:
        """One transaction. ``_BrokenError`` if it was lost."""
        connection = self._connection = self._connection or self._opened(batch)
        with connection.begin() as transaction:
            self._fill(batch, deadline_s)
            try:
                name = transaction_name(connection)
            except sa.exc.DBAPIError as error:
                raise _BrokenError from error
            try:
                transaction.commit()
            except sa.exc.DBAPIError as error:
                if name is None:
                    raise
                raise _BrokenError(name) from error

    def _is_committed(self, transaction: str, batch: list[_Operation[Any]]) -> bool | None:
        self._connection = self._opened(batch)
        try:
            return is_committed(self._connection, transaction)
        except sa.exc.DBAPIError:
            self._drop_connection()
            return None

    def _opened(self, batch: list[_Operation[Any]]) -> sa.Connection:
        try:
            return self._open_connection()
        except BaseException:
            while not self._queue.empty():  # they waited as long: all fail now, not one timeout after the other
                operation = self._queue.get()
                if operation is None:
                    self._queue.put(None)
                    break
                if operation.future.set_running_or_notify_cancel():
                    batch.append(operation)
            raise

    def _fill(self, batch: list[_Operation[Any]], deadline_s: float) -> None:
        for operation in batch:  # the first one; all of a transaction that was lost
            self._perform(operation)
        while time.monotonic() < deadline_s:
            try:
                taken = self._queue.get_nowait()
            except queue.Empty:
                return
            if taken is None:
                self._queue.put(None)
                return
            if taken.future.set_running_or_notify_cancel():
                batch.append(taken)
                self._perform(taken)

    def _perform(self, operation: _Operation[Any]) -> None:
        operation.error, operation.after = None, []
        self._current = operation
        connection = self.connection
        try:
            with connection.begin_nested():
                operation.value = operation.work()
        except Exception as error:
            try:
                is_broken = ends_transaction(connection, error) or not connection.in_transaction()
            except Exception:
                is_broken = True
            if is_broken:
                raise _BrokenError from error
            operation.error = _failure(error) if isinstance(error, sa.exc.DBAPIError) else error
        finally:
            self._current = None

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except Exception:
                connection.invalidate()


def _resolve(batch: list[_Operation[Any]]) -> None:
    for operation in batch:
        if operation.error is not None:
            operation.future.set_exception(operation.error)
            continue
        for action in operation.after:
            action()
        operation.future.set_result(operation.value)


_UNSTORED = "See that its disk has room and its database runs. Nothing of this was stored."
_UNKNOWN = "See that its database runs. It does not know whether this was stored: look before it is written again."


def _failure(error: BaseException, hint: str = _UNSTORED) -> MachineError:
    failure = MachineError(f"the store could not be written ({first_line(error)}).", hint)
    failure.__cause__ = error
    return failure
