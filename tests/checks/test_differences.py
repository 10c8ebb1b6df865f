"""``debug=True``: the ops of both runs and where they part."""

from __future__ import annotations

import functools
import gc
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.checks.differences import explain
from recollect.checks.oplog import OpLog
from recollect.errors import InputChanged
from tests._support import Run, assert_transparent, compat_rerun, leaf, rerun

RUNS = pytest.mark.parametrize("run", [rerun, compat_rerun], ids=["recollect", "compat"])
EXPLAINED = "because you passed `debug=True`"


def parts_at_the_second_op(x: Tensor) -> Tensor:
    x = x.sin()
    if recollect.is_recomputing():
        return x.tanh()
    return x.exp().cos()


def error_of(run: Run, function: Any, **options: Any) -> str:
    out = run(function, leaf(2, 3), **options)
    with pytest.raises(recollect.CheckpointError) as info:
        out.sum().backward()
    return str(info.value)


def columns(message: str) -> tuple[list[str], list[str]]:
    """The two sides of the table, row by row."""
    rows = message.partition("Operations executed during the original forward")[2].splitlines()[1:]
    pairs = [row.partition(" |") for row in rows if " |" in row]
    return [left.strip() for left, _, _ in pairs], [right.strip() for _, _, right in pairs]


@RUNS
def test_shows_the_ops_of_both_runs(run: Run) -> None:
    message = error_of(run, parts_at_the_second_op, debug=True)
    assert EXPLAINED in message
    assert "Operations executed during recomputation" in message
    forward, recompute = columns(message)
    assert forward == [
        "1  sin.default(f32[2, 3]) -> f32[2, 3]",
        ">     2  exp.default(f32[2, 3]) -> f32[2, 3]",
        "3  cos.default(f32[2, 3]) -> f32[2, 3]",
    ]
    assert recompute[:2] == [
        "1  sin.default(f32[2, 3]) -> f32[2, 3]",
        "2  tanh.default(f32[2, 3]) -> f32[2, 3]",
    ]


def test_names_the_first_difference_and_its_line() -> None:
    message = error_of(rerun, parts_at_the_second_op, debug=True)
    verdict = message.split("First difference, at operation 2:")[1].split("Operations executed")[0]
    before, after = verdict.split("recompute:")
    assert "exp.default" in before
    assert "tanh.default" in after
    for part in (before, after):
        assert "test_differences.py:" in part
        assert "in parts_at_the_second_op" in part


def test_original_message_is_kept() -> None:
    message = error_of(rerun, parts_at_the_second_op, debug=True)
    assert "different number of tensors was saved" in message


def test_run_that_ends_before_the_other() -> None:
    message = error_of(
        rerun, lambda x: x.sin() if recollect.is_recomputing() else x.sin().exp(), debug=True
    )
    assert "First difference, at operation 2:" in message
    assert "(no more operations)" in message


def test_works_beside_selective_checkpointing() -> None:
    """torch refuses the two together."""
    contexts = functools.partial(
        recollect.create_selective_checkpoint_contexts, [torch.ops.aten.sin.default]
    )
    message = error_of(
        rerun,
        lambda x: x.sin().exp().cos() if not recollect.is_recomputing() else x.sin().exp(),
        context_fn=contexts,
        debug=True,
    )
    assert "First difference, at operation 3:" in message
    assert "cos.default" in message


@RUNS
def test_silent_when_nothing_is_wrong(run: Run) -> None:
    def train(run: Run) -> Any:
        x = leaf(5)
        out = run(lambda x: torch.dropout(x.sin(), 0.5, True).exp(), x)
        out.sum().backward()
        return out, x.grad

    assert_transparent(train, functools.partial(run, debug=True))


def test_second_backward_is_traced_anew() -> None:
    calls = []

    def fails_at_the_third_run(x: Tensor) -> Tensor:
        calls.append(None)
        return x.sin().exp() if len(calls) < 3 else x.sin().tanh().exp()

    out = rerun(fails_at_the_third_run, leaf(5), debug=True, early_stop=False).sum()
    out.backward(retain_graph=True)
    with pytest.raises(recollect.CheckpointError, match="First difference, at operation 2"):
        out.backward()


# --- the table ------------------------------------------------------------------------------------


def record(function: Callable[..., Any], *args: Any, **options: bool) -> OpLog:
    log = OpLog(**options)
    with log:
        function(*args)
    return log


def chain(*names: str) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        for name in names:
            x = getattr(x, name)()
        return x

    return function


def explained(
    forward: Callable[[Tensor], Any], again: Callable[[Tensor], Any], **options: Any
) -> str:
    x = torch.ones(2)
    error = explain(InputChanged("why"), record(forward, x), record(again, x), **options)
    assert type(error) is InputChanged
    assert str(error).startswith("why\n")
    return str(error)


def test_only_the_surroundings_of_the_first_difference_are_shown() -> None:
    same = ["sin"] * 30
    message = explained(chain(*same, "exp", *same), chain(*same, "cos", *same))
    forward, recompute = columns(message)
    assert "First difference, at operation 31:" in message
    numbers = [int(line.lstrip("> ").split()[0]) for line in forward]
    assert numbers == list(range(27, 44))
    assert len(recompute) == len(forward)
    assert "(26 before these, which agree, left out)" in message
    assert "(18 after these left out)" in message


def test_a_short_log_is_shown_whole() -> None:
    message = explained(chain("sin", "exp"), chain("sin", "cos"))
    assert "left out)" not in message.partition("Operations executed")[2]


def test_a_long_line_is_cut_in_the_table_and_whole_above_it() -> None:
    def stack(x: Tensor) -> Tensor:
        return torch.stack([x] * 30)

    line = f"stack.default([{', '.join(['f32[2]'] * 30)}]) -> f32[30, 2]"
    message = explained(stack, chain("sin"))
    above, _, table = message.partition("Operations executed")
    assert line in above
    assert line not in table
    assert max(len(row) for row in table.splitlines()) < 200


def test_a_run_that_was_stopped_does_not_differ_by_its_end() -> None:
    runs = chain("sin", "exp", "cos"), chain("sin", "exp")
    assert "First difference, at operation 3:" in explained(*runs)
    message = explained(*runs, stopped=True)
    assert "First difference" not in message
    assert "same operations" in message
    assert columns(message)[0][-1].startswith("3  cos")
    assert "First difference, at operation 1:" in explained(chain("cos"), runs[0], stopped=True)


def test_nothing_to_show() -> None:
    assert columns(explained(chain(), chain())) == ([], [])
    assert "First difference, at operation 1:" in explained(chain(), chain("sin"))


class Block(nn.Module):
    """Has a child; takes another way in its second run."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Sequential(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.child(x.sin())
        if recollect.is_recomputing():
            return x.exp()
        return self.child(x).cos()


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), Block()])
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = rerun(block, x, **self.options)
        return x


def test_modules_are_named() -> None:
    out = Model(debug=True)(leaf(2, 3))
    with pytest.raises(recollect.CheckpointError) as info:
        out.sum().backward()
    verdict, _, table = str(info.value).partition("Operations executed")
    before, after = verdict.partition("First difference, at operation 3:")[2].split("recompute:")
    assert "tanh.default" in before
    assert "\n      in Model: blocks.1.child.0\n" in before
    assert "exp.default" in after
    assert "\n      in Block\n" in after  # the modules around it are not running in backward
    headings = [row.strip() for row in table.splitlines() if "Model" in row]
    assert headings == [
        "Model: blocks.1",
        "Model: blocks.1.child.0",
        "Model: blocks.1",
    ]


# --- no growth ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"debug": True}, {"determinism_check": "values"}], ids=str)
def test_nothing_accumulates_over_many_steps(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    recollect.checkpointed(model, **options)
    x = leaf(2, 4)

    def steps(count: int) -> None:
        for _ in range(count):
            model(x).sum().backward()
            model.zero_grad()

    def state() -> tuple[int, int]:
        gc.collect()
        return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        steps(300)  # as many as it takes to fill Python's lists of free tuples
        states = [state()]
        for _ in range(3):
            steps(100)
            states.append(state())
    finally:
        tracemalloc.stop()
    # What accumulates does so every time; what others have left for the collector does not.
    growths = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(states)]
    assert min(objects for objects, _ in growths) < 30
    assert min(size for _, size in growths) < 20_000


# --- set_checkpoint_debug_enabled -----------------------------------------------------------------


@pytest.mark.parametrize(
    "switch",
    [recollect.set_checkpoint_debug_enabled, recollect.compat.set_checkpoint_debug_enabled],
    ids=["recollect", "compat"],
)
@pytest.mark.parametrize(
    ("setting", "option", "explained"),
    [
        (True, False, True),
        (True, True, True),
        (False, True, False),
        (False, False, False),
        (None, True, True),
        (None, False, False),
    ],
)
def test_switch_takes_precedence_unless_none(
    switch: Any, setting: bool | None, option: bool, explained: bool
) -> None:
    with switch(setting):
        out = rerun(parts_at_the_second_op, leaf(2, 3), debug=option)
    with pytest.raises(recollect.CheckpointError) as info:
        out.sum().backward()
    assert (EXPLAINED in str(info.value)) is explained


def test_innermost_switch_counts_and_ends() -> None:
    with recollect.set_checkpoint_debug_enabled(True):
        with recollect.set_checkpoint_debug_enabled(False):
            assert EXPLAINED not in error_of(rerun, parts_at_the_second_op)
        assert EXPLAINED in error_of(rerun, parts_at_the_second_op)
    assert EXPLAINED not in error_of(rerun, parts_at_the_second_op)
