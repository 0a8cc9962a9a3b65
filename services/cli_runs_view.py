"""What ``tidegate runs`` shows of runs, calls and trees."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from services.proxy.types import CallPurpose
from services.trajectory.draw import NodeView, TreeView
from services.trajectory.encoding import CallRow
from services.trajectory.export import GroupFacts, ScoreFacts
from services.trajectory.paths import Fate, RunCalls
from services.trajectory.records import answer_of
from services.trajectory.types import CallRecord, CallRole, RunSelection, RunSummary

_FATE_STYLE = {
    Fate.TARGET: "green",
    Fate.LEFT_OUT: "yellow",
    Fate.SUPERSEDED: "dim strike",
    Fate.NOT_TRAINABLE: "dim",
    Fate.OPEN: "",
    Fate.NOTHING: "dim",
}
_FATE_TEXT = {
    Fate.TARGET: "target",
    Fate.LEFT_OUT: "left out",
    Fate.SUPERSEDED: "superseded",
    Fate.NOT_TRAINABLE: "not trainable",
    Fate.OPEN: "nothing selected",
    Fate.NOTHING: "no tokens",
}


_SHOWN_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def visible(text: str) -> str:
    """Text of a run as a terminal can be given it: control characters and halves of characters are spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").translate(_SHOWN_CONTROLS)


def runs_table(runs: Iterable[RunSummary]) -> Table:
    """One row a run."""
    names = ("run", "task", "outcome", "reward", "advantage", "calls", "tokens in", "out", "targets", "versions", "s")
    table = Table(*names, box=None)
    for run in runs:
        table.add_row(
            run.run_id,
            escape(visible(run.task_name)),
            run.outcome or "unfinished",
            number(run.reward),
            number(run.advantage),
            str(run.num_calls),
            str(run.num_prompt_tokens),
            str(run.num_output_tokens),
            "-" if run.selection is None else str(run.selection.num_targets),
            _versions(run.version_min, run.version_max),
            number(run.wall_s, 1),
        )
    return table


def head_line(summary: RunSummary) -> Text:
    """A run in one line."""
    line = Text.assemble(
        (summary.run_id, "bold"), f" {visible(summary.task_name)}: {summary.outcome or 'unfinished'}, "
    )
    line.append(f"reward {number(summary.reward)}, advantage {number(summary.advantage)}")
    return line.append(f" ({visible(summary.detail)})" if summary.detail else "")


def show_run(console: Console, summary: RunSummary, group: GroupFacts, score: ScoreFacts, run: RunCalls) -> None:
    """A run with every call, and what was sampled: reasoning, text and tool calls apart."""
    console.print(head_line(summary))
    told = f"group {summary.group_id} is {group.state}" + (f": {group.reason}" if group.reason else "")
    if group.trained_step is not None:
        told += f", trained by step {group.trained_step}"
    console.print(visible(told), markup=False, highlight=False)
    if score.evaluated_ref or score.details:
        details = visible(json.dumps(score.details, ensure_ascii=False))
        console.print(f"scored {score.evaluated_ref or 'its work'}: {details}", markup=False, highlight=False)
    for row in run.rows:
        _show_call(console, row, run)


def _show_call(console: Console, row: CallRow, run: RunCalls) -> None:
    call = row.record
    spans = ", ".join(f"{span.num_tokens} at version {span.version}" for span in call.version_spans)
    console.rule(f"{call.call_id} (after {call.parent_call_id or 'nothing'})", align="left")
    console.print(
        f"{run.roles[call.call_id]}, {_FATE_TEXT[run.fates[call.call_id]]}: {row.num_prompt_tokens} prompt tokens "
        f"({len(row.new_prompt_ids)} new), {len(call.output_ids)} sampled ({spans}), {call.finish_reason}, on "
        f"{', '.join(call.cells)}, mean log-probability {float(call.logprobs.mean()) if len(call.logprobs) else 0:.3f}",
        markup=False,
        highlight=False,
    )
    told = _told(call)
    if told:
        console.print(visible(told), markup=False, highlight=False)
    messages = call.request.get("messages", [])
    if messages:
        _show_part(console, str(messages[-1].get("role")), str(messages[-1].get("content", "")))
    answer = answer_of(call)
    if answer.reasoning:
        _show_part(console, "reasoning", answer.reasoning)
    if answer.content or not (answer.reasoning or answer.tool_calls):
        _show_part(console, "assistant", answer.content)
    for tool_call in answer.tool_calls:
        arguments = json.dumps(tool_call.arguments, ensure_ascii=False)
        _show_part(console, f"calls {tool_call.name}", f"{arguments} ({tool_call.call_id})")


def _told(call: CallRecord) -> str:
    """What the harness tells of a call, and how its answer ended."""
    parts = [] if call.purpose is CallPurpose.TURN else [f"made for: {call.purpose}"]
    if call.agent_id:
        parts.append(f"agent {call.agent_id}" + (f" of {call.parent_agent_id}" if call.parent_agent_id else ""))
    if call.stop_string:
        parts.append(f"ended by the stop string {call.stop_string!r}")
    if call.answer is not None and call.answer.num_malformed_calls:
        parts.append(f"{call.answer.num_malformed_calls} malformed tool calls in the text")
    return ", ".join(parts)


def _show_part(console: Console, what: str, text: str) -> None:
    console.print(f"[dim]{escape(visible(what))}:[/dim]", end=" ")
    console.print(visible(text), markup=False, highlight=False)


def call_data(row: CallRow, run: RunCalls, *, tokens: bool) -> dict[str, Any]:
    """A call as JSON-ready data."""
    call = row.record
    data: dict[str, Any] = {
        "call_id": call.call_id,
        "parent_call_id": call.parent_call_id,
        "role": str(run.roles[call.call_id]),
        "fate": str(run.fates[call.call_id]),
        "num_prompt_tokens": row.num_prompt_tokens,
        "num_new_prompt_tokens": len(row.new_prompt_ids),
        "num_sampled_tokens": len(call.output_ids),
        "version_spans": [[span.version, span.num_tokens] for span in call.version_spans],
        "finish_reason": call.finish_reason,
        "trainable": call.trainable,
        "agent_id": call.agent_id,
        "parent_agent_id": call.parent_agent_id,
        "purpose": str(call.purpose),
        "cells": list(call.cells),
        "started_at_s": call.started_at_s,
        "ended_at_s": call.ended_at_s,
        "requested_sampling": call.requested_sampling,
        "sampling": None if call.sampling is None else asdict(call.sampling),
        "request": {name: value for name, value in call.request.items() if name not in ("messages", "tools")},
        "new_messages": list(call.request.get("messages", ()))[row.num_shared_messages :],
        "output_text": call.output_text,
        "answer": None if call.answer is None else asdict(call.answer),
        "stop_string": call.stop_string,
    }
    if tokens:
        data["new_prompt_ids"] = row.new_prompt_ids.tolist()
        data["output_ids"] = call.output_ids.tolist()
        data["logprobs"] = call.logprobs.tolist()
    return json.loads(json.dumps(data, default=str))


# -- the tree ---------------------------------------------------------------------------------------------------------


def tree_of(summary: RunSummary, view: TreeView) -> Tree:
    """The tree of a run. Calls that simply follow each other stand on one level."""
    root = Tree(head_line(summary), guide_style="dim")
    todo = [(root, line) for line in view.lines]
    for place, line in todo:  # grows while it is walked: no deep tree needs a deep call stack
        if line.branch:
            place = place.add(Text(_BRANCH_TEXT.get(line.branch, line.branch), style="bold cyan"))
        for node in line.nodes:
            below = place.add(node_text(summary.run_id, node))
            todo.extend((below, branch) for branch in node.branches)
    return root


_BRANCH_TEXT = {
    "compaction": "compaction: the main conversation begins anew",
    "subagent": "subagent",
    "side": "side call",
    "summary": "summary",
    "retry": "retry: asked again later",
    "branch": "branch",
}


def node_text(run_id: str, node: NodeView) -> Text:
    """One line: which call, what it was for, its tokens, and what became of them."""
    name = node.call_id.removeprefix(f"{run_id}-")
    text = Text()
    if node.num_calls > 1:
        text.append(f"... {node.num_calls} calls from {name} ...", style="dim")
    else:
        text.append(name, style="bold")
    text.append(f"  {node.role}", style="" if node.role == CallRole.MAIN else "cyan")
    text.append(f"  +{node.num_prompt_tokens} prompt, {node.num_sampled_tokens} sampled")
    text.append(f"  v{_versions(node.version_min, node.version_max)}  {node.finish_reason}  ", style="dim")
    text.append(_FATE_TEXT[node.fate], style=_FATE_STYLE[node.fate])
    if node.draw is not None:
        text.append(f"  selected #{node.draw + 1}, {node.num_path_tokens} tokens", style="bold green")
    return text


def tree_totals(view: TreeView, selection: RunSelection | None) -> Table:
    """A run in numbers."""
    totals = view.totals
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    at_most = None if selection is None else selection.max_trajectories
    limit = "" if at_most is None else f" (at most {at_most})"
    table.add_row("calls", str(totals.num_calls))
    table.add_row("trajectories", f"{totals.num_trajectories}, {totals.num_selected} selected{limit}")
    table.add_row(
        "tokens",
        f"{totals.num_unique_tokens} unique; {totals.num_flat_tokens} in all trajectories flattened, "
        f"{totals.dedup_ratio:.2f} times as many",
    )
    by_fate = [f"{num} {_FATE_TEXT[fate]}" for fate, num in totals.by_fate.items() if num]
    table.add_row("sampled", f"{totals.num_sampled_tokens}" + (f": {', '.join(by_fate)}" if by_fate else ""))
    if selection is not None and selection.left_out:
        left_out = ", ".join(f"{num} {role}" for role, num in selection.left_out.items() if num)
        if left_out:
            table.add_row("left out", left_out)
    return table


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _versions(low: int | None, high: int | None) -> str:
    if low is None:
        return "-"
    return str(low) if low == high else f"{low}-{high}"
