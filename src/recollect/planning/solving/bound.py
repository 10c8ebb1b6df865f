"""A lower bound on the step time of any schedule within a budget.

It relaxes `simulate`: some of the memory that it counts is left out, and none is added. At a moment
at least these bytes are allocated:

1. what the plan cannot change; what forward itself still holds; one copy of each value that
   backward has been given, kept or recomputed;
2. what is kept and will be asked for;
3. what is kept for another op to be recomputed from: `simulate` holds it until the tensors for
   which that op is recomputed are dead.

`PriceSearch` turns that into seconds. With a link to the host there is a third choice for a value,
which takes no memory but time on the link.
"""

from __future__ import annotations

import math

from recollect.graph.graph import Graph
from recollect.graph.simulate import simulate_plain
from recollect.planning.solving.liveness import Lives
from recollect.planning.solving.prices import CLOSE, PriceSearch
from recollect.planning.solving.relaxation import Relaxation

__all__ = ["lower_bound"]

#: What rounding may have added to a bound.
_ROUNDING = 1e-9
#: How often the time that the link has is guessed.
_GUESSES = 8


def lower_bound(graph: Graph, budget: int, *, offload: bool = False) -> float:
    """Seconds that no schedule with a peak within ``budget`` can be below; infinite if none is.

    Args:
        graph: The step.
        budget: Bytes.
        offload: Whether schedules may send results to the host.
    """
    if simulate_plain(graph).peak <= budget:
        return graph.plain_seconds
    offload = offload and graph.link is not None
    lives = Lives(graph, offload=offload)
    if max(lives.least, default=graph.base) > budget:
        return math.inf
    if offload:
        reruns = _with_link(lives, budget)
    else:
        reruns = PriceSearch(lives, Relaxation(lives), budget).run()
    return graph.plain_seconds + graph.engine_cost + reruns * (1 - _ROUNDING)


def _with_link(lives: Lives, budget: int) -> float:
    """The seconds of recomputation that no schedule can be below if values may be sent.

    All that is sent has crossed the link when forward is over, in which nothing is recomputed, and
    comes back after the first ask. So if the step takes no more than some time, so many bytes can
    be sent at most, and it takes at least the seconds that follow from that: the bound is where the
    two meet.
    """
    graph = lives.graph
    assert graph.link is not None
    first = next((n for n, each in enumerate(graph.events) if each.unpacks), 0)
    ahead = sum(event.seconds for event in graph.events[:first])
    last = max((n for n, each in enumerate(graph.events) if each.op >= 0), default=-1)
    forward = sum(event.seconds for event in graph.events[: last + 1])
    high = PriceSearch(lives, Relaxation(lives), budget).run()
    search = PriceSearch(lives, Relaxation(lives, offload=True), budget)
    low = best = search.run()
    for _ in range(_GUESSES):
        guess = (low + high) / 2
        whole = graph.plain_seconds + guess
        room = min(graph.link.out_rate * (forward + guess), graph.link.in_rate * (whole - ahead))
        room = max(1.0, room)  # a step may have no time at all
        reached = search.run(room)
        best = max(best, min(guess, reached))
        if reached >= guess:
            low = guess
        else:
            high = guess
        if high - low <= CLOSE * whole:
            break
    return best
