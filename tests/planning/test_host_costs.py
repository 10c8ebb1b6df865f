"""Plans from the loop where the host needs longer to launch a step than the device to run it.

No test here depends on how fast the machine is: what a small op takes is made up.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.modules import OPTIONS
from recollect.planning import host_costs, progress
from recollect.planning.host_costs import small_op_seconds
from recollect.planning.loop.contest import Contest
from tests.planning.test_lazy import Loop, Net

pytestmark = pytest.mark.usefixtures("no_bound")

#: Before it is replaced.
is_launched_by_host = host_costs.is_launched_by_host
#: Seconds of a small op beside which no op here takes long.
SLOW = 1e-2
#: What the engine costs for each saved tensor, in small ops.
SAVED = 40


@pytest.fixture(autouse=True)
def _launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the loop's steps be launched as those of a GPU are."""
    monkeypatch.setattr(host_costs, "is_launched_by_host", lambda _: True)
    monkeypatch.setattr(host_costs, "small_op_seconds", lambda _: SLOW)
    # Blocks as small as those here are faster op by op, and modules are what is tested.
    monkeypatch.setattr(host_costs, "_SAVED", SAVED)
    monkeypatch.setattr(host_costs, "_REGION", 0)


class Torch(Net):
    """All of its blocks are torch's own modules."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        for number in range(len(self.blocks)):
            self.blocks[number] = nn.Sequential(
                nn.LayerNorm(32),
                nn.Linear(32, 128),
                nn.GELU(),
                nn.Linear(128, 32),
                nn.Dropout(dropout),
            )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def modules_of(loop: Loop) -> list[str]:
    assert loop.plan is not None
    return [path for path, _ in loop.plan.schedule.modules]


def test_whole_modules_are_checkpointed_and_gradients_are_plain() -> None:
    loop = Loop(Torch(dropout=0.1), "70%")
    loop.run(steps=6)
    assert modules_of(loop)


def test_the_peak_is_within_the_budget() -> None:
    loop = Loop(Torch(), "70%")
    loop.run(steps=5)
    paths = modules_of(loop)
    assert paths
    assert loop.plan is not None
    # On the CPU, each region holds the state of the random stream, which the device has not.
    states = len(paths) * torch.get_rng_state().nbytes
    assert max(loop.peaks) <= loop.plan.budget + states
    assert loop.peaks[-1] > 0.85 * loop.plan.budget


def test_the_prediction_counts_what_the_host_needs() -> None:
    loop = Loop(Torch(), "70%")
    loop.run()
    plan = loop.plan
    assert plan is not None
    assert plan.graph is not None
    host = 2.7 * SLOW * len(plan.graph.events)
    assert plan.plain_time == pytest.approx(host)
    costs = plan.graph.module_costs
    assert plan.predicted_time == pytest.approx(
        host + sum(costs[each] for each in plan.schedule.modules)
    )
    assert plan.graph.engine_cost == pytest.approx(SAVED * SLOW * len(plan.graph.saved))


@pytest.mark.parametrize("slow", [SLOW, 1e-12])
def test_where_python_decides_compiled_code_is_named(
    monkeypatch: pytest.MonkeyPatch, slow: float
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(progress._log, "info", lambda text, *args: lines.append(text % args))
    monkeypatch.setattr(host_costs, "small_op_seconds", lambda _: slow)
    Loop(Torch(), "70%").run()
    assert "to plan" in lines[0]
    assert any('backend="recollect"' in each for each in lines) == (slow == SLOW)


@pytest.mark.parametrize(("ahead", "expected"), [(0.0, 1.0), (0.1, 0.75), (0.4, 0.0), (1.0, 0.0)])
def test_work_of_the_host_is_hidden_while_the_device_is_behind(
    ahead: float, expected: float
) -> None:
    assert host_costs.exposed(0.4, ahead) == pytest.approx(expected)
    assert host_costs.exposed(0.0, ahead) == 0.0


def test_where_the_device_is_slower_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_costs, "small_op_seconds", lambda _: 1e-12)
    loop = Loop(Torch(), "70%")
    loop.run()
    assert modules_of(loop) == []
    assert loop.plan is not None
    assert loop.plan.graph is not None
    assert loop.plan.graph.engine_cost == 0


def test_on_the_cpu_the_engine_comes_on_top_and_no_module_is_wrapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not is_launched_by_host(torch.device("cpu"))
    assert is_launched_by_host(torch.device("cuda"))
    monkeypatch.setattr(host_costs, "is_launched_by_host", is_launched_by_host)
    loop = Loop(Torch(), "70%")
    loop.run(steps=6)
    assert loop.plan is not None
    assert loop.plan.graph is not None
    graph = loop.plan.graph
    # No op takes long beside what a small op is made to take here.
    assert graph.plain_seconds == pytest.approx(3 * SLOW * len(graph.events), rel=0.1)
    assert graph.engine_cost == pytest.approx(17 * SLOW * len(graph.saved))
    assert loop.plan.predicted_time >= loop.plan.plain_time + graph.engine_cost
    assert modules_of(loop) == []
    assert max(loop.peaks[1:]) <= loop.plan.budget


def test_a_small_op_is_timed_without_a_trace() -> None:
    state = torch.get_rng_state()
    with torch.no_grad():
        assert 0 < small_op_seconds(torch.device("cpu")) < 1
    assert torch.equal(torch.get_rng_state(), state)


class Own(nn.Sequential):
    """A block of the user's, of which nothing is known."""


@pytest.mark.parametrize("inside", [False, True])
def test_modules_of_which_nothing_is_known_run_once(inside: bool) -> None:
    net = Torch()
    for number, block in enumerate(net.blocks):
        net.blocks[number] = nn.Sequential(Own(*block)) if inside else Own(*block)
    loop = Loop(net, "70%")
    loop.run(steps=6)
    assert loop.plan is not None
    assert loop.plan.graph is not None
    priced = {path for path, _ in loop.plan.graph.module_costs}
    assert "blocks.1" not in priced
    assert ("blocks.1.0.0" if inside else "blocks.1.0") in priced


def test_layers_that_transformers_checkpoints_may_run_twice() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=96,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 96, (4, 48))
    loop = Loop(model, "70%")
    loop.run(lambda each, _: each(input_ids=tokens, labels=tokens).loss, steps=6)
    chosen = modules_of(loop)
    assert chosen
    assert {path for path in chosen if path.startswith("model.layers.")} == {*chosen}
    assert all(path.count(".") == 2 for path in chosen)


class Overwritten(Torch):
    """Its modules overwrite what they are given, or have it overwritten later."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.is_later = isinstance(first, nn.Dropout)
        for number, block in enumerate(self.blocks):
            self.blocks[number] = nn.Sequential(copy.deepcopy(first), block)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x * 1.5
            x = x.add_(block(x)) if self.is_later else block(x)
        return self.head(x)


@pytest.mark.parametrize("first", [nn.Dropout(0.1), nn.ReLU(inplace=True)])
def test_modules_whose_inputs_are_overwritten_run_once(first: nn.Module) -> None:
    loop = Loop(Overwritten(first), "70%")
    loop.run(steps=6)
    assert modules_of(loop)
    assert loop.plan is not None
    assert loop.plan.graph is not None
    priced = {path for path, _ in loop.plan.graph.module_costs}
    assert "blocks.1.1" in priced
    assert "blocks.1" not in priced


def test_hooks_inside_of_modules_run_once() -> None:
    net, seen = Torch(), []
    net.blocks[2][1].register_forward_hook(lambda *_: seen.append(1))
    loop = Loop(net, "70%")  # the plain model has the hook too
    loop.run(steps=6)
    assert modules_of(loop)
    assert "blocks.2" not in modules_of(loop)
    assert len(seen) == 12


def test_hooks_of_all_modules_run_once() -> None:
    seen: list[int] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        net = Torch()
        loop = Loop(net, "70%")
        loop.run(steps=6)
    finally:
        handle.remove()
    assert modules_of(loop) == []
    assert len(seen) == 12 * (len([*net.modules()]) - 1)  # all but the list


def test_the_loop_finds_out_which_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted to be about as fast, and measured to be slower than single ops."""
    monkeypatch.setattr(host_costs, "_SAVED", 2)
    monkeypatch.setattr(host_costs, "_RERUN", 1)
    monkeypatch.setattr(host_costs, "_IN_REGION", 6)
    loop = Loop(Torch(), "70%")
    loop.run(steps=2)
    assert loop.plan is not None
    (rival,) = loop.plan.rivals
    schedules = [loop.plan.schedule, rival]
    assert sorted(bool(each.modules) for each in schedules) == [False, True]
    modules = next(each for each in schedules if each.modules)
    entries: list[Any] = []

    def winner(held: Contest) -> Any:
        entries[:] = held._entries
        return modules if all(each.steps == 3 for each in held._entries) else None

    monkeypatch.setattr(Contest, "winner", winner)
    loop.run(steps=8)
    assert [each.schedule for each in entries] == schedules
    (variant,) = vars(loop.model)[OPTIONS]._kinds._known.values()
    assert variant.schedule == modules


def test_a_fitted_model_is_copied_and_unwrapped() -> None:
    loop = Loop(Torch(), "70%")
    loop.run()
    paths = modules_of(loop)
    model = loop.model
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(OPTIONS in vars(copied.get_submodule(path)) for path in paths)
    recollect.unwrap(model)
    assert all(OPTIONS not in vars(module) for module in model.modules())
