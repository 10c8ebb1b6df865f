"""A lower bound on the step time of any schedule within a budget.

A plan shows how far it is above this bound, so that users know what is left to gain. The bound
relaxes `simulate`: it leaves out some of the memory and adds none. At an event at least these bytes
are allocated:

1. fixed bytes; what forward itself still holds; one copy of each value that backward has
   unpacked, kept or recomputed (`liveness`);
2. values that are kept and will be unpacked;
3. values that are kept for another op to be recomputed from: `simulate` holds them until the
   tensors for which that op is recomputed are dead.

`PriceSearch` turns that into seconds. With a link to the host there is a third choice for a value,
which takes no memory but time on the link.
"""

from __future__ import annotations

import math

from recollect.graph.graph import Graph
from recollect.graph.simulate import simulate_plain
from recollect.planning.solving.liveness import Liveness
from recollect.planning.solving.memory_prices import CLOSE, PriceSearch
from recollect.planning.solving.relaxation import Relaxation

#: The error of a bound by rounding.
_ROUNDING = 1e-9
#: Steps of the bisection for the time that the link has.
_GUESSES = 8


def lower_bound(graph: Graph, budget: int, *, offload: bool = False) -> float:
    """A lower bound on the seconds of schedules within ``budget`` bytes; infinite: none fits.

    Args:
        graph: The step.
        budget: Bytes.
        offload: Whether schedules may offload results.
    """
    if simulate_plain(graph).peak <= budget:
        return graph.plain_seconds
    offload = offload and graph.link is not None
    live = Liveness(graph)
    if max(live.least, default=graph.base) > budget:
        return math.inf
    if offload:
        reruns = _with_link(live, budget)
    else:
        reruns = PriceSearch(live, Relaxation(live), budget).run()
    return graph.plain_seconds + graph.engine_cost + reruns * (1 - _ROUNDING)


def _with_link(live: Liveness, budget: int) -> float:
    """A lower bound on the seconds of recomputation if values may be offloaded.

    All offloaded bytes cross the link before forward ends, in which nothing is recomputed, and come
    back after the first tensor is unpacked. So the time of a step limits the bytes that it can
    offload, and these limit the time that it can save: the bound is where the two meet.
    """
    graph = live.graph
    assert graph.link is not None
    first = next((n for n, each in enumerate(graph.events) if each.unpacks), 0)
    ahead = sum(event.seconds for event in graph.events[:first])
    last = max((n for n, each in enumerate(graph.events) if each.op >= 0), default=-1)
    forward = sum(event.seconds for event in graph.events[: last + 1])
    high = PriceSearch(live, Relaxation(live), budget).run()
    search = PriceSearch(live, Relaxation(live, offload=True), budget)
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
