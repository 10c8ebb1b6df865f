"""Lists, dicts and objects in attributes of modules, whose contents a region changes."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recollect import CheckpointError, is_recomputing
from recollect.errors import InputChanged
from recollect.state.module_contents import ModuleContents
from recollect.state.module_index import index_of
from tests._support import (
    ALL,
    RERUNS,
    Run,
    assert_transparent,
    collector_off,
    leaf,
    plain,
    reentrant,
    rerun,
)

#: Of a tensor that is too large to be held.
WIDE = 8192


class Keeps(nn.Module):
    """What it holds is read, and then changed, by each call."""

    def __init__(self, kind: str, width: int = 4) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.rand(width))
        self.kind = kind
        start = torch.zeros(width)
        self.held: Any = {
            "list": lambda: [start],
            "dict": lambda: {"state": start},
            "nested": lambda: {"fwd": SimpleNamespace(history=[start])},
            "object": lambda: SimpleNamespace(state=start, rate=1.0),
            "deque": lambda: deque([start], maxlen=2),
            "set": lambda: {0.0},
            "array": lambda: np.zeros(2),
        }[kind]()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "set":
            self.held.add(float(len(self.held)))
            return ((x * self.own).tanh() * sum(self.held)).tanh()
        if self.kind == "array":
            self.held[0] += 1.5
            return ((x * self.own).tanh() * float(self.held[0])).tanh()
        out = ((x * self.own).tanh() * self.exchange(x)).tanh()
        return out.sin()

    def exchange(self, x: Tensor) -> Any:
        """The state before this call; then there is another one."""
        now = x.detach().mean(0)
        if self.kind == "deque":
            before = sum(self.held)
            self.held.append(now)
        elif self.kind == "object":
            before = self.held.state + self.held.rate
            self.held.state, self.held.rate = now, self.held.rate * 1.5
        else:
            where = self.held["fwd"].history if self.kind == "nested" else self.held
            name = "state" if self.kind == "dict" else -1
            before = where[name] + 1.0
            where[name] = now
        return before


_KINDS = ["list", "dict", "nested", "object", "deque", "set", "array"]


def unroll(module: Any, run: Run, width: int = 4) -> Any:
    x = [leaf(4, width) for _ in range(3)]
    sum(run(module, each).square().sum() for each in x).backward()
    return [each.grad for each in (*x, module.own)]


@ALL
@pytest.mark.parametrize("kind", _KINDS)
def test_a_rerun_finds_the_contents_of_the_call(kind: str, run: Run) -> None:
    def scenario(run: Run) -> Any:
        module = Keeps(kind)
        found = unroll(module, run)
        held = module.held
        left = (
            [vars(held)] if kind == "object" else held if kind in ("list", "deque", "array") else []
        )
        return found[:3], [*left]

    assert_transparent(scenario, run)


class Caches(nn.Module):
    """Attends to what it has seen before, without its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cache = (
            nn.Parameter(torch.rand(4)),
            pytest.importorskip("transformers").DynamicCache(),
        )

    def forward(self, x: Tensor) -> Tensor:
        keys = (x * self.own)[None, None]
        keys, values = self.cache.update(keys.detach(), keys.detach() * 2.0, 0)
        query = (x * self.own)[None, None]
        return nn.functional.scaled_dot_product_attention(query, keys, values)


@RERUNS
def test_a_key_value_cache_of_transformers(run: Run) -> None:
    assert_transparent(lambda run: unroll(Caches(), run), run)


class Collects(nn.Module):
    """Its last result is in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.last = nn.Parameter(torch.rand(WIDE)), {"": torch.zeros(WIDE)}

    def forward(self, x: Tensor) -> Tensor:
        out = (x * self.own + self.last[""]).tanh()
        self.last[""] = out.mean(0)
        return out.square()


@RERUNS
def test_contents_with_a_graph_that_are_gone_are_an_error(run: Run) -> None:
    with pytest.raises(CheckpointError, match="a dict of a module since forward"):
        unroll(Collects(), run, WIDE)


def test_they_are_not_held() -> None:
    module, x = Collects(), leaf(4, WIDE)
    rerun(module, x)
    before = ref(module.last[""])
    with collector_off():
        out = rerun(module, x)
        assert before() is None
    assert out.requires_grad


class Logs(nn.Module):
    """What it collects is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.losses = nn.Parameter(torch.rand(4)), []

    def forward(self, x: Tensor) -> Tensor:
        out = (x * self.own).tanh()
        self.losses.append(out.sum() if self.training else float(out.sum()))
        return out.tanh()


@RERUNS
def test_a_list_of_losses_has_each_once(run: Run) -> None:
    """And they still have the graph of forward."""

    def scenario(run: Run) -> Any:
        module = Logs()
        x = [leaf(3, 4) for _ in range(2)]
        total = sum(run(module, each).sum() for each in x)
        (total + sum(module.losses)).backward()
        return [*(each.grad for each in x), module.own.grad, len(module.losses)]

    assert_transparent(scenario, run)


def test_other_threads_and_loops_may_change_what_the_region_leaves_alone() -> None:
    """Contents that the region has not changed are as they are, in a rerun and after it."""
    module = Keeps("list")
    module.log = []  # type: ignore[assignment]
    out = rerun(module, leaf(4, 4))
    module.log.append("step")  # type: ignore[operator]
    out.sum().backward()
    assert module.log == ["step"]


class Notes(nn.Module):
    """Notes words at each call, and computes with how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = ["made"]

    def forward(self, x: Tensor) -> Tensor:
        out = (x * len(self.notes)).tanh()
        self.notes.append((is_recomputing(), "called", x.dtype, x.device, x.shape))
        return out.sin()


@RERUNS
def test_a_log_has_what_a_rerun_adds_and_is_not_computed_with(run: Run) -> None:
    def scenario(run: Run) -> Any:
        x = leaf(4, 4)
        run(modules[run], x).sum().backward()
        return x.grad

    modules = {run: Notes(), plain: Notes()}
    assert_transparent(scenario, run)
    of_x = torch.float32, torch.device("cpu"), torch.Size([4, 4])
    assert modules[run].notes == ["made", (False, "called", *of_x), (True, "called", *of_x)]


@RERUNS
@pytest.mark.parametrize("window", [True, False])
def test_values_to_compute_with_are_not_taken_for_a_log(run: Run, *, window: bool) -> None:
    class Recent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = [1, 2] if window else [1.0]

        def forward(self, x: Tensor) -> Tensor:
            out = (x * sum(self.seen)).tanh()
            # Other items in the places of those before; or numbers that are no words.
            self.seen[:] = [2, 3, 4] if window else [*self.seen, out.detach().sum().item()]
            return out.sin()

    modules = {run: Recent(), plain: Recent()}

    def scenario(run: Run) -> Any:
        x = leaf(4, 4)
        for _ in range(2):
            run(modules[run], x).sum().backward()
        return x.grad, [*modules[run].seen]

    assert_transparent(scenario, run)


def test_a_module_that_changes_nothing_is_not_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[Any] = []
    make = ModuleContents.__init__
    monkeypatch.setattr(
        ModuleContents, "__init__", lambda self, *each: (looked.append(1), make(self, *each))[1]
    )
    for module, times in (Logs(), 3), (Idle(), 1):
        looked.clear()
        for _ in range(3):
            rerun(module, leaf(4, 4))
        assert len(looked) == times


class Idle(nn.Module):
    """Reads a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.config = nn.Parameter(torch.rand(4)), {"rate": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.own).tanh() * self.config["rate"]


class Replaces(nn.Module):
    """Its results, with their graphs, are in what it holds until others are there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.own, self.kind = nn.Parameter(torch.rand(4)), kind
        self.held: Any = {
            "list": list,
            "deque": lambda: deque(maxlen=1),
            "deque of dicts": lambda: deque(maxlen=1),
            "dict of dicts": lambda: {"": {}},
            "dict of objects": lambda: {"": None},
            "object": SimpleNamespace,
        }[kind]()
        self.results: list[ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        out = (x * self.own).tanh()
        self.results.append(ref(out))
        if self.kind in ("list", "deque"):
            self.held.append(out)
        elif self.kind == "deque of dicts":
            self.held.append({"out": out})
        elif self.kind == "object":
            self.held.last = {"out": [out]}
        else:
            self.held[""] = {"out": out} if "dicts" in self.kind else SimpleNamespace(out=out)
        return out.sin()


@pytest.mark.parametrize(
    "kind", ["list", "deque", "deque of dicts", "dict of dicts", "dict of objects", "object"]
)
@RERUNS
def test_without_a_backward_no_results_gather(kind: str, run: Run) -> None:
    module = Replaces(kind)
    with collector_off():
        for _ in range(4):
            run(module, leaf(3, 4))
            if kind == "list":
                module.held = []
    assert sum(result() is not None for result in module.results) <= 1


class Reads(Replaces):
    """Reads an object with its last result."""

    def forward(self, x: Tensor) -> Tensor:
        last = self.held[""]
        return super().forward(x if last is None else x + last.out.detach().mean(0))


@RERUNS
def test_to_read_an_object_with_a_graph_that_is_gone_is_an_error(run: Run) -> None:
    module = Reads("dict of objects")
    run(module, leaf(3, 4))
    out = run(module, leaf(3, 4))
    with pytest.raises(CheckpointError, match="an object \\(SimpleNamespace\\) in a dict"):
        out.sum().backward()


class Sums(Logs):
    """Reads its former results."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + sum(loss.detach() for loss in self.losses))


@RERUNS
def test_to_read_a_former_result_with_its_graph_is_an_error(run: Run) -> None:
    """Though it is still in the list: nothing with a graph is held."""
    module = Sums()
    out = [run(module, leaf(3, 4)) for _ in range(2)]
    with pytest.raises(CheckpointError, match="the tensor in a list of a module since forward"):
        sum(each.sum() for each in out).backward()


class Fetches(nn.Module):
    """Batches come from a thread, which its forward has nothing to do with."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.rand(4))
        self.loader = SimpleNamespace(lock=threading.Lock(), batches=deque[int]())

    def forward(self, x: Tensor) -> Tensor:
        # As the thread does meanwhile; in a rerun it is another one.
        self.loader.batches.append(len(self.loader.batches))
        return (x * self.own).tanh()


@RERUNS
def test_what_threads_share_is_left_alone(run: Run) -> None:
    module = Fetches()
    run(module, leaf(3, 4)).sum().backward()
    assert [*module.loader.batches] == [0, 1]


class Makes(nn.Module):
    """Has a layer for each width, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.layers = nn.Parameter(torch.rand(4)), {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] not in self.layers:
            self.layers[x.shape[-1]] = nn.Linear(x.shape[-1], 2)
        return self.layers[x.shape[-1]](x * self.own).tanh()


def test_a_layer_that_the_region_puts_into_a_dict_gets_its_gradients() -> None:
    def scenario(run: Run) -> Any:
        module = Makes()
        run(module, leaf(3, 4)).sum().backward()
        return [module.own.grad, module.layers[4].weight.grad]

    assert_transparent(scenario, rerun)
    with pytest.raises(InputChanged, match="makes parameters"):
        scenario(reentrant)


def test_long_lists_and_dicts_are_not_copied() -> None:
    found = ModuleContents(
        [(index_of(Idle()), [[*range(2000)], dict.fromkeys(range(2000)), [0]])], []
    )
    assert [len(thing) for thing, _, _ in found._entries] == [1]


class Assigns(nn.Module):
    """What it holds is read, and then another object is there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.own, self.make = nn.Parameter(torch.rand(4)), _MAKERS[kind]
        self.held = self.make(2.0)

    def forward(self, x: Tensor) -> Tensor:
        held = self.held
        rate = held.rate if isinstance(held, SimpleNamespace) else next(iter(vars_of(held)))
        self.held = self.make(rate * 1.5)
        return ((x * self.own).tanh() * rate).tanh()


def vars_of(held: Any) -> Any:
    return held.values() if isinstance(held, dict) else held


_MAKERS: dict[str, Any] = {
    "list": lambda rate: [rate],
    "tuple": lambda rate: (rate, 1),
    "dict": lambda rate: {"rate": rate},
    "object": lambda rate: SimpleNamespace(rate=rate),
}


@ALL
@pytest.mark.parametrize("kind", _MAKERS)
def test_a_rerun_finds_the_attribute_of_the_call(kind: str, run: Run) -> None:
    def scenario(run: Run) -> Any:
        module = Assigns(kind)
        found, held = unroll(module, run)[:3], module.held
        return [*found, held.rate if kind == "object" else [*vars_of(held)]]

    assert_transparent(scenario, run)


def test_to_note_the_same_size_again_is_no_change() -> None:
    class Sized(Idle):
        size = (1, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.size = (int(x.shape[0]), int(x.shape[1]))
            return super().forward(x)

    module = Sized()
    for _ in range(4):
        rerun(module, leaf(4, 4))
    assert not index_of(module).contents_change


@RERUNS
def test_an_iterator_inside_of_an_attribute_is_refused_as_one_of_a_module(run: Run) -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.names = SimpleNamespace(numbers=iter([1.0, 2.0]))

        def forward(self, x: Tensor) -> Tensor:
            return (x * next(self.names.numbers)).sin()

    out = run(Draws(), leaf(3))
    with pytest.raises(InputChanged, match=r"SimpleNamespace\.numbers of a module of .* iterator"):
        out.sum().backward()
