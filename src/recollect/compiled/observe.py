"""Runs a compiled step with the split that torch chooses, and makes its graph (P2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from torch import fx

from recollect._torch.inductor import assumed
from recollect.compiled.backend import Backend, Call, Compiler, Notes
from recollect.compiled.joint import nbytes_of
from recollect.compiled.merge import Merged, merge, saved_schedule
from recollect.compiled.part import NodeCosts, Part, make_part
from recollect.compiled.sites import Called, Site, installed, model_name, prepare, wrapped
from recollect.compiled.split import ObservingSplit, SeenGraph
from recollect.compiled.timeline import Timeline, measured_timeline
from recollect.graph.graph import Graph, Link, Schedule
from recollect.planning.distributed import compiled_collectives_refused
from recollect.planning.recording.record import Profile
from recollect.planning.recording.step import TrainingStep


@dataclass(frozen=True)
class ObservedStep:
    """A step that ran with the split that torch chooses."""

    sites: Sequence[Site]  #: the compiled modules
    called: Called  #: what they call to run so again
    calls: Sequence[Call]  #: the calls of graphs that have a backward, in the order of forward
    merged: Merged  #: the step as a graph
    torch_schedule: Schedule  #: what torch keeps in it
    profile: Profile  #: the graph with what was measured
    forwards: int = 1  #: how often it calls the first compiled module

    @property
    def site_of(self) -> list[int]:
        """By call: the number of its compiled module."""
        return [call.site for call in self.calls]


def observe_step(
    step: TrainingStep, sites: Sequence[Site], link: Link | None = None
) -> ObservedStep:
    """Run the step, measure it, and make its graph. ``link``: that to the host."""
    notes = Notes()
    called = prepare(sites, lambda compiler, _: Backend(compiler, ObservingSplit(), notes))
    with step.undone(), installed(wrapped(called, notes.begun)):
        with compiled_collectives_refused():
            step.run()  # compiles
        notes.clear()
        step.run()
        calls, forwards, ran = notes.observed(), notes.forwards, len(notes.calls or ())
        _check_calls(step, calls)
        timeline = measured_timeline(step.run, step.device)
        peak = step.measured_peak()
        expected = peak + step.spare_blocks()
        notes.spans = [] if step.on_cuda else None
        timing = step.measured_seconds()
        spans, notes.spans = notes.spans, None
        base = step.base_bytes()
        notes.clear()
    merged = merged_calls(calls, sites, timeline, base, NodeCosts(step.device))
    graph = replace(merged.graph, link=link)
    profile = Profile(graph, {}, None, expected, timing.seconds, True, timing, peak, graph)
    graph = profile.timed(timing.seconds)
    if spans:
        times = [start.elapsed_time(end) / 1000 for start, end in spans]
        forward = median(sum(times[n : n + ran]) for n in range(0, len(times), ran))
        graph = with_forward_of(graph, forward)
    profile = replace(profile, graph=graph)
    merged = replace(merged, graph=profile.graph)
    torchs = saved_schedule(merged, saves_of(calls, lambda graph: graph.torch_saves))
    return ObservedStep(sites, called, calls, merged, torchs, profile, forwards)


def with_forward_of(graph: Graph, seconds: float) -> Graph:
    """The same step with a forward that takes so long, and a backward that takes the rest.

    How much can be copied beside forward depends on it. The times of single kernels add up to
    something else, as those of fused loops are estimated.
    """
    turn, total = graph.turn, graph.plain_seconds
    before = sum(event.seconds for event in graph.events[:turn])
    if not before < total or not 0 < seconds < total:
        return graph
    forward, backward = seconds / before, (total - seconds) / (total - before)
    return replace(
        graph,
        events=[
            replace(event, seconds=event.seconds * (forward if n < turn else backward))
            for n, event in enumerate(graph.events)
        ],
        ops=[replace(op, seconds=op.seconds * forward) for op in graph.ops],
    )


def merged_calls(
    calls: Sequence[Call],
    sites: Sequence[Site],
    timeline: Timeline | None,
    base: int,
    costs: NodeCosts,
) -> Merged:
    """The graph of a step. ``calls``: all those of graphs that have a backward."""
    parts = _parts(calls, costs, [sites[call.site].compiler for call in calls])
    stretches = None if timeline is None else timeline.stretches
    saves = saves_of(calls, lambda graph: graph.saved)
    merged = merge(parts, calls, stretches, saves, base)
    costs.finish()
    return replace(merged, graph=replace(merged.graph, spread=costs.spread))


def sizes_of(calls: Sequence[Call]) -> dict[str, dict[Any, int]]:
    """By key of a graph: its dynamic sizes, the largest of all calls."""
    found: dict[str, dict[Any, int]] = {}
    for call in calls:
        if call.graph is not None:
            sizes = found.setdefault(call.graph.key, {})
            sizes.update({each: max(n, sizes.get(each, 0)) for each, n in call.sizes.items()})
    return found


def saves_of(
    calls: Sequence[Call], nodes: Callable[[SeenGraph], Sequence[fx.Node]]
) -> list[dict[str, int]]:
    """By call: the bytes of results that it saves, by name. ``nodes``: those of a graph."""
    sizes, found = sizes_of(calls), []
    for call in calls:
        if call.graph is not None:
            with assumed(sizes[call.graph.key]):
                found.append({node.name: nbytes_of(node) for node in nodes(call.graph)})
    return found


def _parts(calls: Sequence[Call], costs: NodeCosts, compilers: Sequence[Compiler]) -> list[Part]:
    """By call: what it adds to the step. Calls of one graph share it."""
    known: dict[str, Part] = {}
    for key, sizes in sizes_of(calls).items():
        graph, fused = next(
            (call.graph, compiler.is_fused)
            for call, compiler in zip(calls, compilers, strict=True)
            if call.graph is not None and call.graph.key == key
        )
        with assumed(sizes):
            known[key] = make_part(key, graph.joint, costs, fused=fused)
    return [known[call.graph.key] for call in calls if call.graph is not None]


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
