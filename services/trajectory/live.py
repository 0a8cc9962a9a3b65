"""The live runs of a shard: what later calls are built on, kept once per token; of messages digests.

Kept whole are only the newest answers: those that nothing continues yet tell roles apart, and the last few may have to
be given again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.common.errors import NotFoundError
from services.common.ids import RunId, make_call_id
from services.proxy.conversation import ConversationIndex, Walk, stable_messages, without_cut_answers
from services.proxy.session import Bridge, Prompt, StoredCall
from services.proxy.types import CanonicalRequest, Lineage, Message
from services.trajectory.encoding import CallRow
from services.trajectory.outcome import CallTrouble
from services.trajectory.records import answer_of, messages_of, new_in_request, tools_of, tree_call
from services.trajectory.roles import Opening, RoleBook, opening_of
from services.trajectory.sharing import RequestBook, same_call_key
from services.trajectory.tree import TrajectoryTree
from services.trajectory.types import CallRecord, CallRole, SharedAnswer, TokenIds


@dataclass(frozen=True, slots=True)
class Matched:
    """A request, the stored call that it continues, and the prompt that was built on that."""

    request: CanonicalRequest
    walk: Walk
    call: StoredCall | None
    prompt: Prompt

    @property
    def same_call_key(self) -> Hashable:
        """Equal for requests that are the same call."""
        return same_call_key(self.request, self.walk.nodes[-1])


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that is being generated."""

    call_id: str
    ordinal: int
    parent_call_id: str | None
    num_prompt_tokens: int
    new_prompt_ids: TokenIds
    """int32: the prompt behind the parent's prompt and answer."""
    last_node: int
    """Where its request ends in the tree of messages."""
    request: Mapping[str, Any]
    """JSON-ready: without the messages and tools that the parent's request had too."""
    num_shared_messages: int
    shares_tools: bool
    opening: Opening | None
    """Of a call without a parent."""
    lineage: Lineage


class AttemptLog:
    """The calls of one attempt of a run."""

    def __init__(self, run_id: str, attempt: int, key_hash: bytes | None) -> None:
        self.run_id = run_id
        self.attempt = attempt
        self.key_hash = key_hash
        """None once the attempt is closed: no call is taken any more."""
        self.trouble: CallTrouble | None = None
        """Why the last call was not completed; the store has it too."""
        self.tree = TrajectoryTree()
        self.pending: dict[str, PendingCall] = {}
        self.requests = RequestBook()
        self._next_ordinal = 0
        self._id_suffix = ""
        self._conversations = ConversationIndex()
        self._roles = RoleBook()

    @property
    def is_open(self) -> bool:
        return self.key_hash is not None

    @property
    def next_call_id(self) -> str:
        return make_call_id(RunId(self.run_id), self.attempt, self._next_ordinal) + self._id_suffix

    @property
    def num_calls(self) -> int:
        """Completed calls and calls in flight."""
        return self.tree.num_calls + len(self.pending)

    @property
    def roles(self) -> dict[str, CallRole]:
        """The role of each completed call, as far as can be seen now."""
        return self._roles.roles()

    def match(self, request: CanonicalRequest, bridge: Bridge) -> Matched:
        """Find the call that a request continues, and build its prompt: O(new tokens), and one digest a message."""
        messages = without_cut_answers(request.messages)
        if messages is not request.messages:
            request = replace(request, messages=tuple(messages))
        walk = self._conversations.walk(stable_messages(request.messages), request.tools)
        continued = self._conversations.match(walk)
        call = None
        if continued is not None:
            call_id = continued.call_id
            history, last_id = self.tree.history(call_id), self.tree.last_sampled_id(call_id)
            call = StoredCall(call_id, continued.num_messages, history, last_id)
        return Matched(request, walk, call, bridge.prompt(call, request))

    def begin(self, matched: Matched) -> PendingCall:
        """Note a call that is about to be generated."""
        request, prompt = matched.request, matched.prompt
        parent = None if matched.call is None or prompt.is_false_fork else matched.call.call_id
        num_shared = self._conversations.num_shared(parent, matched.walk) if parent else 0
        shares_tools = parent is not None and self._conversations.shares_tools(parent, request.tools)
        pending = PendingCall(
            call_id=self.next_call_id,
            ordinal=self._next_ordinal,
            parent_call_id=parent,
            num_prompt_tokens=len(prompt.ids),
            new_prompt_ids=prompt.ids[len(prompt.ids) - prompt.num_new_tokens :].copy(),  # no view of the whole prompt
            last_node=matched.walk.nodes[-1],
            request=new_in_request(request, num_shared, shares_tools=shares_tools),
            num_shared_messages=num_shared,
            shares_tools=shares_tools,
            opening=None if parent else opening_of(request.messages, request.tools),
            lineage=request.lineage,
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
            record=replace(
                record,
                parent_call_id=pending.parent_call_id,
                request=dict(pending.request),
                requested_sampling=dict(pending.request["requested_sampling"]),
                agent_id=pending.lineage.agent_id,
                parent_agent_id=pending.lineage.parent_agent_id,
                purpose=pending.lineage.purpose,
            ),
            ordinal=pending.ordinal,
            num_prompt_tokens=pending.num_prompt_tokens,
            new_prompt_ids=pending.new_prompt_ids,
            num_shared_messages=pending.num_shared_messages,
            shares_tools=pending.shares_tools,
        )

    def complete(self, row: CallRow) -> None:
        """Add a stored call. An answer that was cut from outside is kept, but nothing is built on it or trained."""
        record = row.record
        self.tree.append(tree_call(row))
        pending = self.pending.pop(record.call_id, None)
        self.requests.complete(SharedAnswer(replace(record, request={}), row.num_prompt_tokens))
        self._next_ordinal = max(self._next_ordinal, row.ordinal + 1)
        opening = pending.opening if pending else _opening(record)
        self._roles.add_call(record, opening)
        if record.finish_reason != "abort":
            last_node = pending.last_node if pending else self._walk(row).nodes[-1]
            self._conversations.add(record.call_id, last_node, answer_of(record))

    def restarted(self, tag: str) -> None:
        """Never again give the id of a call that was in flight when a shard went down: its answer may yet come.

        ``tag`` tells the ids of this shard from those of all before it, of which only the stored ones are known.
        """
        self._id_suffix = f".{tag}"

    def close(self) -> None:
        """Take no further call; those in flight come too late."""
        self.key_hash = None
        self.pending.clear()
        self.requests = RequestBook()

    def _walk(self, row: CallRow) -> Walk:
        """The way of a request that is read back from the store."""
        record = row.record
        new = stable_messages(_new_messages(row))
        if record.parent_call_id is not None and row.shares_tools:
            return self._conversations.walk_on(record.parent_call_id, row.num_shared_messages, new)
        # the tools changed: what is shared is not below them, so the whole way is walked
        return self._conversations.walk(stable_messages(messages_of(record.request)), tools_of(record.request))


def _new_messages(row: CallRow) -> tuple[Message, ...]:
    return messages_of({"messages": row.record.request["messages"][row.num_shared_messages :]})


def _opening(record: CallRecord) -> Opening | None:
    if record.parent_call_id is not None:
        return None
    return opening_of(messages_of(record.request), tools_of(record.request))
