"""The live runs of a shard: what later calls are built on, kept once per token and per message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.common.errors import NotFoundError
from services.common.ids import RunId, make_call_id
from services.proxy.session import Prompt, StoredCall
from services.proxy.types import CanonicalRequest, Message
from services.trajectory.encoding import CallRow
from services.trajectory.records import answer_of, messages_of, request_key, share_messages, tools_of
from services.trajectory.tree import TrajectoryTree, TreeCall
from services.trajectory.types import CallRecord, TokenIds

_NO_IDS: TokenIds = np.empty(0, dtype=np.int32)
_RESTART_GAP = 10_000


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that is being generated."""

    call_id: str
    ordinal: int
    parent_call_id: str | None
    num_prompt_tokens: int
    new_prompt_ids: TokenIds
    """int32: the prompt behind the parent's prompt and answer."""
    messages: tuple[Message, ...]
    num_shared_messages: int
    shares_tools: bool


class AttemptLog:
    """The calls of one attempt of a run."""

    def __init__(self, run_id: str, attempt: int, key_hash: bytes | None) -> None:
        self.run_id = run_id
        self.attempt = attempt
        self.key_hash = key_hash
        """None once the attempt is closed: no call is taken any more."""
        self.context_overflowed = False
        """The last request did not fit the model's context."""
        self.engine_lost = False
        """No cell could complete the last call."""
        self.tree = TrajectoryTree()
        self.pending: dict[str, PendingCall] = {}
        self._next_ordinal = 0
        self._calls: dict[str, StoredCall] = {}

    @property
    def is_open(self) -> bool:
        return self.key_hash is not None

    @property
    def next_call_id(self) -> str:
        return make_call_id(RunId(self.run_id), self.attempt, self._next_ordinal)

    @property
    def calls(self) -> Sequence[StoredCall]:
        """The completed calls that prompts can be built on. They carry no prompt ids: see ``with_prompt``."""
        return list(self._calls.values())

    def with_prompt(self, call: StoredCall) -> StoredCall:
        """A call with its prompt's ids, taken from the tree."""
        return replace(call, prompt_ids=self.tree.prompt_ids(call.call_id))

    def begin(self, request: CanonicalRequest, prompt: Prompt, matched: StoredCall | None) -> PendingCall:
        """Note a call that is about to be generated."""
        parent = None if matched is None or prompt.is_false_fork else matched
        messages, num_shared = share_messages(request.messages, parent.messages if parent else ())
        pending = PendingCall(
            call_id=self.next_call_id,
            ordinal=self._next_ordinal,
            parent_call_id=parent.call_id if parent else None,
            num_prompt_tokens=len(prompt.ids),
            new_prompt_ids=prompt.ids[len(prompt.ids) - prompt.num_new_tokens :].copy(),  # no view of the whole prompt
            messages=messages,
            num_shared_messages=num_shared,
            shares_tools=parent is not None and request.tools == parent.tools,
        )
        self._next_ordinal += 1
        self.pending[pending.call_id] = pending
        return pending

    def row(self, record: CallRecord) -> CallRow:
        """A completed call as it is stored. ``NotFoundError`` for a call that is not in flight."""
        pending = self.pending.get(record.call_id)
        if pending is None:
            raise NotFoundError(
                f"call {record.call_id} is not in flight.",
                "It was abandoned, or its shard was restarted; the harness may ask again.",
            )
        return CallRow(
            record=replace(record, parent_call_id=pending.parent_call_id),
            ordinal=pending.ordinal,
            num_prompt_tokens=pending.num_prompt_tokens,
            new_prompt_ids=pending.new_prompt_ids,
            num_shared_messages=pending.num_shared_messages,
            shares_tools=pending.shares_tools,
        )

    def complete(self, row: CallRow) -> None:
        """Add a stored call. An answer that was cut from outside is kept, but nothing is built on it or trained."""
        record = row.record
        is_whole = record.finish_reason != "abort"
        self.engine_lost = False
        self.tree.append(
            TreeCall(
                call_id=record.call_id,
                parent_call_id=record.parent_call_id,
                ordinal=row.ordinal,
                new_prompt_ids=row.new_prompt_ids,
                output_ids=record.output_ids,
                logprobs=record.logprobs,
                version_spans=record.version_spans,
                trainable=record.trainable and is_whole,
                request_key=request_key(record.requested_sampling),
            )
        )
        pending = self.pending.pop(record.call_id, None)
        self._next_ordinal = max(self._next_ordinal, row.ordinal + 1)
        if is_whole:
            parent = self._calls.get(record.parent_call_id or "")
            self._calls[record.call_id] = StoredCall(
                call_id=record.call_id,
                messages=pending.messages if pending else _shared(record.request, parent),
                answer=answer_of(record),
                prompt_ids=_NO_IDS,
                output_ids=np.array(record.output_ids, dtype=np.int32),
                finish_reason=record.finish_reason,
                tools=parent.tools if parent and row.shares_tools else tools_of(record.request),
            )

    def restarted(self) -> None:
        """Never again give the id of a call that was in flight when the shard went down: its answer may yet come."""
        self._next_ordinal += _RESTART_GAP

    def close(self) -> None:
        """Take no further call; those in flight come too late."""
        self.key_hash = None
        self.pending.clear()


def _shared(request: Mapping[str, Any], parent: StoredCall | None) -> tuple[Message, ...]:
    messages, _ = share_messages(messages_of(request), parent.messages if parent else ())
    return messages
