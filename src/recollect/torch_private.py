"""The only module that touches names of torch which are not public.

Everything here was tried on torch 2.11 and 2.13 (CPU and CUDA builds); where the two differ the
difference is handled here and nowhere else. ``tests/test_torch_private.py`` fails by name when a
release drops or changes one of them.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, TypeVar

import torch
import torch.fx.traceback
from torch._C._dynamo.guards import TensorGuards
from torch._functorch import pyfunctorch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _device, _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "CAST",
    "FLAGS",
    "FORWARD_HOOKS",
    "GLOBAL_FORWARD_HOOKS",
    "MODULE_CALL",
    "STRANGE",
    "DispatchMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "any_autocast_enabled",
    "argument_names",
    "at_end_of_backward",
    "backward_allows_reentrant",
    "bare_op",
    "below_autograd",
    "below_python",
    "cast_weight",
    "changes_looks",
    "changes_memory",
    "compiled_in",
    "copy_tensors",
    "current_graph_task",
    "current_node",
    "current_operation",
    "current_stream_key",
    "default_device_type",
    "detach_below_autograd",
    "dispatch_mode_count",
    "dispatch_modes",
    "dispatch_modes_active",
    "dropout_of",
    "dropout_positions",
    "dynamo_is_watching",
    "effects_of",
    "fake_on",
    "fake_tensors",
    "fakes_left",
    "foreign_function_modes",
    "free_cuda_workspaces",
    "forward_ad_active",
    "function_mode_count",
    "function_modes",
    "generator_position",
    "get_graph_exec_group",
    "has_dynamic_shape",
    "has_history",
    "hide_from_dynamo",
    "hook_module",
    "inductor_region_key",
    "inner_tensors",
    "is_capturing",
    "is_compiled",
    "is_cast",
    "is_compiling",
    "is_current_stream",
    "is_form_of",
    "is_functorch_wrapped",
    "is_in_custom_function",
    "is_nondeterministic",
    "is_nonstrict_tracing",
    "is_of_torch",
    "is_op_of_others",
    "is_plain_tensor",
    "is_pointwise",
    "is_random",
    "is_tracing",
    "is_transforming",
    "is_weight",
    "makes_lazy_view",
    "key_of_storage",
    "memory_key",
    "metadata_ops",
    "name_of_storage",
    "nested_trace_policy",
    "never_traced",
    "no_dispatch_modes",
    "no_function_modes",
    "offset_position",
    "op_name",
    "overwrites",
    "packed_by",
    "packet_of",
    "pop_saved_tensor_hooks",
    "push_saved_tensor_hooks",
    "profiler_is_on",
    "raw_memory",
    "read_precisions",
    "returns_alias",
    "run_without_dynamo",
    "save_tensor",
    "same_looks",
    "saved_tensor_hooks_active",
    "set_function_modes",
    "set_grad_enabled",
    "set_graph_exec_group",
    "set_version",
    "stderr_hushed",
    "storage_key",
    "strangeness_of",
    "tag_in_trace",
    "tag_recompute_nodes",
    "takes_number",
    "traced_graph",
    "traced_modules",
    "traced_tag",
    "training_position",
    "tree_leaves",
    "tree_map_only",
    "unobserved",
    "unpacks_by",
    "view_base",
    "without_history",
    "write_precisions",
    "writes_unseen",
    "writes_argument",
    "written_arguments",
]

F = TypeVar("F", bound=Callable[..., Any])

_autograd = torch._C._autograd
_eval_frame = torch._C._dynamo.eval_frame

# --- autograd -------------------------------------------------------------------------------------

#: Number of the backward that the calling thread works for, -1 outside of backward.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id

#: Changes with every node that autograd makes: tensors saved at one number are saved by one op.
current_operation: Callable[[], int] = _autograd._get_sequence_nr

get_graph_exec_group: Callable[[], Any] = torch._C._get_graph_exec_group
set_graph_exec_group: Callable[[Any], None] = torch._C._set_graph_exec_group

#: The public classes around these two pairs cost a microsecond a region.
push_saved_tensor_hooks: Callable[..., None] = _autograd._push_saved_tensors_default_hooks
pop_saved_tensor_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled

#: False inside ``autograd.grad`` and ``backward(inputs=)``: a nested backward would go astray.
backward_allows_reentrant: Callable[[], bool] = torch.autograd._is_checkpoint_valid

#: Runs a callable when the current backward is over.
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


_top_saved_tensor_hooks = _autograd._top_saved_tensors_default_hooks


def saved_tensor_hooks_active() -> bool:
    """Whether a tensor saved now would pass through somebody's saved-tensor hooks."""
    return _top_saved_tensor_hooks(True) is not None


def unpacks_by(unpack: Callable[..., Any]) -> bool:
    """Whether a tensor saved now would be got back by ``unpack``."""
    hooks = _top_saved_tensor_hooks(True)
    return hooks is not None and hooks[1] == unpack


class _InputSaver(torch.autograd.Function):
    """Saves one tensor through whatever hooks are active (torch 2.11 has no direct way)."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("this node only stores a tensor and is never run")


class _SavedByNode:
    __slots__ = ("_output",)

    def __init__(self, tensor: torch.Tensor) -> None:
        # The anchor makes autograd build a node even when the tensor itself needs no gradient. The
        # output is what keeps the node alive.
        anchor = torch.empty(0, requires_grad=True, device="cpu")
        self._output: Any = _InputSaver.apply(anchor, tensor)  # type: ignore[no-untyped-call]

    def unpack(self) -> torch.Tensor:
        (tensor,) = self._output.grad_fn.saved_tensors
        return tensor  # type: ignore[no-any-return]


def save_tensor(tensor: torch.Tensor) -> Any:
    """Save ``tensor`` as an autograd node would; ``.unpack()`` of the result gives it back."""
    make = getattr(_autograd, "_make_saved_tensor", None)  # torch >= 2.12
    if make is not None:
        return make(tensor, is_output=False)
    return _SavedByNode(tensor)


#: The node of the graph that the calling thread is running, None outside of backward.
current_node: Callable[[], Any] = torch._C._current_autograd_node


def packed_by(node: Any) -> list[Any]:
    """What ``node`` saved, each as the hooks packed it; nothing once it has been freed."""
    packed: list[Any] = []
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            saved = getattr(node, name)
            saved = saved if isinstance(saved, (tuple, list)) else (saved,)
            packed += [each.data for each in saved]
        except (RuntimeError, AttributeError):
            continue
    return [each for each in packed if each is not None]


# --- modes ----------------------------------------------------------------------------------------

any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

#: How many function modes are active; a default device is one.
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
#: How many dispatch modes are active.
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
_push_dispatch_mode: Callable[[TorchDispatchMode], None] = torch._C._push_on_torch_dispatch_stack
_pop_dispatch_mode: Callable[..., Any] = torch._C._pop_torch_dispatch_stack


def dispatch_modes_active() -> bool:
    """Whether any dispatch mode would see the next op."""
    return dispatch_mode_count() > 0


def dispatch_modes() -> list[Any]:
    """The active dispatch modes, the outermost first."""
    return list(_python_dispatch._get_current_dispatch_mode_stack())


def function_modes() -> list[Any]:
    """The active function modes, the outermost first."""
    return _get_current_function_mode_stack() if function_mode_count() else []


def foreign_function_modes() -> bool:
    """Whether a function mode is on that is no default device."""
    return function_mode_count() > 0 and not all(
        isinstance(mode, _device.DeviceContext) for mode in function_modes()
    )


def set_function_modes(modes: list[Any]) -> None:
    """Make ``modes`` the active function modes, without entering or leaving any."""
    for _ in range(function_mode_count()):
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
    # A default device is a mode, and is noted in a global for compiled code to be checked against.
    devices = [mode.device for mode in modes if isinstance(mode, _device.DeviceContext)]
    _device.CURRENT_DEVICE = devices[-1] if devices else None


#: A context in which function modes see nothing.
no_function_modes: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction


#: A context in which dispatch modes see nothing.
no_dispatch_modes: Callable[[], AbstractContextManager[None]] = torch._C._DisableTorchDispatch


class unobserved:  # noqa: N801 - used like a function
    """A context in which our own tensor work is seen by no mode and recorded by no graph."""

    __slots__ = ("_grad_was_enabled", "_stack")

    def __enter__(self) -> None:
        self._grad_was_enabled = torch.is_grad_enabled()
        set_grad_enabled(False)
        self._stack: ExitStack | None = None
        if dispatch_modes_active() or function_mode_count():
            self._stack = ExitStack()
            self._stack.enter_context(_disable_current_modes())
            self._stack.enter_context(torch._C.DisableTorchFunction())

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._stack is not None:
            self._stack.__exit__(exc_type, exc, traceback)
        set_grad_enabled(self._grad_was_enabled)


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that costs its dispatch and nothing more.

    torch wraps the ``__torch_dispatch__`` of every mode so that dynamo never compiles it: a
    microsecond and a half for each op. Regions run with dynamo switched off altogether when it is
    on (see ``run_without_dynamo``), so the wrapper has nothing to protect here.

    torch also notes in globals what kinds of modes are on, and each mode puts back what it found.
    Modes of two threads that overlap put back each other's: one such pair, and compiled code called
    under a mode fails its guards for the rest of the process. So entering one of ours touches only
    the flag that compiled code asks to know whether a mode wants to see it, and leaving sets it to
    what is true in this thread.
    """

    #: Higher-order ops (flex attention, compiled regions) reach ``__torch_dispatch__`` like others.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        """Nothing is kept of the globals, so there is nothing to make."""

    def __enter__(self) -> DispatchMode:
        _push_dispatch_mode(self)
        _python_dispatch._is_in_torch_dispatch_mode = True
        return self

    def __exit__(self, *exc: object) -> None:
        _pop_dispatch_mode(None)
        _python_dispatch._is_in_torch_dispatch_mode = dispatch_modes_active()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def bare_op(op: Any) -> Callable[..., Any]:
    """What calling ``op`` comes down to, without the method of ``OpOverload`` around it."""
    return op._op if type(op) is OpOverload else op


def op_name(op: Any) -> str:
    """The name by which the dispatcher knows ``op``, without its overload: ``aten::mm``."""
    return op._schema.name if type(op) is OpOverload else str(op)


def argument_names(op: Any, *, lists: bool = False) -> list[str]:
    """The names of the arguments of ``op`` in their order; or of those that are lists of sizes."""
    if type(op) is not OpOverload:
        return []
    arguments = op._schema.arguments
    if lists:
        return [each.name for each in arguments if str(each.type) in _LISTS_OF_SIZES]
    return [each.name for each in arguments]


#: How types of arguments are written that are lists of sizes.
_LISTS_OF_SIZES = ("List[int]", "Optional[List[int]]", "List[SymInt]", "Optional[List[SymInt]]")


def packet_of(function: Any) -> OpOverloadPacket | None:
    """The op of ``aten`` that a function of torch is named after, if there is one: ``torch.mm``."""
    name = str(getattr(function, "__name__", ""))
    packet = getattr(torch.ops.aten, name, None) if name and is_of_torch(function) else None
    return packet if isinstance(packet, OpOverloadPacket) else None


def returns_alias(op: Any) -> bool:
    """Whether ``op`` returns one of its inputs, or a view of it."""
    if type(op) is not OpOverload:
        return False
    # The one view that does not say so: it is promised that the input is not used any more.
    if op is torch.ops.aten._unsafe_view.default:
        return True
    return any(result.alias_info is not None for result in op._schema.returns)


#: Ops that write to running statistics, of which their schemas say nothing.
_HIDDEN_WRITES = frozenset(
    {
        "aten::batch_norm_gather_stats",
        "aten::batch_norm_gather_stats_with_counts",
        "aten::batch_norm_update_stats",
        "aten::cudnn_batch_norm",
        "aten::miopen_batch_norm",
        "aten::native_batch_norm",
    }
)


def written_arguments(op: Any) -> list[tuple[int, str]]:
    """The arguments that ``op`` may write to: position and name of each."""
    if type(op) is not OpOverload:
        return []
    is_hidden = op._schema.name in _HIDDEN_WRITES
    return [
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (is_hidden and argument.name.startswith("running_"))
    ]


def writes_argument(op: Any) -> bool:
    """Whether ``op`` writes to one of its arguments."""
    if type(op) is not OpOverload:
        return False
    return bool(written_arguments(op)) or op._schema.name in _HIDDEN_WRITES


def is_random(op: Any) -> bool:
    """Whether ``op`` draws from a random stream."""
    return type(op) is OpOverload and torch.Tag.nondeterministic_seeded in op.tags


def _argument_of(op: Any, is_wanted: Callable[[Any], bool]) -> tuple[int, str] | None:
    """Position and name of the first argument of ``op`` that is wanted."""
    if type(op) is not OpOverload:
        return None
    found = enumerate(op._schema.arguments)
    return next(((n, each.name) for n, each in found if is_wanted(each)), None)


def generator_position(op: Any) -> tuple[int, str] | None:
    """Where ``op`` takes the generator that it draws from: position and name of the argument."""
    return _argument_of(op, lambda argument: "Generator" in str(argument.type))


def dropout_of(op: Any) -> tuple[int, str] | None:
    """Where ``op`` takes the probability by which it drops: position and name of the argument."""
    return _argument_of(op, lambda argument: argument.name in ("dropout_p", "dropout", "p"))


#: Where factories make tensors that were given no device.
default_device_type: Callable[[], str] = torch._C._get_default_device


def is_pointwise(op: Any) -> bool:
    """Whether each element of what ``op`` makes is a function of one element of each argument."""
    if type(op) is not OpOverload or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return torch.Tag.pointwise in op.tags


#: Views of a part of the whole memory, wherever in it their argument begins.
_ABSOLUTE = ("aten::as_strided", "aten::as_strided_")


def offset_position(op: Any) -> tuple[int, str] | None:
    """Where a view takes the place in memory at which it begins: position and name."""
    if op_name(op) not in _ABSOLUTE:
        return None
    return _argument_of(op, lambda argument: argument.name == "storage_offset")


#: Namespaces of ops that write to their arguments, of which their schemas say nothing.
_WRITING_UNSEEN = ("c10d::", "symm_mem::")
#: The higher-order op that is known to write to none.
_FLEX_ATTENTION = "flex_attention"


def writes_unseen(op: Any) -> bool:
    """Whether ``op`` may write to any of its arguments, and nothing says to which."""
    if type(op) is OpOverload:
        return op._schema.name.startswith(_WRITING_UNSEEN)
    return str(op) != _FLEX_ATTENTION


#: The op by which autocast converts a tensor.
CAST = torch.ops.aten._to_copy.default


def is_cast(op: Any) -> bool:
    """Whether ``op`` is the one by which autocast converts a tensor."""
    return op is CAST


def is_weight(tensor: Any) -> bool:
    """Whether autocast may remember ``tensor`` converted, for whoever uses it next.

    Then whether a region converts it depends on what ran before, in forward and in the rerun.
    """
    return isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.requires_grad


_CASTING_NODE = "ToCopyBackward0"


def cast_weight(tensor: torch.Tensor) -> torch.Tensor | None:
    """The weight of which ``tensor`` is a copy in another dtype, as autocast makes them."""
    try:
        node = tensor.grad_fn
    except RuntimeError:  # a view that may not be differentiated any more
        return None
    if node is None or node.name() != _CASTING_NODE:
        return None
    source = node.next_functions[0][0]
    return getattr(source, "variable", None)


_set_key_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
_VERSIONS_OF_VIEWS = torch._C.DispatchKey.ADInplaceOrView


def detach_below_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """An alias of ``tensor`` without history that shares its version counter.

    To be called inside a dispatch mode, where autograd and the version tracking of views are
    switched off: the latter is switched on here, so that a later in-place change can be noticed.
    """
    _set_key_excluded(_VERSIONS_OF_VIEWS, False)
    try:
        return tensor.detach()
    finally:
        _set_key_excluded(_VERSIONS_OF_VIEWS, True)


def metadata_ops() -> frozenset[Any]:
    """Ops that read shape, strides or device of tensor subclasses."""
    return frozenset(torch._subclasses.functional_tensor.FunctionalTensor.metadata_fns)


def copy_tensors(targets: list[torch.Tensor], sources: list[Any]) -> None:
    """Copy each tensor of ``sources`` into its partner, in one launch if there is a device."""
    if not targets:
        return
    # Their values alone: torch knows no tangents of a copy of several.
    with forward_ad._set_fwd_grad_enabled(False) if forward_ad_active() else nullcontext():
        torch._foreach_copy_(targets, sources)


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version counter of ``tensor``, for a change that has been undone."""
    _autograd._unsafe_set_version_counter((tensor,), (version,))


#: The hooks of a tensor: on its gradient, and after that was accumulated.
TensorHooks = tuple[Any, Any]


def tensor_hooks(tensor: torch.Tensor) -> TensorHooks:
    """The dictionaries of the hooks of ``tensor``, each None if there are none."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def write_tensor_hooks(tensor: torch.Tensor, hooks: TensorHooks) -> None:
    """Give ``tensor`` the dictionaries of hooks that it had."""
    on_gradient, after = hooks
    if tensor._backward_hooks is not on_gradient:
        tensor._backward_hooks = on_gradient
    if tensor._post_accumulate_grad_hooks is not after:
        if tensor._post_accumulate_grad_hooks is not None:
            tensor._post_accumulate_grad_hooks.clear()  # which goes on being called
        tensor._post_accumulate_grad_hooks = after


def global_hooks() -> list[Any]:
    """The dictionaries of hooks that run for every module, and for every optimizer."""
    # Of the latter the module is hidden behind a class of its package's.
    modules: Any = torch.nn.modules.module
    optimizers: Any = sys.modules[torch.optim.Optimizer.__module__]
    return [
        modules._global_forward_pre_hooks,
        modules._global_forward_hooks,
        modules._global_backward_pre_hooks,
        modules._global_backward_hooks,
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    ]


def hook_module(
    module: torch.nn.Module, key: int, before: Callable[..., None], after: Callable[..., None]
) -> None:
    """Have ``before`` and ``after`` called around each call of ``module``, until `unhook_module`.

    ``after`` is called when the module raises, too. ``key`` tells this pair from others.
    """
    module._forward_pre_hooks[key] = before
    module._forward_hooks[key] = after
    module._forward_hooks_always_called[key] = True


#: The attributes of a module under which its forward hooks are, and how each is to be called.
FORWARD_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)

#: The same for the hooks of all modules.
GLOBAL_FORWARD_HOOKS: tuple[dict[int, Any], ...] = (
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_hooks_with_kwargs,
    torch.nn.modules.module._global_forward_hooks_always_called,
)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` returned."""
    return hasattr(module, "_orig_mod") or module.__dict__.get("_compiled_call_impl") is not None


def profiler_is_on() -> bool:
    """Whether torch's profiler is at work in this thread."""
    return bool(torch._C._autograd._profiler_enabled())


@contextmanager
def stderr_hushed() -> Iterator[None]:
    """Discard what is written to stderr below Python.

    torch 2.13 announces the start and the stop of every profile there, at a log level that is read
    only as torch loads.
    """
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)


def compiled_in(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that calls of ``module`` run in compiled code, hooks and all."""
    if module._compiled_call_impl is not None:  # module.compile()
        return list(module.modules())
    if type(module).__module__.startswith("torch._dynamo."):  # torch.compile(module)
        return [each for each in module.modules() if each is not module]
    return []


def unhook_module(module: torch.nn.Module, key: int) -> None:
    """Undo `hook_module`."""
    for hooks in (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._forward_hooks_always_called,
    ):
        hooks.pop(key, None)


#: Ops whose result shares memory but shows other values than the memory holds.
_LAZY = ("aten::_conj", "aten::_neg_view", "aten::conj", "aten::resolve_conj", "aten::resolve_neg")


def makes_lazy_view(op: Any) -> bool:
    """Whether ``op`` returns a view that shows memory conjugated or negated."""
    return op_name(op) in _LAZY


def has_dynamic_shape(op: Any) -> bool:
    """Whether the shape of what ``op`` returns may depend on data."""
    return type(op) is not OpOverload or torch.Tag.dynamic_output_shape in op.tags


_KINDS_OF_TORCH = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    HigherOrderOperator,
)


def is_of_torch(function: Any) -> bool:
    """Whether ``function`` is one of torch's own, which does what its arguments say."""
    if isinstance(function, FunctionType):
        return function.__module__ == "torch" or function.__module__.startswith("torch.")
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return not is_op_of_others(function)
    return isinstance(function, _KINDS_OF_TORCH)


def is_op_of_others(function: Any) -> bool:
    """Whether ``function`` is an op that another library has registered."""
    if not isinstance(function, (OpOverload, OpOverloadPacket)):
        return False
    name = str(function)
    return not name.startswith(("aten.", "prims.", "prim."))


def is_form_of(op: Any, function: Any) -> bool:
    """Whether ``op`` is ``function``, or one of the overloads that it stands for."""
    return op is function or getattr(op, "overloadpacket", None) is function


def changes_looks(op: Any) -> bool:
    """Whether ``op`` gives its argument another shape, on the same memory."""
    return type(op) is OpOverload and torch.Tag.inplace_view in op.tags


_REPLACING = ("aten::resize_", "aten::resize_as_", "aten::set_", "aten::_resize_output_")


def changes_memory(op: Any) -> bool:
    """Whether ``op`` gives its argument another memory."""
    return op_name(op) in _REPLACING


def dropout_positions(op: Any) -> tuple[int, int, int] | None:
    """Of recurrent layers of a library: where dropout, its switch and its state are in arguments.

    They draw from a state that the library has on the device. No generator knows of it, but it is
    seeded anew from one whose state has been set.
    """
    if op_name(op) not in ("aten::_cudnn_rnn", "aten::miopen_rnn"):
        return None
    names = [argument.name for argument in op._schema.arguments]
    return names.index("dropout"), names.index("train"), names.index("dropout_state")


def takes_number(op: Any) -> bool:
    """Whether ``op`` makes a Python number of a tensor's content."""
    return type(op) is OpOverload and torch.Tag.data_dependent_output in op.tags


def is_nondeterministic(op: Any) -> bool:
    """Whether ``op`` may give other bits the next time, from the same input."""
    return type(op) is OpOverload and torch.Tag.nondeterministic_bitwise in op.tags


_OVERWRITING = frozenset(
    f"aten::{name}_"
    for name in (
        *("bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal"),
        *("normal", "random", "uniform", "zero"),
    )
)


def overwrites(op: Any) -> bool:
    """Whether ``op`` replaces what it writes to without looking at it."""
    if type(op) is not OpOverload:
        return False
    # bernoulli_ with a tensor of probabilities reads that, not what it writes to.
    return op._schema.name in _OVERWRITING or any(a.is_out for a in op._schema.arguments)


#: Normalizations whose results are independent of the running statistics that they update.
_UPDATING_NORMS = _HIDDEN_WRITES | {
    "aten::_native_batch_norm_legit",
    "aten::_batch_norm_with_update",
}


def training_position(op: Any) -> int | None:
    """For a normalization with running statistics: which argument says that it updates them.

    -1 if it always does, None if ``op`` is no such thing.
    """
    if op_name(op) not in _UPDATING_NORMS:
        return None
    names = [argument.name for argument in op._schema.arguments]
    return names.index("training") if "training" in names else -1


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or an alias that shares its version, without the graph it comes from."""
    # A view finds out by its base whether it is a leaf, which may fail; and torch may call this
    # while it is at that, to wait for itself for good.
    if tensor.requires_grad and not tensor._is_view() and tensor.is_leaf:
        return tensor
    if not dispatch_mode_count() or _has_own_ways(type(tensor)):
        return tensor.detach()
    with no_dispatch_modes():  # one of the user's may give something else
        return tensor.detach()


def has_history(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` leads to a graph: its own, or that of what it is a view of."""
    return tensor.requires_grad or tensor._is_view()


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is memory with shape and strides, and nothing that stands for another."""
    return (
        (not _has_own_ways(type(tensor)) or type(tensor) is _pretending.kind)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_meta
        and not is_functorch_wrapped(tensor)
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


class _Pretending(threading.local):
    #: The type of tensors that are taken for plain ones.
    kind: type | None = None


_pretending = _Pretending()


@contextmanager
def fake_tensors() -> Iterator[Any]:
    """A mode in which tensors have looks and no memory, and are taken for plain ones.

    Its ``from_tensor`` makes one of another tensor. Afterwards to use one of them is an error.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    before, _pretending.kind = _pretending.kind, FakeTensor
    mode = _mode_that_ends()(allow_non_fake_inputs=True)
    try:
        with warnings.catch_warnings(), mode:
            # Fake memory has no address, and torch warns of everyone who asks for one.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield mode
    finally:
        _pretending.kind = before
        mode.is_over = True


@functools.cache
def _mode_that_ends() -> Any:
    """The type of the modes of `fake_tensors`. torch takes half a second to import what it needs.

    An op on a fake tensor enters the mode that has made it, whoever calls it.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    class FakeMode(FakeTensorMode):
        is_over = False

        def __enter__(self) -> Any:
            if self.is_over:
                raise RuntimeError(
                    "a tensor without values is used, which was made while recollect recorded a "
                    "step and has been held since by a cache of the model's. Clear that cache, "
                    "and make the plan on the device on which the model is trained"
                )
            return super().__enter__()

    return FakeMode


def fakes_left() -> list[torch.Tensor]:
    """All tensors that are alive of those that were made in `fake_tensors`."""
    if not _mode_that_ends.cache_info().currsize:
        return []
    from torch._subclasses.fake_tensor import FakeTensor

    made: list[Any] = [each for each in gc.get_objects() if type(each) is FakeTensor]
    return [each for each in made if isinstance(each.fake_mode, _mode_that_ends())]


def fake_on(mode: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor of the looks of ``tensor``, which has no memory itself, on ``device``."""
    from torch._subclasses.fake_tensor import FakeTensor

    with no_dispatch_modes():
        meta = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        return FakeTensor(mode, meta, device).requires_grad_(tensor.requires_grad)


def same_looks(tensor: torch.Tensor) -> Callable[[Any], bool]:
    """What tells of another value whether it is a tensor of the type, kind and looks of ``tensor``.

    One call where `is_plain_tensor` and a look at shape, strides, dtype, device and gradient take a
    dozen. It may say no to one that is, where modes or autocast are on that were not.
    """
    return _TensorGuards(tensor, dynamic_dims_sizes=None, dynamic_dims_strides=None).check  # type: ignore[no-any-return]


_TensorGuards: Any = TensorGuards  # whose stub is wrong


#: How the descriptions of `strangeness_of` begin.
STRANGE = "a tensor "


def strangeness_of(tensor: torch.Tensor) -> str:
    """What is special about a tensor that is not plain."""
    if is_functorch_wrapped(tensor):
        return STRANGE + "of a transform of torch.func"
    if _has_own_ways(type(tensor)):
        return f"{STRANGE}of type {type(tensor).__name__}"
    kinds = {
        f"of layout {tensor.layout}": tensor.layout is not torch.strided,
        "that is nested": tensor.is_nested,
        "that is quantized": tensor.is_quantized,
        "on the meta device": tensor.is_meta,
        "of zeros without memory": tensor._is_zerotensor(),
        "that is conjugated or negated": True,
    }
    return STRANGE + next(text for text, applies in kinds.items() if applies)


@functools.cache
def _has_own_ways(kind: Any) -> bool:
    """Whether functions and ops of torch may do something else with tensors of this type."""
    usual = (torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    functions = [getattr(each, "__func__", each) for each in (kind.__torch_function__, *usual)]
    is_plain = kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return not is_plain or functions[0] not in functions[1:]


#: Of a build with CUDA.
_get_device = getattr(torch._C, "_cuda_getDevice", None)
_get_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)


def free_cuda_workspaces() -> None:
    """Free the workspaces that cuBLAS holds: one for every stream it has ever run on."""
    if _clear_workspaces is not None and torch.cuda.is_initialized():
        _clear_workspaces()


#: The current device, and what tells the stream on which this thread launches kernels from others.
StreamKey = tuple[int, int]


def current_stream_key() -> StreamKey | None:
    """Where kernels are launched now; None if there are none."""
    if _get_raw_stream is None or _get_device is None or not torch.cuda.is_initialized():
        return None
    device = _get_device()
    return device, _get_raw_stream(device)


def is_current_stream(key: StreamKey) -> bool:
    """Whether kernels are launched there, quicker."""
    assert _get_raw_stream is not None
    assert _get_device is not None
    return bool(_get_device() == key[0] and _get_raw_stream(key[0]) == key[1])


def is_capturing() -> bool:
    """Whether kernels are being captured into a graph."""
    return current_stream_key() is not None and torch.cuda.is_current_stream_capturing()


_functorch = torch._C._functorch


def is_transforming() -> bool:
    """Whether a transform of ``torch.func`` is running."""
    return _functorch.peek_interpreter_stack() is not None


def forward_ad_active() -> bool:
    """Whether tensors may have tangents: forward-mode AD is on, in some thread."""
    return forward_ad._current_level >= 0


_APPLY: CodeType = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def is_in_custom_function(frame: FrameType | None) -> bool:
    """Whether ``frame`` is called by a ``torch.autograd.Function`` that is being applied.

    It counts what it marks as written to when it is over.
    """
    while frame is not None:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back
    return False


class below_autograd:  # noqa: N801 - used like a function
    """A context in which ops are run as autograd and autocast have left them. Modes see them."""

    __slots__ = ("_autocasts", "_grad_was_enabled", "_guard")

    def __enter__(self) -> None:
        self._grad_was_enabled = torch.is_grad_enabled()
        self._guard = torch._C._AutoDispatchBelowAutograd()
        self._guard.__enter__()
        self._autocasts: list[Any] = []
        if any_autocast_enabled():
            accelerator = torch.accelerator.current_accelerator()
            kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
            self._autocasts = [torch.autocast(kind, enabled=False) for kind in kinds]
            for each in self._autocasts:
                each.__enter__()

    def __exit__(self, *exc: object) -> None:
        while self._autocasts:
            self._autocasts.pop().__exit__(*exc)
        self._guard.__exit__(*exc)
        set_grad_enabled(self._grad_was_enabled)


def _keys_above_kernels() -> Any:
    """The keys that stand between a call and the kernel: those of modes, subclasses, autograd."""
    found: list[Any] = []

    def look() -> None:
        others = torch._C._dispatch_tls_local_exclude_set()
        with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
            found.append(torch._C._dispatch_tls_local_exclude_set() - others)

    # This thread may be in inference mode, or in a mode of somebody's, and have excluded some.
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


#: One guard for all of them takes half the time of torch's two.
_ABOVE_KERNELS = _keys_above_kernels()


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

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._keys.__exit__(exc_type, exc, traceback)
        self._functions.__exit__(exc_type, exc, traceback)
        if self._transforms is not None:
            self._transforms.__exit__(exc_type, exc, traceback)


_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


class raw_memory(below_python):  # noqa: N801 - used like a function
    """As `below_python`, with aliases that share version counters, and never in inference mode.

    What is made here is an ordinary tensor, wherever the caller is: in a dispatch mode, where the
    version tracking of views is off, or in inference mode.
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

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._excluded:
            _set_key_excluded(_VERSIONS_OF_VIEWS, True)
        if self._inference is not None:
            self._inference.__exit__(exc_type, exc, traceback)
        super().__exit__(exc_type, exc, traceback)


def view_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that ``tensor`` is a view of, if autograd knows one."""
    return tensor._base


#: Whether a tensor is one of ``torch.func``'s, that stands for another.
is_functorch_wrapped: Callable[[torch.Tensor], bool] = _functorch.is_functorch_wrapped_tensor


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """The tensors that hold the data of ``tensor``: itself, if it is a plain one.

    None if there are no data, or no way to them: a fake tensor, one of ``torch.func``. To be called
    inside `below_python`. Each may have inner tensors in turn.
    """
    if tensor.is_meta or is_functorch_wrapped(tensor):
        return None
    if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return _inner_of_subclass(tensor)
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        return [tensor.dequantize()]
    return [tensor] if tensor.layout is torch.strided else _inner_of_layout(tensor)


def _inner_of_layout(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def _inner_of_subclass(tensor: Any) -> list[torch.Tensor] | None:
    if tensor.layout is torch.jagged:
        # Not the cached lengths, which come and go with use.
        inner = [tensor._values, tensor._offsets, tensor._lengths]
    elif hasattr(tensor, "trigger_wait"):
        inner = [tensor.trigger_wait()]  # the result of a collective that may be under way
    elif hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    else:
        return None
    return [each for each in inner if isinstance(each, torch.Tensor)]


def storage_key(tensor: torch.Tensor) -> int | None:
    """What tells the memory of ``tensor`` from any other alive at the same time, if it has some."""
    try:
        return name_of_storage(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):
        return None


def name_of_storage(storage: torch.UntypedStorage) -> int:
    """What tells a storage from any other alive at the same time."""
    return int(storage._cdata)


def memory_key(tensor: torch.Tensor) -> int | None:
    """As `storage_key`, by the address of the memory if it has one.

    Others may have handed the memory out again as another storage, as DLPack does.
    """
    try:
        return key_of_storage(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):
        return None


def key_of_storage(storage: Any) -> int:
    """The same, of a storage."""
    return storage.data_ptr() or storage._cdata  # type: ignore[no-any-return]


def effects_of(op: Any) -> tuple[list[bool], list[tuple[int, str]]] | None:
    """What the schema of ``op`` says: which results are new, and which arguments are written to.

    A result that is not new is an argument or a view of one. None if ``op`` has no schema.
    """
    if type(op) is not OpOverload:
        return None
    new = [result.alias_info is None for result in op._schema.returns]
    arguments = enumerate(op._schema.arguments)
    written = [(n, a.name) for n, a in arguments if a.alias_info and a.alias_info.is_write]
    return new, written


#: The code of ``nn.Module.__call__``; its first local is ``self``. (Others may have put theirs in
#: that place, which then call this.)
MODULE_CALL: CodeType = torch.nn.Module._wrapped_call_impl.__code__


# --- flags ----------------------------------------------------------------------------------------

_C = torch._C


def _set_deterministic(enabled: bool) -> None:
    warn_only = _C._get_deterministic_algorithms_warn_only()
    _C._set_deterministic_algorithms(enabled, warn_only=warn_only)


def _set_warn_only(warn_only: bool) -> None:
    enabled = _C._get_deterministic_algorithms()
    _C._set_deterministic_algorithms(enabled, warn_only=warn_only)


def _set_fp16_reduction(state: tuple[bool, bool]) -> None:
    _C._set_cublas_allow_fp16_reduced_precision_reduction(*state)


def _set_bf16_reduction(state: tuple[bool, bool]) -> None:
    _C._set_cublas_allow_bf16_reduced_precision_reduction(*state)


#: The order of attention kernels before anybody has set one.
_NO_ORDER = (1, 2, 0, 3, 4)


def _set_sdp_priority_order(order: tuple[int, ...]) -> None:
    # The first attention of a process sets an order of torch's choice. Whoever has read the flags
    # before that does not ask for the other one.
    if order != _NO_ORDER:
        _C._set_sdp_priority_order(list(order))


_Flag = tuple[Callable[[], Any], Callable[[Any], object]]


def _sdp_priority_order() -> tuple[int, ...]:
    return tuple(_C._get_sdp_priority_order())  # which gives a list


#: The least number that processors do not count as denormal.
_NORMAL = sys.float_info.min


def _flushes_denormals() -> bool:
    """Whether this thread takes what is nearer to zero for zero. torch does not say."""
    return _NORMAL / 2 == 0.0


def _set_num_threads(count: int) -> None:
    """Compute with so many threads in this thread.

    torch has those that start later take the number over, which is for the user to say.
    """
    usual = _in_new_thread(torch.get_num_threads)
    torch.set_num_threads(count)
    if usual != count:
        _in_new_thread(lambda: torch.set_num_threads(usual))


def _in_new_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def _precision(backend: str, op: str) -> _Flag:
    """The float32 precision of ops that the older switches do not speak of."""

    def get() -> str:
        precision: str = _C._get_fp32_precision_getter(backend, op)
        return precision

    def set_(precision: str) -> None:
        _C._set_fp32_precision_setter(backend, op, precision)

    get.__name__ = f"fp32_precision_{backend}_{op}"
    return get, set_


_COMMON_FLAGS: tuple[_Flag, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_C._get_deterministic_algorithms, _set_deterministic),
    (_C._get_deterministic_algorithms_warn_only, _set_warn_only),
    (
        _C._get_deterministic_fill_uninitialized_memory,
        _C._set_deterministic_fill_uninitialized_memory,
    ),
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_math_sdp_allow_fp16_bf16_reduction, _C._set_math_sdp_allow_fp16_bf16_reduction),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    (_C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic),
    (_C._get_nnpack_enabled, _C._set_nnpack_enabled),
    _precision("mkldnn", "conv"),
    _precision("mkldnn", "rnn"),
    # Sums are taken in as many parts as there are threads.
    (torch.get_num_threads, _set_num_threads),
    (_flushes_denormals, torch.set_flush_denormal),
)
_ACCELERATOR_FLAGS: tuple[_Flag, ...] = (
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_sdp_priority_order, _set_sdp_priority_order),
    (_C._get_cublas_allow_tf32, _C._set_cublas_allow_tf32),
    (_C._get_cublas_allow_fp16_reduced_precision_reduction, _set_fp16_reduction),
    (_C._get_cublas_allow_bf16_reduced_precision_reduction, _set_bf16_reduction),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (_C._get_cudnn_allow_tf32, _C._set_cudnn_allow_tf32),
    _precision("cuda", "rnn"),
    (_C._get_cublas_allow_fp16_accumulation, _C._set_cublas_allow_fp16_accumulation),
    (_C._get_linalg_preferred_backend, _C._set_linalg_preferred_backend),
    (_C._get_blas_preferred_backend, _C._set_blas_preferred_backend),
)

#: Process-wide switches that decide which kernel an op runs, or what it makes: how to read each,
#: and how to set it. (torch's public functions come down to these, and cost several times as much.)
FLAGS = _COMMON_FLAGS
if torch.accelerator.current_accelerator() is not None:
    FLAGS += _ACCELERATOR_FLAGS
# The last, since to allow or forbid tf32 sets it too.
FLAGS += ((_C._get_float32_matmul_precision, _C._set_float32_matmul_precision),)

_PRECISIONS = (("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul"))


def read_precisions() -> tuple[str, ...]:
    """The float32 precision of each backend, where the older switches cannot express it."""
    return tuple([_C._get_fp32_precision_getter(*place) for place in _PRECISIONS])


def write_precisions(precisions: tuple[str, ...]) -> None:
    """Set what ``read_precisions`` gave."""
    for place, precision in zip(_PRECISIONS, precisions, strict=True):
        if _C._get_fp32_precision_getter(*place) != precision:
            _C._set_fp32_precision_setter(*place, precision)


# --- torch.compile --------------------------------------------------------------------------------


def hide_from_dynamo(function: F) -> F:
    """Keep dynamo from compiling ``function`` as a frame of its own.

    Needed when a graph break leaves the call to eager code while dynamo still watches new frames.
    It may still inline the function into a larger graph, which is how a region inside compiled
    code is found.
    """
    assert isinstance(function, FunctionType)
    code: CodeType = function.__code__
    strategy = _eval_frame._FrameExecStrategy(
        _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT
    )
    _eval_frame.set_code_exec_strategy(code, strategy)
    return function


def never_traced(function: F, reason: str | None = None) -> F:
    """Keep dynamo from looking into ``function`` at all: it is called as it is.

    ``reason``: what it says where all has to be in one graph.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return hide_from_dynamo(function)


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


_eval_frame_callback = _eval_frame.get_eval_frame_callback


def dynamo_is_watching() -> bool:
    """Whether dynamo would compile a new frame if it met one now."""
    return _eval_frame_callback() is not None


def run_without_dynamo(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` such that dynamo compiles nothing inside."""
    import torch._dynamo

    return torch._dynamo.disable(_call, wrapping=False)(function, args, kwargs)


def _never() -> bool:
    return False


#: Whether ops are traced by running eager code as it is (torch >= 2.12).
is_nonstrict_tracing: Callable[[], bool] = getattr(torch.compiler, "_is_non_strict_tracing", _never)


def is_tracing() -> bool:
    """Whether a compiler is tracing ops into a graph (and will place recomputation itself)."""
    if is_nonstrict_tracing():
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def is_compiling() -> bool:
    """Whether a compiler runs this code, to trace it or to see what it does."""
    is_found = (
        torch._guards.TracingContext.try_get() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )
    return is_found and not is_nonstrict_tracing()


def nested_trace_policy() -> Callable[[], AbstractContextManager[Any]] | None:
    """What a rerun must set so that nested tracing is judged as in forward (torch >= 2.12)."""
    if not is_nonstrict_tracing():
        return None
    import torch._dynamo

    allowed = torch._dynamo.config.error_on_nested_fx_trace
    return lambda: torch._dynamo.config.patch(error_on_nested_fx_trace=allowed)


def traced_graph() -> Any:
    """The graph being traced, or None."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


_current_meta = torch.fx.traceback.get_current_meta


def traced_modules() -> list[str]:
    """The paths of the modules, the outermost first, that the op being traced was called in."""
    stack = _current_meta().get("nn_module_stack", {})
    return [re.sub(r"^L\['\w+'\]\.?", "", str(path)) for path, _ in stack.values()]


_TAG = "recollect.tag"


def traced_tag() -> str | None:
    """The name given by `tag_in_trace` to what the op being traced returns."""
    custom: dict[str, str] = _current_meta().get("custom") or {}
    return custom.get(_TAG)


def tag_in_trace(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Called by code that dynamo compiles: an alias of ``tensor`` that the graph knows by name."""
    with torch.fx.traceback.annotate({_TAG: name}):
        alias: torch.Tensor = torch.ops.aten.alias.default(tensor)
        return alias


def _compiler_policy(name: str) -> Any:
    """The member called ``name`` of the policy enum that the graph partitioner compares with."""
    from torch._functorch import partitioners

    policies = vars(partitioners)["CheckpointPolicy"]
    # Before torch 2.12 there is no offload: what should go to the host is kept.
    return getattr(policies, name, policies.MUST_SAVE)


def tag_recompute_nodes(nodes: list[Any], policy: str, graph_id: int | None) -> None:
    """Tell the partitioner what to do with the nodes that one op was traced into."""
    member = _compiler_policy(policy)
    for node in nodes:
        node.meta["recompute"] = member
        if graph_id is not None:
            node.meta["ac_graph_id"] = graph_id


def inductor_region_key(op: Any, args: tuple[Any, ...]) -> Any:
    """What identifies ``op`` for selective checkpointing: a compiled region is known by its code.

    All compiled regions are calls of one higher-order op (torch >= 2.12); each is a queue of its
    own, or skipping one in the recomputation would shift the results of the others.
    """
    from torch._higher_order_ops import wrap

    compiled = getattr(wrap, "inductor_compiled_code", None)
    if compiled is None or op is not compiled or not args:
        return op
    return op, wrap._resolve_inductor_callable(args[0]).idx
