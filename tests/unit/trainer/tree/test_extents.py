from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.tree.extents import Extent, Extents


@given(st.lists(st.one_of(st.integers(1, 50), st.integers(-20, -1)), max_size=60))
def test_extents_never_overlap_and_gaps_are_used_again(steps: list[int]) -> None:
    """A positive step allocates so many bytes, a negative one frees one of those in use."""
    extents, used = Extents(), list[Extent]()
    for step in steps:
        if step > 0:
            used.append(extents.allocate(step))
        elif used:
            extents.free(used.pop(step % len(used)))
        taken = [byte for extent in used for byte in range(extent.offset, extent.end)]
        assert len(taken) == len(set(taken)) == extents.used_bytes
        assert extents.end == max(taken, default=-1) + 1
    gaps = extents.end - extents.used_bytes
    if gaps:
        free = sorted(set(range(extents.end)) - {b for e in used for b in range(e.offset, e.end)})
        longest = length = 1
        for before, after in itertools.pairwise(free):
            length = length + 1 if after == before + 1 else 1
            longest = max(longest, length)
        end = extents.end
        extents.allocate(longest)
        assert extents.end == end


def test_what_is_freed_at_the_end_shortens_the_file() -> None:
    extents = Extents()
    first, second, third = (extents.allocate(10) for _ in range(3))
    extents.free(second)
    assert extents.end == 30
    extents.free(third)
    assert extents.end == 10
    extents.free(first)
    assert (extents.end, extents.used_bytes) == (0, 0)


def test_nothing_is_no_extent() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        Extents().allocate(0)
