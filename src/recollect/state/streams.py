"""All random streams that a region can draw from, and standing there again for a rerun.

The default generators of torch, the streams of ``random`` and ``numpy.random``, and generators that
are objects, where the function keeps them or is given them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from recollect.state.libraries import (
    LibraryState,
    is_library_stream,
    read_libraries,
    write_libraries,
)
from recollect.state.rng import (
    HAS_ACCELERATOR,
    RngState,
    read_rng,
    read_same_rng,
    settle_rng,
    write_rng,
)

__all__ = [
    "Streams",
    "generator_types",
    "read_same_streams",
    "read_streams",
    "settle_streams",
    "write_streams",
]

#: torch's default generators, the two libraries if they matter, each generator that is an object.
Streams = tuple[RngState, LibraryState | None, list[tuple[Any, Any]]]


def read_streams(generators: Iterable[Any]) -> Streams:
    """Where the streams stand now, those of ``generators`` too."""
    objects = [(g, _read_generator(g)) for g in generators if not is_library_stream(g)]
    return read_rng(), read_libraries(), objects


def settle_streams(streams: Streams) -> Streams:
    """``streams``, read before a region, with what only its end can tell.

    A region that leaves the streams of the libraries alone does not need them put back, and others
    may be drawing from them when it is rerun: a thread that loads data.
    """
    defaults, libraries, generators = streams
    if HAS_ACCELERATOR:
        defaults = settle_rng(defaults)
    return defaults, None if libraries == read_libraries() else libraries, generators


def read_same_streams(streams: Streams) -> Streams:
    """Where the streams that ``streams`` is about stand now."""
    defaults, libraries, generators = streams
    return (
        read_same_rng(defaults),
        None if libraries is None else read_libraries(),
        [(g, _read_generator(g)) for g, _ in generators],
    )


def write_streams(streams: Streams) -> None:
    """Put the streams back."""
    defaults, libraries, generators = streams
    write_rng(defaults)
    if libraries is not None:
        write_libraries(libraries)
    for generator, state in generators:
        _write_generator(generator, state)


def generator_types() -> tuple[type, ...]:
    """The types of random streams that are objects."""
    # Which may be half there, while another thread imports it.
    numpy_random = sys.modules.get("numpy.random")
    generator = getattr(numpy_random, "Generator", None)
    return _types_with(generator, getattr(numpy_random, "RandomState", None))


@lru_cache
def _types_with(*more: type | None) -> tuple[type, ...]:
    return torch.Generator, random.Random, *(kind for kind in more if kind is not None)


def _read_generator(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.SystemRandom):  # the system's, which has no state
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)  # of a numpy Generator
    return generator.get_state(legacy=False) if bits is None else bits.state


def _write_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.SystemRandom):
        return
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif (bits := getattr(generator, "bit_generator", None)) is not None:
        bits.state = state
    else:
        generator.set_state(state)
