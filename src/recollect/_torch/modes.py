"""Dispatch and function modes, and contexts that skip layers of the dispatcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device, _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from recollect._torch.dynamo import hide_with_calls

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled

any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


def autocast_of(kinds: Iterable[str]) -> tuple[tuple[str, bool, torch.dtype], ...]:
    """For each of these types of device whether autocast is on, and its dtype."""
    return tuple([(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds])


#: How many function modes are active; a default device is one.
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack

#: Make a mode the innermost function mode, and undo that: what a mode does when it is entered.
push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack

pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack

#: How many dispatch modes are active.
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack


def dispatch_modes_active() -> bool:
    """Whether any dispatch mode would see the next op."""
    return dispatch_mode_count() > 0


def dispatch_modes() -> list[Any]:
    """The active dispatch modes, the outermost first."""
    return list(_python_dispatch._get_current_dispatch_mode_stack())


def function_modes() -> list[Any]:
    """The active function modes, the outermost first."""
    return _get_current_function_mode_stack() if function_mode_count() else []


def is_own_mode(mode: Any) -> bool:
    """Whether ``mode`` is one of recollect's."""
    return type(mode).__module__.startswith("recollect.")


def foreign_function_modes() -> bool:
    """Whether a function mode is active that is not a default device."""
    return any(not isinstance(mode, _device.DeviceContext) for mode in function_modes())


def set_function_modes(modes: list[Any]) -> None:
    """Make ``modes`` the active function modes, without entering or leaving any."""
    for _ in range(function_mode_count()):
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)
    # A default device is a mode, and also a global that compiled code is guarded by.
    devices = [mode.device for mode in modes if isinstance(mode, _device.DeviceContext)]
    _device.CURRENT_DEVICE = devices[-1] if devices else None


#: A context in which function modes see nothing.
no_function_modes: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction

#: A context in which dispatch modes see nothing.
no_dispatch_modes: Callable[[], AbstractContextManager[None]] = torch._C._DisableTorchDispatch


class unobserved:  # noqa: N801 - used like a function
    """A context for our own tensor ops: no mode sees them, and autograd does not record them."""

    __slots__ = ("_grad_was_enabled", "_stack")

    def __enter__(self) -> None:
        self._grad_was_enabled = torch.is_grad_enabled()
        set_grad_enabled(False)
        self._stack: ExitStack | None = None
        if dispatch_modes_active() or function_mode_count():
            self._stack = ExitStack()
            self._stack.enter_context(_disable_current_modes())
            self._stack.enter_context(torch._C.DisableTorchFunction())

    def __exit__(self, *exc: object) -> None:
        if self._stack is not None:
            self._stack.close()
        set_grad_enabled(self._grad_was_enabled)


class DispatchMode(TorchDispatchMode):
    """A dispatch mode without torch's overhead.

    torch wraps the ``__torch_dispatch__`` of every mode so that dynamo never compiles it: a
    microsecond and a half for each op. Ours are hidden from dynamo by their code, which is free.

    torch also keeps the kinds of active modes in globals, which each mode saves and restores. Two
    overlapping modes of two threads restore each other's: after that, compiled code called under a
    mode fails its guards for the rest of the process. So our modes set only the flag that compiled
    code checks, and on exit reset it to the truth in this thread.
    """

    #: Higher-order ops (flex attention, compiled regions) reach ``__torch_dispatch__`` like others.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        """Nothing: the base class would save the globals."""

    def __enter__(self) -> DispatchMode:
        torch._C._push_on_torch_dispatch_stack(self)
        _python_dispatch._is_in_torch_dispatch_mode = True
        return self

    def __exit__(self, *exc: object) -> None:
        torch._C._pop_torch_dispatch_stack(None)
        _python_dispatch._is_in_torch_dispatch_mode = dispatch_modes_active()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in vars(cls):
            hide_with_calls(vars(cls)["__torch_dispatch__"])

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def leave_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Take ``mode`` off this thread's stack, wherever on it that is."""
    above: list[TorchDispatchMode] = []
    if not any(each is mode for each in dispatch_modes()):
        return
    while (top := torch._C._pop_torch_dispatch_stack(None)) is not mode:
        above.append(top)
    for each in reversed(above):
        torch._C._push_on_torch_dispatch_stack(each)
    _python_dispatch._is_in_torch_dispatch_mode = dispatch_modes_active()


_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_key_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded

_VERSIONS_OF_VIEWS = torch._C.DispatchKey.ADInplaceOrView

#: Keys that are off in a dispatch mode: those by which the ops inside of a kernel resolve conjugate
#: views, which some of them would ignore, and the one by which writes to views are counted.
LAZY_VIEWS = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)
COUNTED_WRITES = (_VERSIONS_OF_VIEWS,)


def with_keys(op: Callable[..., Any], keys: tuple[Any, ...]) -> Callable[..., Any]:
    """``op`` for calls from a dispatch mode, with these ``keys`` on."""

    def call(*args: Any, **kwargs: Any) -> Any:
        excluded = [*filter(_key_excluded, keys)]
        for key in excluded:
            _set_key_excluded(key, False)
        try:
            return op(*args, **kwargs)
        finally:
            for key in excluded:
                _set_key_excluded(key, True)

    return call


#: A detached alias of a tensor, in a dispatch mode too. It shares the version counter, so that a
#: later in-place change can be noticed.
detach_below_autograd: Callable[[torch.Tensor], torch.Tensor] = with_keys(
    torch.Tensor.detach, COUNTED_WRITES
)


_functorch = torch._C._functorch


def is_transforming() -> bool:
    """Whether a transform of ``torch.func`` is running."""
    return _functorch.peek_interpreter_stack() is not None


def forward_ad_active() -> bool:
    """Whether tensors may have tangents: forward-mode AD is on, in some thread."""
    return forward_ad._current_level >= 0


#: The saved-tensor hooks that a tensor saved now would pass through; None if there are none.
active_saved_tensor_hooks: Callable[[], Any] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)

_tracing = torch._guards._TLS


def nothing_around() -> bool:
    """Whether no hook, mode, transform or compiler is active: the usual case, in one fast check."""
    return (
        not function_mode_count()
        and not dispatch_mode_count()
        and active_saved_tensor_hooks() is None
        and _functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        # As `TracingContext.try_get`, which is slower than all the others together.
        and _tracing.__dict__.get("tracing_context") is None
    )


def _keys_excluded_by(*guards: Callable[[], AbstractContextManager[Any]]) -> Any:
    found: list[Any] = []

    def read() -> None:
        others = torch._C._dispatch_tls_local_exclude_set()
        with ExitStack() as stack:
            for guard in guards:
                stack.enter_context(guard())
            found.append(torch._C._dispatch_tls_local_exclude_set() - others)

    # In another thread: this one may have excluded some, in inference mode or in a mode.
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    return found[0]


_below_autograd = torch._C._AutoDispatchBelowAutograd
_AUTOCAST = [key for name, key in torch._C.DispatchKey.__members__.items() if "Autocast" in name]
_AUTOGRAD_AND_AUTOCAST = reduce(
    or_, map(torch._C.DispatchKeySet, _AUTOCAST), _keys_excluded_by(_below_autograd)
)


def below_autograd() -> AbstractContextManager[None]:
    """A context in which ops run below autograd and autocast. Modes see them."""
    if any_autocast_enabled():
        return torch._C._ExcludeDispatchKeyGuard(_AUTOGRAD_AND_AUTOCAST)
    return _below_autograd()


#: The dispatch keys above kernels: those of modes, subclasses, autograd. One guard for all of them
#: costs half of torch's two.
_ABOVE_KERNELS = _keys_excluded_by(torch._C._DisableTorchDispatch, _below_autograd)


class below_python:  # noqa: N801 - used like a function
    """A context in which ops go straight to their kernels.

    No mode and no subclass sees them, nor does autograd, nor a transform of ``torch.func``. For
    plain tensors only: the ops of a subclass have no kernels.
    """

    __slots__ = ("_functions", "_keys", "_transforms")

    def __enter__(self) -> None:
        self._transforms: Any = None
        if _functorch.peek_interpreter_stack() is not None:
            self._transforms = pyfunctorch.temporarily_clear_interpreter_stack()
            self._transforms.__enter__()
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        self._keys = torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS)
        self._keys.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._keys.__exit__(None, None, None)
        self._functions.__exit__(None, None, None)
        if self._transforms is not None:
            self._transforms.__exit__(None, None, None)


class raw_memory(below_python):  # noqa: N801 - used like a function
    """As `below_python`, with aliases that share version counters, and never in inference mode.

    Tensors made here are ordinary ones, even if the caller is in a dispatch mode, where the version
    tracking of views is off, or in inference mode.
    """

    __slots__ = ("_excluded", "_inference")

    def __enter__(self) -> None:
        super().__enter__()
        self._inference: Any = None
        if torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode(False)
            self._inference.__enter__()
        self._excluded = _key_excluded(_VERSIONS_OF_VIEWS)
        if self._excluded:
            _set_key_excluded(_VERSIONS_OF_VIEWS, False)

    def __exit__(self, *exc: object) -> None:
        if self._excluded:
            _set_key_excluded(_VERSIONS_OF_VIEWS, True)
        if self._inference is not None:
            self._inference.__exit__(*exc)
        super().__exit__(*exc)


#: Whether a tensor is a wrapper of ``torch.func``.
is_functorch_wrapped: Callable[[torch.Tensor], bool] = _functorch.is_functorch_wrapped_tensor
