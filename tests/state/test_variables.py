"""Variables of enclosing functions, and globals, that a region assigns to."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from recollect import CheckpointError
from tests._support import (
    ALL,
    RERUNS,
    Run,
    assert_transparent,
    collector_off,
    leaf,
    play,
    rerun,
)

#: Of a hidden state that is too large to be held.
WIDE = 8192

STATE: Any = None
CALLS = 0


def unroll(run: Run, state: Any, width: int = 4, *, keeps_graph: bool = False) -> Any:
    """A recurrent function whose hidden state is a variable of this one."""
    own, past = leaf(width), leaf(width)

    def cell(x: Tensor) -> Tensor:
        nonlocal state
        first, *others = state if isinstance(state, tuple) else (state,)
        out = (x * own + first * past).tanh()
        new = out if keeps_graph else out.detach()
        state = (new, *others) if isinstance(state, tuple) else new
        return out * 2.0

    return _stepped(run, cell, [own, past])


def unroll_global(run: Run, state: Tensor) -> Any:
    """The same with a global."""
    global STATE  # noqa: PLW0603 - it is what is tested
    STATE = state
    own, past = leaf(4), leaf(4)

    def cell(x: Tensor) -> Tensor:
        global STATE  # noqa: PLW0603
        out = (x * own + STATE * past).tanh()
        STATE = out.detach()
        return out * 2.0

    return [*_stepped(run, cell, [own, past]), STATE]


def _stepped(run: Run, cell: Any, leaves: list[Tensor]) -> list[Any]:
    x = [leaf(3, leaves[0].numel()) for _ in range(3)]
    sum(run(cell, each).square().sum() for each in x).backward()
    return [each.grad for each in (*x, *leaves)]


@ALL
@pytest.mark.parametrize("parts", [1, 2])
def test_a_hidden_state_is_that_of_the_call(parts: int, run: Run) -> None:
    def scenario(run: Run) -> Any:
        state = torch.rand(3, 4)
        return unroll(run, state if parts == 1 else (state, 0.5))

    assert_transparent(scenario, run)


@ALL
def test_so_is_one_in_a_global(run: Run) -> None:
    assert_transparent(lambda run: unroll_global(run, torch.rand(3, 4)), run)


@ALL
def test_a_number_and_a_flag_are_those_of_the_call(run: Run) -> None:
    def scenario(run: Run) -> Any:
        scale, is_first, seen = 2.0, True, 0

        def function(x: Tensor) -> Tensor:
            nonlocal scale, is_first, seen
            seen += 10
            x = (x * scale).exp() if is_first else (x * scale).sin().exp()
            scale, is_first = scale * 1.5, False
            return x

        x = [leaf(3) for _ in range(3)]
        sum(run(function, each).sum() for each in x).backward()
        return [each.grad for each in x], scale, is_first, seen

    assert_transparent(scenario, run)


@ALL
def test_a_counter_has_its_value_of_the_call_and_counts_reruns(run: Run) -> None:
    def scenario(run: Run) -> Any:
        global CALLS
        CALLS, calls = 0, 0

        def function(x: Tensor) -> Tensor:
            nonlocal calls
            global CALLS  # noqa: PLW0603
            calls += 1
            CALLS += 1
            return (x * calls + CALLS).sin().exp()

        x = [leaf(3) for _ in range(2)]
        sum(run(function, each).sum() for each in x).backward()
        counts.append((calls, CALLS))
        return [each.grad for each in x]

    counts: list[Any] = []
    assert_transparent(scenario, run)
    ours, plain = counts
    assert plain == (2, 2)
    assert ours == (4, 4)


@RERUNS
@pytest.mark.parametrize(
    ("width", "keeps_graph"), [(WIDE, False), (4, True)], ids=["large", "graph"]
)
def test_a_state_that_is_not_held_is_an_error(width: int, keeps_graph: bool, run: Run) -> None:
    with pytest.raises(
        CheckpointError, match="in a variable of an enclosing function since forward"
    ):
        play(lambda run: unroll(run, torch.rand(3, width), width, keeps_graph=keeps_graph), run)


@pytest.mark.parametrize("width", [4, WIDE])
def test_what_is_held(width: int) -> None:
    state = torch.rand(3, width)
    before = ref(state)

    def function(x: Tensor) -> Tensor:
        nonlocal state
        out = (x + state.mean()).sin().exp()
        state = torch.zeros(3)
        return out

    with collector_off():
        out = rerun(function, leaf(3))
        assert (before() is None) == (width == WIDE)
    del out
