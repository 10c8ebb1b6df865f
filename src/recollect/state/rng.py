"""Random streams: where they stood when a region began, and standing there again for a rerun.

A CPU generator is 5 KB of state and a microsecond to read; a CUDA generator is a seed and an
offset, two integers. Both are read before the region runs. Afterwards ``settle_rng`` forgets the
streams that the region did not advance: a region that draws nothing holds nothing, and its rerun
restores nothing.

Streams of all visible accelerators are read, not only those of the arguments: it costs two
integers a device, and a region may reach any device through a closure or a parameter.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recollect.state.devices import DefaultDeviceType, device_module, infer_device_type
from recollect.torch_private import tree_leaves

__all__ = [
    "RngState",
    "get_device_states",
    "read_rng",
    "set_device_states",
    "settle_rng",
    "swap_rng",
    "write_rng",
]

_cpu = torch.default_generator


class _CudaStreams:
    """Seed and offset of every CUDA generator."""

    __slots__ = ("_states",)

    def __init__(self, states: list[tuple[torch.Generator, int, int]]) -> None:
        self._states = states

    @classmethod
    def read(cls) -> _CudaStreams:
        return cls([(g, g.initial_seed(), g.get_offset()) for g in torch.cuda.default_generators])

    @classmethod
    def as_first_initialised(cls) -> _CudaStreams:
        """The streams as they were when CUDA was started, for a region that started it."""
        return cls([(g, g.initial_seed(), 0) for g in torch.cuda.default_generators])

    def advanced(self) -> _CudaStreams | None:
        moved = [
            (generator, seed, offset)
            for generator, seed, offset in self._states
            if generator.get_offset() != offset or generator.initial_seed() != seed
        ]
        return _CudaStreams(moved) if moved else None

    def current(self) -> _CudaStreams:
        return _CudaStreams([(g, g.initial_seed(), g.get_offset()) for g, _, _ in self._states])

    def write(self) -> None:
        for generator, seed, offset in self._states:
            generator.manual_seed(seed)
            generator.set_offset(offset)


class _OtherStreams:
    """States of an accelerator other than CUDA, through its module's own functions."""

    __slots__ = ("_module", "_states")

    def __init__(self, module: Any, states: list[tuple[int, torch.Tensor]]) -> None:
        self._module = module
        self._states = states

    @classmethod
    def read(cls, module: Any) -> _OtherStreams:
        return cls(module, [(i, module.get_rng_state(i)) for i in range(module.device_count())])

    def advanced(self) -> _OtherStreams | None:
        moved = [
            (i, state)
            for i, state in self._states
            if not torch.equal(self._module.get_rng_state(i), state)
        ]
        return _OtherStreams(self._module, moved) if moved else None

    def current(self) -> _OtherStreams:
        return _OtherStreams(
            self._module, [(i, self._module.get_rng_state(i)) for i, _ in self._states]
        )

    def write(self) -> None:
        for i, state in self._states:
            self._module.set_rng_state(state, i)


_Streams = _CudaStreams | _OtherStreams


#: What this build of torch can drive; a build for CPUs alone has none.
_accelerator = torch.accelerator.current_accelerator()


def _read_accelerator() -> _Streams | None:
    if _accelerator is None:
        return None
    if _accelerator.type == "cuda":
        return _CudaStreams.read() if torch.cuda.is_initialized() else None
    module = device_module(_accelerator.type)
    if not hasattr(module, "get_rng_state"):
        return None
    # Reading a stream would start the device; a region that starts it is not ours to hasten.
    started = getattr(module, "is_initialized", None)
    if started is not None and not started():
        return None
    return _OtherStreams.read(module)


#: The CPU's stream and those of the accelerators, each None where it does not matter.
RngState = tuple[torch.Tensor | None, _Streams | None]


def read_rng() -> RngState:
    """Where all streams stand."""
    return _cpu.get_state(), None if _accelerator is None else _read_accelerator()


def settle_rng(state: RngState) -> RngState | None:
    """``state`` without the streams that have not moved since; None if none has."""
    cpu, streams = state
    if cpu is not None and _same_bytes(cpu, _cpu.get_state()):
        cpu = None
    if streams is not None:
        streams = streams.advanced()
    elif _accelerator is not None and torch.cuda.is_initialized():
        streams = _CudaStreams.as_first_initialised().advanced()
    return None if cpu is None and streams is None else (cpu, streams)


def swap_rng(state: RngState) -> RngState:
    """Put the streams of ``state`` back to it; the result has them as they were before."""
    cpu, streams = state
    before = (
        None if cpu is None else _cpu.get_state(),
        None if streams is None else streams.current(),
    )
    write_rng(state)
    return before


def write_rng(state: RngState) -> None:
    """Put the streams of ``state`` back to it."""
    cpu, streams = state
    if cpu is not None:
        _cpu.set_state(cpu)
    if streams is not None:
        streams.write()


def _find_memcmp() -> Callable[[int, int, int], int]:
    library = ctypes.cdll.msvcrt if sys.platform == "win32" else ctypes.CDLL(None)
    memcmp: Any = library.memcmp
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return memcmp  # type: ignore[no-any-return]


_memcmp = _find_memcmp()


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Not torch.equal: that is an op, and a dispatch mode of the user's would see it.
    return _memcmp(a.data_ptr(), b.data_ptr(), a.numel()) == 0


def get_device_states(*args: Any) -> tuple[list[int], list[torch.Tensor]]:
    """Indices of the devices that hold the tensors in ``args``, and their random states.

    A device is listed once for each tensor on it. CPU and meta tensors are passed over.
    """
    devices = [
        leaf.get_device()
        for leaf in tree_leaves(args)
        if isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", "meta")
    ]
    if not devices:
        return [], []
    module = device_module(infer_device_type(*args))
    states = []
    for index in devices:
        with module.device(index):
            states.append(module.get_rng_state())
    return devices, states


def set_device_states(
    devices: Sequence[int], states: Sequence[torch.Tensor], *, device_type: str | None = None
) -> None:
    """Set the random state of each device in ``devices`` to its partner in ``states``.

    ``device_type`` defaults to ``DefaultDeviceType.get_device_type()``.
    """
    if device_type is None:
        device_type = DefaultDeviceType.get_device_type()
    if device_type == "meta":
        return
    module = device_module(device_type)
    for index, state in zip(devices, states, strict=False):
        with module.device(index):
            module.set_rng_state(state)
