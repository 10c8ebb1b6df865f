"""What the host needs to launch a step, and what the engine adds to that (P3).

The ops of a step that the loop ran were timed one by one, and it is not run again. On the CPU, the
Python code between the ops and the engine come on top. If a device is faster than its host, it
waits for it: the step takes as long as the host needs to launch its ops, and everything that the
engine does on the host makes it longer. Whole modules then cost less than single ops. These are
estimates, from the time of a small op: on a device, the loop finds out which of the schedules that
were chosen by them is the fastest (`loop.contest`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from recollect.graph.graph import Graph
from recollect.planning.recording.record import Profile
from recollect.planning.recording.step import device_of
from recollect.planning.regions.module_regions import callable_paths, may_run_twice
from recollect.planning.solving.modules import find_units, paths_around

#: What the host needs on a device, as multiples of a small op in a tight loop: for an event of the
#: step; what replay adds for each saved tensor, for each op that it runs again, and for each tensor
#: that it offloads; for each module that is checkpointed as a whole, and for each op in it. Found
#: on an H200 with Llama and GPT-2 of transformers and an MLP, at sizes for which the device waits.
_EVENT, _SAVED, _RERUN, _OFFLOADED, _REGION, _IN_REGION = 2.7, 4.5, 0.3, 10, 45, 5.5
#: The same on the CPU, where ops were timed on the host: what comes between two events, and what
#: replay adds to each saved tensor. Measured with Llama, GPT-2, decoders, MLPs and convolutions.
_BETWEEN, _SAVED_ON_CPU = 3, 17
#: The engine is not priced if it adds less than this fraction of the step.
_LITTLE = 0.03
#: How many small ops are timed at once, and how often.
_OPS, _SAMPLES = 64, 7


def with_host_costs(profile: Profile, model: nn.Module) -> Profile:
    """The profile of a step of the loop, with the costs of the engine in its graph."""
    graph, device = profile.graph, device_of(model)
    small = small_op_seconds(device)
    if not is_launched_by_host(device):
        graph = profile.timed(profile.seconds + _BETWEEN * small * len(graph.events))
        graph = replace(graph, engine_cost=_SAVED_ON_CPU * small * len(graph.saved))
        # No modules: the simulator knows to the byte only what the replay engine holds.
        return replace(profile, graph=graph, seconds=graph.plain_seconds)
    host = _EVENT * small * len(graph.events)
    plain = max(profile.seconds, host)
    engine = host + _SAVED * small * len(graph.saved) - plain
    if engine <= _LITTLE * plain:
        return profile
    graph = replace(
        profile.timed(plain),
        engine_cost=engine,
        rerun_cost=_RERUN * small,
        offload_cost=_OFFLOADED * small,
    )
    profile = replace(profile, graph=graph, seconds=plain)
    if graph.varies or profile.stopped:  # which only the engine notices
        return profile
    modules = dict(model.named_modules())
    paths = {path for path in callable_paths(model) if may_run_twice(modules[path])}
    units = find_units(graph, paths - _with_changed_inputs(graph))
    share = small * exposed(_IN_REGION * small * len(graph.ops), plain - host)
    costs = {
        (unit.path, "rerun"): max(unit.seconds, share * (_REGION + _IN_REGION * unit.count))
        for unit in units
    }
    return replace(profile, graph=replace(graph, module_costs=costs))


def exposed(seconds: float, ahead: float) -> float:
    """The fraction of ``seconds`` of work on the host that takes time, not hidden by the device.

    ``ahead``: by how much the host finishes a step before the device.
    """
    return max(0.0, 1 - ahead / seconds) if seconds else 0.0


def is_launched_by_host(device: torch.device) -> bool:
    """Whether ops run on a device while the host launches the next ones."""
    return device.type != "cpu"


def _with_changed_inputs(graph: Graph) -> set[str]:
    """The modules that read from outside what is overwritten, by themselves or later."""
    last = {value.storage: number for number, value in enumerate(graph.values)}
    found: set[str] = set()
    for op in graph.ops:
        for number in op.reads:
            value = graph.values[number]
            if last[value.storage] != number:
                around = paths_around(graph.ops[value.op].path)
                found.update(each for each in paths_around(op.path) if each not in around)
    return found


@cache
def small_op_seconds(device: torch.device) -> float:
    """Seconds that the host needs for a small op and its backward, for each of the two."""
    start, factor = torch.ones(8, device=device, requires_grad=True), torch.ones(8, device=device)
    with torch.enable_grad():
        return min(_chain_seconds(start, factor) for _ in range(_SAMPLES))


def _chain_seconds(start: torch.Tensor, factor: torch.Tensor) -> float:
    begin, out = time.perf_counter(), start
    for _ in range(_OPS):
        out = out * factor
    torch.autograd.grad(out.sum(), start)
    return (time.perf_counter() - begin) / (3 * _OPS)
