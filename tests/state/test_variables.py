"""Variables of enclosing functions, globals and attributes that a region assigns to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
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
@pytest.mark.parametrize("kind", [dict, list])
def test_a_container_that_is_replaced_is_that_of_the_call(kind: type, run: Run) -> None:
    def scenario(run: Run) -> Any:
        cache: Any = {0: 2.0} if kind is dict else [2.0]

        def function(x: Tensor) -> Tensor:
            nonlocal cache
            y = (x * cache[0]).exp()
            cache = {0: cache[0] * 1.5} if kind is dict else [cache[0] * 1.5]
            return y

        x = [leaf(3) for _ in range(3)]
        sum(run(function, each).sum() for each in x).backward()
        return [each.grad for each in x], cache

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


# --- tensors in attributes of modules that a region replaces --------------------------------------


class Cell(nn.Module):
    """Its hidden state is an attribute."""

    def __init__(self, width: int, *, keeps_graph: bool = False) -> None:
        super().__init__()
        self.own, self.past = (nn.Parameter(torch.rand(width)) for _ in range(2))
        self.state: Any = torch.zeros(4, width)
        self.keeps_graph = keeps_graph

    def forward(self, x: Tensor) -> Tensor:
        out = (x * self.own + self.state * self.past).tanh()
        self.state = out if self.keeps_graph else out.detach()
        return out * 2.0


class Several(Cell):
    """Its hidden state has several parts."""

    def __init__(self, width: int, kind: type) -> None:
        super().__init__(width)
        self.state = kind((self.state, self.state + 1.0))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.state
        out = (x * self.own + first * self.past + second).tanh()
        self.state = type(self.state)((out.detach(), second * 0.5))
        return out * 2.0


class Tapped(Cell):
    """Others look at its results, and it at their form."""

    def forward(self, x: Tensor) -> Tensor:
        is_new = self.state.shape != x.shape or self.state.device != x.device
        self.state = (x * self.own).tanh()
        return self.state * (3.0 if is_new else 2.0)


def unroll_cell(cell: Cell, run: Run) -> Any:
    x = [leaf(4, cell.own.numel()) for _ in range(3)]
    sum(run(cell, each).square().sum() for each in x).backward()
    return [each.grad for each in (*x, cell.own, cell.past)]


@ALL
@pytest.mark.parametrize("kind", [tuple, list])
def test_the_parts_of_a_hidden_state_are_restored(kind: type, run: Run) -> None:
    assert_transparent(lambda run: unroll_cell(Several(4, kind), run), run)


@RERUNS
@pytest.mark.parametrize(
    "cell",
    [
        lambda: Cell(WIDE),
        lambda: Cell(4, keeps_graph=True),
        lambda: Several(WIDE, tuple),
    ],
    ids=["large", "graph", "large parts"],
)
def test_so_is_one_in_an_attribute_that_is_not_held(cell: Any, run: Run) -> None:
    with pytest.raises(
        CheckpointError, match=r"'state' of a module since.*register_buffer\('state'"
    ):
        unroll_cell(cell(), run)


class Attends(nn.Module):
    """What it attends to is an attribute, which the loop assigns."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.rand(4))
        self.context: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.own + self.context[0]).tanh() * self.context[1]


@RERUNS
@pytest.mark.parametrize("kind", [tuple, list, torch.stack])
def test_what_the_loop_replaces_is_restored(kind: Any, run: Run) -> None:
    """With its graph: two forwards, and then one backward."""

    def scenario(run: Run) -> Any:
        module, found = Attends(), []
        x, sources = leaf(3, 4), [leaf(3, 4) for _ in range(4)]
        for first in (0, 2):
            module.context = kind([source.exp() for source in sources[first : first + 2]])
            found.append(run(module, x))
        sum(each.square().sum() for each in found).backward()
        return [x.grad, module.own.grad, *(source.grad for source in sources)]

    assert_transparent(scenario, run)


@ALL
@pytest.mark.parametrize("width", [4, WIDE])
def test_one_that_is_only_looked_at_is_not_needed(width: int, run: Run) -> None:
    def scenario(run: Run) -> Any:
        cell, x = Tapped(width), [leaf(size, width) for size in (4, 4, 2)]
        sum(run(cell, each).sum() for each in x).backward()
        return [each.grad for each in (*x, cell.own)]

    assert_transparent(scenario, run)


@pytest.mark.parametrize(
    "make",
    [lambda: Cell(WIDE), lambda: Cell(4, keeps_graph=True), lambda: Several(WIDE, tuple)],
    ids=["large", "graph", "large parts"],
)
def test_it_is_not_held(make: Callable[[], Cell]) -> None:
    cell = make()
    x = leaf(4, cell.own.numel())
    rerun(cell, x)
    before = [ref(each) for each in (cell.state if isinstance(cell, Several) else [cell.state])]
    with collector_off():
        out = rerun(cell, x)
        assert [each() for each in before] == [None] * len(before)
    assert out.requires_grad


def test_a_list_that_holds_itself_is_no_state() -> None:
    def scenario(run: Run) -> Any:
        cell = Tapped(4)
        cell.others = [cell.state]  # type: ignore[assignment]
        cell.others.append(cell.others)  # type: ignore[operator]
        return unroll_cell(cell, run)[0]

    assert_transparent(scenario, rerun)


class _Ops(TorchDispatchMode):
    """The ops that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_around_the_region_do_not_see_the_form() -> None:
    """The replay engine, around it, records no step with a tensor on the meta device."""
    cell, x = Cell(4, keeps_graph=True), leaf(4, 4)
    cell(x)
    with _Ops() as ops:
        rerun(cell, x)
    assert torch.ops.aten.empty_strided.default not in ops.seen


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_in_an_attribute_does_no_harm() -> None:
    def scenario(run: Run) -> Any:
        cell = Tapped(4)
        parts = [torch.ones(2, 3), torch.ones(4, 3)]
        cell.parts = torch.nested.nested_tensor(parts, requires_grad=True)
        return unroll_cell(cell, run)[0]

    assert_transparent(scenario, rerun)


#: Each asks a state for its form alone.
_QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "is_contiguous": lambda state: 2.0 if state.is_contiguous() else 3.0,
    "is_cuda": lambda state: 3.0 if state.is_cuda else 2.0,
    "get_device": lambda state: 3.0 if state.get_device() >= 0 else 2.0,
    "itemsize": lambda state: float(state.itemsize * state.nbytes * state.nelement()),
    "signed": lambda state: 2.0 if state.is_signed() and torch.numel(state) else 3.0,
    "requires_grad": lambda state: float(type(state.requires_grad) is bool),
}
#: Each makes another tensor of it.
_USES: dict[str, Callable[[Tensor], Any]] = {
    "view_as": lambda state: torch.ones(state.shape).flatten().view_as(state).sum(0),
    "expand_as": lambda state: torch.ones(state.shape)[0].expand_as(state),
    "to": lambda state: torch.ones(state.shape).double().to(state),
    "type_as": lambda state: torch.ones(state.shape).double().type_as(state),
    "zeros_like": torch.zeros_like,
    "rand_like": torch.rand_like,
    "randint_like": lambda state: torch.randint_like(state, 1, 4),
    "new_ones": lambda state: state.new_ones(1),
}


class Asks(Cell):
    """Asks its last state for its form."""

    def __init__(self, width: int, question: str) -> None:
        super().__init__(width)
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        answer = {**_QUESTIONS, **_USES}[self.question](self.state)
        self.state = (x * self.own).tanh()
        return self.state * answer


@ALL
@pytest.mark.parametrize("width", [4, WIDE])
@pytest.mark.parametrize("question", _QUESTIONS)
def test_a_stand_in_answers_for_its_form(question: str, width: int, run: Run) -> None:
    assert_transparent(lambda run: unroll_cell(Asks(width, question), run)[:4], run)


@RERUNS
@pytest.mark.parametrize("question", _USES)
def test_to_use_a_stand_in_is_an_error(question: str, run: Run) -> None:
    with pytest.raises(CheckpointError, match="the tensor in the attribute 'state' of a module"):
        unroll_cell(Asks(WIDE, question), run)


class Twice(Cell):
    """Its state is in two attributes, of which it replaces one."""

    def forward(self, x: Tensor) -> Tensor:
        out = x * self.own * self.kept
        self.state = out
        return out


@RERUNS
@pytest.mark.parametrize("needs_grad", [False, True])
def test_what_is_in_another_place_too_stays_guarded(needs_grad: bool, run: Run) -> None:
    cell, x = Twice(WIDE), leaf(4, WIDE)
    cell.state = cell.kept = torch.rand(4, WIDE, requires_grad=needs_grad) * 1.0
    out = run(cell, x)
    cell.kept.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()


def test_it_is_not_held_while_the_region_runs() -> None:
    cell, x, before = Tapped(4), leaf(4, 4), []
    rerun(cell, x)
    before.append(ref(cell.state))
    cell.register_forward_hook(lambda *_: before.append(before[0]() is None))
    with collector_off():
        rerun(cell, x)
    assert before[1] is True


class Waits(Cell):
    """In a rerun it lets another thread look at its state."""

    def __init__(self, width: int) -> None:
        super().__init__(width, keeps_graph=True)
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        if recollect.is_recomputing():
            thread = threading.Thread(target=self.look)
            thread.start()
            thread.join()
        self.state = (x * self.own).tanh()
        return self.state.square()

    def look(self) -> None:
        with pytest.raises(CheckpointError) as info:
            self.state * 1.0
        self.seen.append(str(info.value))


def test_another_thread_gets_the_error_too() -> None:
    cell, x = Waits(4), leaf(4, 4)
    for _ in range(2):
        out = rerun(cell, x)
    now = cell.state
    out.sum().backward()
    assert "the tensor in the attribute 'state' of a module" in cell.seen[0]
    assert cell.state is now
