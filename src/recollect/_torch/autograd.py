"""Autograd: nodes, saved tensors and their hooks, backward, versions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from sys import getrefcount
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from recollect._torch.dynamo import hide_with_calls
from recollect._torch.modes import active_saved_tensor_hooks as active_saved_tensor_hooks
from recollect._torch.modes import dispatch_mode_count, no_dispatch_modes
from recollect._torch.tensors import overrides_torch

_autograd = torch._C._autograd

#: Number of the backward that the calling thread works for, -1 outside of backward.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id

#: Changes with every node that autograd creates: tensors saved at one number belong to one op.
current_operation: Callable[[], int] = _autograd._get_sequence_nr

#: In backward: whether it leaves the graph as it is, as with ``retain_graph`` or ``create_graph``.
backward_keeps_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph

_is_forward_ad_enabled: Callable[[], bool] = torch._C._is_fwd_grad_enabled

get_graph_exec_group: Callable[[], Any] = torch._C._get_graph_exec_group

set_graph_exec_group: Callable[[Any], None] = torch._C._set_graph_exec_group

#: The reference count of a ticket for a saved tensor that is dead: only a list holds it, no graph.
(DEAD_COUNT,) = map(getrefcount, [[object()]])

#: The public classes around these two pairs cost a microsecond a region.
push_saved_tensor_hooks: Callable[..., None] = _autograd._push_saved_tensors_default_hooks

pop_saved_tensor_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks

#: False inside ``autograd.grad`` and ``backward(inputs=)``, where a nested backward would fail.
backward_allows_reentrant: Callable[[], bool] = torch.autograd._is_checkpoint_valid


def backward_is_split(parameters: Iterable[torch.Tensor]) -> bool:
    """In backward: whether another one is left to compute the gradients of all ``parameters``.

    As in zero-bubble schedules of pipelines: this one has ``inputs``, and retains the graph.
    """
    if backward_allows_reentrant() or torch.is_grad_enabled() or not backward_keeps_graph():
        return False
    trained = [each for each in parameters if each.requires_grad]
    return bool(trained) and not any(map(_is_asked_for, trained))


def _is_asked_for(leaf: torch.Tensor) -> bool:
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # it is one of the inputs
        return True


#: Runs a callable when the current backward is over.
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)

_engine: Any = torch.autograd
_run_backward: Callable[..., Any] = _engine._engine_run_backward
_after_backward: dict[object, Callable[[], None]] = {}


def after_each_backward(act: Callable[[], None]) -> Callable[[], None]:
    """Call ``act`` after each backward, in the thread that called backward.

    Callbacks of the engine run inside backward, perhaps in another thread, and cannot change a
    thread's modes. Returns a function that ends this.
    """
    key = object()
    _after_backward[key] = act
    _engine._engine_run_backward = _run_and_act

    def end() -> None:
        _after_backward.pop(key, None)
        if not _after_backward and _engine._engine_run_backward is _run_and_act:
            _engine._engine_run_backward = _run_backward

    return end


def _run_and_act(*args: Any, **kwargs: Any) -> Any:
    try:
        return _run_backward(*args, **kwargs)
    finally:
        _act_after()


@hide_with_calls
def _act_after() -> None:
    for act in [*_after_backward.values()]:
        act()


def saved_tensor_hooks_active() -> bool:
    """Whether a tensor saved now would pass through saved-tensor hooks."""
    return active_saved_tensor_hooks() is not None


def unpacks_by(unpack: Callable[..., Any]) -> bool:
    """Whether ``unpack`` would return a tensor saved now."""
    hooks = active_saved_tensor_hooks()
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


def _save_by_node(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    # With the anchor, autograd builds a node even when the tensor itself needs no gradient. The
    # output keeps the node alive.
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    output: Any = _InputSaver.apply(anchor, tensor)  # type: ignore[no-untyped-call]
    return lambda: output.grad_fn.saved_tensors[0]


def save_tensor(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Save ``tensor`` as an autograd node would; the result unpacks it."""
    make = getattr(_autograd, "_make_saved_tensor", None)  # torch >= 2.12
    if make is None:
        return _save_by_node(tensor)
    return make(tensor, is_output=False).unpack  # type: ignore[no-any-return]


def node_behind(results: Iterable[Any], name: str) -> Any:
    """The node called ``name`` that made ``results``, or that a view of its output leads to."""
    for each in results:
        node = each.grad_fn if isinstance(each, torch.Tensor) and each.requires_grad else None
        while node is not None and node.name() != name:
            following = node.next_functions
            node = following[0][0] if len(following) == 1 else None
        if node is not None:
            return node
    return None


def forms_of_outputs(node: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shape and dtype of each output of a node."""
    return [(tuple(each.shape), each.dtype) for each in node._input_metadata]


#: The node of the graph that the calling thread is running, None outside of backward.
current_node: Callable[[], Any] = torch._C._current_autograd_node


def current_node_number() -> tuple[int, int]:
    """Identifies that node, without a reference to it."""
    node = current_node()
    return current_graph_task(), -1 if node is None else node._sequence_nr()


#: The nodes of leaves have a number above this.
_NO_NUMBER = 1 << 63


def graph_nodes(roots: Iterable[Any], since: int = -1) -> Iterator[Any]:
    """The nodes that backward from ``roots`` would run, breadth first; None among roots is skipped.

    The nodes are kept alive meanwhile, because torch makes a new Python object for a node that is
    not. ``since``: only those made since `current_operation` had this value, and none of leaves.
    """
    seen = dict.fromkeys(node for node in roots if node is not None)
    queue = deque(seen)
    while queue:
        node = queue.popleft()
        yield node
        for following, _ in node.next_functions:
            if following is None or following in seen:
                continue
            if since < 0 or since <= following._sequence_nr() < _NO_NUMBER:
                seen[following] = None
                queue.append(following)


def packed_by(node: Any) -> list[Any]:
    """The saved tensors of ``node``, as the hooks packed them; none once it has been freed."""
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


def is_weight(tensor: Any) -> bool:
    """Whether ``tensor`` is a leaf that requires grad. Autocast may cache its conversion."""
    return isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.requires_grad


def cast_weight(tensor: torch.Tensor) -> torch.Tensor | None:
    """The weight that ``tensor`` is a copy of, in another dtype, as autocast makes them."""
    try:
        node = tensor.grad_fn
    except RuntimeError:  # a view that may not be differentiated any more
        return None
    if node is None or node.name() != "ToCopyBackward0":
        return None
    return getattr(node.next_functions[0][0], "variable", None)


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version counter of ``tensor``, for a change that has been undone."""
    _autograd._unsafe_set_version_counter((tensor,), (version,))


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` if it is a leaf that requires grad, else a detached alias of the same version."""
    # ``is_leaf`` of a view asks its base, which may fail; and torch may call this while it holds
    # the lock that this needs: a deadlock.
    if tensor.requires_grad and not tensor._is_view() and tensor.is_leaf:
        return tensor
    return detached(tensor)


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a detached alias if it leads to a graph: its own, or that of its base."""
    if not tensor._is_view() and tensor.is_leaf:
        return tensor
    return detached(tensor)


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """A detached alias of ``tensor``, made by no dispatch mode."""
    if not dispatch_mode_count() or overrides_torch(type(tensor)):
        return tensor.detach()
    with no_dispatch_modes():  # a user's mode may return something else
        return tensor.detach()


def is_in_custom_function() -> bool:
    """Whether a ``torch.autograd.Function`` is being applied in this thread.

    Such a function bumps the versions of the tensors that it marks as dirty when it is over.
    """
    # Its call has no frame (torch 2.15), but switches forward-mode AD off. So does inference mode,
    # and nothing public else. In inference mode, versions are better compared than taken as seen.
    return not _is_forward_ad_enabled() and not torch.is_inference_mode_enabled()


#: The tensor that a tensor is a view of, if autograd knows one.
view_base: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
