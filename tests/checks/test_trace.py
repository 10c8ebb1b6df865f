"""``debug=True``: the ops of both runs and where they part."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
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


@RUNS
def test_shows_the_ops_of_both_runs(run: Run) -> None:
    message = error_of(run, parts_at_the_second_op, debug=True)
    assert EXPLAINED in message
    forward, recompute = message.split("Operations executed during recomputation")
    forward = forward.split("Operations executed during the original forward:")[1]
    for op in ("sin", "exp", "cos"):
        assert f"{op}.default(f32[2, 3]) -> f32[2, 3]" in forward
    for op in ("sin", "tanh"):
        assert f"{op}.default(f32[2, 3]) -> f32[2, 3]" in recompute
    assert "exp" not in recompute


def test_names_the_first_difference_and_its_line() -> None:
    message = error_of(rerun, parts_at_the_second_op, debug=True)
    verdict = message.split("First difference, at operation 2:")[1].split("Operations executed")[0]
    before, after = verdict.split("recompute:")
    assert "exp.default" in before
    assert "tanh.default" in after
    for part in (before, after):
        assert "test_trace.py:" in part
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
