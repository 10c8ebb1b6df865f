"""Contents are taken, compared and put back, for each kind of thing and whatever its class does."""

from __future__ import annotations

import asyncio
import enum
import functools
import gc
import logging
import queue
import random
import threading
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recollect.state.restorers import (
    ARRAY,
    ARRAY_COPY,
    ATOMS,
    CAPTURED_ELSEWHERE,
    ITERATOR,
    TENSOR,
    Restorer,
    _put_dict,
    restorers_of,
)


class Hostile:
    """Overrides whatever can be overridden; nobody may call any of it."""

    def _trap(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("code of the user was called")

    __iter__ = __len__ = __eq__ = __ne__ = __getitem__ = __setitem__ = __delitem__ = _trap
    __contains__ = __bool__ = __getattr__ = __setattr__ = __delattr__ = _trap
    keys = values = items = copy = update = clear = extend = append = add = discard = _trap
    __hash__ = object.__hash__


class HostileList(Hostile, list):
    pass


class HostileDict(Hostile, dict):
    pass


class HostileOrderedDict(Hostile, OrderedDict):
    pass


class HostileSet(Hostile, set):
    pass


class HostileDeque(Hostile, deque):
    pass


class HostileObject(Hostile):
    def __init__(self) -> None:
        object.__setattr__(self, "step", 3)


class ModelOutput(OrderedDict):
    """As in transformers: the items are attributes too, and some methods are forbidden."""

    def __init__(self, **items: Any) -> None:
        super().__init__()
        for name, value in items.items():
            self[name] = value

    def __delitem__(self, *args: Any) -> None:
        raise TypeError("forbidden")

    def update(self, *args: Any) -> None:
        raise TypeError("forbidden")

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys():
            super().__setitem__(name, value)
        super().__setattr__(name, value)


class Plain:
    def __init__(self) -> None:
        self.step = 3
        self.name = "x"


class Slotted:
    __slots__ = ("__hidden", "later", "step")

    def __init__(self) -> None:
        self.step = 3
        self.__hidden = [1]

    def hide(self, value: Any) -> None:
        self.__hidden = value


class SlottedAndPlain(Slotted):
    pass


@dataclass(frozen=True)
class Frozen:
    step: int = 3


@dataclass(slots=True)
class SlottedData:
    step: int = 3


class WithProperty:
    def __init__(self) -> None:
        self._step = 3

    @property
    def step(self) -> int:
        raise AssertionError("a property was read")


def fill_ordered(cls: type) -> Any:
    thing = OrderedDict.__new__(cls)
    OrderedDict.__setitem__(thing, "a", 1)
    return thing


def fill_dict(cls: type) -> Any:
    thing = dict.__new__(cls)
    dict.__setitem__(thing, "a", 1)
    return thing


def insert_first(thing: dict[str, Any]) -> None:
    """The same items in another order."""
    items = [("first", 0), *thing.items()]
    thing.clear()
    thing.update(items)


def replace_dict(thing: Any) -> None:
    thing.__dict__ = {"step": 4}


#: What is made, and what is done to it.
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list grows": (lambda: [1, 2], lambda x: x.append(3)),
    "list shrinks": (lambda: [1, 2], lambda x: x.pop(0)),
    "list item": (lambda: [[], []], lambda x: x.__setitem__(0, [])),
    "list reversed": (lambda: [1, 2], lambda x: x.reverse()),
    "dict grows": (lambda: {"a": 1}, lambda x: x.update(b=2)),
    "dict shrinks": (lambda: {"a": 1, "b": 2}, lambda x: x.pop("a")),
    "dict value": (lambda: {"a": 1, "b": 2}, lambda x: x.update(a=3)),
    "dict order": (lambda: {"a": 1, "b": 2}, lambda x: x.update(a=x.pop("a"))),
    "dict key": (lambda: {1: "x", 2: "y"}, lambda x: x.update({1.0: x.pop(1)})),
    "dict begins otherwise": (lambda: {"a": 1}, insert_first),
    "dict emptied": (lambda: {"a": 1}, lambda x: x.clear()),
    "ordered dict": (lambda: OrderedDict(a=1, b=2), lambda x: x.move_to_end("a")),
    "defaultdict": (lambda: defaultdict(list, a=[1]), lambda x: x["b"].append(2)),
    "counter": (lambda: Counter("abb"), lambda x: x.update("c")),
    "user dict": (lambda: UserDict(a=1).data, lambda x: x.update(b=2)),
    "model output": (lambda: ModelOutput(loss=1), lambda x: x.__setitem__("logits", 2)),
    "model output attribute": (lambda: ModelOutput(loss=1), lambda x: setattr(x, "loss", 2)),
    "set grows": (lambda: {1, 2}, lambda x: x.add(3)),
    "set shrinks": (lambda: {1, 2}, lambda x: x.remove(1)),
    "set of equals": (lambda: {1, 2}, lambda x: (x.remove(1), x.add(True))),
    "deque": (lambda: deque([1, 2]), lambda x: x.appendleft(0)),
    "full deque": (lambda: deque([1, 2], maxlen=2), lambda x: x.append(3)),
    "object": (Plain, lambda x: setattr(x, "step", 4)),
    "object grows": (Plain, lambda x: setattr(x, "other", 4)),
    "object shrinks": (Plain, lambda x: delattr(x, "step")),
    "object gets another dict": (Plain, replace_dict),
    "slots": (Slotted, lambda x: setattr(x, "step", 4)),
    "slot set": (Slotted, lambda x: setattr(x, "later", 4)),
    "slot deleted": (Slotted, lambda x: delattr(x, "step")),
    "private slot": (Slotted, lambda x: x.hide(None)),
    "inherited slot": (SlottedAndPlain, lambda x: setattr(x, "step", 4)),
    "dict beside slots": (SlottedAndPlain, lambda x: setattr(x, "other", 4)),
    "frozen": (Frozen, lambda x: object.__setattr__(x, "step", 4)),
    "slotted dataclass": (SlottedData, lambda x: setattr(x, "step", 4)),
    "property": (WithProperty, lambda x: setattr(x, "_step", 4)),
    "namespace": (lambda: SimpleNamespace(step=3), lambda x: setattr(x, "step", 4)),
    "attribute of a tuple": (
        lambda: type("Pair", (tuple,), {})((1, 2)),
        lambda x: setattr(x, "step", 4),
    ),
    "hostile list": (lambda: HostileList([1]), lambda x: list.append(x, 2)),
    "hostile dict": (lambda: fill_dict(HostileDict), lambda x: dict.__setitem__(x, "b", 2)),
    "hostile ordered dict": (
        lambda: fill_ordered(HostileOrderedDict),
        lambda x: OrderedDict.__setitem__(x, "b", 2),
    ),
    "hostile set": (lambda: HostileSet([1]), lambda x: set.add(x, 2)),
    "hostile deque": (lambda: HostileDeque([1]), lambda x: deque.append(x, 2)),
    "hostile object": (HostileObject, lambda x: object.__setattr__(x, "step", 4)),
    "bytearray": (lambda: bytearray(b"abc"), lambda x: x.__setitem__(0, 0)),
    "bytearray grows": (lambda: bytearray(b"abc"), lambda x: x.extend(bytes(10**5))),
    "array": (lambda: array("f", [1, 2]), lambda x: x.append(3)),
    "numpy": (lambda: np.ones(3), lambda x: np.add(x, 1, out=x)),
    "numpy -0.0": (lambda: np.zeros(3), lambda x: np.negative(x, out=x)),
    "numpy view": (lambda: np.ones((4, 4))[::2, ::2], lambda x: np.add(x, 1, out=x)),
    "numpy scalar array": (lambda: np.ones(()), lambda x: np.add(x, 1, out=x)),
    "numpy objects": (lambda: np.array([[], {}], dtype=object), lambda x: x.__setitem__(0, [])),
    "numpy dates": (
        lambda: np.zeros(3, "datetime64[s]"),
        lambda x: x.__iadd__(np.timedelta64(1, "s")),
    ),
}


def raw(thing: Any) -> Any:
    """What is in ``thing``: addresses where there are objects, and nothing is called."""
    if isinstance(thing, np.ndarray):
        return thing.shape, thing.tobytes()
    if isinstance(thing, (bytearray, array)):
        return bytes(thing)
    return [
        [id(part) for part in taken]
        if isinstance(taken, list)
        else [*map(id, taken), *map(id, taken.values())]
        for kind in restorers_of(type(thing))
        if kind.mutable
        for taken in [kind.take(thing)]
    ]


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_put_back_and_forth(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    thing = make()
    kinds = [
        ARRAY_COPY if kind is ARRAY else kind for kind in restorers_of(type(thing)) if kind.mutable
    ]
    taken = [kind.take(thing) for kind in kinds]
    before = raw(thing)
    assert all(kind.same(thing, t) for kind, t in zip(kinds, taken, strict=True))
    change(thing)
    after = raw(thing)
    assert not all(kind.same(thing, t) for kind, t in zip(kinds, taken, strict=True))
    assert before != after
    held = [kind.take(thing) for kind in kinds]
    for contents, expected in ((taken, before), (held, after)):
        for kind, content in zip(kinds, contents, strict=True):
            kind.put(thing, content)
        assert raw(thing) == expected
        assert all(kind.same(thing, t) for kind, t in zip(kinds, contents, strict=True))


def test_order_of_a_set_that_had_one_more() -> None:
    items = {f"item {n}" for n in range(100)}
    order = list(items)
    (kind,) = restorers_of(set)
    taken = kind.take(items)
    items.add("one more")
    kind.put(items, taken)
    assert list(items) == order


def test_only_what_differs_is_touched() -> None:
    """Another thread may look at the rest at any time."""

    touched = []

    class Base(dict):
        def __setitem__(self, key: Any, value: Any) -> None:
            touched.append(key)
            super().__setitem__(key, value)

    thing = Base(a=1, b=2)
    taken = dict(thing)
    dict.update(thing, b=3, c=4)
    _put_dict(thing, taken, Base)
    assert (thing, touched) == ({"a": 1, "b": 2}, ["b"])


@pytest.mark.parametrize(
    "make", [bytearray, lambda n: np.zeros(n, np.uint8)], ids=["bytearray", "numpy"]
)
def test_a_region_compares_arrays_and_does_not_copy_them(make: Any) -> None:
    thing = make(2 << 20)
    assert restorers_of(type(thing)) == (ARRAY,)
    taken = ARRAY.take(thing)
    assert ARRAY.same(thing, taken)
    thing[10**5] = 1
    assert not ARRAY.same(thing, taken)
    with pytest.raises(ValueError, match="it holds other values"):
        ARRAY.put(thing, taken)
    assert thing[10**5] == 1


@pytest.mark.parametrize("kind", [ARRAY, ARRAY_COPY])
def test_difference_of_arrays(kind: Restorer) -> None:
    thing = np.zeros((2, 3))
    taken = kind.take(thing)
    thing.resize((4, 3), refcheck=False)
    with pytest.raises(ValueError, match=r"shape \(2, 3\).* -> shape \(4, 3\)"):
        kind.put(thing, taken)


# --- types ----------------------------------------------------------------------------------------


async def produce() -> Any:
    yield 1


class Reader:
    def __next__(self) -> int:
        return 1


@pytest.mark.parametrize(
    "value",
    [
        iter([]),
        (item for item in ()),
        zip(),
        map(abs, []),
        filter(None, []),
        enumerate([]),
        reversed([]),
        iter({}),
        iter({}.items()),
        iter(range(3)),
        iter(int, 1),
        produce(),
        Reader(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_iterators(value: Any) -> None:
    assert restorers_of(type(value)) is ITERATOR


@pytest.mark.parametrize(
    "value",
    [
        range(3),
        {}.keys(),
        {}.values(),
        {}.items(),
        OrderedDict().values(),
        MappingProxyType({}),
        "text",
        b"",
        memoryview(b""),
        ChainMap(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_iterators(value: Any) -> None:
    assert restorers_of(type(value)) is not ITERATOR


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        len,
        print,
        functools.partial(print, []),
        Plain,
        enum,
        Colour.RED,
        threading.Event(),
        threading.Lock(),
        threading.local(),
        queue.Queue(),
        logging.getLogger(),
        asyncio.Event,
        torch.ops.aten.mm.default,
        torch.optim.SGD([torch.zeros(1)]),
        object(),
        memoryview(b""),
        vars(Plain),
        np.float32(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_left_alone(value: Any) -> None:
    assert type(value) in ATOMS or restorers_of(type(value)) == ()


def test_files_are_not_read(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "data", mode="w+", shape=(3,))
    assert ARRAY not in restorers_of(type(mapped))


@pytest.mark.parametrize(
    "value",
    [
        nn.Linear(1, 1),
        torch.Generator(),
        random.Random(),
        np.random.default_rng(),
        np.random.RandomState(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_state_of_these_is_looked_after_elsewhere(value: Any) -> None:
    assert restorers_of(type(value)) is CAPTURED_ELSEWHERE


@pytest.mark.parametrize("cls", [Tensor, nn.Parameter, type("Sub", (Tensor,), {})])
def test_tensors(cls: type) -> None:
    assert restorers_of(cls) is TENSOR


def test_plain_data_of_torch_is_looked_into() -> None:
    assert restorers_of(torch.distributions.Normal)
    assert not restorers_of(torch.fx.Graph)


class Pair(NamedTuple):
    a: int
    b: list[int]


def test_named_tuple() -> None:
    pair = Pair(1, [2])
    (kind,) = restorers_of(type(pair))
    assert not kind.mutable
    assert [*kind.parts(kind.take(pair))] == [("[0]", 1), ("[1]", [2])]


def test_view_leads_to_its_dict() -> None:
    mapping = {"a": 1}
    (kind,) = restorers_of(type(mapping.values()))
    (inside,) = kind.items(kind.take(mapping.values()))
    assert inside is mapping


def test_class_with_a_dict_of_its_own_making() -> None:
    class Odd:
        __slots__ = ()

        @property
        def __dict__(self) -> Any:
            raise AssertionError("a property was read")

    assert restorers_of(Odd) == ()


def test_slot_under_a_property_of_a_subclass() -> None:
    class WithProperty(SlottedData):
        @property
        def step(self) -> Any:
            raise AssertionError("a property was read")

    slot = vars(SlottedData)["step"]
    thing = WithProperty.__new__(WithProperty)
    slot.__set__(thing, 3)
    kind = next(each for each in restorers_of(WithProperty) if each.take(thing))
    held = kind.take(thing)
    slot.__set__(thing, 4)
    assert not kind.same(thing, held)
    kind.put(thing, held)
    assert slot.__get__(thing) == 3


@pytest.mark.parametrize("body", [{}, {"__slots__": ("step",)}], ids=["dict", "slots"])
def test_class_is_not_held_by_what_is_known_of_it(body: dict[str, Any]) -> None:
    cls = type("Passing", (), body)
    assert restorers_of(cls)
    held = ref(cls)
    del cls
    gc.collect()
    assert held() is None
