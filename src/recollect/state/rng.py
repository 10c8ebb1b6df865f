"""The random streams that a region can draw from, read at the call and restored for a rerun.

These are torch's default generators, the streams of ``random`` and ``numpy.random``, and generator
objects that the function can reach. Of torch's, all visible accelerators count: a region may reach
any device through a closure or a parameter. They are cheap to read, and kept for every region: one
that leaves a stream where it was may still have drawn from it (``torch.random.fork_rng``).

``random.getstate()`` takes 13 microseconds and numpy's ``get_state()`` 60: too much for every
region, since few draw from either. So both are called only where a few words of the stream, at
an address that does not change, are not as they were. If they are not where this module expects
them, it calls the public functions each time.
"""

from __future__ import annotations

import ctypes
import importlib
import random
import struct
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from recollect._torch.dynamo import hide_with_calls
from recollect._torch.pytree import tree_leaves
from recollect.errors import CheckpointError
from recollect.state.tensors import same_values

# --- torch's default generators -------------------------------------------------------------------

_read_cpu = torch.default_generator.get_state
_write_cpu = torch.default_generator.set_state

#: What this build of torch can drive; a build for CPUs alone has none.
_accelerator = torch.accelerator.current_accelerator()

HAS_ACCELERATOR = _accelerator is not None

#: The CPU's stream, and one for each device of the accelerator if that has been started.
RngState = tuple[torch.Tensor, list[torch.Tensor] | None]


def _accelerator_module() -> Any:
    """The module of the accelerator once it is in use; reading a stream would start it."""
    if _accelerator is None:
        return None
    module: Any = torch.get_device_module(_accelerator.type)
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
    """The states of torch's default generators."""
    return _read_cpu(), None if _accelerator is None else _read_accelerator()


def write_rng(state: RngState) -> None:
    """Restore torch's default generators to ``state``."""
    cpu, streams = state
    _write_cpu(cpu)
    if streams is not None:
        _write_accelerator(streams)


def same_rng(a: RngState, b: RngState) -> bool:
    """Whether all generators are in the same state."""
    before, after = ([state[0], *(state[1] or ())] for state in (a, b))
    return len(before) == len(after) and all(map(same_values, before, after))


def _with_first_seeds(state: RngState) -> RngState:
    """``state``, read before a region. One that was the first to use CUDA found fresh seeds."""
    if state[1] is not None or not torch.cuda.is_initialized():
        return state
    fresh = (
        torch.Generator(generator.device).manual_seed(generator.initial_seed())
        for generator in torch.cuda.default_generators
    )
    return state[0], [generator.get_state() for generator in fresh]


def reseed_recurrent_layers(device: torch.device) -> None:
    """Have recurrent layers of cuDNN seed the state of their dropout from torch's generator.

    They do so when the generator's state was set since their last call. A rerun sets it, so it must
    be set before forward too. Other generators may be in use, and are not touched.
    """
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
        generator.set_state(generator.get_state())


# --- random and numpy.random ----------------------------------------------------------------------

#: Of ``random``, and of numpy if that is imported.
LibraryState = tuple[Any, Any]


class Stream(NamedTuple):
    """How one stream is read and written."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def stream_of(generator: Any) -> Stream:
    """The stream of a generator, by its public functions."""
    if isinstance(generator, random.SystemRandom):  # the system's, which has no state
        return Stream(lambda: None, lambda _: None)
    if isinstance(generator, random.Random):
        return Stream(generator.getstate, generator.setstate)
    bits = getattr(generator, "bit_generator", None)  # of a numpy Generator
    if bits is not None:
        return Stream(lambda: bits.state, partial(setattr, bits, "state"))
    if isinstance(generator, torch.Generator):
        return Stream(generator.get_state, generator.set_state)
    return Stream(partial(generator.get_state, legacy=False), generator.set_state)


#: Words of a Mersenne twister that tell whether it has changed: its position and 15 others. A draw
#: moves the position or replaces all words; so does a new seed.
_MARK = struct.Struct("=16I")


def _memory(address: int, size: int) -> Any:
    """``size`` bytes at ``address``, as ``raw``."""
    return (ctypes.c_char * size).from_address(address)


def _watched(
    stream: Stream, address: int, mark_of: Callable[[Any], bytes], read_spare: Callable[[], Any]
) -> Stream:
    """``stream``, which is read only if its mark, in memory at ``address``, has changed.

    ``mark_of``: the mark of a state. ``read_spare``: tells the second of a pair of normal numbers.
    """
    memory = _memory(address, _MARK.size)
    if memory.raw != mark_of(stream.read()):
        return stream
    known: tuple[bytes, Any, Any] = b"", None, None

    def read() -> Any:
        nonlocal known
        mark, spare, state = known
        if mark != memory.raw or spare != read_spare():
            mark, spare = memory.raw, read_spare()
            state = stream.read()  # regions that do not draw share it
            known = mark, spare, state
        return state

    return Stream(read, stream.write)


def _python_stream() -> Stream:
    hidden: Any = random.getstate.__self__  # type: ignore[attr-defined]
    stream = stream_of(hidden)
    if type(hidden) is not random.Random or sys.implementation.name != "cpython":
        return stream
    # In memory the position is the first word; in a state it is the last.
    address, spare = id(hidden) + object.__basicsize__, partial(getattr, hidden, "gauss_next")
    return _watched(stream, address, lambda state: _MARK.pack(state[1][-1], *state[1][:15]), spare)


def _read_twister(generator: Any) -> Any:
    name, words, *others = generator.get_state()
    return name, words.tolist(), *others  # which can be compared


def _own_memory(generator: Any) -> Callable[[], bytes]:
    """The fields of a ``RandomState``: the second normal number, and what never changes."""
    size = type(generator).__basicsize__ - object.__basicsize__
    return partial(getattr, _memory(id(generator) + object.__basicsize__, size), "raw")


@lru_cache(maxsize=1)  # the user may replace the bit generator
def _make_numpy_stream(numpy_random: Any, bits: Any) -> Stream:
    generator = numpy_random.get_state.__self__
    if (type(generator), type(bits)) != (numpy_random.RandomState, numpy_random.MT19937):
        return stream_of(generator)
    stream = Stream(partial(_read_twister, generator), generator.set_state)
    trial = numpy_random.RandomState(5)
    memory = _own_memory(trial)
    before, state = memory(), trial.get_state()
    trial.set_state((*state[:3], 1, 0.25))
    if memory() == before:
        return stream
    # In memory the position is the last word.
    address, spare = bits.ctypes.state_address + 625 * 4 - _MARK.size, _own_memory(generator)
    return _watched(stream, address, lambda state: _MARK.pack(*state[1][-15:], state[2]), spare)


_modules = sys.modules
_python = _python_stream()


def _numpy_stream() -> Stream | None:
    numpy_random: Any = _modules.get("numpy.random")
    if numpy_random is None:
        if "numpy" not in _modules:
            return None
        # Loaded, and seeded, at its first use: inside a region that would be too late.
        numpy_random = importlib.import_module("numpy.random")
    try:
        bits = numpy_random.get_bit_generator()
    except AttributeError:
        importlib.import_module("numpy.random")  # waits for the thread that is importing it
        bits = numpy_random.get_bit_generator()
    return _make_numpy_stream(numpy_random, bits)


def read_libraries() -> LibraryState:
    """The states of ``random`` and ``numpy.random``."""
    numpy = _numpy_stream()
    return _python.read(), None if numpy is None else numpy.read()


def write_libraries(state: LibraryState) -> None:
    """Restore ``random`` and ``numpy.random`` to ``state``."""
    _python.write(state[0])
    if state[1] is not None:
        numpy = _numpy_stream()
        if numpy is None or type(state[1]) is not type(numpy.read()):
            raise CheckpointError(
                "numpy's bit generator was exchanged after a checkpointed region drew from it, "
                "which cannot draw the same numbers again. Exchange it before forward or after "
                "backward, or pass preserve_rng_state=False."
            )
        numpy.write(state[1])


def _is_library_stream(generator: Any) -> bool:
    """Whether ``generator`` is the one behind the functions of a library."""
    if isinstance(generator, random.Random):
        return generator is random.getstate.__self__  # type: ignore[attr-defined]
    numpy_random: Any = _modules.get("numpy.random")
    return numpy_random is not None and generator is numpy_random.get_state.__self__


# --- all streams ----------------------------------------------------------------------------------

#: torch's default generators, the two libraries if they matter, each generator that is an object.
Streams = tuple[RngState, LibraryState | None, list[tuple[Stream, Any]]]


def read_streams(generators: Collection[Any]) -> Streams:
    """The present states of all streams, those of ``generators`` too."""
    if not generators:
        return read_rng(), read_libraries(), []
    streams = [stream_of(each) for each in generators if not _is_library_stream(each)]
    return read_rng(), read_libraries(), [(each, each.read()) for each in streams]


def settle_streams(streams: Streams) -> Streams:
    """``streams``, read before a region, with what only its end can tell.

    A region that leaves the streams of the libraries alone does not need them restored, and others
    may be drawing from them when it is rerun: a thread that loads data.
    """
    defaults, libraries, generators = streams
    if HAS_ACCELERATOR:
        defaults = _with_first_seeds(defaults)
    return defaults, None if libraries == read_libraries() else libraries, generators


@hide_with_calls
def read_same_streams(streams: Streams) -> Streams:
    """The present states of the streams in ``streams``."""
    (_, devices), libraries, generators = streams
    return (
        (_read_cpu(), None if devices is None else _read_accelerator()),
        None if libraries is None else read_libraries(),
        [(each, each.read()) for each, _ in generators] if generators else [],
    )


@hide_with_calls
def write_streams(streams: Streams) -> None:
    """Restore the streams."""
    (cpu, devices), libraries, generators = streams
    _write_cpu(cpu)
    if devices is not None:
        _write_accelerator(devices)
    if libraries is not None:
        write_libraries(libraries)
    for stream, state in generators:
        stream.write(state)


def generator_types() -> tuple[type, ...]:
    """The types of random streams that are objects."""
    # numpy.random may be half there, while another thread imports it.
    numpy_random = _modules.get("numpy.random")
    generator = getattr(numpy_random, "Generator", None)
    return _types_with(generator, getattr(numpy_random, "RandomState", None))


@lru_cache
def _types_with(*more: type | None) -> tuple[type, ...]:
    return torch.Generator, random.Random, *(kind for kind in more if kind is not None)


# --- the helpers of torch.utils.checkpoint --------------------------------------------------------


class DefaultDeviceType:
    """The device type assumed when no argument lives on an accelerator.

    Starts as the accelerator of this machine, or ``"cpu"`` where there is none.
    """

    _default_device_type: str | None = None

    @staticmethod
    def set_device_type(device: str = "cuda") -> None:
        """Make ``device`` the default device type."""
        DefaultDeviceType._default_device_type = device

    @staticmethod
    def get_device_type() -> str:
        """The default device type."""
        if not DefaultDeviceType._default_device_type:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            DefaultDeviceType._default_device_type = accelerator.type if accelerator else "cpu"
        return DefaultDeviceType._default_device_type


def _on_devices(args: tuple[Any, ...], *others: str) -> list[torch.Tensor]:
    """The tensors in ``args``, except those on ``others``."""
    leaves = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.device.type not in others]


def infer_device_type(*args: Any) -> str:
    """The type of accelerator on which the tensors in ``args`` live.

    CPU tensors do not count. CUDA wins over other types; without any, the default type is given.
    """
    types = [tensor.device.type for tensor in _on_devices(args, "cpu")]
    if not types:
        return DefaultDeviceType.get_device_type()
    distinct = sorted(set(types))
    if len(distinct) > 1:
        warnings.warn(
            "Tensor arguments, excluding CPU tensors, are detected on at least two types of "
            "devices, and this function can name only one of them (cuda first, then the first "
            f"met).\nDevice types: {distinct} first device type: {types[0]}",
            stacklevel=2,
        )
    return "cuda" if "cuda" in distinct else types[0]


def get_device_states(*args: Any) -> tuple[list[int], list[torch.Tensor]]:
    """Indices of the devices that hold the tensors in ``args``, and their random states.

    A device is listed once for each tensor on it. CPU and meta tensors are passed over.
    """
    devices = [tensor.get_device() for tensor in _on_devices(args, "cpu", "meta")]
    if not devices:
        return [], []
    module: Any = torch.get_device_module(infer_device_type(*args))
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
    device_type = device_type or DefaultDeviceType.get_device_type()
    if device_type == "meta":
        return
    module: Any = torch.get_device_module(device_type)
    for index, state in zip(devices, states, strict=False):
        with module.device(index):
            module.set_rng_state(state)
