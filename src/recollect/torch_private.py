"""The only module that touches names of torch which are not public.

Everything here was tried on torch 2.11 and 2.13 (CPU and CUDA builds); where the two differ the
difference is handled here and nowhere else. ``tests/test_torch_private.py`` fails by name when a
release drops or changes one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
import torch.fx.traceback
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "DispatchMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "any_autocast_enabled",
    "at_end_of_backward",
    "backward_allows_reentrant",
    "bare_op",
    "current_device_context",
    "current_graph_task",
    "current_operation",
    "detach_below_autograd",
    "dispatch_modes_active",
    "dynamo_is_watching",
    "function_mode_count",
    "get_graph_exec_group",
    "hide_from_dynamo",
    "inductor_region_key",
    "is_nonstrict_tracing",
    "is_random",
    "is_tracing",
    "metadata_ops",
    "nested_trace_policy",
    "never_traced",
    "pop_saved_tensor_hooks",
    "push_saved_tensor_hooks",
    "returns_alias",
    "run_without_dynamo",
    "save_tensor",
    "saved_tensor_hooks_active",
    "set_grad_enabled",
    "set_graph_exec_group",
    "tag_recompute_nodes",
    "traced_graph",
    "tree_leaves",
    "tree_map_only",
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


# --- modes ----------------------------------------------------------------------------------------

any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

#: How many function modes are active; a default device is one.
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def dispatch_modes_active() -> bool:
    """Whether any dispatch mode would see the next op."""
    return _dispatch_modes() > 0


def current_device_context() -> AbstractContextManager[Any] | None:
    """The innermost ``with torch.device(...)`` or default device, if there is one."""
    if not function_mode_count():
        return None
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode
    return None


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that costs its dispatch and nothing more.

    torch wraps the ``__torch_dispatch__`` of every mode so that dynamo never compiles it: a
    microsecond and a half for each op. Regions run with dynamo switched off altogether when it is
    on (see ``run_without_dynamo``), so the wrapper has nothing to protect here.
    """

    #: Higher-order ops (flex attention, compiled regions) reach ``__torch_dispatch__`` like others.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def bare_op(op: Any) -> Callable[..., Any]:
    """What calling ``op`` comes down to, without the method of ``OpOverload`` around it."""
    return op._op if type(op) is OpOverload else op


def returns_alias(op: Any) -> bool:
    """Whether ``op`` returns one of its inputs, or a view of it (or cannot tell)."""
    return type(op) is OpOverload and any(
        result.alias_info is not None for result in op._schema.returns
    )


def is_random(op: Any) -> bool:
    """Whether ``op`` draws from a random stream."""
    return type(op) is OpOverload and torch.Tag.nondeterministic_seeded in op.tags


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


def never_traced(function: F) -> F:
    """Keep dynamo from looking into ``function`` at all: it is called as it is."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
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


def _compiler_policy(name: str) -> Any:
    """The member called ``name`` of the policy enum that the graph partitioner compares with."""
    from torch._functorch import partitioners

    return getattr(vars(partitioners)["CheckpointPolicy"], name)


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
