"""Tensors that are parts of a whole in each process: ``DTensor``, and results of collectives.

A ``DTensor`` wraps the *local tensor*, the part of this process, and a spec: mesh, placements, and
the metadata of the whole. Its ops become ops on local tensors and collectives. The result of an
asynchronous collective is wrapped until its first use. Neither wrapper has memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from recollect._torch.modules import known_class

_DTENSOR = "torch.distributed.tensor"
_COLLECTIVES = "torch.distributed._functional_collectives"
#: The types of nearly all tensors, asked about first: these questions are put at every recorded op.
USUAL_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def is_dtensor(value: Any) -> bool:
    """Whether ``value`` is a ``DTensor``."""
    kind = known_class(_DTENSOR, "DTensor")
    return kind is not None and isinstance(value, kind)


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this type wrap the one of this process."""
    if kind in USUAL_TENSORS:
        return False
    wrappers = known_class(_DTENSOR, "DTensor"), known_class(_COLLECTIVES, "AsyncCollectiveTensor")
    return any(each is not None and issubclass(kind, each) for each in wrappers)


def local_tensor(tensor: Any) -> torch.Tensor:
    """The tensor of this process that ``tensor`` wraps; itself, if it wraps none."""
    if type(tensor) in USUAL_TENSORS:
        return tensor  # type: ignore[no-any-return]
    while is_wrapper(type(tensor)):
        tensor = tensor._local_tensor if is_dtensor(tensor) else tensor.elem
    return tensor  # type: ignore[no-any-return]


def spec_of(tensor: Any) -> Any:
    """Mesh, placements and global metadata of a ``DTensor``; None for other tensors."""
    return tensor._spec if type(tensor) not in USUAL_TENSORS and is_dtensor(tensor) else None


def ranks_of_parts(model: torch.nn.Module) -> set[int]:
    """The ranks that have parts of the parameters of ``model``; none if these are plain tensors."""
    specs = (spec_of(each) for each in model.parameters())
    meshes = {id(spec.mesh): spec.mesh for spec in specs if spec is not None}
    return {rank for mesh in meshes.values() for rank in mesh.mesh.flatten().tolist()}


def wrapped(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """The ``DTensor`` of a local tensor, without history."""
    make: Any = known_class(_DTENSOR, "DTensor")
    return make(local, spec, requires_grad=False)  # type: ignore[no-any-return]


def count_writes(tensors: Iterable[Any]) -> None:
    """Count a write to each ``DTensor``: ops on lists of them (``_foreach_mul_``) count none."""
    kind = known_class(_DTENSOR, "DTensor")
    if kind is not None:
        for tensor in tensors:
            if isinstance(tensor, kind) and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def has_dtensors(types: Any) -> bool:
    """Whether an op with arguments of these types becomes ops on local tensors.

    A dispatch mode sees it before. If it returns ``NotImplemented``, it sees those ops instead.
    """
    return bool(types) and any(map(is_wrapper, types))


def is_redistributing(frame: FrameType | None) -> bool:
    """Whether ``frame`` is called by a ``DTensor`` that changes its placements."""
    function = known_class("torch.distributed.tensor._redistribute", "redistribute_local_tensor")
    while function is not None and frame is not None:
        if frame.f_code is function.__code__:
            return True
        frame = frame.f_back
    return False


def waiting(call: Callable[..., Any]) -> Callable[..., Any]:
    """The functional collective ``call``, whose results are there when it returns."""

    def run(*args: Any, **kwargs: Any) -> Any:
        wait = torch.ops._c10d_functional.wait_tensor.default
        out = call(*args, **kwargs)
        return [wait(each) for each in out] if isinstance(out, (list, tuple)) else wait(out)

    return run
