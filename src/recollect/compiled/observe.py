"""Runs a compiled step with the split that torch chooses, and makes its graph (P2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from recollect._torch.inductor import called_around
from recollect.compiled.backend import Backend, Call, Compiler, Notes
from recollect.compiled.costs import NodeCosts
from recollect.compiled.merge import Merged, merge, saved_schedule
from recollect.compiled.part import Part, make_part
from recollect.compiled.sites import Called, Site, installed, model_name, prepare
from recollect.compiled.split import Observer, SeenGraph
from recollect.compiled.timeline import Timeline, measured_timeline
from recollect.graph.schedule import Schedule
from recollect.planning.distributed import compiled_collectives_refused
from recollect.planning.recording.record import Profile
from recollect.planning.recording.step import TrainingStep


@dataclass(frozen=True)
class ObservedStep:
    """A step that ran with the split that torch chooses.

    Args:
        sites: The compiled modules.
        called: What they call to run so again.
        calls: The calls of graphs that have a backward, in the order of forward.
        merged: The step as a graph.
        torch_schedule: What torch keeps in it.
        profile: The graph with what was measured.
        forwards: How often it calls the first compiled module.
    """

    sites: Sequence[Site]
    called: Called
    calls: Sequence[Call]
    merged: Merged
    torch_schedule: Schedule
    profile: Profile
    forwards: int = 1

    @property
    def site_of(self) -> list[int]:
        """By call: the number of its compiled module."""
        return [call.site for call in self.calls]


def observe_step(step: TrainingStep, sites: Sequence[Site]) -> ObservedStep:
    """Run the step, measure it, and make its graph."""
    notes = Notes()
    backends: list[Backend] = []

    def backend_for(number: int) -> Backend:
        compiler = sites[number].compiler
        for backend in backends:
            if backend.compiler == compiler:
                return backend
        backends.append(Backend(compiler, Observer(), notes=notes))
        return backends[-1]

    called = prepare(sites, backend_for)
    noting = {
        number: called_around(each, partial(_noting, notes, number))
        for number, each in called.items()
    }
    with step.undone(), installed(sites, noting):
        with compiled_collectives_refused():
            step.run()  # compiles
        notes.clear()
        step.run()
        calls, forwards = [call for call in notes.calls if call.graph is not None], notes.forwards
        _check_calls(step, calls)
        timeline = measured_timeline(step.run, step.device)
        peak = step.measured_peak()
        expected = peak + step.spare_blocks()
        timing = step.measured_seconds()
        base = step.base_bytes()
        notes.clear()
    merged = merged_calls(calls, sites, timeline, base, NodeCosts(step.device))
    graph = merged.graph
    profile = Profile(graph, {}, None, expected, timing.seconds, True, timing, peak, graph)
    profile = replace(profile, graph=profile.timed(timing.seconds))
    merged = replace(merged, graph=profile.graph)
    saves = [call.graph.torch_saves for call in calls if call.graph is not None]
    torchs = saved_schedule(merged, saves)
    return ObservedStep(sites, called, calls, merged, torchs, profile, forwards)


def merged_calls(
    calls: Sequence[Call],
    sites: Sequence[Site],
    timeline: Timeline | None,
    base: int,
    costs: NodeCosts,
) -> Merged:
    """The graph of a step. ``calls``: all those of graphs that have a backward."""
    graphs = [call.graph for call in calls if call.graph is not None]
    parts = _parts(graphs, costs, [sites[call.site].compiler for call in calls])
    stretches = None if timeline is None else timeline.stretches
    merged = merge(parts, calls, stretches, [graph.saved for graph in graphs], base)
    costs.settle()
    return replace(merged, graph=replace(merged.graph, spread=costs.spread))


def _noting(notes: Notes, number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        notes.begin(number)
        return function(*args, **kwargs)

    return noting


def _parts(
    graphs: Sequence[SeenGraph], costs: NodeCosts, compilers: Sequence[Compiler]
) -> list[Part]:
    """By call: what it adds to the step. Calls of one graph share it."""
    known: dict[str, Part] = {}
    for graph, compiler in zip(graphs, compilers, strict=True):
        if graph.key not in known:
            known[graph.key] = make_part(graph.key, graph.joint, costs, fused=compiler.is_fused)
    return [known[graph.key] for graph in graphs]


def _check_calls(step: TrainingStep, calls: Sequence[Call]) -> None:
    """Refuse a step in which no compiled graph has a backward."""
    if not calls:
        raise ValueError(
            f"model: this {model_name(step.model)} is compiled, but no compiled graph of its "
            "step has a backward. Perhaps the compiler is switched off (torch.compiler.set_stance, "
            "TORCHDYNAMO_DISABLE), or has left forward as it is, as for a graph break in a loop "
            "(TORCH_LOGS=graph_breaks shows it). Plan for the model that was compiled, or compile "
            "parts of it: block.compile()"
        )
