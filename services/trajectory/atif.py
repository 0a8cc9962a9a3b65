"""Runs in Harbor's Agent Trajectory Interchange Format, ATIF-v1.7.

Source of the format: https://harborframework.com/docs/trajectory-format and the RFC 0001 that it names; checked against
the models of the Python package ``harbor`` 0.26.

One document holds one conversation in steps. The first path of the main conversation is the run's document; further
ones (behind a compaction, or other ways on) are its continuations, in which the steps that an earlier document holds
are marked as copied; the paths of summaries, subagents and side calls are embedded in the run's document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from services.trajectory.encoding import CallRow
from services.trajectory.export import ScoreFacts, answer_message, full_messages
from services.trajectory.paths import Fate, RunCalls, Trajectory, trajectories_of
from services.trajectory.types import CallRecord, CallRole, RunSummary

SCHEMA_VERSION = "ATIF-v1.7"


@dataclass(frozen=True, slots=True)
class AgentName:
    """What a document says of the agent."""

    name: str = "unknown"
    version: str = "unknown"
    model_name: str = ""


def atif_documents(
    summary: RunSummary, run: RunCalls, agent: AgentName, score: ScoreFacts, *, selected_only: bool = False
) -> dict[str, dict[str, Any]]:
    """A run as documents by file name: ``RUN.json``, ``RUN.cont-1.json`` and so on; none for a run without calls."""
    trajectories = [one for one in trajectories_of(run) if one.is_selected or not selected_only]
    main = [one for one in trajectories if one.role == CallRole.MAIN]
    main.sort(
        key=lambda one: run.fates[one.calls[-1].record.call_id] == Fate.SUPERSEDED
    )  # what a retry left comes last
    others = [one for one in trajectories if one.role != CallRole.MAIN]
    if not main:
        main, others = others[:1], others[1:]
    maker = _Maker(summary, run, agent, score)
    documents = [maker.document(one) for one in main]
    embedded = [maker.document(one) for one in others]
    names = [f"{summary.run_id}.json", *(f"{summary.run_id}.cont-{at}.json" for at in range(1, len(documents)))]
    for document, following in zip(documents, names[1:], strict=False):
        document["continued_trajectory_ref"] = following
    if embedded:
        documents[0]["subagent_trajectories"] = embedded
    return dict(zip(names, documents, strict=False))


class _Maker:
    """Makes the documents of one run; a call's own step is in the first of them that holds it."""

    def __init__(self, summary: RunSummary, run: RunCalls, agent: AgentName, score: ScoreFacts) -> None:
        self._summary, self._run, self._agent, self._score = summary, run, agent, score
        self._given: set[str] = set()

    def document(self, trajectory: Trajectory) -> dict[str, Any]:
        summary = self._summary
        calls = trajectory.calls
        steps = self._steps(calls)
        tools = list(calls[-1].record.request.get("tools", ()))
        agent: dict[str, Any] = {"name": self._agent.name, "version": self._agent.version}
        if self._agent.model_name:
            agent["model_name"] = self._agent.model_name
        if tools:
            agent["tool_definitions"] = [_tool(tool) for tool in tools]
        num_sampled = sum(len(call.record.output_ids) for call in calls)
        return {
            "schema_version": SCHEMA_VERSION,
            "session_id": summary.run_id,
            "trajectory_id": f"{summary.run_id}-a{summary.attempt}-t{trajectory.index}",
            "agent": agent,
            "steps": steps,
            "final_metrics": {
                "total_prompt_tokens": sum(call.num_prompt_tokens for call in calls),
                "total_completion_tokens": num_sampled,
                "total_steps": len(steps),
            },
            "extra": {
                "group_id": summary.group_id,
                "task_name": summary.task_name,
                "attempt": summary.attempt,
                "outcome": None if summary.outcome is None else str(summary.outcome),
                "reward": summary.reward,
                "advantage": summary.advantage,
                "evaluated_ref": self._score.evaluated_ref,
                "score_details": self._score.details,
                "n_run": 0 if self._run.selection is None else self._run.selection.num_targets,
                "role": str(trajectory.role),
                "is_selected": trajectory.is_selected,
            },
        }

    def _steps(self, calls: Sequence[CallRow]) -> list[dict[str, Any]]:
        messages = full_messages(calls)
        by_answer = {len(call.record.request.get("messages", ())): call for call in calls}
        steps: list[dict[str, Any]] = []
        for at, message in enumerate(messages):
            if message["role"] == "tool" and steps and steps[-1]["source"] == "agent":
                steps[-1].setdefault("observation", {"results": []})["results"].append(_result(message, steps[-1]))
                continue
            call = by_answer.get(at) if message["role"] == "assistant" else None
            said = message if call is None else _as_said(call.record, message)
            steps.append(self._step(len(steps) + 1, said, call))
        return steps

    def _step(self, step_id: int, message: Mapping[str, Any], call: CallRow | None) -> dict[str, Any]:
        source = {"system": "system", "assistant": "agent"}.get(message["role"], "user")
        step: dict[str, Any] = {"step_id": step_id, "source": source, "message": message["content"]}
        if source != "agent":
            return step
        if message.get("reasoning"):
            step["reasoning_content"] = message["reasoning"]
        if message.get("tool_calls"):
            step["tool_calls"] = [
                {"tool_call_id": one["call_id"], "function_name": one["name"], "arguments": one["arguments"]}
                for one in message["tool_calls"]
            ]
        if call is not None:
            step |= self._of_call(call)
        return step

    def _of_call(self, call: CallRow) -> dict[str, Any]:
        record = call.record
        step: dict[str, Any] = {"llm_call_count": 1}
        step["timestamp"] = datetime.fromtimestamp(record.ended_at_s, UTC).isoformat().replace("+00:00", "Z")
        if record.call_id in self._given:
            step["is_copied_context"] = True
        self._given.add(record.call_id)
        step["metrics"] = {
            "prompt_tokens": call.num_prompt_tokens,
            "completion_tokens": len(record.output_ids),
            "completion_token_ids": record.output_ids.tolist(),
            "logprobs": record.logprobs.tolist(),
            "extra": {"new_prompt_token_ids": call.new_prompt_ids.tolist()},
        }
        fate = self._run.fates[record.call_id]
        step["extra"] = {
            "call_id": record.call_id,
            "role": str(self._run.roles[record.call_id]),
            "is_target": fate == Fate.TARGET and "is_copied_context" not in step,
            "fate": str(fate),
            "purpose": str(record.purpose),
            "agent_id": record.agent_id,
            "parent_agent_id": record.parent_agent_id,
            "finish_reason": record.finish_reason,
            "stop_string": record.stop_string,
            "num_malformed_calls": 0 if record.answer is None else record.answer.num_malformed_calls,
            "sampling": None if record.sampling is None else asdict(record.sampling),
            "version_spans": [[span.version, span.num_tokens] for span in record.version_spans],
        }
        return step


def _as_said(record: CallRecord, sent: Mapping[str, Any]) -> Mapping[str, Any]:
    """An answer as it was generated: harnesses drop reasoning from what they send back, and write it anew.

    Its tool calls keep the ids that the harness gave them, for its tool messages name those.
    """
    if record.answer is None:
        return sent
    own = answer_message(record)
    ids = [call["call_id"] for call in sent.get("tool_calls", ())]
    if len(ids) == len(own["tool_calls"]):
        own["tool_calls"] = [{**call, "call_id": given} for call, given in zip(own["tool_calls"], ids, strict=True)]
    return own


def _result(message: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a tool. It names its call only where the step has that call, as ATIF wants it."""
    known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    result: dict[str, Any] = {"content": message["content"]}
    if message.get("tool_call_id") in known:
        result["source_call_id"] = message["tool_call_id"]
    return result


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}
