"""Runs a compiled model by the decisions of a plan (P7), and graphs that it has none for (P8)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recollect._torch.inductor import (
    break_when_traced,
    is_compiled_in_place,
)
from recollect.checks.place import warn_user
from recollect.compiled.backend import Backend, Compiler, Notes
from recollect.compiled.decisions import CompiledStep
from recollect.compiled.joint import Joint
from recollect.compiled.merge import NOTHING_AROUND, merge_alone
from recollect.compiled.part import NodeCosts, make_part
from recollect.compiled.sites import Called, Site, called_now, find_sites, install, prepare
from recollect.compiled.split import PlannedSplit
from recollect.compiled.watch import Watch
from recollect.errors import PlanWarning
from recollect.graph.graph import Schedule
from recollect.planning.budget import IF_SHAPES_VARY
from recollect.planning.recording.step import device_of
from recollect.planning.solving.solve import Solver
from recollect.report.units import bytes_text

_log = logging.getLogger("recollect")


class Installed:
    """Marks a compiled model that runs code of ours, as `Runner` marks others."""

    #: The plan that is in effect; None if there is none yet.
    plan: Any = None

    def __init__(self, model: nn.Module) -> None:
        self.sites: Sequence[Site] = find_sites(model)
        self._before = called_now(self.sites)
        self._breaks = [break_when_traced(site.module) for site in self.sites]

    def unwrapped(self, _model: nn.Module) -> None:
        """The model runs as it did before."""
        install(self._before)
        for end in self._breaks:
            end()

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the model is no part of this."""
        self.warn_of_copy()

    def __reduce__(self) -> Any:
        self.warn_of_copy()
        return type(None), ()

    def warn_of_copy(self) -> None:
        """The model is copied: warn if the copy will have no plan."""
        raise NotImplementedError


class Applied(Installed):
    """A plan that is in effect in a compiled model."""

    def __init__(self, plan: Any, model: nn.Module) -> None:
        step: CompiledStep = plan.compiled
        _check_sites(step, find_sites(model))
        super().__init__(model)
        self.plan = plan
        code: Code | None = step.code
        if code is None or [*code.called] != [site.module for site in self.sites]:
            code = make_code(step, self.sites)
        fused = self.sites[0].compiler.is_fused
        for split in code.splits:
            split.decide = _Unplanned(step, plan.budget, device_of(model), fused)
        self.code = code
        self._watch = Watch(plan, model, self.sites, code.notes, step.forwards)
        install(self._watch.watched(code.called))

    def unwrapped(self, model: nn.Module) -> None:
        """The model runs as it did before."""
        self._watch.end()
        super().unwrapped(model)

    def warn_of_copy(self) -> None:
        """Warn if the copy will have no plan."""
        if any(is_compiled_in_place(site.module) for site in self.sites):
            warn_user(
                "a model with a plan is copied or pickled, and compiled by module.compile(), which "
                "torch drops: the copy is not compiled, and has no plan. If it is to be trained: "
                "copy.compile(), then plan.apply(copy)",
                PlanWarning,
            )


@dataclass(frozen=True)
class Code:
    """Compiled code for the modules of a model."""

    called: Called
    splits: Sequence[PlannedSplit]
    notes: Notes


def make_code(step: CompiledStep, sites: Sequence[Site]) -> Code:
    """The code of modules that run by decisions. It is compiled when they are called."""
    notes, splits = Notes(), list[PlannedSplit]()
    sizes = {each.source: each.sizes for each in step.graphs}
    variants = dict(step.sites)

    def backend(compiler: Compiler, variant: int) -> Backend:
        decisions = {each.key: each for each in step.graphs if each.variant == variant}
        uuid = f"{step.uuid}-{variant}"
        splits.append(PlannedSplit(decisions, sizes, uuid, fused=compiler.is_fused))
        return Backend(compiler, splits[-1], notes, _warn_of_larger)

    called = prepare(sites, backend, [variants[site.path] for site in sites])
    return Code(called, splits, notes)


def _warn_of_larger() -> None:
    warn_user(
        "compiled code with dynamic shapes runs on larger ones than it was split for, and the step "
        "may exceed its budget. Compile with dynamic=False, or plan for the largest "
        "batch: recollect.plan(model, batch, budget)",
        PlanWarning,
    )


def _check_sites(step: CompiledStep, sites: Sequence[Site]) -> None:
    planned, found = [path for path, _ in step.sites], [site.path for site in sites]
    if planned != found:
        raise ValueError(
            f"model: this plan is for a model whose compiled modules are {_listed(planned)}, and "
            f"here they are {_listed(found)}. Compile the same ones, or make a plan for it: "
            "recollect.plan(model, batch, budget)"
        )
    names = {site.compiler.name for site in sites}
    if names != {step.backend}:
        raise ValueError(
            f"model: this plan is for backend={step.backend!r}, and the model is compiled with "
            f"{_listed(sorted(names))}. Make a plan for it: recollect.plan(model, batch, budget)"
        )
    if step.offloads and any(site.compiler.uses_cuda_graphs for site in sites):
        raise ValueError(
            "model: this plan offloads, and the model is compiled with CUDA graphs "
            "(mode='reduce-overhead' or 'max-autotune'), which cannot. Make a plan for it: "
            "recollect.plan(model, batch, budget)"
        )


def _listed(paths: Sequence[str]) -> str:
    shown = [repr(path) if path else "the model itself" for path in paths[:3]]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return (", ".join(shown) or "none") + more


class _Unplanned:
    """Decides for graphs that were not planned: another shape, eval mode, another dtype."""

    def __init__(self, step: CompiledStep, budget: int, device: torch.device, fused: bool) -> None:
        self._step, self._budget = step, budget
        self._device, self._fused = device, fused

    def __call__(self, key: str, joint: Joint) -> Collection[str]:
        part = make_part(key, joint, NodeCosts(self._device), fused=self._fused)
        alone = len(self._step.around) == len(NOTHING_AROUND)
        around = self._around(part.returned) if alone else NOTHING_AROUND
        merged = merge_alone(part, self._step.base, around, self._step.made)
        solver = Solver(merged.graph, rough=True)
        target = int(self._step.target * IF_SHAPES_VARY)
        solution = solver.solve(target) if alone else None
        if solution is None:
            solution = solver.least_solution()
            self._warn(solution.outcome.peak, target, alone=alone)
        else:
            _log.info("recollect: a graph that was not planned is split for the same budget")
        return merged.kept_in(0, Schedule(solution.schedule.kept))

    def _around(self, returned: int) -> Sequence[tuple[int, int]]:
        """What is around a graph: the loss takes more if forward returns more."""
        more = max(1.0, returned / self._step.returned) if self._step.returned else 1.0
        *others, last = self._step.around
        larger = [(int(max(h, h * more)), int(max(m, m * more))) for h, m in others]
        return [*larger, last]

    def _warn(self, peak: int, target: int, *, alone: bool) -> None:
        if alone:
            which = (
                f"its step takes about {bytes_text(peak)} with as little saved as possible, and "
                f"the budget of {bytes_text(self._budget)} leaves {bytes_text(target)} for a step "
                "that is not measured"
            )
        else:
            which = (
                "as little of it is saved as possible, and whether the step exceeds its budget "
                "depends on the other graphs"
            )
        warn_user(
            f"the compiler has made a graph that was not planned (another shape, mode or dtype): "
            f"{which}. Make a plan for such steps: recollect.plan(model, batch, budget)",
            PlanWarning,
        )
