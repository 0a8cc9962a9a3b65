"""TrajectoryService: translates between protobuf and the trajectory service's own types, and nothing else.

It reads the store in a few threads of its own: the event loop of the server that hosts it is never held up. It needs
no shard, so it answers also while one is away.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import grpc

from services.common.errors import ConfigError, NotFoundError
from services.common.grpc import errors_as_status, stream_errors_as_status
from services.common.ids import RunId, group_of
from services.pb import common_pb2, records_pb2, trajectory_pb2, trajectory_pb2_grpc
from services.proxy.types import ParsedAnswer
from services.trajectory.encoding import CallRow
from services.trajectory.export import GroupFacts, ScoreFacts
from services.trajectory.paths import RunCalls, calls_of_run, trajectories_of
from services.trajectory.source import RunSource, StoreSource, filter_of
from services.trajectory.store import RunFilter
from services.trajectory.types import RunSelection, RunSummary

SERVICE_NAME = trajectory_pb2.DESCRIPTOR.services_by_name["TrajectoryService"].full_name

PAGE_BY_DEFAULT = 200
PAGE_AT_MOST = 1000
NUM_THREADS = 2
MAX_STREAMS = 8
"""Streams at one time; each holds the unique tokens of one run until its client has taken them."""
_TOKENS_A_BATCH = 1 << 16

_T = TypeVar("_T")


def trajectory_service(job_id: str, job_dir: Path) -> tuple[Callable[[grpc.aio.Server], None], str]:
    """What adds the service of a job to a server, and the service's name. The store may still be to come."""
    servicer = TrajectoryServicer(job_id, lambda: StoreSource(job_dir, job_id))
    add = functools.partial(trajectory_pb2_grpc.add_TrajectoryServiceServicer_to_server, servicer)
    return add, SERVICE_NAME


class TrajectoryServicer(trajectory_pb2_grpc.TrajectoryServiceServicer):
    """The gRPC face of a job's runs. ``open_source`` is called for every request, in a thread: a shard's file that came
    later is seen."""

    def __init__(self, job_id: str, open_source: Callable[[], RunSource]) -> None:
        self._job_id = job_id
        self._open_source = open_source
        self._pool: ThreadPoolExecutor | None = None
        self._num_streams = 0

    @errors_as_status
    async def GetRun(self, request: Any, context: Any) -> trajectory_pb2.GetRunResponse:  # noqa: N802
        self._check(request)

        def read(source: RunSource) -> trajectory_pb2.GetRunResponse:
            summary = _summary_of(source, request.run_id)
            group = group_to_pb(source.group(summary.group_id))
            return trajectory_pb2.GetRunResponse(
                summary=summary_to_pb(summary),
                group=group,
                job_id=self._job_id,
                score=score_to_pb(source.score(summary)),
            )

        return await self._read(read)

    @errors_as_status
    async def ListRunSummaries(self, request: Any, context: Any) -> trajectory_pb2.ListRunSummariesResponse:  # noqa: N802
        self._check_job(request.job_id)
        filters = filter_from_pb(request)
        size = _page_size(request.limit)

        def read(source: RunSource) -> trajectory_pb2.ListRunSummariesResponse:
            runs, token = _page(source.list_runs(filters), request.page_token, size)
            return trajectory_pb2.ListRunSummariesResponse(
                runs=[summary_to_pb(run) for run in runs], next_page_token=token, job_id=self._job_id
            )

        return await self._read(read)

    @stream_errors_as_status
    async def StreamCalls(self, request: Any, context: Any) -> AsyncIterator[trajectory_pb2.Call]:  # noqa: N802
        self._check(request)
        if self._num_streams >= MAX_STREAMS:
            said = f"{MAX_STREAMS} streams of calls are being read already; try again when one has ended"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, said)
        self._num_streams += 1
        context.add_done_callback(self._note_end)
        _, rows = await self._read(lambda source: source.read_calls(request.run_id, _attempt(request)))
        for batch in _batches(rows):
            # a message is taken when the client has room for it, so a slow one slows down only itself
            for message in await self._in_thread(functools.partial(_calls_to_pb, batch)):
                yield message

    @errors_as_status
    async def GetTree(self, request: Any, context: Any) -> trajectory_pb2.GetTreeResponse:  # noqa: N802
        self._check(request)

        def read(source: RunSource) -> trajectory_pb2.GetTreeResponse:
            summary, rows = source.read_calls(request.run_id, _attempt(request))
            return tree_to_pb(summary, calls_of_run(rows, selection_for(summary, rows)))

        return await self._read(read)

    def _note_end(self, context: Any) -> None:
        self._num_streams -= 1

    def _check(self, request: Any) -> None:
        self._check_job(request.job_id)
        if not request.run_id:
            raise ConfigError("run_id is empty.", "Name one of the runs that ListRunSummaries lists, as g000000-r0.")
        if _attempt(request) is not None and request.attempt < 0:
            raise ConfigError(f"attempt={request.attempt} is negative.", "Leave it unset for the newest.")

    def _check_job(self, job_id: str) -> None:
        if job_id and job_id != self._job_id:
            raise NotFoundError(f"no job {job_id!r} here.", f"This is the server of {self._job_id!r}.")

    async def _read(self, work: Callable[[RunSource], _T]) -> _T:
        return await self._in_thread(lambda: work(self._open_source()))

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_THREADS, "trajectory-reader")
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def selection_for(summary: RunSummary, rows: Sequence[CallRow]) -> RunSelection | None:
    """The selection of a run, if these are the calls that it was made of (those of the newest attempt)."""
    is_newest = all(row.record.attempt == summary.attempt for row in rows)
    return summary.selection if is_newest else None


def _summary_of(source: RunSource, run_id: str) -> RunSummary:
    try:
        runs = source.list_runs(RunFilter(group_id=group_of(RunId(run_id))))
    except ValueError:
        runs = []
    found = next((run for run in runs if run.run_id == run_id), None)
    if found is None:
        raise NotFoundError(f"no run {run_id}.", "ListRunSummaries lists the runs.")
    return found


def _attempt(request: Any) -> int | None:
    has_one = "attempt" in request.DESCRIPTOR.fields_by_name and request.HasField("attempt")
    return request.attempt if has_one else None


def _page_size(limit: int) -> int:
    if not 0 <= limit <= PAGE_AT_MOST:
        raise ConfigError(f"limit={limit} is not in 0..{PAGE_AT_MOST}.", f"0 means {PAGE_BY_DEFAULT}.")
    return limit or PAGE_BY_DEFAULT


def _page(runs: Sequence[RunSummary], token: str, size: int) -> tuple[Sequence[RunSummary], str]:
    """A page and the token of the next one: the id of the page's last run."""
    start = 0
    if token:
        at = next((at for at, run in enumerate(runs) if run.run_id == token), None)
        if at is None:
            raise ConfigError(
                f"page_token {token!r} is unknown.", "Use the same filters, or begin with the first page."
            )
        start = at + 1
    page = runs[start : start + size]
    return page, page[-1].run_id if start + size < len(runs) else ""


def _batches(rows: Sequence[CallRow]) -> Iterator[list[CallRow]]:
    batch: list[CallRow] = []
    num_tokens = 0
    for row in rows:
        batch.append(row)
        num_tokens += len(row.new_prompt_ids) + len(row.record.output_ids)
        if num_tokens >= _TOKENS_A_BATCH:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


def filter_from_pb(request: trajectory_pb2.ListRunSummariesRequest) -> RunFilter:
    is_eval = request.is_eval if request.HasField("is_eval") else None
    return filter_of(group_id=request.group_id, task_name=request.task_name, outcome=request.outcome, is_eval=is_eval)


def summary_to_pb(run: RunSummary) -> trajectory_pb2.RunSummary:
    return trajectory_pb2.RunSummary(
        run_id=run.run_id,
        group_id=run.group_id,
        task_name=_text(run.task_name),
        attempt=run.attempt,
        outcome=run.outcome or "",
        reward=run.reward,
        advantage=run.advantage,
        num_calls=run.num_calls,
        num_prompt_tokens=run.num_prompt_tokens,
        num_output_tokens=run.num_output_tokens,
        version_min=run.version_min,
        version_max=run.version_max,
        wall_s=run.wall_s,
        is_eval=run.is_eval,
        detail=_text(run.detail),
        selection=None if run.selection is None else selection_to_pb(run.selection),
    )


def selection_to_pb(selection: RunSelection) -> trajectory_pb2.RunSelection:
    return trajectory_pb2.RunSelection(
        max_trajectories=selection.max_trajectories,
        seed=selection.seed,
        leaf_call_ids=selection.leaf_call_ids,
        leaf_roles=[str(role) for role in selection.leaf_roles],
        target_call_ids=selection.target_call_ids,
        num_targets=selection.num_targets,
        num_left_out=selection.num_left_out,
        num_not_trainable=selection.num_not_trainable,
        num_superseded=selection.num_superseded,
        left_out={str(role): num_tokens for role, num_tokens in selection.left_out.items()},
    )


def group_to_pb(group: GroupFacts) -> trajectory_pb2.Group:
    return trajectory_pb2.Group(
        version=group.version,
        state=group.state,
        reason=_text(group.reason),
        loss_reason=group.loss_reason,
        trained_step=group.trained_step,
    )


def _calls_to_pb(rows: Sequence[CallRow]) -> list[trajectory_pb2.Call]:
    return [call_to_pb(row) for row in rows]


def score_to_pb(score: ScoreFacts) -> trajectory_pb2.Score:
    return trajectory_pb2.Score(evaluated_ref=_text(score.evaluated_ref), details_json=json.dumps(score.details))


def call_to_pb(row: CallRow) -> trajectory_pb2.Call:
    record = row.record
    request = {name: value for name, value in record.request.items() if name != "tools" or not row.shares_tools}
    request["messages"] = list(record.request.get("messages", ()))[row.num_shared_messages :]
    return trajectory_pb2.Call(
        record=records_pb2.CallRecord(
            call_id=record.call_id,
            run_id=record.run_id,
            attempt=record.attempt,
            parent_call_id=record.parent_call_id,
            request_json=json.dumps(request),
            output_ids=record.output_ids.tolist(),
            logprobs=record.logprobs.tolist(),
            version_spans=[
                common_pb2.VersionSpan(version=span.version, num_tokens=span.num_tokens)
                for span in record.version_spans
            ],
            output_text=_text(record.output_text),
            finish_reason=record.finish_reason,
            trainable=record.trainable,
            cells=record.cells,
            started_at_s=record.started_at_s,
            ended_at_s=record.ended_at_s,
            requested_sampling_json=json.dumps(record.requested_sampling),
        ),
        ordinal=row.ordinal,
        num_prompt_tokens=row.num_prompt_tokens,
        new_prompt_ids=row.new_prompt_ids.tolist(),
        num_shared_messages=row.num_shared_messages,
        shares_tools=row.shares_tools,
        agent_id=_text(record.agent_id),
        parent_agent_id=_text(record.parent_agent_id),
        purpose=str(record.purpose),
        answer=None if record.answer is None else answer_to_pb(record.answer),
        stop_string=_text(record.stop_string),
        sampling_json="" if record.sampling is None else json.dumps(asdict(record.sampling)),
    )


def answer_to_pb(answer: ParsedAnswer) -> trajectory_pb2.Answer:
    return trajectory_pb2.Answer(
        text=_text(answer.text),
        reasoning=_text(answer.reasoning),
        tool_calls=[
            trajectory_pb2.ToolCall(
                call_id=_text(call.call_id), name=_text(call.name), arguments_json=json.dumps(call.arguments)
            )
            for call in answer.tool_calls
        ],
        num_malformed_calls=answer.num_malformed_calls,
    )


def tree_to_pb(summary: RunSummary, run: RunCalls) -> trajectory_pb2.GetTreeResponse:
    trajectories = trajectories_of(run)
    return trajectory_pb2.GetTreeResponse(
        summary=summary_to_pb(summary),
        nodes=[_node_to_pb(row, run) for row in run.rows],
        num_unique_tokens=run.num_tokens,
        num_flat_tokens=sum(one.num_tokens for one in trajectories),
        num_trajectories=len(trajectories),
    )


def _node_to_pb(row: CallRow, run: RunCalls) -> trajectory_pb2.TreeNode:
    record = row.record
    versions = [span.version for span in record.version_spans]
    return trajectory_pb2.TreeNode(
        call_id=record.call_id,
        parent_call_id=run.parent(record.call_id),
        role=str(run.roles[record.call_id]),
        fate=str(run.fates[record.call_id]),
        num_fresh_prompt_tokens=run.num_fresh_tokens[record.call_id],
        num_prompt_tokens=row.num_prompt_tokens,
        num_sampled_tokens=len(record.output_ids),
        version_min=min(versions, default=None),
        version_max=max(versions, default=None),
        finish_reason=record.finish_reason,
    )


def _text(text: str) -> str:
    """Text as protobuf takes it: without lone surrogates, which harnesses may send."""
    return text.encode("utf-8", "replace").decode("utf-8")
