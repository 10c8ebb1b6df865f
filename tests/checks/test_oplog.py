"""Logs of ops: what an entry says, which values count, and which op is which in two logs."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recollect.checks import oplog
from recollect.checks.differences import align
from recollect.checks.fingerprint import compare, fingerprint
from recollect.checks.oplog import LoggedOp, OpLog
from tests._support import leaf


def record(function: Callable[..., Any], *args: Any, **options: bool) -> OpLog:
    log = OpLog(**options)
    with log:
        function(*args)
    return log


def lines(log: OpLog) -> list[str]:
    return [entry.line for entry in log.entries]


values = functools.partial(record, stacks=False, fingerprints=True)


# --- an entry -------------------------------------------------------------------------------------


def test_an_op_is_written_with_its_inputs_and_results() -> None:
    log = record(lambda x: torch.topk(x.to(torch.bfloat16), 2, dim=0), torch.ones(3, 4))
    assert lines(log) == [
        "_to_copy.default(f32[3, 4], dtype=torch.bfloat16) -> bf16[3, 4]",
        "topk.default(bf16[3, 4], 2, 0) -> [bf16[2, 4], i64[2, 4]]",
    ]


def test_a_log_changes_no_result() -> None:
    x = leaf(3)
    with OpLog(fingerprints=True):
        y = x.sin() * 2
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(slope, 2 * x.detach().cos())


def test_what_has_an_address_is_shown_by_its_type() -> None:
    def draw() -> None:
        torch.rand(2, generator=torch.Generator())

    first, second = record(draw), record(draw)
    assert "generator=<Generator>" in lines(first)[0]
    assert lines(first) == lines(second)


def test_a_number_read_from_a_tensor_is_in_the_line() -> None:
    assert lines(record(lambda: torch.tensor(2.5).item()))[-1].endswith("-> 2.5")


def test_stacks_are_taken_as_asked() -> None:
    def here() -> None:
        torch.ones(1)

    (entry,) = record(here, stacks=True).entries
    file, line, name = entry.stack[0]
    assert file == __file__
    assert line == here.__code__.co_firstlineno + 1
    assert name == "here"
    assert len(entry.stack) <= 12
    assert record(here, stacks=False).entries[0].stack == ()


def test_nothing_is_written_while_off() -> None:
    log = OpLog()
    with log:
        torch.ones(1)
        log.recording = False
        torch.zeros(1)
        log.recording = True
        torch.ones(2)
    assert [line.partition(".")[0] for line in lines(log)] == ["ones", "ones"]


def test_higher_order_ops_are_written() -> None:
    def function(x: Tensor) -> None:
        torch.ops.higher_order.cond(True, lambda x: x.sin(), lambda x: x.cos(), (x,))

    entry = values(function, torch.ones(2)).entries[-1]
    assert entry.line == "cond(True, <function>, <function>, [f32[2]]) -> f32[2]"
    assert [p.item() for p in entry.prints.fingerprints] == [
        fingerprint(torch.ones(2).sin()).item()
    ]


# --- values ---------------------------------------------------------------------------------------


def computed(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """By op, how many fingerprints an entry has."""
    log = values(function, *args)
    return {entry.line.partition("(")[0]: len(entry.prints.fingerprints) for entry in log.entries}


def test_no_fingerprints_unless_asked() -> None:
    (entry,) = record(lambda: torch.ones(3)).entries
    assert entry.prints.fingerprints == entry.prints.strides == ()


def test_every_new_result_has_a_fingerprint() -> None:
    x = torch.randn(4, 3)
    assert computed(x.sin) == {"sin.default": 1}
    assert computed(lambda: torch.topk(x, 2)) == {"topk.default": 2}
    assert computed(lambda: torch.split_with_sizes_copy(x, [1, 3])) == {
        "split_with_sizes_copy.default": 2
    }
    (entry,) = values(x.sin).entries
    assert entry.prints.fingerprints[0].item() == fingerprint(x.sin()).item()


def test_a_view_computes_nothing() -> None:
    x = torch.randn(4, 3)
    assert computed(lambda: x.t()[1:].split(1)) == {
        "t.default": 0,
        "slice.Tensor": 0,
        "split.Tensor": 0,
    }


def test_of_a_tensor_changed_in_place_it_is_the_changed_one() -> None:
    def function() -> None:
        torch.zeros(3).add_(1)

    *_, entry = values(function).entries
    assert [print_.item() for print_ in entry.prints.fingerprints] == [
        fingerprint(torch.ones(3)).item()
    ]


def test_a_change_through_a_view_and_through_out_count() -> None:
    def function() -> None:
        x = torch.zeros(4)
        x[1:].add_(1)
        torch.sin(torch.ones(4), out=x)

    assert computed(function) == {
        "zeros.default": 1,
        "slice.Tensor": 0,
        "add_.Tensor": 1,
        "ones.default": 1,
        "sin.out": 1,
    }


def test_a_tensor_from_outside_that_is_changed_does_not_count() -> None:
    outside = torch.zeros(3)
    assert computed(lambda: outside[1:].add_(1)) == {"slice.Tensor": 0, "add_.Tensor": 0}


def test_training_a_batch_norm_twice_computes_the_same() -> None:
    norm = nn.BatchNorm1d(3)
    x = torch.randn(4, 3)
    first, second = values(norm, x), values(norm, x)
    assert norm.num_batches_tracked == 2
    prints = [[p for e in log.entries for p in e.prints.fingerprints] for log in (first, second)]
    assert len(prints[0]) >= 3
    assert compare(*prints) is None


def test_an_op_that_only_writes_to_its_arguments_counts() -> None:
    def function() -> None:
        torch._foreach_add_([torch.zeros(2), torch.ones(2)], 1)

    *_, entry = values(function).entries
    expected = [fingerprint(torch.full((2,), value)) for value in (1.0, 2.0)]
    assert len(entry.prints.fingerprints) == 2
    assert compare(entry.prints.fingerprints, expected) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.empty(3),
        torch.empty_like,
        lambda x: x.new_empty(3),
        lambda x: x.new_empty_strided((3,), (1,)),
        lambda x: torch.empty_strided((3,), (1,)),
        lambda x: torch.empty_permuted((3, 2), (1, 0)),
        lambda x: torch.ones(2).resize_(3),
    ],
)
def test_memory_not_written_yet_does_not_count(make: Callable[[Tensor], Tensor]) -> None:
    *_, entry = values(make, torch.ones(3)).entries
    assert entry.prints.fingerprints == ()
    assert "empty" in entry.line or "resize_" in entry.line


def test_scratch_space_of_kernels_does_not_count() -> None:
    x = torch.randn(1, 2, 4, 8)
    counts = computed(F.scaled_dot_product_attention, x, x, x)
    assert counts["_scaled_dot_product_flash_attention_for_cpu.default"] == 1


def test_the_ops_singled_out_exist() -> None:
    missing = [name for name in oplog._MEANINGFUL if not hasattr(torch.ops.aten, name)]
    assert missing == []


def test_strides_are_those_of_results_where_they_matter() -> None:
    x = torch.randn(2, 1, 3)

    def strides(function: Callable[[], Any]) -> Any:
        return values(function).entries[-1].prints.strides

    assert strides(lambda: x.transpose(0, 2)) == ((1, None, 3),)
    assert strides(lambda: x[:1]) == ((None, None, 1),)
    assert strides(x.to_sparse) == ((),)


# --- two logs -------------------------------------------------------------------------------------


def entry(name: str, *, optional: bool = False) -> LoggedOp:
    return LoggedOp(None, name, "", optional, ())


def aligned(forward: str, recompute: str) -> tuple[str, int | None]:
    """Logs as words of one letter an op, those that are optional in lower case."""
    logs = ([entry(c, optional=c.islower()) for c in word] for word in (forward, recompute))
    rows, first = align(*logs)
    return " ".join("".join("-" if e is None else e.line for e in row) for row in rows), first


@pytest.mark.parametrize(
    ("forward", "recompute", "rows", "first"),
    [
        ("", "", "", None),
        ("ABC", "ABC", "AA BB CC", None),
        ("ABC", "AXC", "AA BX CC", 1),
        ("ABC", "AB", "AA BB C-", 2),
        ("AB", "ABC", "AA BB -C", 2),
        ("aAbB", "AB", "a- AA b- BB", None),
        ("AB", "aAbB", "-a AA -b BB", None),
        ("aAB", "aAB", "aa AA BB", None),
        ("aAB", "bAB", "a- -b AA BB", None),
        ("aA", "bB", "a- -b AB", 2),
        ("AaB", "A", "AA a- B-", 2),
        ("Aa", "A", "AA a-", None),
        ("A", "Aa", "AA -a", None),
        ("AXaB", "AYB", "AA XY aB B-", 1),
    ],
)
def test_which_op_is_which(forward: str, recompute: str, rows: str, first: int | None) -> None:
    assert aligned(forward, recompute) == (rows, first)


def test_casts_that_autocast_has_cached_are_optional() -> None:
    linear = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        first, second = values(linear, x), values(linear, x)
    assert len(first.entries) > len(second.entries)
    assert align(first.entries, second.entries)[1] is None


# --- it lives and dies ----------------------------------------------------------------------------


def test_a_log_keeps_nothing_alive() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.randn(2, 3)
    log = record(model, x, fingerprints=True)
    assert len(log.entries) >= 3
    parts = [weakref.ref(part) for part in (model, model[0].weight, x)]
    del model, x
    gc.collect()
    assert [part() for part in parts] == [None] * 3


def test_results_are_let_go_as_without_a_log() -> None:
    alive: list[int] = []
    made: list[Any] = []

    def function(x: Tensor) -> None:
        for _ in range(5):
            x = x.sin()
            made.append(weakref.ref(x))
            alive.append(sum(each() is not None for each in made))

    record(function, torch.ones(3), fingerprints=True)
    assert alive == [1] * 5
