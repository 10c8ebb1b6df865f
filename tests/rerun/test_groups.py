"""``GraphExecGroup``: several backwards that share one recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from tests._support import Counted, assert_identical, collector_off, leaf, rerun


def separate_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """No saved tensor is shared: addition saves nothing."""
    return (x + 1).sin().exp(), (x + 2).cos().tanh()


def slopes_of_heads(x: Tensor) -> list[Tensor]:
    return [torch.autograd.grad(head.sum(), x)[0] for head in separate_heads(x)]


@pytest.mark.parametrize("group", [recollect.GraphExecGroup, recollect.compat.GraphExecGroup])
def test_one_recomputation_serves_all_backwards(group: Any) -> None:
    function, x = Counted(separate_heads), leaf(5)
    heads = rerun(function, x)
    with group():
        slopes = [torch.autograd.grad(head.sum(), x)[0] for head in heads]
    assert function.started == 2
    assert_identical(slopes, slopes_of_heads(x))


def test_without_a_group_every_backward_recomputes() -> None:
    function, x = Counted(separate_heads), leaf(5)
    for head in rerun(function, x):
        head.sum().backward()
    assert function.started == 3


def test_a_second_group_recomputes_anew() -> None:
    function, x = Counted(separate_heads), leaf(5)
    heads = rerun(function, x)
    for runs in (2, 3):
        with recollect.GraphExecGroup():
            slopes = [torch.autograd.grad(h.sum(), x, retain_graph=True)[0] for h in heads]
        assert function.started == runs
        assert_identical(slopes, slopes_of_heads(x))


def test_one_recomputation_for_each_of_nested_regions() -> None:
    inner, x = Counted(separate_heads), leaf(5)
    outer = Counted(lambda x: rerun(inner, x))
    heads = rerun(outer, x)
    with recollect.GraphExecGroup():
        slopes = [torch.autograd.grad(head.sum(), x)[0] for head in heads]
    assert (outer.started, inner.started) == (2, 2)
    assert_identical(slopes, slopes_of_heads(x))


def test_overlapping_backwards_are_refused() -> None:
    out = rerun(lambda x: x.sin().exp(), leaf(5)).sum()
    with recollect.GraphExecGroup():
        out.backward(retain_graph=True)
        with pytest.raises(recollect.CheckpointError, match=r"already unpacked once.*overlap"):
            out.backward(retain_graph=True)
    out.backward()  # outside of the group it may


def test_groups_do_not_nest() -> None:
    with recollect.GraphExecGroup() as group:
        nested = recollect.GraphExecGroup()
        with pytest.raises(RuntimeError, match="GraphExecGroup contexts cannot be nested"), nested:
            pytest.fail("entered")
        assert recollect.GraphExecGroup._get_current_group() is group, "the outer one goes on"
    assert recollect.GraphExecGroup._get_current_group() is None


def test_group_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), recollect.GraphExecGroup():
        raise KeyError
    assert recollect.GraphExecGroup._get_current_group() is None
    with recollect.GraphExecGroup():
        pass


def test_one_object_may_be_entered_again() -> None:
    group, function, x = recollect.GraphExecGroup(), Counted(separate_heads), leaf(5)
    first, second = rerun(function, x)
    with group:
        first.sum().backward()
    with group:
        second.sum().backward()
    assert function.started == 2, "the group is known by its identity"


def test_what_is_left_of_a_recomputation_dies_with_the_outputs() -> None:
    """Only one head goes backward: the other's tensors are recomputed and never used."""
    with collector_off():
        x, seen = leaf(5), []

        def heads(x: Tensor) -> tuple[Tensor, Tensor]:
            out = separate_heads(x)
            seen.append(torch._C._WeakTensorRef(out[1]))
            return out

        first, second = rerun(heads, x, early_stop=False)
        with recollect.GraphExecGroup():
            first.sum().backward()
        del first, second
        assert all(reference.expired() for reference in seen)


def test_reentrant_regions_are_not_affected() -> None:
    function, x = Counted(separate_heads), leaf(5)
    first, second = rerun(function, x, engine="reentrant")
    with recollect.GraphExecGroup():
        first.sum().backward(retain_graph=True)
        second.sum().backward()
    assert function.started == 3
