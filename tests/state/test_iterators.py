"""Iterators: which are used up, what stands in for them, and where one is replaced."""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch

from recollect.state.iterators import StandIn, exchanged, is_used_up, successor, with_exchanged


class Counts:
    """An iterator whose state is in its attributes."""

    number = 0

    def __next__(self) -> int:
        self.number += 1
        return self.number


@pytest.mark.parametrize("value", [iter([1]), (n for n in ()), zip([1], [2], strict=True)])
def test_used_up(value: Any) -> None:
    assert is_used_up(value)


@pytest.mark.parametrize("value", [[1], range(3), "a", None, torch.zeros(2), Counts()])
def test_not_used_up(value: Any) -> None:
    assert not is_used_up(value)


@pytest.mark.parametrize(
    "iterator",
    [
        iter([1, 2, 3]),
        iter((1, 2, 3)),
        iter(range(3)),
        iter("abc"),
        iter(b"abc"),
        reversed([1, 2, 3]),
        itertools.count(),
        itertools.count(5, -2),
        itertools.count(1.5, 0.5),
    ],
    ids=lambda iterator: repr(iterator).partition(" at ")[0],
)
def test_successor_goes_on_where_the_iterator_stands(iterator: Any) -> None:
    next(iterator)
    other = successor(iterator)
    assert [next(other), next(other)] == [next(iterator), next(iterator)]


@pytest.mark.parametrize("iterator", [(n for n in ()), itertools.count(Fraction(1, 2))])
def test_no_successor(iterator: Any) -> None:
    assert successor(iterator) is None


def test_stand_in_refuses_or_hands_on() -> None:
    error: list[Exception] = []
    stand_in = StandIn((n for n in range(3)), lambda: error[0] if error else None)
    assert iter(stand_in) is stand_in
    assert next(stand_in) == 0
    assert stand_in.gi_frame is not None
    error.append(KeyError())
    with pytest.raises(KeyError):
        next(stand_in)
    with pytest.raises(KeyError):
        stand_in.send(None)
    assert not is_used_up(stand_in)


def test_exchanged_wherever_it_is() -> None:
    old, new = itertools.count(), itertools.count(10)
    others = {id(old): new}
    assert exchanged(old, others) is new
    assert exchanged((1, (old,)), others) == (1, (new,))
    assert exchanged(old.__next__, others)() == 10
    assert exchanged(partial(next, old), others)() == 11
    assert exchanged(partial(dict, a=old), others)() == {"a": new}


@pytest.mark.parametrize("value", [1, (1, 2), partial(int, "1"), [1].__len__, [itertools.count()]])
def test_others_stay_the_same_object(value: Any) -> None:
    assert exchanged(value, {}) is value


def test_contents_without_a_replaced_item_stay_the_same_object() -> None:
    old, new = iter([1]), iter([10])
    for held in ([1, 2], {"a": 1}):
        assert with_exchanged(held, {}) is held
    assert with_exchanged([1, old], {id(old): new}) == [1, new]
    assert with_exchanged({"a": old}, {id(old): new}) == {"a": new}
