"""What the engine itself costs, measured: for each step, and for each op that runs again.

A step is timed in three ways that take turns: plain; by a plan that keeps everything, which is
plain and what the engine does in forward; and by one that runs many ops again. What the last takes
beyond the second and the ops themselves is what running them costs.
"""

from __future__ import annotations

from dataclasses import replace

from recollect.graph.graph import Graph
from recollect.graph.simulate import Schedule, simulate
from recollect.planning.choices import Choices, trimmed
from recollect.planning.profile import Profile
from recollect.planning.runner import Told
from recollect.planning.step import Step
from recollect.planning.timing import Timing
from recollect.planning.trial import Way, times_under
from recollect.policy.op_sets import ATTENTION, MATMULS

__all__ = ["with_overhead"]

#: If the engine took so many seconds for each op, and that were no more than this part of the step,
#: it is not worth being measured.
_PER_OP = 50e-6
_LITTLE = 0.03


def with_overhead(profile: Profile, step: Step, told: Told) -> Profile:
    """The profile with the costs of the engine in its graph."""
    graph = profile.graph
    if _PER_OP * len(graph.moments) < _LITTLE * profile.seconds or not graph.choices:
        return profile
    everything = Schedule(frozenset(graph.choices))
    again = _that_runs_again(graph)
    ways = [Way(), *(Way(Choices.of(graph, each).decisions()) for each in (everything, again))]
    plain, kept, rerun = times_under(ways, step, told, warm=2)
    if profile.timing is None or plain.seconds <= profile.seconds:  # which was less disturbed
        profile = replace(
            profile, graph=profile.timed(plain.seconds), seconds=plain.seconds, timing=plain
        )
    return replace(profile, graph=_priced(profile.graph, again, plain, kept, rerun))


def _that_runs_again(graph: Graph) -> Schedule:
    """A schedule as plans are: what is dear is kept, the rest runs again."""
    dear = {n for n in graph.choices if graph.ops[n].name in MATMULS | ATTENTION}
    schedule = trimmed(graph, Schedule(frozenset(dear)))
    plain = Schedule(frozenset(graph.choices))
    if dear and simulate(graph, schedule).peak <= simulate(graph, plain).peak:
        return schedule
    return trimmed(graph, Schedule(frozenset(graph.choices[::2])))


def _priced(graph: Graph, again: Schedule, plain: Timing, kept: Timing, rerun: Timing) -> Graph:
    free, count = _reruns(graph, again)
    in_forward = max(0.0, kept.seconds - plain.seconds)  # the same for all plans
    if not count:
        return replace(graph, engine_cost=in_forward)
    # What was measured is off by the spread. Of all prices that it allows, take the usual one: by
    # this one it is decided what runs again.
    more = rerun.seconds - kept.seconds - free
    noise = _noise(rerun, kept) / count
    return replace(
        graph,
        engine_cost=in_forward,
        rerun_cost=_nearest(graph.rerun_cost, more / count, noise),
    )


def _reruns(graph: Graph, schedule: Schedule) -> tuple[float, int]:
    """The seconds of the ops that run again, and how many do."""
    free, one = (simulate(replace(graph, rerun_cost=cost), schedule).rerun for cost in (0.0, 1.0))
    return free, round(one - free)


def _noise(*timings: Timing) -> float:
    return sum(timing.spread * timing.seconds for timing in timings)


def _nearest(usual: float, measured: float, noise: float) -> float:
    """What is nearest to ``usual`` within ``noise`` of ``measured``, and not below 0."""
    return max(0.0, min(max(usual, measured - noise), measured + noise))
