"""Running the step in one way or another, and measuring that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from recollect.modules import unwrap_module, wrap_module
from recollect.planning.blocks import unwrap_blocks, wrap_blocks
from recollect.planning.output import watch_output
from recollect.planning.runner import Told, run_planned
from recollect.planning.step import Step
from recollect.planning.timing import Timing, timing_of
from recollect.replay.engine import Witness
from recollect.replay.planned_ops import Decisions
from recollect.state.streams import read_streams, settle_streams, write_streams

__all__ = ["Peaks", "Way", "peaks_under", "times_under"]

#: How many steps are run to know a peak: one is recorded, one checked against that, one is known.
_STEPS = 3
#: Rounds of steps that are timed; and the seconds after which two have to do.
_LEAST, _MOST = 3, 8
_SECONDS = 6.0


@dataclass(frozen=True)
class Way:
    """How the step is run.

    Args:
        by: What the engine goes by; None: plain.
        blocks: Paths of modules that are checkpointed.
    """

    by: Decisions | None = None
    blocks: tuple[str, ...] = ()

    @contextmanager
    def taken(
        self,
        model: nn.Module,
        told: Told,
        note: Callable[[int], None] | None = None,
        witnesses: list[Witness] | None = None,
    ) -> Iterator[None]:
        """A context in which ``model`` is run so.

        ``note`` is given the bytes of its output that are there when backward reaches it;
        ``witnesses`` one for each call.
        """
        by = self.by
        if by is None:
            yield
            return

        def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
            witness = Witness()
            output = run_planned(function, args, kwargs, by, told, witness)
            if witnesses is not None:
                witness.recall = None  # which holds tensors: they would count in the next step
                witnesses.append(witness)
            if note is not None:
                watch_output(output, lambda alive, _: note(alive))
            return output

        wrap_module(model, run)
        try:
            wrap_blocks(model, self.blocks)
            yield
        finally:
            unwrap_blocks(model)
            unwrap_module(model)


@dataclass(frozen=True)
class Peaks:
    """The most bytes that steps allocated.

    Args:
        measured: What was measured.
        expected: With room for what may be more in others that are like them.
        output: Bytes of the model's output that were there when backward reached it; None if it did
            not.
        each: What was measured, step by step.
    """

    measured: int
    expected: int
    output: int | None
    each: tuple[int, ...] = ()


def peaks_under(
    way: Way,
    step: Step,
    told: Told,
    progress: Callable[[float], None],
    witnesses: list[Witness] | None = None,
) -> Peaks:
    """What steps allocate that are run in a way."""
    measured, spare = [], []
    output: list[int] = []
    with step.undone(), way.taken(step.model, told, output.append, witnesses):
        for number in range(_STEPS):
            progress(number / _STEPS)
            measured.append(step.measured_peak())
            spare.append(step.spare_blocks())
    expected = max(map(sum, zip(measured, spare, strict=True)))
    return Peaks(max(measured), expected, max(output, default=None), tuple(measured))


def times_under(ways: Sequence[Way], step: Step, told: Told, warm: int = 1) -> list[Timing]:
    """What a step takes in each of several ways.

    They take turns, so that what slows the machine down for a while slows all of them down. Before
    that, ``warm`` steps are run in each. All draw the same random numbers: what forward does may be
    up to chance.
    """
    samples: list[list[float]] = [[] for _ in ways]
    with step.undone():
        streams = read_streams(())
        for way in ways:
            with way.taken(step.model, told):
                for _ in range(warm):
                    write_streams(settle_streams(streams))
                    step.run()
        while True:
            for way, found in zip(ways, samples, strict=True):
                with way.taken(step.model, told):
                    write_streams(settle_streams(streams))
                    found.append(step.seconds())
            timings = [timing_of(found, long=True) for found in samples]
            if _is_enough(len(samples[0]), sum(map(sum, samples)), timings):
                return timings


def _is_enough(rounds: int, seconds: float, timings: Sequence[Timing]) -> bool:
    if rounds < _LEAST:
        return rounds > 1 and seconds > _SECONDS
    return rounds >= _MOST or seconds > _SECONDS or all(t.is_steady for t in timings)
