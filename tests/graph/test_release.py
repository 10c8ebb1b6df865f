"""The rules of use and release, on small graphs that are written out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from recollect.graph.release import (
    Needs,
    WorkingSet,
    find_needs,
    missing_ops,
    pop_unneeded,
)


@dataclass
class Op:
    reads: list[int]


@dataclass
class Value:
    op: int


class Flow:
    """Value 0 is from outside. Op n reads what is given, and makes value n + 1."""

    def __init__(self, *reads: list[int]) -> None:
        self.ops = [Op(each) for each in reads]
        self.values = [Value(number - 1) for number in range(len(reads) + 1)]


#: 0 -> 1 -> 2 -> 3
CHAIN = Flow([0], [1], [2])
#: 0 -> 1 -> {2, 3} -> 4, which reads both
DIAMOND = Flow([0], [1], [1], [2, 3])


# --- find_needs -----------------------------------------------------------------------------------


def test_nothing_is_needed_for_nothing() -> None:
    assert find_needs(CHAIN, [], ()) == Needs([0, 0, 0, 0], set(), [])


def test_a_chain_is_recomputed_from_outside() -> None:
    needs = find_needs(CHAIN, [3], ())
    assert needs.again == {0, 1, 2}
    assert needs.uses == [1, 1, 1, 1]
    assert needs.order == [(0, 0)]


def test_a_held_value_ends_the_search() -> None:
    needs = find_needs(CHAIN, [3], {2})
    assert needs.again == {2}
    assert needs.uses == [0, 0, 1, 1]
    assert needs.order == [(2, 0)]


def test_a_saved_value_that_is_held_is_used_once_and_not_recomputed() -> None:
    needs = find_needs(CHAIN, [2], {2})
    assert (needs.again, needs.uses[2], needs.order) == (set(), 1, [(2, 0)])


def test_each_op_reads_once_however_many_tensors_need_it() -> None:
    needs = find_needs(DIAMOND, [4, 4, 2], ())
    assert needs.again == {0, 1, 2, 3}
    # Value 1 is read by two ops; 2 by one op, and unpacked once; 4 is unpacked twice.
    assert needs.uses == [1, 2, 2, 1, 2]


def test_held_values_are_in_the_order_of_the_first_tensor_that_needs_them() -> None:
    flow = Flow([0], [0], [1], [2, 1])
    needs = find_needs(flow, [3, 4], {1, 2})
    assert needs.order == [(1, 0), (2, 1)]


def test_an_op_with_two_results_of_which_one_is_held() -> None:
    flow = Flow([0], [0])
    flow.values[2].op = 0  # op 0 makes 1 and 2
    needs = find_needs(flow, [1, 2], {2})
    assert needs.again == {0}
    assert needs.order == [(0, 0), (2, 1)]


# --- missing_ops ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "held", "ops"),
    [
        (set(), {0}, [0, 1, 2, 3]),
        ({1}, {0}, [1, 2, 3]),
        (set(), {1}, [1, 2, 3]),
        ({2}, {1}, [2, 3]),
        ({2, 3}, (), [3]),
        ({4}, (), []),
    ],
)
def test_ops_lead_from_what_is_there_in_the_order_of_forward(
    here: Any, held: Any, ops: list[int]
) -> None:
    assert missing_ops(DIAMOND, 4, here, held) == ops


def test_a_value_that_no_op_makes_has_to_be_held() -> None:
    with pytest.raises(AssertionError, match="no op makes"):
        missing_ops(CHAIN, 3, (), ())


# --- pop_unneeded ---------------------------------------------------------------------------------


def test_values_are_released_with_the_last_tensor_that_needs_them() -> None:
    order = [(7, 0), (8, 2), (9, 2)]
    assert pop_unneeded(order, 3) == []
    assert pop_unneeded(order, 2) == [9, 8]
    assert order == [(7, 0)]
    assert pop_unneeded(order, 1) == []
    assert pop_unneeded(order, 0) == [7]
    assert order == []


# --- WorkingSet -----------------------------------------------------------------------------------


def test_a_value_stays_until_its_last_use() -> None:
    working = WorkingSet[str]([2, 1])
    working.end_op([], [(0, "a"), (1, "b")])
    working.use(0)
    assert working.here == {0: "a", 1: "b"}
    working.use(0)
    assert working.here == {1: "b"}


def test_a_result_that_nobody_uses_is_released_at_once() -> None:
    working = WorkingSet[str]([1, 0])
    working.end_op([], [(0, "a"), (1, "b")])
    assert working.here == {0: "a"}


def test_an_op_releases_what_it_reads_for_the_last_time() -> None:
    working = WorkingSet[str]([1, 2, 1])
    working.end_op([], [(0, "a"), (1, "b")])
    working.end_op([0, 1], [(2, "c")])
    assert working.here == {1: "b", 2: "c"}


def test_what_was_unpacked_stays_if_it_is_still_used() -> None:
    working = WorkingSet[str]([2])
    working.end_op([], [(0, "a")])
    working.give(0)
    assert (working.here, working.given) == ({0: "a"}, {0})
    working.use(0)
    assert working.here == {}


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("is_given", [False, True])
def test_an_op_may_write_to_a_value_that_nobody_uses_any_more(uses: int, is_given: bool) -> None:
    working = WorkingSet[str]([uses + is_given])
    working.end_op([], [(0, "a")])
    if is_given:
        working.give(0)
    assert working.use_up(0) is (uses == 1 and not is_given)


# --- together -------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [{0}, {0, 1}, {0, 2, 3}])
@pytest.mark.parametrize("saved", [[4], [1, 2, 3, 4], [2, 4, 4]])
def test_a_backward_by_these_rules_uses_everything_up(saved: list[int], held: set[int]) -> None:
    needs = find_needs(DIAMOND, saved, held)
    working = WorkingSet[int](needs.uses.copy())
    for value in reversed(saved):
        if value not in held and value not in working.here:
            for op in missing_ops(DIAMOND, value, working.here, held):
                assert op in needs.again
                working.end_op(DIAMOND.ops[op].reads, [(op + 1, op)])
            assert value in working.here
        working.give(value)
    assert working.here == {}
    assert set(working.uses) <= {0}
