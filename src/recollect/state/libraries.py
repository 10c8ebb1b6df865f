"""The random streams of ``random`` and ``numpy.random``, read and put back.

``random.getstate()`` takes 13 microseconds and numpy's ``get_state()`` 60: too much for every
region, of which few draw from either. Both streams are a Mersenne twister, 624 words and a
position, in memory that does not move, so they are read and written as the bytes they are. Whether
the bytes are where we think they are is tried out on streams of our own, once; if not, the public
functions serve.
"""

from __future__ import annotations

import ctypes
import importlib
import random
import struct
import sys
from typing import Any, Protocol

from recollect.errors import CheckpointError

__all__ = ["LibraryState", "is_library_stream", "read_libraries", "write_libraries"]

#: 624 words and a position.
_TWISTER_SIZE = 625 * 4


def _memory(address: int, size: int) -> Any:
    """So many bytes of memory; its ``raw`` reads and writes them, faster than any function does."""
    return (ctypes.c_char * size).from_address(address)


#: Of ``random``, and of numpy if that is imported.
LibraryState = tuple[Any, Any]


class _Stream(Protocol):
    def read(self) -> Any: ...

    def write(self, state: Any) -> None: ...


class _PythonStream:
    """The stream behind the functions of ``random``."""

    __slots__ = ("_generator", "_twister")

    def __init__(self, generator: random.Random) -> None:
        self._generator: Any = generator
        self._twister = _memory(id(generator) + object.__basicsize__, _TWISTER_SIZE)

    def read(self) -> Any:
        return self._twister.raw, self._generator.gauss_next

    def write(self, state: Any) -> None:
        self._twister.raw, self._generator.gauss_next = state


class _PublicPythonStream:
    """The same, by its public functions."""

    __slots__ = ("_generator",)

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def read(self) -> Any:
        return self._generator.getstate()

    def write(self, state: Any) -> None:
        self._generator.setstate(state)


def _python_layout_is_known() -> bool:
    trial = random.Random(5)
    trial.gauss(0, 1)
    position, *words = struct.unpack("=i624I", _PythonStream(trial).read()[0])
    return bool((*words, position) == trial.getstate()[1])


def _python_stream() -> _Stream:
    hidden = random.getstate.__self__  # type: ignore[attr-defined]
    exact = type(hidden) is random.Random and sys.implementation.name == "cpython"
    return (_PythonStream if exact and _python_layout_is_known() else _PublicPythonStream)(hidden)


class _NumpyStream:
    """The stream behind the functions of ``numpy.random``.

    Beside the twister it has the second of a pair of normal numbers, if the first has been drawn.
    """

    __slots__ = ("_gauss", "_owners", "_twister")

    def __init__(self, generator: Any, bits: Any, gauss_offset: int) -> None:
        self._owners = generator, bits  # of the memory
        self._twister = _memory(bits.ctypes.state_address, _TWISTER_SIZE)
        self._gauss = _memory(id(generator) + gauss_offset, _GAUSS.size)

    def read(self) -> Any:
        return self._twister.raw, self._gauss.raw

    def write(self, state: Any) -> None:
        self._twister.raw, self._gauss.raw = state


class _PublicNumpyStream:
    """The same, by its public functions."""

    __slots__ = ("_generator",)

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def read(self) -> Any:
        return self._generator.get_state(legacy=False)

    def write(self, state: Any) -> None:
        self._generator.set_state(state)


#: Whether there is a second normal number (an int, padded), and the number.
_GAUSS = struct.Struct("=iid")


def _gauss_offset(numpy_random: Any) -> int | None:
    """Where in a ``RandomState`` the second normal number is; None if that cannot be found out."""
    trial = numpy_random.RandomState(5)
    name, words, position, *_ = trial.get_state()
    size = type(trial).__basicsize__
    for candidate in range(object.__basicsize__, size - _GAUSS.size + 1, 8):
        found = []
        for has_gauss, gauss in ((0, 0.25), (1, -1.75)):
            trial.set_state((name, words, position, has_gauss, gauss))
            flag, _, number = _GAUSS.unpack(_memory(id(trial) + candidate, _GAUSS.size).raw)
            found.append((flag, number) == (has_gauss, gauss))
        if all(found):
            return candidate
    return None


def _make_numpy_stream(numpy_random: Any, bits: Any) -> _Stream:
    generator = numpy_random.get_state.__self__
    state = generator.get_state(legacy=False)
    if state["bit_generator"] != "MT19937" or type(generator) is not numpy_random.RandomState:
        return _PublicNumpyStream(generator)
    offset = _gauss_offset(numpy_random)
    if offset is None:
        return _PublicNumpyStream(generator)
    stream = _NumpyStream(generator, bits, offset)
    words = struct.unpack("=624Ii", stream.read()[0])
    expected = (*state["state"]["key"].tolist(), state["state"]["pos"])
    return stream if words == expected else _PublicNumpyStream(generator)


_python = _python_stream()


class _Numpy:
    """numpy's stream, found when numpy is there; again if the user exchanges its bit generator."""

    __slots__ = ("_bits", "_stream")

    def __init__(self) -> None:
        self._bits: Any = None
        self._stream: _Stream | None = None

    def __call__(self) -> _Stream | None:
        numpy_random: Any = _modules.get("numpy.random")
        if numpy_random is None:
            if "numpy" not in _modules:
                return None
            # Loaded, and seeded, at its first use: inside a region that would be too late.
            numpy_random = importlib.import_module("numpy.random")
        if not hasattr(numpy_random, "get_bit_generator"):
            importlib.import_module("numpy.random")  # waits for the thread that is importing it
        bits = numpy_random.get_bit_generator()
        if bits is not self._bits:
            self._bits, self._stream = bits, _make_numpy_stream(numpy_random, bits)
        return self._stream


_modules = sys.modules
_numpy_stream = _Numpy()


def is_library_stream(generator: Any) -> bool:
    """Whether ``generator`` is the one behind the functions of a library."""
    if isinstance(generator, random.Random):
        return generator is random.getstate.__self__  # type: ignore[attr-defined]
    numpy_random: Any = _modules.get("numpy.random")
    return numpy_random is not None and generator is numpy_random.get_state.__self__


def read_libraries() -> LibraryState:
    """Where the two streams stand."""
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
