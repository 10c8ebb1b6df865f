"""Modes, and contexts that skip layers of the dispatcher."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from recollect._torch.modes import (
    _ABOVE_KERNELS,
    DispatchMode,
    _keys_excluded_by,
    any_autocast_enabled,
    below_autograd,
    below_python,
    detach_below_autograd,
    dispatch_modes,
    dispatch_modes_active,
    forward_ad_active,
    function_mode_count,
    function_modes,
    leave_dispatch_mode,
    nothing_around,
    pop_function_mode,
    push_function_mode,
    raw_memory,
    set_function_modes,
    set_grad_enabled,
    unobserved,
)
from recollect._torch.ops import bare_op
from recollect._torch.tensors import copy_tensors


def test_grad_mode_is_set_for_good():
    set_grad_enabled(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        set_grad_enabled(True)


def test_modes_are_counted():
    assert (function_mode_count(), dispatch_modes_active()) == (0, False)
    with torch.device("cpu"):
        assert function_mode_count() == 1
    with DispatchMode():
        assert dispatch_modes_active()


def test_a_function_mode_is_pushed_and_popped():
    mode = torch.device("meta")
    mode.__enter__()
    context = pop_function_mode()
    assert not torch.ones(1).is_meta
    push_function_mode(context)
    assert torch.ones(1).is_meta
    mode.__exit__(None, None, None)
    assert function_mode_count() == 0


def test_what_is_around_a_call_is_noticed():
    seen = []

    def look(x):
        seen.append(nothing_around())
        return x

    look(None)
    assert seen.pop()
    x = torch.ones(1)
    with torch.device("cpu"):
        look(x)
    with DispatchMode():
        look(x)
    with torch.autograd.graph.saved_tensors_hooks(look, look):
        look(x)
    torch.func.vmap(look)(x)
    with forward_ad.dual_level():
        look(x)
    with torch._guards.tracing(torch._guards.TracingContext(None)):
        look(x)
    make_fx(look)(x)
    assert not any(seen)
    assert len(seen) == 7
    look(None)
    assert seen.pop()


def test_function_modes_are_exchanged():
    assert function_modes() == []
    with torch.device("meta"):
        modes = function_modes()
        set_function_modes([])
        assert not torch.ones(1).is_meta
        set_function_modes(modes)
        assert torch.ones(1).is_meta
    set_function_modes(modes)
    assert torch.get_default_device().type == "meta"
    set_function_modes([])
    assert not torch.ones(1).is_meta


def test_nobody_observes():
    with Log() as log, torch.device("meta"), unobserved():
        assert not torch.ones(1).is_meta
        assert not torch.is_grad_enabled()
    assert log.ops == []
    assert torch.is_grad_enabled()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_ad_is_seen():
    assert not forward_ad_active()
    with forward_ad.dual_level():
        assert forward_ad_active()
        x = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        copy_tensors([torch.zeros(2)], [x])
    assert not forward_ad_active()


def test_autocast_of_any_device_is_seen():
    assert not any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert any_autocast_enabled()


class Log(DispatchMode):
    """Remembers ops, and calls them without their Python wrapper."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return bare_op(func)(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_ops_and_nests():
    x = torch.ones(2, requires_grad=True)
    with Log() as outer, Log() as inner:
        x.sin().sum()
    expected = [torch.ops.aten.sin.default, torch.ops.aten.sum.default]
    assert outer.ops == inner.ops == expected
    assert issubclass(DispatchMode, TorchDispatchMode)


def test_a_mode_of_ours_leaves_no_flag_that_a_mode_of_another_thread_had_set():
    """The flags are the process's: a mode that put back what it found would leave them set."""

    class Theirs(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    names = [name for name in vars(_python_dispatch) if name.startswith("_is_in")]

    def flags():
        return [name for name in names if getattr(_python_dispatch, name)]

    assert "_is_in_any_mode_without_ignore_compile_internals" in names
    assert flags() == []
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(Theirs().__enter__).result()
        with DispatchMode():
            assert _python_dispatch.is_in_torch_dispatch_mode()
            other.submit(theirs.__exit__, None, None, None).result()
    assert flags() == []


def test_to_detach_outside_of_a_mode_leaves_the_version_tracking_of_views_on():
    x = torch.ones(2)
    with raw_memory():
        alias = detach_below_autograd(x)
    detach_below_autograd(x)
    x.detach().mul_(2)
    assert (x._version, alias._version) == (1, 1)


def test_a_detached_alias_shares_the_version():
    x = torch.ones(2)
    versions = []

    class Detach(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.sin.default:
                versions.append(detach_below_autograd(out))
            return out

    with Detach():
        y = x.requires_grad_().sin()
    (alias,) = versions
    assert alias._version == 0
    y.detach().mul_(2)
    assert (alias._version, alias.requires_grad) == (1, False)
    assert torch.equal(alias, y)


def test_below_python_nothing_sees_an_op():
    x = torch.ones(2, requires_grad=True)
    with Log() as log, torch.device("meta"):
        with below_python():
            y = x * torch.ones(2)
        assert torch.ones(1).is_meta
    assert log.ops == [torch.ops.aten.ones.default]
    assert (y.device.type, y.requires_grad) == ("cpu", False)
    assert (x * 1).requires_grad


def test_below_python_a_transform_is_not_seen_either():
    def function(x):
        with below_python():
            seen.append(torch.ones(2).sum().item())
        return x.sum()

    seen = []
    torch.func.vmap(function)(torch.ones(2, 3))
    assert seen == [2.0]


def test_what_is_excluded_does_not_depend_on_the_importer():
    with torch.inference_mode():
        found = _keys_excluded_by(
            torch._C._DisableTorchDispatch, torch._C._AutoDispatchBelowAutograd
        )
    assert found.raw_repr() == _ABOVE_KERNELS.raw_repr()
    x = torch.randn(3, requires_grad=True)
    with below_python():
        assert not (x * 2).requires_grad


@pytest.mark.parametrize("casts", [False, True])
def test_below_autograd_nothing_is_cast_or_differentiated(casts):
    x = torch.randn(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=casts), below_autograd():
        y = torch.ops.aten.mm.default(x, x)
    assert y.dtype is torch.float32
    assert not y.requires_grad
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        assert ((x @ x).dtype is torch.bfloat16) == casts


def test_a_mode_is_left_wherever_it_is_on_the_stack():
    class Mode(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    modes = [Mode() for _ in range(3)]
    for mode in modes:
        mode.__enter__()
    leave_dispatch_mode(modes[1])
    assert dispatch_modes() == [modes[0], modes[2]]
    leave_dispatch_mode(modes[1])  # it is not there
    leave_dispatch_mode(modes[2])
    leave_dispatch_mode(modes[0])
    assert dispatch_modes() == []
