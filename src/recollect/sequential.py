"""Sequential models in segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from recollect.options import Options
from recollect.region import run_region

__all__ = ["balanced", "run_segments", "steps_of"]

Function = Callable[[Any], Any]


def steps_of(functions: Any, segments: int) -> list[Function]:
    """The functions of a ``Sequential`` or an iterable, which are to be cut into ``segments``."""
    steps = _checked_functions(functions)
    if not 1 <= segments <= len(steps):
        raise ValueError(
            f"segments should be between 1 and the number of functions, {len(steps)}, but got "
            f"{segments}"
        )
    return steps


def _checked_functions(functions: Any) -> list[Function]:
    if isinstance(functions, nn.Sequential):
        return list(functions.children())
    if not isinstance(functions, Iterable):
        raise TypeError(
            "functions should be an nn.Sequential or a list of modules or functions, but got "
            f"{functions!r}"
        )
    steps = list(functions)
    for position, step in enumerate(steps):
        if not callable(step):
            raise TypeError(f"functions[{position}] should be callable, but got {step!r}")
    return steps


def balanced(count: int, segments: int) -> list[int]:
    """The boundaries that cut ``count`` steps into parts whose lengths differ by at most one."""
    short, longer = divmod(count, segments)
    lengths = (short + (part < longer) for part in range(segments))
    return list(accumulate(lengths, initial=0))


def run_segments(
    steps: list[Function],
    boundaries: list[int],
    input: Any,
    options: Options,
    *,
    read_once: bool = False,
) -> Any:
    """Run ``steps``, each segment but the last one checkpointed."""
    *checkpointed, last = pairwise(boundaries)
    for start, end in checkpointed:
        chain = _chain(steps[start:end])
        input = run_region(chain, (input,), {}, options, read_once=read_once)
    return _chain(steps[slice(*last)])(input)


def _chain(steps: list[Function]) -> Function:
    def run(value: Any) -> Any:
        for step in steps:
            value = step(value)
        return value

    return run
