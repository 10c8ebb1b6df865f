"""Plans for compiled models that hold saved tensors on the host."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import recollect
from recollect.checks.place import WarnOnce
from recollect.compiled import lazy, offload, split
from recollect.compiled.applied import make_code
from recollect.compiled.decisions import Away, CompiledStep
from recollect.compiled.merge import SMALLEST
from recollect.compiled.observe import with_forward_of
from recollect.compiled.offload import FETCH, FETCHED, SEND, SENT
from recollect.compiled.planner import CompiledTrials
from recollect.compiled.sites import installed
from recollect.graph.graph import Graph, Link, Schedule
from recollect.graph.simulate import simulate
from recollect.modules import OPTIONS
from recollect.planning import prepare
from recollect.replay.named_schedule import trimmed
from tests._support import assert_identical
from tests.compiled._steps import Compiled, as_it_is, in_blocks
from tests.store._fake import Event, FakeLink


class HostLink(FakeLink):
    """Copies run when somebody waits for them. The memory of its host is not that of torch."""

    #: The most copies back that were under way at once.
    most_back = 0

    def copy_in(self, pieces: Any, after: Any) -> Event:
        done = super().copy_in(pieces, after)
        self.most_back = max(self.most_back, len(self.back.steps) // 2)  # a copy and its event
        return done

    def pin(self, size: int) -> Tensor:
        if self.pin_error:
            raise RuntimeError(self.pin_error)
        return torch.frombuffer(bytearray(b"\xff" * size), dtype=torch.uint8)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostLink]:
    """Of the CPU, which has none."""
    link = HostLink()
    monkeypatch.setattr(offload, "link_of", lambda tensor: link)
    monkeypatch.setattr(prepare, "measured_link", lambda device: Link(5e9, 5e9))
    yield link
    assert link.violations == []
    assert not offload._running


def frontier_of(compiled: Compiled) -> recollect.Frontier:
    return recollect.frontier(compiled.model, compiled.batch, loss=compiled.loss)


def trials_of(frontier: recollect.Frontier) -> CompiledTrials:
    trials = frontier._planner.trials
    assert isinstance(trials, CompiledTrials)
    return trials


def drawn(graph: Graph, seed: int) -> Schedule:
    """A schedule as the solver would not choose it."""
    draw = random.Random(seed)
    sends, keeps = draw.uniform(0.1, 1), draw.random()
    may = {n for n in graph.choices if graph.ops[n].can_offload}
    away = {n for n in may if draw.random() < sends}
    kept = {n for n in graph.choices if n not in away and draw.random() < keeps}
    total = sum(graph.values[value].nbytes for op in away for value in graph.results[op])
    limit = int(total * draw.choice([0, 0.1, 0.3, 1]))
    ahead, begin = draw.choice([None, 0, total // 5]), draw.choice([None, 3, 20])
    return trimmed(graph, Schedule(frozenset(kept), frozenset(away), limit, ahead, begin))


def outcome_under(compiled: Compiled, trials: CompiledTrials, step: CompiledStep) -> list[Tensor]:
    torch._dynamo.reset()
    with installed(make_code(step, trials.observed.sites).called):
        return compiled.outcome()


@pytest.mark.parametrize("backend", ["aot_eager", "recollect"])
def test_results_are_those_without_a_plan_however_late_copies_are(link: HostLink, backend: str):
    compiled = Compiled("decoder_dropout", lambda model: torch.compile(model, backend=backend))
    expected = compiled.outcome()
    trials = trials_of(frontier_of(compiled))
    for seed in range(2):
        decided = trials.decisions(drawn(trials.graph, seed))
        (graph,) = decided.graphs
        assert graph.away
        before = len(link.copied_out), len(link.copied_in)
        assert_identical(outcome_under(compiled, trials, decided), expected)
        assert len(link.copied_out) - before[0] == len(graph.away)
        assert len(link.copied_in) - before[1] == len(graph.away)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("case", ["decoder_dropout", "conv"])
def test_inductor_leaves_copies_in_place(
    link: HostLink, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Its caches know the decisions, and not what is made of them.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = Compiled(case, torch.compile)
    trials = trials_of(frontier_of(compiled))
    at_once = replace(drawn(trials.graph, 0), limit=1 << 40, ahead=None, begin=None)
    for schedule in (drawn(trials.graph, 0), at_once):
        decided = trials.decisions(schedule)
        (graph,) = decided.graphs
        here = replace(decided, graphs=(replace(graph, away=()),))
        expected = outcome_under(compiled, trials, here)
        before = len(link.copied_out)
        assert_identical(outcome_under(compiled, trials, decided), expected)
        assert len(link.copied_out) - before == len(graph.away) > 1
    assert link.most_back == len(graph.away)


def test_a_plan_that_offloads_has_all_that_other_plans_have(
    link: HostLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Which is faster is not measured: copies that wait for somebody to wait take long.
    monkeypatch.setattr(CompiledTrials, "_time", lambda self, schedules: None)
    compiled = Compiled("decoder_dropout", as_it_is)
    expected = compiled.outcome()
    frontier = frontier_of(compiled)
    plan = frontier.plan_for(frontier.least)
    assert plan.compiled is not None
    assert plan.compiled.offloads
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    assert {row.fate for row in plan.explain()} == {"kept", "recomputed", "offloaded"}
    assert "offloaded" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = recollect.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    for each in (plan, loaded):
        with each.applied(compiled.model):
            link.copied_out.clear()
            assert_identical(compiled.outcome(), expected)
            assert link.copied_out
            assert compiled.peak() <= plan.budget


def test_the_simulated_peak_is_that_of_the_step(link: HostLink):
    compiled = Compiled("decoder", as_it_is)
    trials = trials_of(frontier_of(compiled))
    graph = trials.graph
    for seed in range(2):
        draw = random.Random(seed)
        away = {n for n in graph.choices if graph.ops[n].can_offload and draw.random() < 0.5}
        away -= {value.op for value in graph.values if value.nbytes < 4096}
        kept = frozenset(graph.choices) - away
        schedule = trimmed(graph, Schedule(kept, frozenset(away), draw.randrange(100_000), 0))
        assert len(schedule.offloaded) > 10
        torch._dynamo.reset()
        with installed(make_code(trials.decisions(schedule), trials.observed.sites).called):
            compiled.step()
            assert compiled.peak() == simulate(graph, schedule).peak


def test_no_plan_offloads_if_it_must_not(link: HostLink):
    compiled = Compiled("decoder", as_it_is)
    frontier = recollect.frontier(compiled.model, compiled.batch, loss=compiled.loss, offload=False)
    plan = frontier.plan_for((frontier.least + frontier.plain_peak) // 2)
    assert plan.compiled is not None
    assert not plan.compiled.offloads
    assert link.copied_out == []


def test_where_copies_are_in_the_graphs(link: HostLink, monkeypatch: pytest.MonkeyPatch):
    halves: list[Any] = []

    def offload(*args: Any, **kwargs: Any) -> None:
        before(*args, **kwargs)
        halves[:] = args[:2]

    before = split.offload
    monkeypatch.setattr(split, "offload", offload)
    compiled = Compiled("decoder", as_it_is)
    trials = trials_of(frontier_of(compiled))
    decided = trials.decisions(drawn(trials.graph, 0))
    outcome_under(compiled, trials, decided)
    forward, backward = ([*half.graph.nodes] for half in halves)
    first, then = ({node.name: n for n, node in enumerate(half)} for half in (forward, backward))
    found = decided.graphs[0].away
    assert len(found) > 10
    for away in found:
        (sent,) = (n for n in forward if n.target is SENT and n.args[0].name == away.name)
        assert sent.args[1].target is SEND
        assert first[away.freed] < first[sent.name]
        (fetch,) = (n for n in backward if n.target is FETCH and n.args[0].name == away.name)
        (fetched,) = (n for n in backward if n.target is FETCHED and n.args[1] is fetch)
        used = min(then[node.name] for node in fetched.users)
        assert then[fetch.name] < then[fetched.name] < used
        assert not away.fetched or then[away.fetched] < then[fetch.name]


def test_the_time_of_forward_is_as_measured(link: HostLink):
    graph = trials_of(frontier_of(Compiled("decoder", as_it_is))).graph
    total = graph.plain_seconds
    timed = with_forward_of(graph, total / 4)
    assert timed.plain_seconds == pytest.approx(total)
    assert sum(event.seconds for event in timed.events[: graph.turn]) == pytest.approx(total / 4)
    # Ops that run again are those of forward.
    before = sum(event.seconds for event in graph.events[: graph.turn])
    for op, now in zip(graph.ops, timed.ops, strict=True):
        assert now.seconds == pytest.approx(op.seconds * total / 4 / before)
    assert with_forward_of(graph, total) is graph


def test_memory_that_cannot_be_pinned_is_told_once(link: HostLink, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offload, "_warnings", WarnOnce())
    compiled = Compiled("decoder", as_it_is)
    expected = compiled.outcome()
    trials = trials_of(frontier_of(compiled))
    link.pin_error = "no more of it"
    with pytest.warns(recollect.PlanWarning, match="not pinned: no more of it") as told:
        found = outcome_under(compiled, trials, trials.decisions(drawn(trials.graph, 0)))
    assert len(told) == 1
    assert_identical(found, expected)


def broken(model: nn.Module) -> nn.Module:
    """Compiled, with a graph break after each block."""
    for layer in model.layers:  # type: ignore[union-attr]
        layer.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    return as_it_is(model)


def whole(graph: Graph, schedule: Schedule) -> Schedule:
    """The same, but for ops of which some results are too small to offload."""
    small = {value.op for value in graph.values if value.nbytes < SMALLEST}
    away = schedule.offloaded
    return replace(schedule, kept=schedule.kept | (away & small), offloaded=away - small)


@pytest.mark.parametrize("how", [in_blocks, broken])
def test_each_of_several_graphs_hides_its_own_copies(
    link: HostLink, how: Callable[[nn.Module], nn.Module]
):
    compiled = Compiled("decoder_dropout", how)
    expected = compiled.outcome()
    frontier = frontier_of(compiled)
    trials, solver = trials_of(frontier), frontier._planner.solver
    sites = trials.observed.site_of
    keys = [part.key for part in trials.observed.merged.parts]
    for fraction in (0.2, 0.9):
        budget = int(frontier.least + fraction * (frontier.plain_peak - frontier.least))
        solution = solver.solve(budget)
        assert solution is not None
        schedule = whole(trials.graph, solution.schedule)
        decided = trials.decisions(schedule)
        variants = [variant for _, variant in decided.sites]
        away = {(each.variant, each.key): len(each.away) for each in decided.graphs}
        torch._dynamo.reset()
        with installed(make_code(decided, trials.observed.sites).called):
            compiled.step()
            assert compiled.peak() == simulate(trials.graph, schedule).peak
            before = len(link.copied_out), len(link.copied_in)
            assert_identical(compiled.outcome(), expected)
        copied = len(link.copied_out) - before[0], len(link.copied_in) - before[1]
        ran = sum(away[variants[n], key] for n, key in zip(sites, keys, strict=True))
        assert copied == (ran, ran)
        assert ran > 5
    plan = frontier.plan_for(frontier.least)
    assert plan.compiled is not None
    assert plan.compiled.offloads
    with plan.applied(compiled.model):
        assert_identical(compiled.outcome(), expected)
        assert compiled.peak() <= plan.budget


@pytest.mark.filterwarnings("ignore:the training steps before there was a plan")
@pytest.mark.parametrize("how", [as_it_is, in_blocks])
def test_a_plan_of_the_loop_offloads_if_asked_to(
    link: HostLink, how: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lazy, "check_can_offload", lambda device, is_shared: None)
    monkeypatch.setattr(lazy, "measured_link", lambda device: Link(5e9, 5e9))
    plain, fitted = Compiled("decoder_dropout", how), Compiled("decoder_dropout", how)
    recollect.fit(fitted.model, budget=0.6, offload=True)
    for seed in range(5):
        for each in (plain, fitted):
            each.step(seed)
            torch.optim.SGD(each.bare.parameters(), lr=1e-3).step()
    assert_identical([*fitted.bare.parameters()], [*plain.bare.parameters()])
    plan = (vars(fitted.model).get(OPTIONS) or vars(fitted.bare)[OPTIONS]).plan
    assert plan.compiled.offloads
    assert link.copied_out
    assert fitted.peak() <= plan.budget


def test_where_offload_cannot_be_had_it_is_refused():
    compiled = Compiled("decoder", as_it_is)
    with pytest.raises(ValueError, match="offload=True needs a CUDA device"):
        recollect.plan(compiled.model, compiled.batch, 0.7, loss=compiled.loss, offload=True)
    with pytest.raises(ValueError, match="offload=True needs a CUDA device"):
        recollect.fit(compiled.model, budget=0.7, offload=True)
    graphs = torch.compile(compiled.bare, mode="reduce-overhead")
    with pytest.raises(ValueError, match="offload=True: the model is compiled with CUDA graphs"):
        recollect.plan(graphs, compiled.batch, 0.7, loss=compiled.loss, offload=True)
    own = torch.compile(compiled.bare, backend=aot_autograd(fw_compiler=lambda graph, _: graph))
    with pytest.raises(ValueError, match="which may not know the operations that copy"):
        recollect.plan(own, compiled.batch, 0.7, loss=compiled.loss, offload=True)


def test_a_plan_that_offloads_is_not_for_cuda_graphs(link: HostLink):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU())
    batch = torch.randn(256, 64)
    compiled = torch.compile(model)
    plan = recollect.plan(torch.compile(model, backend="aot_eager"), batch, 1.0)
    assert plan.compiled is not None
    (graph,) = plan.compiled.graphs
    decided = replace(graph, away=(Away("mm", "", ""),))
    step = replace(plan.compiled, backend="inductor", graphs=(decided,))
    replace(plan, compiled=step).apply(compiled)
    recollect.unwrap(compiled)
    graphs = torch.compile(model, mode="reduce-overhead")
    with pytest.raises(ValueError, match="this plan offloads, and the model is compiled with CUDA"):
        replace(plan, compiled=step).apply(graphs)
