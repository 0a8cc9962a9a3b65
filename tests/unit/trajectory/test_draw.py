from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given

from services.common.types import VersionSpan
from services.trajectory.draw import NUM_FOLDED_AT_LEAST, Branch, LineView, NodeView, TreeView, draw_tree
from services.trajectory.encoding import CallRow
from services.trajectory.paths import Fate, RunCalls, calls_of_run, trajectories_of
from services.trajectory.tree import TreeCall as Call
from services.trajectory.types import CallRecord, CallRole, RunSelection
from tests.unit.trajectory.trees import make_call, tree_calls, unhurried

TASK = {"role": "user", "content": "do it", "reasoning": "", "tool_calls": [], "tool_call_id": ""}


def rows_for(calls: Sequence[Call]) -> list[CallRow]:
    """Calls as a store gives them."""
    ends: dict[str, int] = {}
    rows = []
    for call in calls:
        num_prompt = ends.get(call.parent_call_id or "", 0) + len(call.new_prompt_ids)
        ends[call.call_id] = num_prompt + len(call.output_ids)
        record = CallRecord(
            call_id=call.call_id,
            run_id="g000000-r0",
            attempt=0,
            parent_call_id=call.parent_call_id,
            request={"messages": [TASK], "tools": []},
            prompt_ids=np.empty(0, dtype=np.int32),
            output_ids=call.output_ids,
            logprobs=call.logprobs,
            version_spans=call.version_spans,
            output_text="x",
            finish_reason="stop",
            trainable=call.trainable,
            cells=("cell-1",),
            started_at_s=1.0,
            ended_at_s=2.0,
            requested_sampling={"key": call.request_key},
        )
        rows.append(CallRow(record, call.ordinal, num_prompt, call.new_prompt_ids, 0, False))
    return rows


def run_for(*calls: Call, selection: RunSelection | None = None, **roles: CallRole) -> RunCalls:
    run = calls_of_run(rows_for(calls), selection)
    return replace(run, roles={**run.roles, **roles})


def chain(num_calls: int) -> list[Call]:
    return [
        make_call(f"c{at}", f"c{at - 1}" if at else None, [1, 2, 3], [4, 5], ordinal=at, version=at)
        for at in range(num_calls)
    ]


def selected(leaf: str, *targets: str, num_targets: int = 0) -> RunSelection:
    return RunSelection(5, 0, (leaf,), (CallRole.MAIN,), targets, num_targets, 0, 0, 0)


def nodes_of(view: TreeView) -> Iterator[NodeView]:
    todo: list[LineView] = list(view.lines)
    while todo:
        for node in todo.pop().nodes:
            yield node
            todo.extend(node.branches)


def test_a_long_straight_conversation_is_folded_to_its_ends() -> None:
    (line,) = draw_tree(run_for(*chain(40))).lines
    assert [(node.call_id, node.num_calls) for node in line.nodes] == [("c0", 1), ("c1", 38), ("c39", 1)]
    folded = line.nodes[1]
    assert (folded.num_prompt_tokens, folded.num_sampled_tokens, folded.num_path_tokens) == (38 * 3, 38 * 2, 39 * 5)
    assert (folded.version_min, folded.version_max) == (1, 38)


def test_nothing_is_folded_that_is_asked_for_or_short() -> None:
    assert len(draw_tree(run_for(*chain(40)), fold=False).lines[0].nodes) == 40
    short = chain(NUM_FOLDED_AT_LEAST + 1)  # its ends stand alone, so fewer are left
    assert all(node.num_calls == 1 for node in nodes_of(draw_tree(run_for(*short))))


def test_calls_with_branches_and_ends_of_selected_paths_are_never_folded() -> None:
    calls = [*chain(30), make_call("side", "c15", [7], [8], ordinal=30)]
    view = draw_tree(run_for(*calls, selection=selected("c29", "c29")))
    alone = [node.call_id for node in view.lines[0].nodes if node.num_calls == 1]
    assert alone == ["c0", "c15", "c29"]
    (branch,) = next(node for node in view.lines[0].nodes if node.call_id == "c15").branches
    assert (branch.branch, [node.call_id for node in branch.nodes]) == (Branch.BRANCH, ["side"])
    assert view.lines[0].nodes[-1].draw == 0


def test_a_line_goes_on_with_its_own_role_and_calls_others_by_name() -> None:
    calls = [
        *chain(2),
        make_call("sub", "c0", [9], [9], ordinal=2),
        make_call("sub2", "sub", [9], [9], ordinal=3),
        make_call("retried", "c1", [6], [1], ordinal=4),
        make_call("again", "c1", [6], [2], ordinal=5),
        make_call("summary", "again", [3], [3], ordinal=6),
        make_call("anew", None, [5], [5], ordinal=7),
        make_call("helper", None, [8], [8], ordinal=8),
    ]
    subagents = dict.fromkeys(("sub", "sub2", "helper"), CallRole.SUBAGENT)
    view = draw_tree(run_for(*calls, summary=CallRole.MAIN_SUMMARY, **subagents))
    main, anew, helper = view.lines
    assert [node.call_id for node in main.nodes] == ["c0", "c1", "again", "summary"]
    assert [line.branch for node in main.nodes for line in node.branches] == [Branch.SUBAGENT, Branch.RETRY]
    assert (main.branch, anew.branch, helper.branch) == (Branch.FIRST, Branch.COMPACTION, Branch.SUBAGENT)


def test_fates_say_what_became_of_the_sampled_tokens() -> None:
    calls = [
        make_call("taken", None, [1], [2, 2], ordinal=0),
        make_call("left", "taken", [3], [4, 4, 4], ordinal=1),
        make_call("greedy", "taken", [5], [6], ordinal=2, trainable=False),
        make_call("orphan", "taken", [7], [8], ordinal=3),
        make_call("again", "taken", [7], [9], ordinal=4),
        make_call("mute", "taken", [7, 7], [], ordinal=5),
    ]
    run = run_for(*calls, selection=selected("again", "taken", "again", num_targets=3))
    assert run.fates == {
        "taken": Fate.TARGET,
        "left": Fate.LEFT_OUT,
        "greedy": Fate.NOT_TRAINABLE,
        "orphan": Fate.SUPERSEDED,
        "again": Fate.TARGET,
        "mute": Fate.NOTHING,
    }
    by_fate = draw_tree(run).totals.by_fate
    assert (by_fate[Fate.TARGET], by_fate[Fate.LEFT_OUT], by_fate[Fate.SUPERSEDED]) == (3, 3, 1)
    unsettled = run_for(*calls)
    assert unsettled.fates["left"] == Fate.OPEN


def test_an_answer_that_was_cut_is_not_trainable() -> None:
    (row,) = rows_for([make_call("cut", None, [1], [2])])
    cut = replace(row, record=replace(row.record, finish_reason="abort"))
    assert calls_of_run([cut], None).fates == {"cut": Fate.NOT_TRAINABLE}


def test_the_dedup_ratio_compares_flattened_trajectories_with_unique_tokens() -> None:
    calls = [make_call("a", None, [1] * 90, [2] * 10)]
    calls += [make_call(f"b{at}", "a", [3 + at], [4] * 9, ordinal=1 + at) for at in range(4)]
    totals = draw_tree(run_for(*calls)).totals
    assert (totals.num_unique_tokens, totals.num_flat_tokens) == (140, 440)
    assert totals.dedup_ratio == 440 / 140
    assert draw_tree(run_for()).totals.dedup_ratio == 1.0


def test_a_prompt_that_an_earlier_call_has_counts_once() -> None:
    calls = [make_call("a", None, [1, 2, 3], [4]), make_call("b", None, [1, 2, 9], [4], ordinal=1)]
    run = run_for(*calls)
    assert run.num_fresh_tokens == {"a": 3, "b": 1}
    assert run.num_tokens == 3 + 1 + 1 + 1


def test_a_tree_of_thousands_of_calls_is_drawn_at_once() -> None:
    calls = chain(3000)
    calls += [make_call(f"s{at}", f"c{at}", [9], [9], ordinal=3000 + at) for at in range(0, 3000, 10)]
    view = draw_tree(run_for(*calls))
    assert view.totals.num_calls == 3300
    assert sum(node.num_calls for node in nodes_of(view)) == 3300


def test_of_paths_with_the_same_last_answer_only_the_first_is_selected() -> None:
    calls = [
        make_call("a", None, [1], [2]),
        make_call("mute", "a", [3], [], ordinal=1),
        make_call("mute2", "a", [4], [], ordinal=2),
    ]
    run = run_for(*calls, selection=selected("a", "a", num_targets=1))
    assert [one.draw for one in trajectories_of(run)] == [0, None]


@unhurried
@given(tree_calls(max_calls=12))
def test_every_call_is_drawn_once_and_every_token_counted_once(calls: list[Call]) -> None:
    run = run_for(*calls)
    for fold in (True, False):
        view = draw_tree(run, fold=fold)
        nodes = list(nodes_of(view))
        assert sum(node.num_calls for node in nodes) == len(calls)
        unique = sum(node.num_prompt_tokens + node.num_sampled_tokens for node in nodes)
        assert unique == view.totals.num_unique_tokens == run.num_tokens
        assert sum(view.totals.by_fate.values()) == sum(len(call.output_ids) for call in calls)


def test_versions_are_those_of_the_spans() -> None:
    (row,) = rows_for([make_call("a", None, [1], [2, 3, 4])])
    spans = (VersionSpan(7, 2), VersionSpan(5, 1))
    run = calls_of_run([replace(row, record=replace(row.record, version_spans=spans))], None)
    (node,) = nodes_of(draw_tree(run))
    assert (node.version_min, node.version_max) == (5, 7)


def test_no_conversation_goes_on_with_a_side_call_but_that_of_side_calls() -> None:
    calls = [
        *chain(2),
        make_call("title", "c1", [9], [9], ordinal=2),
        make_call("title2", "title", [9], [9], ordinal=3),
        make_call("check", None, [8], [8], ordinal=4),
    ]
    sides = dict.fromkeys(("title", "title2", "check"), CallRole.SIDE)
    main, check = draw_tree(run_for(*calls, **sides)).lines
    assert [node.call_id for node in main.nodes] == ["c0", "c1"]
    (titles,) = main.nodes[-1].branches
    assert (titles.branch, [node.call_id for node in titles.nodes]) == (Branch.SIDE, ["title", "title2"])
    assert (main.branch, check.branch) == (Branch.FIRST, Branch.SIDE)
