"""Which modules are checkpointed as a whole: the knapsack, its order, and its bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from recollect.graph.graph import Graph, Schedule
from recollect.graph.simulate import simulate, simulate_plain
from recollect.planning.solving.modules import (
    ModuleSolver,
    block_paths,
    find_units,
    module_kind,
    module_schedule,
)
from tests.planning._graphs import Maker, decoder

MS = 1e-3
LAYERS = 6


def _graph(costs: dict[tuple[str, str], float] | None = None) -> Graph:
    """Blocks with a wide part inside, whose results backward needs."""
    make = Maker()
    state = make.op("embedding", [], 100)
    for layer in range(LAYERS):
        make.path = f"layers.{layer}.norm"
        norm = make.op("norm", [state], 100, saves=[state], saves_result=True)
        make.path = f"layers.{layer}.wide"
        up = make.op("up", [norm], 400, saves=[norm])
        act = make.op("act", [up], 400, saves=[up], saves_result=True)
        down = make.op("down", [act], 100, saves=[act])
        make.path = f"layers.{layer}"
        state = make.op("add", [state, down], 100)
    make.path = "head"
    make.op("head", [state], 100, saves=[state])
    return replace(make.graph(loss=100, base=0), module_costs=costs or {})


PATHS = {
    path for n in range(LAYERS) for path in (f"layers.{n}", f"layers.{n}.wide", f"layers.{n}.norm")
} | {"head"}


def _priced(block: float, wide: float) -> Graph:
    costs = {(f"layers.{n}", "rerun"): block for n in range(LAYERS)}
    costs |= {(f"layers.{n}.wide", "replay"): wide for n in range(LAYERS)}
    return _graph(costs)


def _solver(graph: Graph) -> ModuleSolver:
    return ModuleSolver(graph, find_units(graph, PATHS))


def test_a_unit_frees_what_only_its_ops_read() -> None:
    freed = {unit.path: unit.freed for unit in find_units(_graph(), PATHS)}
    assert freed["layers.0.wide"] == 800  # but for what it is given and returns
    assert freed["layers.0"] == 900
    assert "layers.0.norm" not in freed  # the next one reads its result
    assert "head" not in freed


def test_units_are_in_the_order_of_forward_the_outer_first() -> None:
    paths = [unit.path for unit in find_units(_graph(), PATHS)]
    assert paths[:4] == ["layers.0", "layers.0.wide", "layers.1", "layers.1.wide"]


def test_a_module_with_an_op_that_must_not_run_again_is_none() -> None:
    graph = _graph()
    number = next(n for n, op in enumerate(graph.ops) if op.path == "layers.2.wide")
    ops = [replace(op, forced=n == number) for n, op in enumerate(graph.ops)]
    paths = [unit.path for unit in find_units(replace(graph, ops=ops), PATHS)]
    assert "layers.2" not in paths
    assert "layers.2.wide" not in paths
    assert "layers.3" in paths


def test_a_module_with_most_of_the_memory_is_none() -> None:
    graph = decoder(4)
    assert not find_units(graph, {"layers"})
    assert len(find_units(graph, {f"layers.{n}" for n in range(4)})) == 4


def test_kinds_and_blocks() -> None:
    assert module_kind("layers.11.wide.0") == "layers.*.wide.*"
    assert block_paths(_graph(), PATHS) == tuple(f"layers.{n}" for n in range(LAYERS))


def test_what_goes_from_one_module_to_the_next_is_kept() -> None:
    graph = _graph()
    chosen = [(f"layers.{n}", "rerun") for n in range(LAYERS)]
    kept = [graph.ops[n] for n in module_schedule(graph, chosen).kept]
    assert {op.name for op in kept} == {"aten::embedding", "aten::add", "aten::head"}
    kept = [graph.ops[n] for n in module_schedule(graph, [("layers.1.wide", "rerun")]).kept]
    inside = [op.name for op in kept if op.path == "layers.1.wide"]
    assert inside == ["aten::down"]  # which is added outside
    assert len(kept) == len(graph.ops) - 2


def test_the_cheaper_by_the_byte_is_chosen_first_and_the_first_in_forward() -> None:
    solver = _solver(_priced(block=3 * MS, wide=1 * MS))
    choices = solver._choices
    assert choices[0] == ("layers.0.wide",)
    assert choices[LAYERS - 1] == tuple(f"layers.{n}.wide" for n in range(LAYERS))
    assert choices[LAYERS] == ("layers.0", *(f"layers.{n}.wide" for n in range(1, LAYERS)))
    assert choices[-1] == tuple(f"layers.{n}" for n in range(LAYERS))
    solver = _solver(_priced(block=1 * MS, wide=1 * MS))
    assert solver._choices == [tuple(f"layers.{n}" for n in range(k + 1)) for k in range(LAYERS)]


def test_its_time_is_the_sum_of_costs_by_the_cheaper_engine() -> None:
    graph = _priced(block=3 * MS, wide=1 * MS)
    costs = {**graph.module_costs, ("layers.0.wide", "rerun"): 0.5 * MS}
    graph = replace(graph, module_costs=costs, engine_cost=50 * MS, rerun_cost=9 * MS)
    first = _solver(graph).frontier()[-1]
    assert first.schedule.modules == (("layers.0.wide", "rerun"),)
    assert first.outcome.seconds == pytest.approx(graph.plain_seconds + 0.5 * MS)
    assert simulate(graph, Schedule(first.schedule.kept)).seconds > 50 * MS


@pytest.mark.parametrize("prices", [(3.0, 1.0), (1.0, 1.0), (2.0, 1.5), (1.0, 0.95)])
def test_each_budget_is_kept_and_no_choice_is_much_quicker(prices: tuple[float, float]) -> None:
    graph = _priced(*(price * MS for price in prices))
    solver, plain = _solver(graph), simulate_plain(graph)
    units = [unit.path for unit in find_units(graph, PATHS)]
    engines = {"layers": "rerun", "wide": "replay"}
    outcomes = []
    for count in range(1, 5):
        for paths in combinations(units, count):
            if any(b.startswith(f"{a}.") for a in paths for b in paths):
                continue
            chosen = [(p, engines["wide" if p.endswith("wide") else "layers"]) for p in paths]
            outcomes.append(simulate(graph, module_schedule(graph, chosen)))
    low = min(outcome.peak for outcome in outcomes)
    last = 0.0
    for part in range(8):
        budget = low + (plain.peak - low) * part // 8
        found = solver.solve(budget)
        assert found is not None
        assert found.outcome.peak <= budget
        best = min(o.seconds for o in outcomes if o.peak <= budget)
        assert solver.bound(budget) <= best
        assert found.outcome.seconds <= best + max(prices) * MS
        last = found.outcome.seconds
    assert last < solver.frontier()[0].outcome.seconds


def test_more_memory_never_takes_longer() -> None:
    solver = _solver(_priced(block=3 * MS, wide=1 * MS))
    peaks = [each.outcome.peak for each in solver.frontier()]
    found = [solver.solve(budget) for budget in range(peaks[0], peaks[-1], 37)]
    times = [each.outcome.seconds for each in found if each is not None]
    assert len(times) == len(found)
    assert all(after <= before for before, after in pairwise(times))
    assert solver.solve(peaks[0] - 1) is None
