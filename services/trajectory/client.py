"""A client of TrajectoryService: dataclasses in and out, a token on every call, deadlines on all but the stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from services.common.grpc import DEFAULT_DEADLINE_S, channel, error_from_status
from services.common.types import VersionSpan
from services.pb import trajectory_pb2, trajectory_pb2_grpc
from services.proxy.types import CallPurpose, ParsedAnswer, ToolCall
from services.trajectory.encoding import CallRow
from services.trajectory.export import UNFINISHED, GroupFacts, ScoreFacts
from services.trajectory.outcome import Outcome
from services.trajectory.paths import Fate
from services.trajectory.rebuild import sampling_of
from services.trajectory.store import RunFilter
from services.trajectory.types import CallRecord, CallRole, RunSelection, RunSummary

STREAM_DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True)
class ShapeNode:
    """A call without its tokens."""

    call_id: str
    parent_call_id: str | None
    role: CallRole
    fate: Fate
    num_fresh_prompt_tokens: int
    """Prompt tokens that no earlier call of the run has at their place."""
    num_prompt_tokens: int
    num_sampled_tokens: int
    version_min: int | None
    version_max: int | None
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RunShape:
    """A run's tree without its tokens."""

    summary: RunSummary
    nodes: tuple[ShapeNode, ...]
    """Parents before their children."""
    num_unique_tokens: int
    num_flat_tokens: int
    num_trajectories: int


class TrajectoryClient:
    """Reads the runs of one job. ``job_id`` may stay empty: then it is the job of the server at ``address``.

    Errors: ``AccessError`` (token), ``NotFoundError`` (another job, an unknown run), ``ConfigError`` (bad filter),
    ``MachineError`` (no answer, lost connection).
    """

    def __init__(self, address: str, token: str, job_id: str = "", deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        self.job_id = job_id
        """Of the server, once it has answered."""
        self._channel = channel(address, token, deadline_s)
        self._stub: Any = trajectory_pb2_grpc.TrajectoryServiceStub(self._channel)

    async def run(self, run_id: str) -> tuple[RunSummary, GroupFacts, ScoreFacts]:
        """A run, its group, and how it was scored."""
        request = trajectory_pb2.GetRunRequest(job_id=self.job_id, run_id=run_id)
        answer = await _call(self._stub.GetRun(request))
        self.job_id = answer.job_id
        score = ScoreFacts(answer.score.evaluated_ref, json.loads(answer.score.details_json or "{}"))
        return summary_from_pb(answer.summary), group_from_pb(answer.group), score

    async def summaries(self, filters: RunFilter | None = None, page_size: int = 0) -> AsyncIterator[RunSummary]:
        """Runs in order of dispatch, page by page; ``filters.limit`` is not looked at."""
        filters = filters or RunFilter()
        outcome = UNFINISHED if filters.unfinished else str(filters.outcome or "")
        request = trajectory_pb2.ListRunSummariesRequest(
            job_id=self.job_id,
            group_id=filters.group_id or "",
            task_name=filters.task_name or "",
            outcome=outcome,
            is_eval=filters.is_eval,
            limit=page_size,
        )
        while True:
            answer = await _call(self._stub.ListRunSummaries(request))
            self.job_id = answer.job_id
            for run in answer.runs:
                yield summary_from_pb(run)
            request.page_token = answer.next_page_token
            if not answer.next_page_token:
                return

    async def calls(self, run_id: str, attempt: int | None = None) -> AsyncIterator[CallRow]:
        """The calls of an attempt (None: the newest), parents before their children."""
        request = trajectory_pb2.StreamCallsRequest(job_id=self.job_id, run_id=run_id, attempt=attempt)
        known: dict[str, CallRow] = {}
        stream = self._stub.StreamCalls(request, timeout=STREAM_DEADLINE_S)
        try:
            async for message in stream:
                row = call_from_pb(message, known)
                known[row.record.call_id] = row
                yield row
        except grpc.RpcError as error:
            raise error_from_status(error) from error
        finally:
            stream.cancel()  # one that is not read to its end would hold its place at the server

    async def tree(self, run_id: str, attempt: int | None = None) -> RunShape:
        """The shape of a run without its tokens."""
        request = trajectory_pb2.GetTreeRequest(job_id=self.job_id, run_id=run_id, attempt=attempt)
        answer = await _call(self._stub.GetTree(request))
        return RunShape(
            summary=summary_from_pb(answer.summary),
            nodes=tuple(_node_from_pb(node) for node in answer.nodes),
            num_unique_tokens=answer.num_unique_tokens,
            num_flat_tokens=answer.num_flat_tokens,
            num_trajectories=answer.num_trajectories,
        )

    async def close(self) -> None:
        await self._channel.close()


async def _call(call: Any) -> Any:
    try:
        return await call
    except grpc.RpcError as error:
        raise error_from_status(error) from error


def summary_from_pb(run: trajectory_pb2.RunSummary) -> RunSummary:
    def given(name: str) -> Any:
        return getattr(run, name) if run.HasField(name) else None  # type: ignore[arg-type]

    return RunSummary(
        run_id=run.run_id,
        group_id=run.group_id,
        task_name=run.task_name,
        attempt=run.attempt,
        outcome=Outcome(run.outcome) if run.outcome else None,
        reward=given("reward"),
        advantage=given("advantage"),
        num_calls=run.num_calls,
        num_prompt_tokens=run.num_prompt_tokens,
        num_output_tokens=run.num_output_tokens,
        version_min=given("version_min"),
        version_max=given("version_max"),
        wall_s=given("wall_s"),
        is_eval=run.is_eval,
        detail=run.detail,
        selection=selection_from_pb(run.selection) if run.HasField("selection") else None,
    )


def selection_from_pb(selection: trajectory_pb2.RunSelection) -> RunSelection:
    has_limit = selection.HasField("max_trajectories")
    return RunSelection(
        max_trajectories=selection.max_trajectories if has_limit else None,
        seed=selection.seed,
        leaf_call_ids=tuple(selection.leaf_call_ids),
        leaf_roles=tuple(CallRole(role) for role in selection.leaf_roles),
        target_call_ids=tuple(selection.target_call_ids),
        num_targets=selection.num_targets,
        num_left_out=selection.num_left_out,
        num_not_trainable=selection.num_not_trainable,
        num_superseded=selection.num_superseded,
        left_out={CallRole(role): num_tokens for role, num_tokens in selection.left_out.items()},
    )


def _node_from_pb(node: trajectory_pb2.TreeNode) -> ShapeNode:
    return ShapeNode(
        call_id=node.call_id,
        parent_call_id=node.parent_call_id if node.HasField("parent_call_id") else None,
        role=CallRole(node.role),
        fate=Fate(node.fate),
        num_fresh_prompt_tokens=node.num_fresh_prompt_tokens,
        num_prompt_tokens=node.num_prompt_tokens,
        num_sampled_tokens=node.num_sampled_tokens,
        version_min=node.version_min if node.HasField("version_min") else None,
        version_max=node.version_max if node.HasField("version_max") else None,
        finish_reason=node.finish_reason,
    )


def group_from_pb(group: trajectory_pb2.Group) -> GroupFacts:
    version = group.version if group.HasField("version") else None
    trained_step = group.trained_step if group.HasField("trained_step") else None
    return GroupFacts(version, group.state, group.reason, group.loss_reason, trained_step)


def call_from_pb(message: trajectory_pb2.Call, known: dict[str, CallRow]) -> CallRow:
    """A call; ``known`` holds those before it, whose messages and tools it may share."""
    given = message.record
    request = json.loads(given.request_json)
    parent = known.get(given.parent_call_id)
    if parent is not None:
        shared = parent.record.request["messages"][: message.num_shared_messages]
        request["messages"] = [*shared, *request["messages"]]
        if message.shares_tools:
            request["tools"] = parent.record.request["tools"]
    record = CallRecord(
        call_id=given.call_id,
        run_id=given.run_id,
        attempt=given.attempt,
        parent_call_id=given.parent_call_id if given.HasField("parent_call_id") else None,
        request=request,
        prompt_ids=np.empty(0, dtype=np.int32),
        output_ids=np.array(given.output_ids, dtype=np.int32),
        logprobs=np.array(given.logprobs, dtype=np.float32),
        version_spans=tuple(VersionSpan(span.version, span.num_tokens) for span in given.version_spans),
        output_text=given.output_text,
        finish_reason=given.finish_reason,
        trainable=given.trainable,
        cells=tuple(given.cells),
        started_at_s=given.started_at_s,
        ended_at_s=given.ended_at_s,
        requested_sampling=json.loads(given.requested_sampling_json),
        sampling=sampling_of(message.sampling_json),
        agent_id=message.agent_id,
        parent_agent_id=message.parent_agent_id,
        purpose=CallPurpose(message.purpose or CallPurpose.TURN),
        answer=_answer_from_pb(message.answer) if message.HasField("answer") else None,
        stop_string=message.stop_string,
    )
    return CallRow(
        record=record,
        ordinal=message.ordinal,
        num_prompt_tokens=message.num_prompt_tokens,
        new_prompt_ids=np.array(message.new_prompt_ids, dtype=np.int32),
        num_shared_messages=message.num_shared_messages,
        shares_tools=message.shares_tools,
    )


def _answer_from_pb(answer: trajectory_pb2.Answer) -> ParsedAnswer:
    return ParsedAnswer(
        text=answer.text,
        reasoning=answer.reasoning,
        tool_calls=tuple(
            ToolCall(call.call_id, call.name, json.loads(call.arguments_json)) for call in answer.tool_calls
        ),
        num_malformed_calls=answer.num_malformed_calls,
    )
