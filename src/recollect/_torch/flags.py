"""Process-wide switches that decide which kernels run."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_C = torch._C


def _set_deterministic(enabled: bool) -> None:
    warn_only = _C._get_deterministic_algorithms_warn_only()
    _C._set_deterministic_algorithms(enabled, warn_only=warn_only)


def _set_warn_only(warn_only: bool) -> None:
    enabled = _C._get_deterministic_algorithms()
    _C._set_deterministic_algorithms(enabled, warn_only=warn_only)


#: The order of attention kernels before it is set.
_NO_ORDER = (1, 2, 0, 3, 4)


def _set_sdp_priority_order(order: tuple[int, ...]) -> None:
    # The first attention of a process sets torch's own order. Flags read before must not undo it.
    if order != _NO_ORDER:
        _C._set_sdp_priority_order(list(order))


_Flag = tuple[Callable[[], Any], Callable[[Any], object]]


def _sdp_priority_order() -> tuple[int, ...]:
    return tuple(_C._get_sdp_priority_order())  # which gives a list


def _without_frame(name: str, get: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """A getter without a Python frame: it is called at many functions of every region."""
    getter = partial(get, *args)
    vars(getter)["__name__"] = name
    return getter


#: The smallest positive number that is not denormal.
_NORMAL = sys.float_info.min

#: 1.0, or 0.0 if this thread flushes denormal numbers to zero. torch does not say.
_keeps_denormals = _without_frame("keeps_denormals", math.prod, (_NORMAL, 0.5, 2.0 / _NORMAL))


def _set_num_threads(count: int) -> None:
    """Set the number of threads that compute for this thread.

    torch gives it to threads that start later too: for those, the number is set back.
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
    """The float32 precision of ops that the older switches do not cover."""
    name = f"fp32_precision_{backend}_{op}"
    get = _without_frame(name, _C._get_fp32_precision_getter, backend, op)
    return get, partial(_C._set_fp32_precision_setter, backend, op)


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
    # The number of threads decides how a sum is split.
    (torch.get_num_threads, _set_num_threads),
    (_keeps_denormals, lambda keeps: torch.set_flush_denormal(not keeps)),
)

_ACCELERATOR_FLAGS: tuple[_Flag, ...] = (
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_sdp_priority_order, _set_sdp_priority_order),
    (_C._get_cublas_allow_tf32, _C._set_cublas_allow_tf32),
    (
        _C._get_cublas_allow_fp16_reduced_precision_reduction,
        lambda state: _C._set_cublas_allow_fp16_reduced_precision_reduction(*state),
    ),
    (
        _C._get_cublas_allow_bf16_reduced_precision_reduction,
        lambda state: _C._set_cublas_allow_bf16_reduced_precision_reduction(*state),
    ),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (_C._get_cudnn_allow_tf32, _C._set_cudnn_allow_tf32),
    _precision("cuda", "rnn"),
    (_C._get_cublas_allow_fp16_accumulation, _C._set_cublas_allow_fp16_accumulation),
    (_C._get_linalg_preferred_backend, _C._set_linalg_preferred_backend),
    (_C._get_blas_preferred_backend, _C._set_blas_preferred_backend),
)

#: Process-wide switches that decide which kernel an op runs, or its result: a getter and a setter
#: each. (torch's public functions call these, at several times the cost.)
FLAGS = _COMMON_FLAGS

if torch.accelerator.current_accelerator() is not None:
    FLAGS += _ACCELERATOR_FLAGS

# Last, because the tf32 switches set it too.
FLAGS += ((_C._get_float32_matmul_precision, _C._set_float32_matmul_precision),)

#: Flags that only attention, convolutions, recurrent layers, batch norm, CTC and linear algebra
#: solvers read from ``at::Context``; products, layer norm and reductions do not.
SPECIAL_FLAGS = frozenset(
    name
    for name in (read.__name__ for read, _ in FLAGS)
    if name.endswith(("_sdp_enabled", "_sdp_allow_fp16_bf16_reduction", "_sdp_priority_order"))
    or name.startswith(("_get_cudnn_", "_get_nnpack_", "_get_linalg_", "fp32_precision_"))
)

_PRECISIONS = (("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul"))


def read_precisions() -> tuple[str, ...]:
    """The float32 precision of each backend, where the older switches cannot express it."""
    return tuple([_C._get_fp32_precision_getter(*place) for place in _PRECISIONS])


def write_precisions(precisions: tuple[str, ...]) -> None:
    """Set the result of ``read_precisions``."""
    for place, precision in zip(_PRECISIONS, precisions, strict=True):
        if _C._get_fp32_precision_getter(*place) != precision:
            _C._set_fp32_precision_setter(*place, precision)
