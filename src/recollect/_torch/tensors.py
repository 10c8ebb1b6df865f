"""Tensors: plain or not, their storages, their hooks, fake tensors."""

from __future__ import annotations

import functools
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad

from recollect._torch.dtensors import USUAL_TENSORS, local_tensor
from recollect._torch.modes import (
    dispatch_mode_count,
    forward_ad_active,
    is_functorch_wrapped,
    no_dispatch_modes,
)


def version_of(tensor: torch.Tensor) -> int | None:
    """How often ``tensor`` was written to; None for an inference tensor, which has no count."""
    try:
        return tensor._version
    except RuntimeError:
        if tensor.is_inference():
            return None
        raise


def copy_tensors(targets: list[torch.Tensor], sources: list[Any]) -> None:
    """Copy each tensor of ``sources`` into its partner, in one launch if there is a device."""
    if not targets:
        return
    # Only values: the foreach copy does not support tangents.
    with forward_ad._set_fwd_grad_enabled(False) if forward_ad_active() else nullcontext():
        torch._foreach_copy_(targets, sources)


#: The hooks of a tensor: on its gradient, and after that was accumulated.
TensorHooks = tuple[Any, Any]


def tensor_hooks(tensor: torch.Tensor) -> TensorHooks:
    """The dictionaries of the hooks of ``tensor``, each None if there are none."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def write_tensor_hooks(tensor: torch.Tensor, hooks: TensorHooks) -> None:
    """Restore the hooks of ``tensor``."""
    on_gradient, after = hooks
    if tensor._backward_hooks is not on_gradient:
        tensor._backward_hooks = on_gradient
    if tensor._post_accumulate_grad_hooks is not after:
        if tensor._post_accumulate_grad_hooks is not None:
            tensor._post_accumulate_grad_hooks.clear()  # torch goes on calling them
        tensor._post_accumulate_grad_hooks = after


_dispatch_keys = torch._C._dispatch_keys

#: The dispatch keys of the plain tensors met so far. They tell all that `_is_plain` asks of a
#: tensor that is of no subclass, at half of the cost.
_plain_keys: set[int] = set()


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a plain strided tensor: no subclass, wrapper or lazy view."""
    if type(tensor) not in USUAL_TENSORS:
        return _is_plain(tensor)
    keys = _dispatch_keys(tensor).raw_repr()
    if keys in _plain_keys:
        return True
    is_plain = _is_plain(tensor)
    # Wrappers of `torch.func.functionalize` have the keys of those of a compiler.
    if is_plain and not torch._is_functional_tensor(tensor):
        _plain_keys.add(keys)
    return is_plain


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        (not overrides_torch(type(tensor)) or type(tensor) is _pretending.kind)
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
    #: A type of tensors that count as plain.
    kind: type | None = None


_pretending = _Pretending()


@contextmanager
def fake_tensors() -> Iterator[Any]:
    """A mode in which tensors have metadata and no memory, and count as plain.

    Its ``from_tensor`` converts a tensor. Using a fake tensor after the mode is an error.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    before, _pretending.kind = _pretending.kind, FakeTensor
    mode = _mode_that_ends()(allow_non_fake_inputs=True)
    try:
        with warnings.catch_warnings(), mode:
            # Fake memory has no address, and torch warns when one is read.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield mode
    finally:
        _pretending.kind = before
        mode.is_over = True


@functools.cache
def _mode_that_ends() -> Any:
    """The type of the modes of `fake_tensors`; its imports take half a second.

    An op on a fake tensor enters the mode that made the tensor, at any later time.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    class FakeMode(FakeTensorMode):
        is_over = False

        def __enter__(self) -> Any:
            if self.is_over:
                raise RuntimeError(
                    "the model uses a tensor without values, which was made while recollect "
                    "recorded a step and stayed in a cache of the model. Clear that cache, and "
                    "make the plan on the device on which the model is trained"
                )
            return super().__enter__()

    return FakeMode


def finds_shapes() -> bool:
    """Whether ops run on fake tensors, outside of `fake_tensors`.

    That is how torch finds the shapes of a ``DTensor``, in the middle of an op.
    """
    # Almost always no other mode is active, and to ask for one by its key takes longer.
    if not dispatch_mode_count() or _pretending.kind is not None:
        return False
    return torch._C._get_dispatch_mode(_FAKES) is not None


_FAKES = torch._C._TorchDispatchModeKey.FAKE


def fakes_left() -> list[torch.Tensor]:
    """The tensors made in `fake_tensors` that are still alive."""
    if not _mode_that_ends.cache_info().currsize:
        return []
    from torch._subclasses.fake_tensor import FakeTensor

    made: list[Any] = [each for each in gc.get_objects() if type(each) is FakeTensor]
    return [each for each in made if isinstance(each.fake_mode, _mode_that_ends())]


def fake_on(mode: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor with the metadata of ``tensor``, on ``device``."""
    from torch._subclasses.fake_tensor import FakeTensor

    with no_dispatch_modes():
        meta = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
        )
        return FakeTensor(mode, meta, device).requires_grad_(tensor.requires_grad)


def metadata_test(tensor: torch.Tensor) -> Callable[[Any], bool]:
    """A fast test: whether a value is a tensor with the type and metadata of ``tensor``.

    It replaces a dozen calls by one. It may reject a matching tensor if other modes or another
    autocast are active.
    """
    return _TensorGuards(tensor, dynamic_dims_sizes=None, dynamic_dims_strides=None).check  # type: ignore[no-any-return]


_TensorGuards: Any = TensorGuards  # whose stub is wrong


class UnsupportedTensor(str):
    """Why replay falls back to rerun, in words: a tensor that is not plain."""

    __slots__ = ()


def unsupported_tensor(tensor: torch.Tensor) -> UnsupportedTensor:
    """Why ``tensor``, which is not plain, is not supported."""
    if is_functorch_wrapped(tensor):
        return UnsupportedTensor("a tensor of a transform of torch.func")
    if overrides_torch(type(tensor)):
        return UnsupportedTensor(f"a tensor of type {type(tensor).__name__}")
    kinds = {
        f"of layout {tensor.layout}": tensor.layout is not torch.strided,
        "that is nested": tensor.is_nested,
        "that is quantized": tensor.is_quantized,
        "on the meta device": tensor.is_meta,
        "of zeros without memory": tensor._is_zerotensor(),
        "that is conjugated or negated": True,
    }
    kind = next(text for text, applies in kinds.items() if applies)
    return UnsupportedTensor(f"a tensor {kind}")


@functools.cache
def overrides_torch(kind: Any) -> bool:
    """Whether tensors of this type override functions or ops of torch."""
    usual = (torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    functions = [getattr(each, "__func__", each) for each in (kind.__torch_function__, *usual)]
    return _overrides_ops(kind) or functions[0] not in functions[1:]


def run_ops_themselves(types: Any) -> bool:
    """Whether an op gets tensors of ``types``, of a dispatch mode, that no kernel may get.

    Those have no memory of their own. Kernels run by `no_dispatch_modes` would crash.
    """
    return bool(types) and any(
        each is not _pretending.kind and _overrides_ops(each) for each in types
    )


def _overrides_ops(kind: Any) -> bool:
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """The tensors that hold the data of ``tensor``: itself, if it is a plain one.

    None if its data do not exist or cannot be accessed: a fake tensor, one of ``torch.func``, or a
    zero of forward-mode AD, which has no memory.
    Call it inside `below_python`. Each may have inner tensors in turn.
    """
    if tensor.is_meta or is_functorch_wrapped(tensor) or tensor._is_zerotensor():
        return None
    if _overrides_ops(type(tensor)):
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
        # Not the cached lengths, which are made when used.
        inner = [tensor._values, tensor._offsets, tensor._lengths]
    elif hasattr(tensor, "trigger_wait"):
        inner = [tensor.trigger_wait()]  # the result of a collective that may be under way
    else:
        return _wrapped_by(tensor)
    return [each for each in inner if isinstance(each, torch.Tensor)]


def _wrapped_by(tensor: Any) -> list[torch.Tensor] | None:
    """The tensors that hold the data of a wrapper subclass; None if ``tensor`` is not of one."""
    if not _overrides_ops(type(tensor)) or not hasattr(tensor, "__tensor_flatten__"):
        return None
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [each for each in inner if isinstance(each, torch.Tensor)]


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def local_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of this process that hold the data of ``tensor``: itself, unless it has others.

    A ``DTensor`` has the shape of the whole, and wraps the part that this process has. A sparse
    tensor has indices and values.
    """
    inner = _wrapped_by(tensor)
    if inner is None and tensor.layout in _SPARSE:
        inner = _inner_of_layout(tensor)
    return [tensor] if inner is None else [each for one in inner for each in local_tensors(one)]


def storage_key(tensor: torch.Tensor) -> int | None:
    """A key of the storage of ``tensor``, unique while it is alive; None if it has none.

    Of a ``DTensor`` it is that of the part of this process.
    """
    try:
        return int(local_tensor(tensor).untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


def memory_key(tensor: torch.Tensor) -> int | None:
    """As `storage_key`, but by memory address if there is one: storages of DLPack share memory."""
    try:
        storage = local_tensor(tensor).untyped_storage()
        # Fake memory has no address, and torch warns when one is read.
        is_fake = type(tensor) is not torch.Tensor and storage.device.type == "meta"
        return int(storage._cdata) if is_fake else key_of_storage(storage)
    except (RuntimeError, NotImplementedError):
        return None


def key_of_storage(storage: Any) -> int:
    """The `memory_key` of a storage."""
    return storage.data_ptr() or storage._cdata  # type: ignore[no-any-return]
