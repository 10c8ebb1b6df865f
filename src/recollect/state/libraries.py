"""The random streams of ``random`` and ``numpy.random``, read and put back.

``random.getstate()`` takes 13 microseconds and numpy's ``get_state()`` 60: too much for every
region, of which few draw from either. Both streams are a Mersenne twister, 624 words and a
position, at an address that does not change, so they are read and written as bytes. If the bytes
are not where this module expects them, the public functions serve.
"""

from __future__ import annotations

import ctypes
import importlib
import random
import struct
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from recollect.errors import CheckpointError

__all__ = [
    "LibraryState",
    "Stream",
    "is_library_stream",
    "read_libraries",
    "stream_of",
    "write_libraries",
]

#: 624 words and a position.
_TWISTER_SIZE = 625 * 4
#: Whether there is a second normal number (an int, padded), and the number.
_GAUSS = struct.Struct("=iid")

#: Of ``random``, and of numpy if that is imported.
LibraryState = tuple[Any, Any]


class Stream(NamedTuple):
    """How one stream is read and written."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    is_memory: bool = False


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


def _memory(address: int, size: int) -> Any:
    """``size`` bytes at ``address``; their ``raw`` reads and writes them."""
    return (ctypes.c_char * size).from_address(address)


def _python_by_memory(generator: Any) -> Stream:
    twister = _memory(id(generator) + object.__basicsize__, _TWISTER_SIZE)

    def read() -> Any:
        return twister.raw, generator.gauss_next

    def write(state: Any) -> None:
        twister.raw, generator.gauss_next = state

    return Stream(read, write, is_memory=True)


def _python_stream() -> Stream:
    hidden: Any = random.getstate.__self__  # type: ignore[attr-defined]
    if type(hidden) is random.Random and sys.implementation.name == "cpython":
        stream = _python_by_memory(hidden)
        position, *words = struct.unpack("=i624I", stream.read()[0])
        if (*words, position) == hidden.getstate()[1]:
            return stream
    return stream_of(hidden)


def _numpy_by_memory(generator: Any, bits: Any, gauss_offset: int) -> Stream:
    twister = _memory(bits.ctypes.state_address, _TWISTER_SIZE)
    gauss = _memory(id(generator) + gauss_offset, _GAUSS.size)

    def read() -> Any:
        return twister.raw, gauss.raw

    def write(state: Any) -> None:
        twister.raw, gauss.raw = state

    return Stream(read, write, is_memory=True)


def _gauss_offset(numpy_random: Any) -> int | None:
    """Where a ``RandomState`` holds the second of a pair of normal numbers; None if unknown."""
    trial = numpy_random.RandomState(5)
    name, words, position, *_ = trial.get_state()
    for offset in range(object.__basicsize__, type(trial).__basicsize__ - _GAUSS.size + 1, 8):
        found = []
        for has_gauss, gauss in ((0, 0.25), (1, -1.75)):
            trial.set_state((name, words, position, has_gauss, gauss))
            flag, _, number = _GAUSS.unpack(_memory(id(trial) + offset, _GAUSS.size).raw)
            found.append((flag, number) == (has_gauss, gauss))
        if all(found):
            return offset
    return None


@lru_cache(maxsize=1)  # the user may replace the bit generator
def _make_numpy_stream(numpy_random: Any, bits: Any) -> Stream:
    generator = numpy_random.get_state.__self__
    state = generator.get_state(legacy=False)
    if state["bit_generator"] == "MT19937" and type(generator) is numpy_random.RandomState:
        offset = _gauss_offset(numpy_random)
        if offset is not None:
            stream = _numpy_by_memory(generator, bits, offset)
            expected = (*state["state"]["key"].tolist(), state["state"]["pos"])
            if struct.unpack("=624Ii", stream.read()[0]) == expected:
                return stream
    return stream_of(generator)


_modules = sys.modules
_python = _python_stream()


def _numpy_stream() -> Stream | None:
    numpy_random: Any = _modules.get("numpy.random")
    if numpy_random is None:
        if "numpy" not in _modules:
            return None
        # Loaded, and seeded, at its first use: inside a region that would be too late.
        numpy_random = importlib.import_module("numpy.random")
    if not hasattr(numpy_random, "get_bit_generator"):
        importlib.import_module("numpy.random")  # waits for the thread that is importing it
    return _make_numpy_stream(numpy_random, numpy_random.get_bit_generator())


def is_library_stream(generator: Any) -> bool:
    """Whether ``generator`` is the one behind the functions of a library."""
    if isinstance(generator, random.Random):
        return generator is random.getstate.__self__  # type: ignore[attr-defined]
    numpy_random: Any = _modules.get("numpy.random")
    return numpy_random is not None and generator is numpy_random.get_state.__self__


def read_libraries() -> LibraryState:
    """The states of the two streams."""
    numpy = _numpy_stream()
    return _python.read(), None if numpy is None else numpy.read()


def write_libraries(state: LibraryState) -> None:
    """Put the two streams back to ``state``."""
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
