"""Several graphs of a step as one."""

import torch
from torch import Tensor

from recollect.compiled.merge import Merged, merge, merge_alone, saved_schedule
from recollect.compiled.observe import saves_of
from recollect.compiled.part import NodeCosts, Part, make_part
from recollect.compiled.timeline import Stretch
from recollect.graph.graph import Schedule
from recollect.graph.simulate import simulate
from tests.compiled._steps import calls_of

BYTES = 4 * 8 * 4
BASE = 1000


def broken(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).sin()
    torch._dynamo.graph_break()
    return (y @ w).sin()


def merged(stretches: list[Stretch] | None = None) -> Merged:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    calls = calls_of(broken, x, w)
    graphs = [call.graph for call in calls if call.graph is not None]
    assert len(graphs) == 2
    saves = saves_of(calls, lambda graph: graph.saved)
    return merge([part_of(each) for each in graphs], calls, stretches, saves, BASE)


def part_of(graph) -> Part:
    return make_part(graph.key, graph.joint, NodeCosts(torch.device("cpu")), fused=False)


def names(found: Merged, kept: frozenset[int]) -> list[str]:
    return [found.graph.ops[n].key for n in sorted(kept)]


def test_calls_are_one_behind_the_other_with_an_event_before_each():
    found = merged()
    graph = found.graph
    assert [op.key for op in graph.ops] == [
        "|aten::mm|0",
        "|aten::sin|0",
        "|aten::mm|1",
        "|aten::sin|1",
    ]
    assert len(found.gaps) == 5
    assert graph.turn == found.gaps[2]
    in_forward = [event.op for event in graph.events[: graph.turn] if event.op >= 0]
    assert in_forward == [0, 1, 2, 3]
    assert graph.base == BASE


def test_a_result_that_another_graph_reads_is_kept_by_every_plan():
    graph = merged().graph
    assert graph.ops[2].reads == (1,)  # the result of sin in the first graph
    assert [op.forced for op in graph.ops] == [False, True, False, False]
    least = simulate(graph, Schedule(frozenset()))
    assert least.peak >= BASE + BYTES


def test_decisions_for_calls_make_the_schedule_that_they_were_taken_from():
    found = merged()
    for kept in ({0}, {2}, {0, 2}):
        schedule = Schedule(frozenset(kept))
        decided = [found.decided(call, schedule) for call in range(2)]
        assert found.together(decided) == schedule
    assert found.kept_in(0, Schedule(frozenset({0}))) == {"mm", "sin"}  # sin by every plan
    assert found.kept_in(1, Schedule(frozenset())) == frozenset()


def test_the_schedule_of_torch_is_what_its_split_saves():
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    calls = calls_of(broken, x, w)
    saves = saves_of(calls, lambda graph: graph.saved)
    found = merged()
    by_name = [
        {found.parts[n].names[k] for k in found.decided(n, saved_schedule(found, saves))[0]}
        for n in range(2)
    ]
    assert by_name == [set(each) for each in saves]


def test_what_was_held_around_the_graphs_is_counted():
    bare = merged()
    levels = simulate(bare.graph, saved_schedule(bare, _saves()), curve=True)
    order = [(False, 0), (False, 1), (True, 1), (True, 0), None]
    more = 10 * levels.peak
    stretches = [Stretch(more, more, call) for call in order]
    found = merged(stretches)
    assert simulate(found.graph, saved_schedule(found, _saves())).peak >= BASE + more
    assert len(found.around) == 5


def _saves():
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    return saves_of(calls_of(broken, x, w), lambda graph: graph.saved)


def test_one_graph_alone():
    part = merged().parts[0]
    alone = merge_alone(part, BASE, [(0, 0), (500, 700), (0, 0)])
    assert len(alone.gaps) == 3
    turn = alone.graph.events[alone.gaps[1]]
    assert (turn.before, turn.during) == (500, 700)
    assert simulate(alone.graph, Schedule(frozenset())).peak >= BASE + 700
