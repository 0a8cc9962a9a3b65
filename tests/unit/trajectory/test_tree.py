from __future__ import annotations

import time

import pytest
from hypothesis import given

from services.common.errors import InvariantError, NotFoundError
from services.trajectory.tree import TrajectoryTree, TreeCall
from tests.unit.trajectory.trees import make_call, make_tree, tree_calls, unhurried


def kinds(tree: TrajectoryTree, index: int) -> list[tuple[str, list[int]]]:
    path = [tree.segments[one] for one in tree.path(index)]
    return [("sampled" if one.is_sampled else "prompt", one.token_ids.tolist()) for one in path]


def test_a_continued_call_adds_only_its_new_tokens() -> None:
    tree = make_tree(make_call("c0", None, [1, 2, 3], [4, 5]), make_call("c1", "c0", [6], [7]))
    assert tree.num_tokens == 7
    assert tree.prompt_ids("c1").tolist() == [1, 2, 3, 4, 5, 6]
    (leaf,) = tree.leaves()
    assert kinds(tree, leaf) == [("prompt", [1, 2, 3]), ("sampled", [4, 5]), ("prompt", [6]), ("sampled", [7])]


def test_prompts_that_part_inside_a_segment_split_it_there() -> None:
    tree = make_tree(
        make_call("c0", None, [1, 2, 3, 4], [9]),
        make_call("c1", None, [1, 2, 5], [8]),
        make_call("c2", "c0", [6], [7]),
    )
    assert tree.num_tokens == 4 + 1 + 1 + 1 + 1 + 1
    assert tree.prompt_ids("c0").tolist() == [1, 2, 3, 4]
    assert tree.prompt_ids("c1").tolist() == [1, 2, 5]
    assert tree.prompt_ids("c2").tolist() == [1, 2, 3, 4, 9, 6]
    assert len(tree.roots) == 1
    assert tree.segments[tree.roots[0]].token_ids.tolist() == [1, 2]


def test_a_prompt_that_is_the_beginning_of_another_shares_it() -> None:
    tree = make_tree(make_call("c0", None, [1, 2, 3], [9]), make_call("c1", None, [1, 2], [8]))
    assert tree.num_tokens == 5
    assert tree.prompt_ids("c1").tolist() == [1, 2]


def test_the_same_answer_sampled_twice_is_two_samples() -> None:
    tree = make_tree(make_call("c0", None, [1], [2, 3]), make_call("c1", None, [1], [2, 3]))
    assert tree.num_tokens == 5
    assert len(tree.leaves()) == 2


def test_an_answer_is_never_shared_with_prompt_tokens() -> None:
    tree = make_tree(make_call("c0", None, [1], [2, 3]), make_call("c1", None, [1, 2, 3], [4]))
    assert tree.num_tokens == 3 + 2 + 1


def test_a_call_is_appended_once_and_only_below_a_known_parent() -> None:
    tree = make_tree(make_call("c0", None, [1], [2]))
    with pytest.raises(InvariantError):
        tree.append(make_call("c0", None, [1], [2]))
    with pytest.raises(NotFoundError):
        tree.append(make_call("c2", "c1", [1], [2]))
    assert tree.num_calls == 1


def test_a_retry_supersedes_the_answer_that_nobody_went_on_from() -> None:
    first, retry = make_call("c0", None, [1], [2], ordinal=0), make_call("c1", None, [1], [3], ordinal=1)
    tree = make_tree(retry, first)  # the first one's answer may well arrive last
    assert [tree.segments[index].call_id for index in tree.superseded()] == ["c0"]


def test_an_answer_that_was_extended_is_not_superseded() -> None:
    tree = make_tree(
        make_call("c0", None, [1], [2], ordinal=0),
        make_call("c1", None, [1], [3], ordinal=1),
        make_call("c2", "c0", [4], [5], ordinal=2),
    )
    assert tree.superseded() == frozenset()


def test_another_request_with_the_same_prompt_is_no_retry() -> None:
    tree = make_tree(
        make_call("c0", None, [1], [2], ordinal=0, request_key="a"),
        make_call("c1", None, [1], [3], ordinal=1, request_key="b"),
    )
    assert tree.superseded() == frozenset()


@unhurried
@given(tree_calls())
def test_any_tree_holds_every_call_and_each_sampled_token_once(calls: list[TreeCall]) -> None:
    tree = make_tree(*calls)
    expected: dict[str, list[int]] = {}
    for call in calls:
        history = expected[call.parent_call_id] if call.parent_call_id else []
        prompt = [*history, *call.new_prompt_ids.tolist()]
        assert tree.prompt_ids(call.call_id).tolist() == prompt
        expected[call.call_id] = [*prompt, *call.output_ids.tolist()]
    sampled = [segment for segment in tree.segments if segment.is_sampled]
    assert sorted(segment.call_id or "" for segment in sampled) == sorted(c.call_id for c in calls if len(c.output_ids))
    assert tree.num_tokens == sum(len(segment.token_ids) for segment in tree.segments)
    assert all(len(segment.token_ids) for segment in tree.segments)
    assert all(segment.end == len(expected[segment.call_id]) for segment in sampled if segment.call_id)
    assert sorted(tree.preorder()) == list(range(len(tree.segments)))
    for index, segment in enumerate(tree.segments):
        assert segment.end == len(tree.ids(index))


def test_appending_behind_a_long_history_costs_no_more_than_behind_a_short_one() -> None:
    def seconds_per_append(history: int) -> float:
        tree = make_tree(make_call("c0", None, [0] * history, [1]))
        best = float("inf")
        for repeat in range(20):
            started = time.perf_counter()
            for index in range(20):
                parent = "c0" if index == 0 else f"{repeat}-{index - 1}"
                tree.append(make_call(f"{repeat}-{index}", parent, [5, repeat, index], [1] * 10))
            best = min(best, time.perf_counter() - started)
        return best / 20

    short, long = seconds_per_append(100), seconds_per_append(1_000_000)
    assert long < 5 * short + 1e-4
