"""The exception tree, and that nothing of ours leaks into user code."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import recollect
from recollect import errors
from tests._support import leaf, rerun

PUBLIC_ERRORS = [
    error
    for _, error in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error, Exception)
    and error.__module__ == errors.__name__
    # No cause of an exception, unless the user makes it one.
    and not issubclass(error, Warning)
]


def test_everything_raised_in_backward_has_one_root() -> None:
    assert len(PUBLIC_ERRORS) > 1
    for error in PUBLIC_ERRORS:
        assert issubclass(error, recollect.CheckpointError)


def test_root_is_torchs_and_a_runtime_error() -> None:
    """Code that catches torch's class must catch ours."""
    assert recollect.CheckpointError is recollect.compat.CheckpointError
    assert issubclass(recollect.CheckpointError, torch.utils.checkpoint.CheckpointError)
    assert issubclass(recollect.CheckpointError, RuntimeError)


def test_tree_in_the_docstring_is_the_tree() -> None:
    for error in PUBLIC_ERRORS:
        assert error.__name__ in errors.__doc__


def test_warnings_of_ours_have_one_root() -> None:
    assert issubclass(recollect.PlanWarning, recollect.RecollectWarning)
    assert issubclass(recollect.RecollectWarning, UserWarning)
    policy = recollect.policy.save_ops(torch.ops.aten.mm)
    with pytest.warns(recollect.RecollectWarning, match="matched nothing"):
        recollect.checkpoint(torch.sin, leaf(3), policy=policy).sum().backward()


def test_signal_to_stop_is_not_seen_as_an_exception() -> None:
    seen: list[BaseException] = []

    def watch(x: Tensor) -> Tensor:
        try:
            return x.sin().exp()
        except Exception as error:
            seen.append(error)
            raise

    rerun(watch, leaf(3)).sum().backward()
    assert seen == []


def test_signal_to_stop_does_not_escape_backward() -> None:
    x = leaf(3)
    out = rerun(lambda x: rerun(lambda x: x.sin().exp(), x).cos().exp(), x)
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    "function", [None, 3, "sin", leaf(2)], ids=["None", "int", "str", "tensor"]
)
@pytest.mark.parametrize("engine", ["rerun", "reentrant"])
def test_function_must_be_callable(function: object, engine: str) -> None:
    with pytest.raises(TypeError, match="function should be callable"):
        rerun(function, leaf(3), engine=engine)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"use_reentrant": None}, TypeError),
        ({"debug": 1}, TypeError),
        ({"early_stop": "yes"}, TypeError),
        ({"preserve_rng_state": None}, TypeError),
        ({"context_fn": 3}, TypeError),
        ({"policy": 3}, TypeError),
        ({"engine": "rerunn"}, ValueError),
        ({"engine": 3}, ValueError),
        ({"determinism_check": "most"}, ValueError),
        ({"use_reentrant": True, "engine": "rerun"}, ValueError),
        ({"policy": [], "context_fn": lambda: None}, ValueError),
    ],
    ids=lambda value: ",".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_option_is_refused_at_the_call_and_named(
    option: dict[str, object], error: type[Exception]
) -> None:
    called = []
    with pytest.raises(error, match=next(iter(option))):
        rerun(called.append, leaf(3), **option)
    assert called == []
