"""Random programs under random policies: the results and gradients of plain autograd.

The programs are those of `tests.test_properties`: views, in-place ops, random numbers, buffers,
regions in regions. Here every region has a policy, made of random rules.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import pytest
import torch

import recollect
from recollect import policy
from tests._support import assert_identical
from tests.test_properties import (
    BACKWARDS,
    CHANGED,
    NOT_IN_PLACE,
    PACKETS,
    STATEFUL,
    Checkpointing,
    Interpreter,
    Program,
    Step,
    play,
    programs,
    region,
    with_examples,
    writes_elsewhere,
)

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
example, given = hypothesis.example, hypothesis.given

#: All but the one that plain autograd may refuse.
ALLOWED = [name for name in BACKWARDS if name != "one_by_one_and_free"]

packets = st.lists(st.sampled_from(PACKETS), min_size=1, max_size=4, unique=True)
rules = st.one_of(
    packets.map(lambda ops: policy.save_ops(*ops)),
    packets.map(lambda ops: policy.recompute_ops(*ops)),
    packets.map(lambda ops: policy.offload_ops(*ops)),
    st.builds(policy.every_nth, st.sampled_from(PACKETS), st.integers(1, 3)),
    st.lists(st.sampled_from(STATEFUL), min_size=1, max_size=2).map(
        lambda names: policy.save_modules(*names)
    ),
    st.builds(policy.everything),
    st.builds(policy.nothing),
    st.builds(policy.matmuls),
)
policies = st.lists(rules, min_size=1, max_size=3).map(lambda several: reduce(or_, several))


class Store:
    """Keeps copies."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}
        self.count = 0

    def put(self, tensor: Any) -> int:
        copy = tensor.clone()  # which an outer region may see, and put here too
        self.count += 1
        self.kept[self.count] = copy
        return self.count

    def get(self, handle: int) -> Any:
        return self.kept[handle].clone()

    def drop(self, handle: int) -> None:
        del self.kept[handle]


#: Of the program that runs; not in the interpreter, which the regions can reach.
OPTIONS: dict[str, Any] = {}


class UnderPolicy(Checkpointing):
    """Gives all regions one policy."""

    def __init__(self, chosen: Any, **options: Any) -> None:
        super().__init__()
        OPTIONS.clear()
        OPTIONS.update({"policy": chosen, **options})

    def run(self, region: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        options = region.options | OPTIONS
        return recollect.checkpoint(function, *args, **kwargs, **options)


def compare(program: Program, chosen: Any, **options: Any) -> None:
    plainly = Interpreter()
    expected = play(program, plainly)
    actual = play(program, UnderPolicy(chosen, **options))
    if expected.error is None and actual.error is None:
        assert_identical(actual.results, expected.results)
    elif expected.error is None:
        assert isinstance(actual.error, recollect.CheckpointError), actual.error
        assert any(reason in str(actual.error) for reason in CHANGED), actual.error
        assert plainly.wrote_to_input or CHANGED[1] in str(actual.error)
    elif expected.in_forward:
        assert actual.in_forward
        assert type(actual.error) is type(expected.error)
    elif actual.error is None and not writes_elsewhere(program):
        assert CHANGED[0] in str(expected.error)
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            right = play(program, Interpreter())
        assert right.error is None
        assert_identical(actual.results, right.results)


# A rule that finds nothing in a random program says so.
pytestmark = pytest.mark.filterwarnings("ignore:the policy's .* matched nothing")


@with_examples(100)
@example(Program((region(Step("matmul", 1, 1), Step("relu_"), Step("sin")),)), policy.everything())
@given(programs(), policies)
def test_random_programs_with_random_policies(program: Program, chosen: Any) -> None:
    compare(program, chosen)


@with_examples(50)
@given(programs())
def test_random_programs_with_everything_kept(program: Program) -> None:
    compare(program, policy.everything())


@with_examples(35)
@given(programs(NOT_IN_PLACE, ALLOWED), policies)
def test_random_programs_without_writing_have_no_excuse(program: Program, chosen: Any) -> None:
    """No false alarm: what plain autograd gets right, we do too."""
    expected = play(program, Interpreter())
    actual = play(program, UnderPolicy(chosen))
    assert expected.error is None
    assert actual.error is None, actual.error
    assert_identical(actual.results, expected.results)


@with_examples(35)
@given(programs(NOT_IN_PLACE, ALLOWED), policies, st.booleans())
def test_random_programs_with_a_store(program: Program, chosen: Any, inputs: bool) -> None:
    store = Store()
    expected = play(program, Interpreter())
    actual = play(program, UnderPolicy(chosen, store=store, offload_inputs=inputs))
    assert expected.error is None
    assert actual.error is None, actual.error
    assert_identical(actual.results, expected.results)
