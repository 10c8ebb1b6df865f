"""``context_fn``: each context entered and left once, errors seen, nothing left behind."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from tests._support import Counted, Run, compat_rerun, leaf, rerun


class Noted:
    """A context manager that writes down what happens to it."""

    def __init__(self, name: str, events: list[str], *, swallows: bool = False) -> None:
        self._name = name
        self._events = events
        self._swallows = swallows

    def __enter__(self) -> None:
        self._events.append(f"enter {self._name}")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        failed = isinstance(exc, Exception)
        self._events.append(f"leave {self._name}" + (f" by {exc!r}" if failed else ""))
        return self._swallows


@pytest.fixture
def events() -> list[str]:
    return []


def wave(x: Tensor) -> Tensor:
    return x.sin().exp()


def assert_saves_normally() -> None:
    """No hooks are left on the stack: a plain op holds the very tensor it saves."""
    x = leaf(5)
    out = x.exp()
    assert out.grad_fn._saved_result.data_ptr() == out.data_ptr()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not recollect.is_recomputing()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("run", [rerun, compat_rerun], ids=["recollect", "compat"])
def test_entered_and_left_once(run: Run, early_stop: bool, events: list[str]) -> None:
    calls = Counted(lambda: (Noted("forward", events), Noted("recompute", events)))
    out = run(wave, leaf(5), context_fn=calls, early_stop=early_stop)
    assert events == ["enter forward", "leave forward"]
    out.sum().backward()
    assert events[2:] == ["enter recompute", "leave recompute"]
    assert calls.started == 1
    assert_saves_normally()


def test_around_every_recomputation(events: list[str]) -> None:
    out = rerun(
        wave, leaf(5), context_fn=lambda: (Noted("forward", events), Noted("recompute", events))
    ).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert events[2:] == ["enter recompute", "leave recompute"] * 2


def test_left_when_forward_fails(events: list[str]) -> None:
    def fail(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rerun(fail, leaf(5), context_fn=lambda: (Noted("forward", events), Noted("again", events)))
    assert events == ["enter forward", "leave forward by KeyError('mine')"]
    assert_saves_normally()


def test_left_when_the_recomputation_fails(events: list[str]) -> None:
    def fail_again(x: Tensor) -> Tensor:
        if recollect.is_recomputing():
            raise KeyError("mine")
        return wave(x)

    out = rerun(
        fail_again, leaf(5), context_fn=lambda: (Noted("forward", events), Noted("again", events))
    )
    with pytest.raises(KeyError, match="mine"):
        out.sum().backward()
    assert events[2:] == ["enter again", "leave again by KeyError('mine')"]
    assert_saves_normally()


def test_forward_context_must_not_swallow_an_exception(events: list[str]) -> None:
    def fail(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(RuntimeError, match=r"suppressed an exception.*KeyError\('mine'\)") as info:
        rerun(
            fail,
            leaf(5),
            context_fn=lambda: (Noted("f", events, swallows=True), Noted("r", events)),
        )
    assert isinstance(info.value.__cause__, KeyError)
    assert_saves_normally()


@pytest.mark.parametrize("fails", ["before", "after"])
def test_recompute_context_must_not_swallow_an_exception(fails: str, events: list[str]) -> None:
    """Before all tensors are there, or after: the error must be seen in either case."""

    def fail_again(x: Tensor) -> Tensor:
        out = wave(x) if fails == "after" or not recollect.is_recomputing() else x
        if recollect.is_recomputing():
            raise KeyError("mine")
        return out

    out = rerun(
        fail_again,
        leaf(5),
        context_fn=lambda: (Noted("f", events), Noted("r", events, swallows=True)),
        early_stop=False,
    )
    with pytest.raises(RuntimeError, match=r"suppressed an exception.*KeyError\('mine'\)"):
        out.sum().backward()
    assert_saves_normally()


def test_recompute_context_that_swallows_does_not_disturb_early_stop(events: list[str]) -> None:
    x = leaf(5)
    rerun(
        wave, x, context_fn=lambda: (Noted("f", events), Noted("r", events, swallows=True))
    ).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(wave(x).sum(), x)[0])


def test_a_recomputation_that_may_use_no_hooks_leaves_nothing_changed() -> None:
    x = leaf(5)
    out = rerun(wave, x)
    state = torch.get_rng_state()
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("none here"),
        pytest.raises(RuntimeError, match="none here"),
    ):
        out.sum().backward(retain_graph=True)
    assert not recollect.is_recomputing()
    assert torch.equal(torch.get_rng_state(), state)
    out.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(wave(x).sum(), x)[0])


@pytest.mark.parametrize("name", ["forward", "recompute"])
def test_context_that_fails_on_entering(name: str, events: list[str]) -> None:
    class Fails(Noted):
        def __enter__(self) -> None:
            raise KeyError("mine")

    forward = Fails("f", events) if name == "forward" else Noted("f", events)
    with pytest.raises(KeyError, match="mine"):
        rerun(wave, leaf(5), context_fn=lambda: (forward, Fails("r", events))).sum().backward()
    assert "leave r" not in events
    assert_saves_normally()


@pytest.mark.parametrize("name", ["forward", "recompute"])
def test_context_that_fails_on_leaving(name: str, events: list[str]) -> None:
    class Fails(Noted):
        def __exit__(self, *exc: object) -> bool:
            raise KeyError("mine")

    forward = Fails("f", events) if name == "forward" else Noted("f", events)
    with pytest.raises(KeyError, match="mine"):
        rerun(wave, leaf(5), context_fn=lambda: (forward, Fails("r", events))).sum().backward()
    assert_saves_normally()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("run", [rerun, compat_rerun], ids=["recollect", "compat"])
@pytest.mark.parametrize(
    "returned",
    [None, (), "ab", (None, None), lambda events: (Noted("f", events),), lambda events: 3],
    ids=["none", "empty", "text", "nones", "one context", "number"],
)
def test_bad_return_is_refused(run: Run, debug: bool, returned: Any, events: list[str]) -> None:
    value = returned(events) if callable(returned) else returned
    function = Counted(wave)
    with pytest.raises(TypeError, match="context_fn should return a tuple of two context managers"):
        run(function, leaf(5), context_fn=lambda: value, debug=debug)
    assert function.started == 0
    assert events == []
    assert_saves_normally()


def test_a_second_context_that_is_not_one_is_refused_before_the_first_is_entered(
    events: list[str],
) -> None:
    with pytest.raises(TypeError, match=r"'not a context' of type str is not one"):
        rerun(wave, leaf(5), context_fn=lambda: (Noted("forward", events), "not a context"))
    assert events == []


def test_error_of_context_fn_itself_passes_through() -> None:
    def fail() -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rerun(wave, leaf(5), context_fn=fail)
    assert_saves_normally()


def test_not_called_without_grad_mode() -> None:
    calls = Counted(recollect.noop_context_fn)
    with torch.no_grad():
        rerun(wave, leaf(5), context_fn=calls)
    assert calls.started == 0


def test_contexts_may_be_dispatch_modes() -> None:
    class Counts(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    modes = Counts(), Counts()
    out = rerun(lambda x: x.sin().exp().cos(), leaf(5), context_fn=lambda: modes)
    out.sum().backward()
    forward, recompute = ([n for n in mode.names if n != "aten::detach"] for mode in modes)
    assert forward == ["aten::sin", "aten::exp", "aten::cos"]
    assert recompute == ["aten::sin", "aten::exp"], "the cosine saves its input, and that is all"
