"""Tries schedules for a compiled step: compiles it, runs it, measures its peak and time (P5)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from recollect.checks.place import WarnOnce
from recollect.compiled.applied import Code, make_code
from recollect.compiled.decisions import CompiledStep, GraphDecision
from recollect.compiled.observe import ObservedStep, sizes_of
from recollect.compiled.sites import Called, installed, model_name
from recollect.compiled.tied import Unit, unit_of
from recollect.graph.graph import Graph, Schedule
from recollect.planning.progress import Progress
from recollect.planning.recording.model_state import ModelState
from recollect.planning.recording.step import TrainingStep
from recollect.planning.trial import Trials
from recollect.planning.ways import Bench, Peaks, Way, peaks_under


@dataclass(frozen=True, kw_only=True)
class _CompiledWay(Way):
    """The step with certain code in its compiled modules."""

    called: Called

    @contextmanager
    def applied(self, *_: Any) -> Iterator[None]:
        with installed(self.called):
            yield


class CompiledTrials(Trials):
    """The trials of one compiled step. Each compiles it once."""

    def __init__(
        self, step: TrainingStep, observed: ObservedStep, state: ModelState, progress: Progress
    ) -> None:
        super().__init__(Bench(step, observed.profile.made), observed.profile, state, progress)
        self.observed = observed
        self.plain_schedule = observed.torch_schedule
        #: By schedule that was tried: the code.
        self.code: dict[Schedule, Code] = {}

    @cached_property
    def graph(self) -> Graph:
        """The step."""
        return self.profile.graph

    @property
    def title(self) -> str:
        """What the model is called."""
        return f"compiled {model_name(self.step.model)}"

    def decisions(self, schedule: Schedule | None, target: int = 0) -> CompiledStep:
        """What a schedule decides for the graphs; None: everything as torch chooses."""
        observed = self.observed
        merged, sites = observed.merged, observed.site_of
        kept: dict[Unit, tuple[str, ...] | None] = {}
        for call in range(len(merged.parts)):
            names = None if schedule is None else merged.kept_in(call, schedule)
            unit = unit_of(merged, sites, call)
            kept.setdefault(unit, None if names is None else tuple(sorted(names)))
        variants = _variants(kept, len(observed.sites))
        sources = {call.graph.key: call.source for call in observed.calls if call.graph}
        sizes = {key: tuple(each.values()) for key, each in sizes_of(observed.calls).items()}
        away = () if schedule is None else merged.away(schedule)
        graphs = {
            GraphDecision(key, sources[key], names, variants[site], sizes[key], away): None
            for (site, key), names in kept.items()
        }
        return CompiledStep(
            graphs=tuple(graphs),
            sites=tuple((site.path, variants[n]) for n, site in enumerate(observed.sites)),
            backend=observed.sites[0].compiler.name,
            target=target,
            base=merged.graph.base,
            around=tuple(merged.around) if len(merged.parts) == 1 else (),
            returned=merged.parts[0].returned,
            forwards=observed.forwards,
            made=tuple(observed.calls[0].made) if len(merged.parts) == 1 else (),
        )

    # --- peaks ------------------------------------------------------------------------------------

    def _run(self, schedule: Schedule) -> tuple[Peaks, bool]:
        self._progress("compiling", 0.0)
        code = make_code(self.decisions(schedule), self.observed.sites)
        way = _CompiledWay(called=code.called)
        with self._plan_removed():  # the first step compiles
            peaks = peaks_under(way, self.step, WarnOnce(), self._trying, warm=1)
        self.code[schedule] = code
        return peaks, False

    def _way(self, schedule: Schedule | None) -> Way:
        plain = self.observed.called
        return _CompiledWay(called=plain if schedule is None else self.code[schedule].called)

    @contextmanager
    def _plan_removed(self) -> Iterator[None]:
        obstacle = self._difference()
        if obstacle is not None:
            raise ValueError(obstacle)
        yield  # whatever runs has code of its own


def _variants(kept: dict[tuple[int, str], tuple[str, ...] | None], count: int) -> list[int]:
    """By site: the number of its variant. Sites that decide the same have the same."""
    decided: list[dict[str, Any]] = [{} for _ in range(count)]
    for (site, key), names in kept.items():
        decided[site][key] = names
    found: list[dict[str, Any]] = []
    variants = []
    for own in decided:
        number = next((n for n, other in enumerate(found) if _agree(own, other)), len(found))
        if number == len(found):
            found.append({})
        found[number].update(own)
        variants.append(number)
    return variants


def _agree(own: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two sites decide the same where both decide."""
    return all(other[key] == names for key, names in own.items() if key in other)
