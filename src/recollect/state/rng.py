"""The random streams of torch's default generators, read at the call and put back for a rerun.

The streams of all visible accelerators are read, not only those of the arguments: a region may
reach any device through a closure or a parameter. A CPU stream is 5 KB and a microsecond to read, a
CUDA stream 16 bytes and less. They are kept for every region: one that leaves a stream where it
found it may still have drawn from it (``torch.random.fork_rng`` inside).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recollect._torch.pytree import tree_leaves
from recollect.state.devices import DefaultDeviceType, device_module, infer_device_type
from recollect.state.tensors import same_values

__all__ = [
    "HAS_ACCELERATOR",
    "RngState",
    "get_device_states",
    "read_rng",
    "read_same_rng",
    "reseed_recurrent_layers",
    "same_rng",
    "set_device_states",
    "settle_rng",
    "write_rng",
]

_cpu = torch.default_generator

#: What this build of torch can drive; a build for CPUs alone has none.
_accelerator = torch.accelerator.current_accelerator()

HAS_ACCELERATOR = _accelerator is not None

#: The CPU's stream, and one for each device of the accelerator if that has been started.
RngState = tuple[torch.Tensor, list[torch.Tensor] | None]


def _accelerator_module() -> Any:
    """The module of the accelerator once it is in use; reading a stream would start it."""
    if _accelerator is None:
        return None
    module = device_module(_accelerator.type)
    started = getattr(module, "is_initialized", None)
    if started is not None and not started():
        return None
    return module if hasattr(module, "get_rng_state") else None


def _read_accelerator() -> list[torch.Tensor] | None:
    module = _accelerator_module()
    if module is None:
        return None
    if module is torch.cuda:  # without the detour through device indices
        return [generator.get_state() for generator in torch.cuda.default_generators]
    return [module.get_rng_state(index) for index in range(module.device_count())]


def _write_accelerator(states: list[torch.Tensor]) -> None:
    module = _accelerator_module()
    if module is torch.cuda:
        for generator, state in zip(torch.cuda.default_generators, states, strict=True):
            generator.set_state(state)
        return
    for index, state in enumerate(states):
        module.set_rng_state(state, index)


def read_rng() -> RngState:
    """The states of all streams."""
    return _cpu.get_state(), None if _accelerator is None else _read_accelerator()


def reseed_recurrent_layers(device: torch.device) -> None:
    """Have recurrent layers of cuDNN seed the state by which they drop out from torch's stream.

    They do whenever the stream has been set since. A rerun sets it; so that it draws the same, it
    must have been set before the call, too. No other stream is touched: it may be in use.
    """
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
        generator.set_state(generator.get_state())


def settle_rng(state: RngState) -> RngState:
    """``state``, read before a region, with what only the region's end can tell.

    A region that was the first to use CUDA found the streams at the beginning of their seed.
    """
    cpu, streams = state
    if _accelerator is None or streams is not None or not torch.cuda.is_initialized():
        return state
    fresh = (
        torch.Generator(generator.device).manual_seed(generator.initial_seed())
        for generator in torch.cuda.default_generators
    )
    return cpu, [generator.get_state() for generator in fresh]


def same_rng(a: RngState, b: RngState) -> bool:
    """Whether all streams are in the same state."""
    before, after = ([state[0], *(state[1] or ())] for state in (a, b))
    return len(before) == len(after) and all(map(same_values, before, after))


def read_same_rng(state: RngState) -> RngState:
    """The present states of the streams in ``state``."""
    return _cpu.get_state(), None if state[1] is None else _read_accelerator()


def write_rng(state: RngState) -> None:
    """Put the streams of ``state`` back to it."""
    cpu, streams = state
    _cpu.set_state(cpu)
    if streams is not None:
        _write_accelerator(streams)


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
