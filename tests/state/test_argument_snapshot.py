"""Containers and objects are put back in place for a while, whatever happens meanwhile."""

from __future__ import annotations

import io
import itertools
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn

import recollect
from recollect.errors import InputChanged
from recollect.state import argument_snapshot as containers
from recollect.state.inputs import Inputs
from recollect.state.iterators import StandIn
from tests._support import collector_off, leaf


class State:
    """A plain object."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class WithSlots:
    """An object without a dictionary."""

    __slots__ = ("lines",)

    def __init__(self, lines: Any) -> None:
        self.lines = lines


class Items(list[Any]):
    """A list with attributes."""


@dataclass
class Row:
    items: Any


class Pair(NamedTuple):
    first: Any
    second: Any


@contextmanager
def as_at_the_call(inputs: Inputs) -> Iterator[None]:
    """Where a rerun would take place."""
    inputs.recall()
    swapped = inputs.swap()
    try:
        yield
    finally:
        if swapped is not None:
            swapped.put_back()


@pytest.fixture(autouse=True)
def lock_is_free() -> Iterator[None]:
    yield
    assert not containers._swapping._is_owned()


# --- in place -------------------------------------------------------------------------------------


def test_nothing_to_do_without_containers() -> None:
    inputs = Inputs((leaf(3), None, 1, "a", (torch.zeros(1, 1), 2)), {"dtype": torch.float32})
    inputs.settle()
    assert inputs._contents is None
    assert inputs.swap() is None


def test_list_is_the_same_list() -> None:
    items = [1]
    inputs = Inputs((items, items), {"more": {"items": items}})
    items.append(2)
    inputs.settle()
    items.append(3)
    args, kwargs = inputs.recall()
    assert args[0] is args[1] is kwargs["more"]["items"] is items
    with as_at_the_call(inputs):
        assert items == [1]
        items.append(4)
    assert items == [1, 2, 3]


#: What is nested how: a thing and the list inside it.
NESTED: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": lambda items: (1, (items,)),
    "named tuple": lambda items: Pair(1, items),
    "frozenset": lambda items: frozenset([ByIdentity(items)]),
    "list": lambda items: [[items]],
    "dict": lambda items: {"a": {"b": items}},
    "set": lambda items: {ByIdentity(items)},
    "deque": lambda items: deque([items]),
    "object": lambda items: State(inner=State(items=items)),
    "namespace": lambda items: SimpleNamespace(items=items),
    "view": lambda items: {"a": items}.values(),
    "array of objects": lambda items: [items, np.array([1, None], dtype=object)],
}


class ByIdentity:
    def __init__(self, items: list[Any]) -> None:
        self.items = items


@pytest.mark.parametrize("by_name", [False, True], ids=["args", "kwargs"])
@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED)
def test_nested(nest: Callable[[list[Any]], Any], by_name: bool) -> None:
    items = [1]
    nested = nest(items)
    inputs = Inputs((), {"a": nested}) if by_name else Inputs((nested,), {})
    items.append(2)
    with as_at_the_call(inputs):
        assert items == [1]
    assert items == [1, 2]


def test_what_is_inside_is_put_back_with_what_holds_it() -> None:
    """The layers of a cache: those at the call are not those of today, and each has changed."""
    first = State(keys="old")
    cache = State(layers=[first], seen=1)
    inputs = Inputs((), {"cache": cache})
    first.keys = "new"
    cache.layers.append(State(keys="second"))
    cache.layers, layers = [State(keys="third")], cache.layers
    cache.seen = 2
    del first
    with as_at_the_call(inputs):
        assert cache.layers is layers
        assert [layer.keys for layer in cache.layers] == ["old"]
        assert cache.seen == 1
    assert [layer.keys for layer in cache.layers] == ["third"]
    assert [layer.keys for layer in layers] == ["new", "second"]
    assert cache.seen == 2


def test_cycles() -> None:
    items: list[Any] = [1]
    state = State(items=items)
    state.me = state
    items.extend([items, state, (items, state)])
    inputs = Inputs((items, state), {})
    items.append(2)
    state.me = None
    with as_at_the_call(inputs):
        assert len(items) == 4
        assert state.me is state
    assert len(items) == 5
    assert state.me is None


def test_deep() -> None:
    innermost = [1]
    nested: Any = innermost
    for n in range(containers.LIMIT - 1):
        nested = [nested] if n % 3 else (State(a=nested) if n % 2 else {"a": nested})
    inputs = Inputs((nested,), {})
    innermost.append(2)
    with as_at_the_call(inputs):
        assert innermost == [1]
    assert innermost == [1, 2]


def test_deep_tuples_hit_no_limit_of_recursion() -> None:
    innermost = [1]
    nested: Any = innermost
    for _ in range(100_000):
        nested = (nested,)
    inputs = Inputs((nested,), {})
    innermost.append(2)
    with as_at_the_call(inputs):
        assert innermost == [1]


def test_limit_counts_from_the_outside_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "LIMIT", 5)
    deep: list[Any] = [1]
    chain: Any = deep
    for _ in range(6):
        chain = [chain]
    near = [[1], [2]]
    inputs = Inputs((chain, near), {})
    deep.append(2)
    near[1].append(3)
    with as_at_the_call(inputs):
        assert near == [[1], [2]]
        assert deep == [1, 2], "not looked at"


def test_long_lists_of_numbers_are_one_thing() -> None:
    numbers = [*range(10 * containers.LIMIT)]
    inputs = Inputs((numbers, last := [1]), {})
    numbers.clear()
    last.append(2)
    with as_at_the_call(inputs):
        assert (len(numbers), last) == (10 * containers.LIMIT, [1])


def test_things_that_change_together_with_their_attributes() -> None:
    class Output(dict):
        pass

    output = Output(a=1)
    output.b = [2]
    inputs = Inputs((output,), {})
    output["a"] = 3
    output.b.append(4)
    output.c = 5
    with as_at_the_call(inputs):
        assert (dict(output), vars(output)) == ({"a": 1}, {"b": [2]})
    assert (dict(output), vars(output)) == ({"a": 3}, {"b": [2, 4], "c": 5})


def test_modules_are_not_looked_into() -> None:
    module = nn.Linear(1, 1)
    module.calls = [1]
    inputs = Inputs((module, [module]), {})
    module.calls.append(2)
    module.other = 3
    with as_at_the_call(inputs):
        assert module.calls == [1, 2]
        assert module.other == 3


def test_modules_and_generators_are_handed_on() -> None:
    module, generator = nn.Linear(1, 1), torch.Generator()
    inputs = Inputs((module,), {"state": State(inner=[generator])})
    assert [type(thing) for thing in inputs.reachable()] == [nn.Linear, torch.Generator]
    assert Inputs((torch.zeros(1),), {}).reachable() == []
    made = Inputs((len, torch.sin, Inputs.settle), {"f": inputs.settle}).reachable()
    assert made == [Inputs.settle, inputs.settle]


# --- arrays and tensors ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: np.ones(3), lambda: bytearray(b"\1\1\1")])
def test_small_array_is_put_back(make: Callable[[], Any]) -> None:
    data = make()
    inputs = Inputs((data,), {})
    data[0] = 7
    with as_at_the_call(inputs):
        assert data[0] == 1
        data[1] = 8
    assert [*data] == [7, 1, 1]


def read_only(data: Any) -> None:
    data[0] = 7
    data.flags.writeable = False


@pytest.mark.parametrize(
    ("size", "change"),
    [(100_000, lambda data: data.__setitem__(0, 7)), (3, read_only)],
    ids=["large", "read-only"],
)
def test_array_that_cannot_be_put_back(size: int, change: Callable[[Any], Any]) -> None:
    data, items = np.ones(size), [1]
    inputs = Inputs((items,), {"state": State(table=[data])})
    change(data)
    items.append(2)
    inputs.recall()
    with pytest.raises(
        InputChanged, match=r"kwargs\['state'\]\.table\[0\] of .* changed: "
    ) as info:
        inputs.swap()
    assert "Pass a copy" in str(info.value)
    assert items == [1, 2], "all else is as it was"


def test_growing_array_says_how_much() -> None:
    data = np.ones(3)
    inputs = Inputs((data,), {})
    data.resize(5, refcheck=False)
    with pytest.raises(InputChanged, match=r"args\[0\] of .* changed: shape \(3,\) -> \(5,\)"):
        inputs.swap()


def test_without_guard_an_array_that_cannot_be_put_back_is_left() -> None:
    data = np.ones(100_000)
    inputs = Inputs((data,), {}, guard=False)
    data[0] = 7
    with as_at_the_call(inputs):
        assert data[0] == 7


def test_array_that_has_grown_large_keeps_its_contents() -> None:
    data = bytearray(b"abc")
    inputs = Inputs((data,), {})
    data.extend(b"\7" * 100_000)
    with as_at_the_call(inputs):
        assert data == b"abc"
    assert data == b"abc" + b"\7" * 100_000


def test_tensor_that_the_region_changes_has_its_value_and_version_back() -> None:
    counter = torch.zeros(1)
    inputs = Inputs(([counter],), {})
    counter += 1
    inputs.settle()
    counter += 1
    with as_at_the_call(inputs):
        assert (counter.item(), counter._version) == (0, 0)
        counter += 1
        assert (counter.item(), counter._version) == (1, 1)
    assert (counter.item(), counter._version) == (2, 2)


def test_tensor_that_others_change_is_refused() -> None:
    tensor = torch.zeros(1)
    inputs = Inputs(([tensor],), {})
    inputs.settle()
    tensor += 1
    with pytest.raises(
        InputChanged, match=r"inplace operation: args\[0\]\[0\] of .* after the region"
    ):
        inputs.swap()


def test_copies_are_made_unseen() -> None:
    class Log(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    counter = torch.zeros(1)
    with Log():
        inputs = Inputs(([counter],), {})
    counter += 1
    inputs.settle()
    with Log(), as_at_the_call(inputs):
        pass
    assert seen == []


@pytest.mark.parametrize(
    "make",
    [lambda t: t, lambda t: (t,), lambda t: Pair(1, t)],
    ids=["bare", "tuple", "named tuple"],
)
def test_tensors_that_nothing_mutable_holds_are_not_copied(make: Callable[[Any], Any]) -> None:
    inputs = Inputs((), {"mask": make(torch.zeros(1, 1))})
    assert inputs.swap() is None
    assert len(inputs._guards) == 1


# --- names ----------------------------------------------------------------------------------------

large = torch.zeros(2000)


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        ((1, large), {}, "args[1]"),
        (((1, (2, large)),), {}, "args[0][1][1]"),
        (([{"k": large}],), {}, "args[0][0]['k']"),
        (({1: large},), {}, "args[0][1]"),
        (({("a", 1): large},), {}, "args[0][<tuple>]"),
        (({large},), {}, "args[0]{...}"),
        ((frozenset([large]),), {}, "args[0]{...}"),
        ((deque([1, large]),), {}, "args[0][1]"),
        ((Pair(1, large),), {}, "args[0][1]"),
        (({"k": large}.values(),), {}, "args[0]['k']"),
        ((State(keys=[large]),), {}, "args[0].keys[0]"),
        ((), {"mask": large}, "kwargs['mask']"),
        ((), {"cache": State(layers=[State(keys=large)])}, "kwargs['cache'].layers[0].keys"),
        (([[[large]]], large), {}, "args[1]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_name_of_an_argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
    assert Inputs(args, kwargs)._name(large) == name


def test_name_is_where_it_was_at_the_call() -> None:
    items = [1, large]
    inputs = Inputs((items,), {})
    items.clear()
    assert inputs._name(large) == "args[0][1]"


# --- iterators ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (lambda it: ((1, it), {}), "args[1]"),
        (lambda it: (((1, it),), {}), "args[0][1]"),
        (lambda it: (([[it]],), {}), "args[0][0][0]"),
        (lambda it: ((), {"batches": it}), "kwargs['batches']"),
        (lambda it: ((), {"data": {"batches": it}}), "kwargs['data']['batches']"),
        (lambda it: ((Pair(1, it),), {}), "args[0][1]"),
        (lambda it: (({it},), {}), "args[0]{...}"),
        (lambda it: ((State(pair=(1, it)),), {}), "args[0].pair[1]"),
        (lambda it: ((Items([it]),), {}), "args[0][0]"),
    ],
)
def test_iterators_are_refused_by_name(place: Callable[[Any], Any], name: str) -> None:
    args, kwargs = place(iter([1, 2]))
    with pytest.raises(TypeError) as info:
        Inputs(args, kwargs)
    assert str(info.value).startswith(
        f"{name} of a checkpointed region is an iterator (list_iterator)"
    )
    assert "list(...)" in str(info.value)


def held_by_attribute(iterator: Any) -> list[tuple[Any, Callable[[Any], Any]]]:
    """Objects that lead to an iterator, and how it is had from each."""
    return [
        (State(lines=iterator), lambda o: o.lines),
        (WithSlots(iterator), lambda o: o.lines),
        (Row(iterator), lambda o: o.items),
        (State(inner=[1, {"a": iterator}]), lambda o: o.inner[1]["a"]),
        ([State(inner=State(lines=iterator))], lambda o: o[0].inner.lines),
    ]


@pytest.mark.parametrize("number", range(5))
def test_an_iterator_in_an_attribute_may_be_of_no_concern(number: int) -> None:
    iterator = iter([1, 2])
    thing, get = held_by_attribute(iterator)[number]
    weight = torch.randn(3, requires_grad=True)
    out = recollect.checkpoint(lambda _, w: torch.sin(w).exp(), thing, weight, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(weight.grad, (weight.sin().exp() * weight.cos()).detach())
    assert get(thing) is iterator
    assert [*iterator] == [1, 2]


@pytest.mark.parametrize("number", range(5))
def test_a_rerun_does_not_draw_from_an_iterator_in_an_attribute(number: int) -> None:
    iterator = iter([1, 2])
    thing, get = held_by_attribute(iterator)[number]
    weight = torch.randn(3, requires_grad=True)

    def draw(thing: Any, weight: torch.Tensor) -> torch.Tensor:
        return torch.sin(weight * next(get(thing)))

    out = recollect.checkpoint(draw, thing, weight, use_reentrant=False)
    with pytest.raises(InputChanged, match=r"is an iterator \(list_iterator\)"):
        out.sum().backward()
    assert get(thing) is iterator
    assert [*iterator] == [2]


@pytest.mark.parametrize(
    "iterator",
    [
        (n for n in range(3)),
        zip([1], [2], strict=True),
        enumerate([1]),
        iter({1: 2}.items()),
        itertools.count(),
        itertools.chain([1], [2]),
    ],
    ids=lambda iterator: type(iterator).__name__,
)
def test_stand_ins_are_for_iterators_of_any_kind(iterator: Any) -> None:
    row = Row(iterator)
    inputs = Inputs((row,), {})
    swapped = inputs.swap()
    assert swapped is not None
    assert type(row.items) is StandIn
    assert iter(row.items) is row.items
    swapped.put_back()
    assert row.items is iterator


def test_another_thread_may_go_on_drawing_during_a_rerun() -> None:
    row = Row(iter([1, 2]))
    swapped = Inputs((row,), {}).swap()
    assert swapped is not None
    assert next(row.items) == 1
    swapped.put_back()
    assert next(row.items) == 2


class Counts:
    """An iterator that is written in Python, and has its state in attributes."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Counts:
        return self

    def __next__(self) -> int:
        self.number += 1
        return self.number


def test_an_iterator_of_python_in_an_attribute_is_put_back() -> None:
    state = State(counts=Counts())
    weight = torch.randn(3, requires_grad=True)

    def draw(state: Any, weight: torch.Tensor) -> torch.Tensor:
        return torch.sin(weight * next(state.counts))

    next(state.counts)
    out = recollect.checkpoint(draw, state, weight, use_reentrant=False)
    next(state.counts)
    out.sum().backward()
    assert torch.equal(weight.grad, (2 * (2 * weight).cos()).detach())
    assert state.counts.number == 3


def test_files_are_no_iterators() -> None:
    with tempfile.TemporaryFile() as file:
        Inputs((State(log=file, out=io.StringIO()),), {})


# --- one after the other, and at once -------------------------------------------------------------


def test_exceptions_put_everything_back() -> None:
    items, state = [1], State(step=3)
    inputs = Inputs((items, state), {})
    items.append(2)
    state.step = 4

    def fail() -> None:
        items.extend([5, 6])
        del state.step
        raise KeyError

    with pytest.raises(KeyError), as_at_the_call(inputs):
        fail()
    assert (items, state.step) == ([1, 2], 4)


def test_put_back_twice_is_as_once() -> None:
    items = [1]
    inputs = Inputs((items,), {})
    items.append(2)
    swapped = inputs.swap()
    assert swapped is not None
    swapped.put_back()
    items.append(3)
    swapped.put_back()
    assert items == [1, 2, 3]


def test_what_only_the_rerun_changes_is_put_back_too() -> None:
    items = [1]
    inputs = Inputs((items,), {})
    with as_at_the_call(inputs):
        items.append(2)
    assert items == [1]


def test_one_inside_the_other() -> None:
    """A rerun that starts another, of the same region or of one with the same container."""
    items: list[int] = []
    calls = []
    for n in range(3):
        calls.append(Inputs((items,), {}))
        items.append(n)
    with as_at_the_call(calls[2]):
        assert items == [0, 1]
        items.append(7)
        with as_at_the_call(calls[0]):
            assert items == []
            items.append(8)
            with as_at_the_call(calls[2]):
                assert items == [0, 1]
            assert items == [8]
        assert items == [0, 1, 7]
    assert items == [0, 1, 2]


class Worker(threading.Thread):
    """Holds the contents of ``inputs`` until it is told to end."""

    def __init__(self, inputs: Inputs, look: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._inputs = inputs
        self._look = look
        self.inside, self.leave = threading.Event(), threading.Event()
        self.saw: Any = None
        self.start()

    def run(self) -> None:
        with as_at_the_call(self._inputs):
            self.inside.set()
            assert self.leave.wait(60)
            self.saw = self._look()

    def end(self) -> Any:
        self.leave.set()
        self.join(60)
        return self.saw


def test_threads_take_turns_with_what_has_changed() -> None:
    items = [0]
    first = Inputs((items,), {})
    items.append(1)
    second = Inputs((items,), {})
    items.append(2)
    workers = [Worker(first, lambda: [*items]), Worker(second, lambda: [*items])]
    assert workers[0].inside.wait(60)
    assert not workers[1].inside.wait(0.05)
    assert workers[0].end() == [0]
    assert workers[1].inside.wait(60)
    assert workers[1].end() == [0, 1]
    assert items == [0, 1, 2]


def test_nobody_changes_what_another_thread_reads() -> None:
    items: list[int] = []
    before = Inputs((items,), {})
    before.settle()
    items.append(0)
    now = Inputs((items,), {})
    now.settle()
    reader = Worker(now, lambda: [*items])
    assert reader.inside.wait(60)
    writer = Worker(before, lambda: [*items])
    assert not writer.inside.wait(0.05)
    assert reader.end() == [0]
    assert writer.inside.wait(60)
    assert writer.end() == []
    assert items == [0]


def test_what_the_region_itself_changes_serves_one_thread() -> None:
    """Also if it is as it was by now: each rerun will change it."""
    items: list[int] = []
    inputs = Inputs((items,), {})
    items.append(0)
    inputs.settle()
    items.clear()
    workers = [Worker(inputs, lambda: items.append(1)) for _ in range(2)]
    entered = [worker.inside.wait(0.2) for worker in workers]
    assert sorted(entered) == [False, True]
    for worker in sorted(workers, key=lambda worker: not worker.inside.is_set()):
        worker.end()
    assert items == []


def test_without_containers_nobody_waits() -> None:
    Inputs((items := [1],), {}).settle()
    worker = Worker(Inputs((items,), {}), lambda: [*items])
    assert worker.inside.wait(60)
    other = Worker(Inputs((torch.zeros(3, 3), (1, "a")), {}), lambda: None)
    assert other.inside.wait(60)
    other.end()
    assert worker.end() == [1]


def test_waiting_for_ever_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [0]
    inputs = Inputs((items,), {})
    items.append(1)
    worker = Worker(inputs, lambda: [*items])
    assert worker.inside.wait(60)
    monkeypatch.setattr(containers, "PATIENCE", 0.05)
    with pytest.raises(recollect.CheckpointError, match="same container"):
        inputs.swap()
    assert worker.end() == [0]
    assert items == [0, 1]


def test_many_threads_corrupt_nothing() -> None:
    items: list[int] = []
    calls = []
    for n in range(8):
        calls.append((Inputs((items,), {}), n))
        items.append(n)
    wrong = []

    def rerun(inputs: Inputs, length: int) -> None:
        for _ in range(200):
            with as_at_the_call(inputs):
                if items != [*range(length)]:
                    wrong.append([*items])
                items.append(-1)

    threads = [threading.Thread(target=rerun, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert items == [*range(8)]


# --- lifetimes ------------------------------------------------------------------------------------


def test_everything_dies_with_the_inputs() -> None:
    with collector_off():
        state = State(items=[State()], counter=torch.zeros(1))
        held = [ref(state), ref(state.items[0]), ref(state.counter)]
        inputs = Inputs(([state],), {"state": state})
        state.items.append(1)
        state.counter += 1
        inputs.settle()
        with as_at_the_call(inputs):
            pass
        del state, inputs
        assert [reference() for reference in held] == [None, None, None]


def test_what_was_replaced_meanwhile_dies_when_it_is_put_back() -> None:
    with collector_off():
        items: list[Any] = []
        inputs = Inputs((items,), {})
        with as_at_the_call(inputs):
            items.append(made := State())
            held = ref(made)
            del made
        assert held() is None


def test_nothing_stays_behind_an_error() -> None:
    with collector_off():
        state = State()
        held = ref(state)
        inputs = Inputs(([state], data := np.ones(100_000)), {})
        data[0] = 7
        with pytest.raises(InputChanged) as info:
            inputs.swap()
        del info, inputs, state
        assert held() is None
