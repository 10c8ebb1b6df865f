"""Early stop: when it happens, who decides, and that user code cannot get in its way."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from tests._support import Counted, Run, assert_transparent, compat_rerun, leaf, rerun

SWITCHES = {
    "recollect": recollect.set_checkpoint_early_stop,
    "compat": recollect.compat.set_checkpoint_early_stop,
}


def wave(x: Tensor) -> Tensor:
    return x.sin().exp()


def stops_early(run: Run, **options: Any) -> bool:
    """Whether the recomputation of a region ends before the end of the function."""
    function = Counted(lambda x: wave(x).sum())
    run(function, leaf(5), **options).backward()
    assert function.started == 2
    return function.finished == 1


@pytest.mark.parametrize("run", [rerun, compat_rerun], ids=["recollect", "compat"])
def test_option(run: Run) -> None:
    assert stops_early(run)
    assert stops_early(run, early_stop=True)
    assert not stops_early(run, early_stop=False)


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
@pytest.mark.parametrize("option", [True, False])
@pytest.mark.parametrize("enable", [True, False])
def test_context_manager_takes_precedence(switch: Any, option: bool, enable: bool) -> None:
    with switch(enable):
        assert stops_early(rerun, early_stop=option) is enable
    assert stops_early(rerun, early_stop=option) is option


def test_innermost_context_manager_counts() -> None:
    with recollect.set_checkpoint_early_stop(False):
        with recollect.set_checkpoint_early_stop(True):
            assert stops_early(rerun)
        assert not stops_early(rerun)


def test_context_manager_is_read_in_forward() -> None:
    function = Counted(wave)
    with recollect.set_checkpoint_early_stop(False):
        out = rerun(function, leaf(5))
    out.sum().backward()
    assert function.finished == 2


def test_context_manager_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), recollect.set_checkpoint_early_stop(False):
        raise KeyError
    assert stops_early(rerun)


def test_context_manager_of_one_thread_does_not_affect_another() -> None:
    inside, checked, results = threading.Event(), threading.Event(), []

    def other_thread() -> None:
        inside.wait(10)
        results.append(stops_early(rerun))
        checked.set()

    thread = threading.Thread(target=other_thread)
    thread.start()
    with recollect.set_checkpoint_early_stop(False):
        inside.set()
        assert checked.wait(10)
        assert not stops_early(rerun)
    thread.join()
    assert results == [True]


# --- user code that catches, cleans up, or gets in the way ----------------------------------------


def catches_exceptions(x: Tensor) -> Tensor:
    try:
        return x.sin().exp()
    except Exception as error:
        raise AssertionError("user code saw the signal") from error


def swallows_everything(x: Tensor) -> Tensor:
    y = x.sin()
    try:  # noqa: SIM105 - `suppress` is the next test
        y = y.exp()
    except BaseException:  # noqa: BLE001 - what this test is about
        pass
    return y


def swallows_everything_and_goes_on(x: Tensor) -> Tensor:
    y = swallows_everything(x)
    for _ in range(3):
        y = swallows_everything(y) + 1
    return y.cos()


def suppresses_everything(x: Tensor) -> Tensor:
    y = x.sin()
    with contextlib.suppress(BaseException):
        y = y.exp()
    return y * y


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        catches_exceptions,
        swallows_everything,
        swallows_everything_and_goes_on,
        suppresses_everything,
    ],
)
def test_gradients_are_right_whatever_user_code_catches(function: Any, early_stop: bool) -> None:
    def train(run: Run) -> Any:
        x = leaf(5)
        out = run(function, x)
        out.sum().backward()
        return out, x.grad

    assert_transparent(train, partial(rerun, early_stop=early_stop))


def test_finally_blocks_and_context_managers_are_left() -> None:
    events = []

    @contextlib.contextmanager
    def noted(name: str) -> Iterator[None]:
        events.append(f"enter {name}")
        try:
            yield
        finally:
            events.append(f"leave {name}")

    def function(x: Tensor) -> Tensor:
        with noted("region"):
            return x.sin().exp()

    rerun(function, leaf(5)).sum().backward()
    assert events == ["enter region", "leave region"] * 2


def test_grad_mode_and_autocast_inside_are_left() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
            return x.sin().exp()

    with torch.enable_grad():
        rerun(function, leaf(5)).sum().backward()
        assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_generator_inside_the_region() -> None:
    """The signal passes through a generator's frame like any exception."""

    def train(run: Run) -> Any:
        def steps(x: Tensor) -> Iterator[Tensor]:
            for _ in range(3):
                x = x.sin().exp()
                yield x

        x = leaf(5)
        run(lambda x: list(steps(x))[-1], x).sum().backward()
        return x.grad

    assert_transparent(train, rerun)


@pytest.mark.parametrize("everywhere", [False, True], ids=["module", "global"])
@pytest.mark.parametrize("with_kwargs", [False, True], ids=["", "kwargs"])
def test_hooks_that_are_always_called_see_the_end_of_a_module(
    everywhere: bool, with_kwargs: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.Linear(3, 3)))
    names = {module: name for name, module in model.named_modules()}
    seen: list[str] = []

    def before(module: torch.nn.Module, *given: Any) -> None:
        seen.append(f"+{names[module]}")

    def after(module: torch.nn.Module, *given: Any) -> None:
        assert len(given) == 2 + with_kwargs
        seen.append(f"-{names[module]}")

    options = {"with_kwargs": with_kwargs, "always_call": True}
    if everywhere:
        shared = torch.nn.modules.module
        handles = [
            shared.register_module_forward_pre_hook(before),
            shared.register_module_forward_hook(after, **options),
        ]
    else:
        handles = [
            handle
            for module in names
            for handle in (
                module.register_forward_pre_hook(before),
                module.register_forward_hook(after, **options),
            )
        ]
    try:
        out = rerun(model, leaf(2, 3))
        forward = seen.copy()
        seen.clear()
        out.sum().backward()
    finally:
        for handle in handles:
            handle.remove()
        # `remove` leaves it behind
        torch.nn.modules.module._global_forward_hooks_with_kwargs.pop(handles[-1].id, None)
    assert seen == forward == ["+", "+0", "-0", "+1", "+1.0", "-1.0", "-1", "-"]


def test_error_in_a_hook_that_is_always_called_is_a_warning() -> None:
    model = torch.nn.Linear(3, 3)
    calls: list[object] = []

    def fail(module: torch.nn.Module, args: Any, result: object) -> None:
        calls.append(result)
        if result is None:
            raise RuntimeError("not now")

    model.register_forward_hook(fail, always_call=True)
    out = rerun(model, leaf(2, 3))
    with pytest.warns(UserWarning, match="not now"):
        out.sum().backward()
    assert len(calls) == 2
