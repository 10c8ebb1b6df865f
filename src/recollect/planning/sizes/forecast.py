"""A training step at several sizes: recorded, or predicted from recordings at others (P1).

If the recordings are of the same step (`growth`), its graph at another size is known. Schedules
that were solved for one size are simulated at others, which takes a fraction of the time of
solving. If not, peaks are taken to lie on a line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch

from recollect.graph.graph import Graph, Schedule
from recollect.graph.growth import Growth
from recollect.graph.simulate import Outcome, simulate, simulate_plain
from recollect.planning.planner import Planner, Record
from recollect.planning.prepare import Request, prepare_step
from recollect.planning.progress import Progress
from recollect.planning.recording.batch import check_batch, split_batch, tensors_of_batch
from recollect.planning.recording.model_state import check_model
from recollect.planning.recording.record import Profile, record_step, simulated_profile
from recollect.planning.recording.step import refusal_of
from recollect.planning.solving.solve import Solver
from recollect.report.units import bytes_text
from recollect.state.rng import read_streams, settle_streams, write_streams

#: How many schedules of a solved size are simulated at others.
_SCHEDULES = 24


class SizedSteps:
    """The training steps of a model with batches of several sizes.

    Holds no batch: on a device one would count in the peak of all other sizes. The ``request`` has
    none either: ``make_batch`` makes that of a size.
    """

    def __init__(
        self, request: Request, make_batch: Callable[[int], Any], progress: Progress
    ) -> None:
        if not callable(make_batch):
            raise TypeError(
                "make_batch should be a function of a size that returns a batch of that size, such "
                f"as lambda n: torch.randn(n, 64), but got {type(make_batch).__name__}"
            )
        if fault := refusal_of(make_batch, (1,), {}):
            raise TypeError(
                f"make_batch should be a function of a size, such as lambda n: torch.randn(n, 64), "
                f"but does not take make_batch(1): {fault}"
            )
        self.model = request.model
        check_model(self.model)
        self._request = request
        self._make_batch = make_batch
        self._progress = progress
        #: By size: the bytes of the tensors in its batch.
        self._nbytes: dict[int, int] = {}

    def planner(self, size: int, record: Record = record_step) -> Planner:
        """A planner for the step at a size, which is recorded by ``record``."""

        def progress(what: str, done: float) -> None:
            self._progress(f"size {size}: {what}", done)

        request = replace(self._request, batch=self._batch(size))
        return Planner.of(request, progress, record=record)

    def plain_seconds(self, size: int) -> float:
        """Time the plain step at a size."""
        self._progress(f"size {size}: timing the plain step", 0.0)
        step = prepare_step(replace(self._request, batch=self._batch(size)))
        with step.undone():
            step.run()
            return step.measured_seconds().seconds

    def _batch(self, size: int) -> Any:
        streams = read_streams(())
        try:
            with torch.inference_mode(False):  # as the step runs: else autograd cannot save it
                batch = self._make_batch(size)
        finally:
            write_streams(settle_streams(streams))
        check_batch(batch, self.model)
        tensors = tensors_of_batch(*split_batch(batch, self.model))
        if not tensors:
            raise TypeError(
                f"make_batch should return a batch of the size that it is given, with tensors in "
                f"it, but make_batch({size}) returned {type(batch).__name__} without one. Return "
                "what the model is called with, such as lambda n: torch.randn(n, 64)"
            )
        self._nbytes[size] = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
        self._check_growth()
        return batch

    def _check_growth(self) -> None:
        """Refuse batches that do not grow with their size: all sizes would seem to fit."""
        sizes = sorted(self._nbytes)
        for smaller, larger in pairwise(sizes):
            if self._nbytes[larger] <= self._nbytes[smaller]:
                raise ValueError(
                    f"make_batch: the tensors of make_batch({larger}) have "
                    f"{bytes_text(self._nbytes[larger])}, and those of make_batch({smaller}) "
                    f"{bytes_text(self._nbytes[smaller])}: batches should grow with their size, as "
                    "by lambda n: torch.randn(n, 64). If it rounds sizes up, as to a multiple of "
                    "8, say so: multiple_of=8"
                )


# --- sizes that were not recorded -----------------------------------------------------------------


@dataclass(frozen=True)
class PredictedStep:
    """A step that was not run, under a plan."""

    peak: int
    seconds: float | None


class GraphForecast:
    """Predicts steps by their graph at each size. All peaks are in bytes.

    ``profiles``: the recordings, by size; those of ``growth.sizes`` at least.
    """

    def __init__(
        self, growth: Growth, profiles: Mapping[int, Profile], *, offload: bool, progress: Progress
    ) -> None:
        self.growth = growth
        self._profiles = [profiles[size] for (size,) in growth.sizes]
        self._offload = offload
        self._progress = progress
        self._solvers: dict[int, Solver] = {}
        #: Schedules, each with the size that it was solved for.
        self._known: dict[Schedule, int] = {}
        last = self._profiles[-1]
        self._plain_excess = max(1.0, last.plain_peak / simulate_plain(last.graph).peak)
        self.graph_at = cache(self._graph_at)
        self._outcomes_at = cache(self._simulated)

    def _graph_at(self, size: int) -> Graph:
        return self.growth.graph_at((size,))

    def profile_at(self, size: int) -> Profile:
        """The profile of the step at a size, as if it had been recorded."""
        number, last = self.growth.number_at((size,)), self._profiles[-1]
        made = {
            path: number(*(profile.made.get(path, 0) for profile in self._profiles))
            for path in last.made
        }
        graph = self.graph_at(size)
        profile = simulated_profile(graph, made, last.stopped, can_run=last.can_run)
        return replace(profile, plain_peak=self.plain_peak(size))

    def plain_peak(self, size: int) -> int:
        """The peak without a plan."""
        return int(simulate_plain(self.graph_at(size)).peak * self._plain_excess)

    def least(self, size: int) -> int:
        """The least peak of any plan."""
        return min(outcome.peak for outcome in self._outcomes(size))

    def fastest(self, size: int, budget: int) -> PredictedStep | None:
        """The fastest plan within a budget; None if there is none."""
        found = [each for each in self._outcomes(size) if each.peak <= budget]
        best = min(found, key=lambda each: each.seconds, default=None)
        return None if best is None else PredictedStep(best.peak, best.seconds)

    # --- schedules --------------------------------------------------------------------------------

    def solver(self, size: int) -> Solver:
        """The solver for a size. What it finds is tried for others too."""
        if size not in self._solvers:
            progress = partial(self._progress, f"size {size}: solving")
            solver = Solver(self.graph_at(size), offload=self._offload, progress=progress)
            self._solvers[size] = solver
            frontier = solver.frontier()
            stride = max(1, (len(frontier) - 1) // _SCHEDULES)
            for each in (*frontier[::stride], frontier[-1]):
                self._known.setdefault(each.schedule, size)
        return self._solvers[size]

    def is_solved(self, size: int) -> bool:
        """Whether the solver was run for a size."""
        return size in self._solvers

    def _outcomes(self, size: int) -> tuple[Outcome, ...]:
        if not self._known:
            self.solver(self.growth.sizes[-1][0])
        found = self._outcomes_at(size, len(self._known))
        if size in self._solvers:
            found += tuple(each.outcome for each in self._solvers[size].frontier())
        return found

    def _simulated(self, size: int, _known: int) -> tuple[Outcome, ...]:
        """``_known``: how many schedules there are to simulate, for the cache."""
        graph = self.graph_at(size)
        return tuple(
            simulate(graph, _resized(schedule, size / solved))
            for schedule, solved in self._known.items()
        )


def _resized(schedule: Schedule, times: float) -> Schedule:
    """The same decisions for a step that is ``times`` as large."""
    if not schedule.offloaded:
        return schedule
    ahead = None if schedule.ahead is None else int(schedule.ahead * times)
    return replace(schedule, limit=int(schedule.limit * times), ahead=ahead)


@dataclass
class TrendForecast:
    """The same by lines through what was measured."""

    base: int  #: what is allocated throughout: the peak at size 0
    plain_peaks: Mapping[int, int]  #: by size: the peak without a plan
    leasts: Mapping[int, int]  #: by size: the least peak of a plan

    def plain_peak(self, size: int) -> int:
        """The peak without a plan."""
        return self._on_line(self.plain_peaks, size)

    def least(self, size: int) -> int:
        """The least peak of any plan."""
        return self._on_line(self.leasts or self.plain_peaks, size)

    def fastest(self, size: int, budget: int) -> PredictedStep | None:
        """The plan of the least peak, if that is within a budget."""
        peak = self.least(size)
        return PredictedStep(peak, None) if peak <= budget else None

    def _on_line(self, known: Mapping[int, int], size: int) -> int:
        """The number at ``size`` on the line through the last two that are known."""
        (before, small), (last, large) = [(0, self.base), *sorted(known.items())][-2:]
        return large + max(0, -(-(large - small) * (size - last) // (last - before)))


Forecast = GraphForecast | TrendForecast


def forecast_of(
    profiles: Mapping[int, Profile], leasts: Mapping[int, int], *, offload: bool, progress: Progress
) -> Forecast:
    """The best forecast that recordings allow. ``leasts``: least peaks, by size, if measured."""
    growth = Growth.of(((size,), profile.graph) for size, profile in profiles.items())
    if growth is not None:
        return GraphForecast(growth, profiles, offload=offload, progress=progress)
    base = min(profile.graph.base for profile in profiles.values())
    return TrendForecast(base, {size: each.plain_peak for size, each in profiles.items()}, leasts)


def find_largest(fits: Callable[[int], bool], low: int, high: int, unit: int) -> int:
    """The largest multiple of ``unit`` between ``low`` and ``high`` that ``fits``; ``low`` if none.

    ``low`` fits and ``high`` does not, whatever ``fits`` says of them. Both are multiples.
    """
    stride = unit
    while low + stride < high and fits(low + stride):
        low += stride
        stride *= 2
    high = min(high, low + stride)
    while high - low > unit:
        middle = low + (high - low) // (2 * unit) * unit
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
