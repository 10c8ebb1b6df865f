"""Functions of torch's Python interface: they call an op quicker than its own object does.

The object converts its arguments by the schema, and puts them on a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from recollect._torch.modes import TorchDispatchMode
from recollect._torch.ops import OpOverload, bindings_of
from recollect._torch.pytree import tree_leaves, tree_map_only

_known: dict[Any, Callable[..., Any]] = {}


def quickest_call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The quickest function that calls just ``op``, for arguments of the types of these.

    Tensors among the arguments are not read. Functions are tried with these; `bare_op`
    is given none, and knows a few ops for which they make no difference.
    """
    if type(op) is not OpOverload:
        function: Callable[..., Any] = op
        return function
    key = op, _kind((*args,)), _kind(dict(kwargs))
    if key not in _known:
        found = (each for each in bindings_of(op) if _calls_just(each, op, args, kwargs))
        _known[key] = next(found, op._op)
    return _known[key]


def _kind(value: Any) -> Any:
    """Values of one kind are the same to the parser of arguments."""
    if isinstance(value, (list, tuple)):
        return type(value), *map(_kind, value)
    if isinstance(value, dict):
        return tuple((name, _kind(each)) for name, each in value.items())
    if isinstance(value, (torch.Tensor, int, float, complex)):
        return torch.Tensor if isinstance(value, torch.Tensor) else type(value)
    return repr(value)


class _Called(TorchDispatchMode):
    """Notes the ops that are called, and runs none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Sequence[Any], Mapping[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.calls.append((func, args, kwargs or {}))
        raise _Enough


class _Enough(Exception):
    """An op was called."""


def _calls_just(
    function: Callable[..., Any], op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether ``function`` calls ``op`` with these arguments, before anything else."""
    bare_args, bare_kwargs = tree_map_only(torch.Tensor, _bare, ((*args,), dict(kwargs)))
    called = _Called()
    try:
        with called:
            function(*bare_args, **bare_kwargs)
    except (_Enough, TypeError, RuntimeError, ValueError, NotImplementedError):
        pass
    if len(called.calls) != 1 or called.calls[0][0] is not op:
        return False
    given = _by_name(op, bare_args, bare_kwargs)
    return _are_same(given, _by_name(op, *called.calls[0][1:]))


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((1,) * tensor.dim(), dtype=tensor.dtype, device="meta")


def _by_name(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call, with those that it leaves out."""
    arguments = op._schema.arguments
    found = {each.name: each.default_value for each in arguments if each.has_default_value()}
    found.update(zip((each.name for each in arguments), args, strict=False))
    return {**found, **kwargs}


def _are_same(first: Any, second: Any) -> bool:
    ours, others = tree_leaves(first), tree_leaves(second)
    return len(ours) == len(others) and all(map(_is_same, ours, others))


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return first is second
    return type(first) is type(second) and bool(first == second)
