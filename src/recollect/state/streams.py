"""All random streams that a region can draw from, put back for a rerun.

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
    Stream,
    is_library_stream,
    read_libraries,
    stream_of,
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
Streams = tuple[RngState, LibraryState | None, list[tuple[Stream, Any]]]


def read_streams(generators: Iterable[Any]) -> Streams:
    """The present states of all streams, those of ``generators`` too."""
    streams = [stream_of(each) for each in generators if not is_library_stream(each)]
    return read_rng(), read_libraries(), [(each, each.read()) for each in streams]


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
    """The present states of the streams in ``streams``."""
    defaults, libraries, generators = streams
    return (
        read_same_rng(defaults),
        None if libraries is None else read_libraries(),
        [(each, each.read()) for each, _ in generators],
    )


def write_streams(streams: Streams) -> None:
    """Put the streams back."""
    defaults, libraries, generators = streams
    write_rng(defaults)
    if libraries is not None:
        write_libraries(libraries)
    for stream, state in generators:
        stream.write(state)


def generator_types() -> tuple[type, ...]:
    """The types of random streams that are objects."""
    # numpy.random may be half there, while another thread imports it.
    numpy_random = sys.modules.get("numpy.random")
    generator = getattr(numpy_random, "Generator", None)
    return _types_with(generator, getattr(numpy_random, "RandomState", None))


@lru_cache
def _types_with(*more: type | None) -> tuple[type, ...]:
    return torch.Generator, random.Random, *(kind for kind in more if kind is not None)
