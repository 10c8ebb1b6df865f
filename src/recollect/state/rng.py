"""Random streams: where they stood when a region began, and standing there again for a rerun.

A CPU generator is 5 KB of state and a microsecond to read; a CUDA generator is a seed and an
offset, two integers. Both are read before the region runs. Afterwards ``settle`` forgets the
accelerators whose streams the region did not advance. For the CPU, finding that out would cost more
than restoring a stream that nobody draws from.

Streams of all visible accelerators are read, not only those of the arguments: it costs two
integers a device, and a region may reach any device through a closure or a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recollect.state.devices import DefaultDeviceType, device_module, infer_device_type
from recollect.torch_private import tree_leaves

__all__ = ["RngSnapshot", "get_device_states", "set_device_states"]

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
        moved = [s for s in self._states if s[0].initial_seed() != s[1] or s[0].get_offset() != s[2]]
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


class RngSnapshot:
    """The random streams at one moment."""

    __slots__ = ("_cpu_state", "_streams")

    def __init__(self, cpu_state: torch.Tensor, streams: _Streams | None) -> None:
        self._cpu_state = cpu_state
        self._streams = streams

    @classmethod
    def take(cls) -> RngSnapshot:
        """Read all streams."""
        return cls(_cpu.get_state(), None if _accelerator is None else _read_accelerator())

    def settle(self) -> None:
        """Forget the accelerator streams that have not moved since."""
        if _accelerator is None:
            return
        if self._streams is not None:
            self._streams = self._streams.advanced()
        elif torch.cuda.is_initialized():
            self._streams = _CudaStreams.as_first_initialised().advanced()

    def swap_in(self) -> RngSnapshot:
        """Put the streams back to this snapshot; the result has them as they were before."""
        streams = self._streams
        current = RngSnapshot(_cpu.get_state(), None if streams is None else streams.current())
        self.write()
        return current

    def write(self) -> None:
        """Put the streams back to this snapshot."""
        _cpu.set_state(self._cpu_state)
        if self._streams is not None:
            self._streams.write()


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
