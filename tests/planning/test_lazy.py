"""``fit(model, budget=...)`` without a batch: planned from the loop's own first step.

Every loop is compared with the plain one bit for bit, and the peak of every step with the budget,
the first one included.
"""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import recollect
from recollect._torch.modes import dispatch_modes
from recollect.modules import OPTIONS
from recollect.planning.planner import Planner
from recollect.planning.recording import prices
from tests._support import assert_identical, gradients, measure
from tests.planning._models import ConvNet, squares, static_bytes

pytestmark = pytest.mark.usefixtures("no_bound")


@pytest.fixture(autouse=True)
def _no_prices_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a profiler measures a step, the memory of its ops is known from earlier ones alone."""
    monkeypatch.setattr(prices, "_known", {})


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, layers: int = 6, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@cache
def batch(length: int = 128, seed: int = 1) -> Tensor:
    """Always the same object: what a step is given is there before it."""
    return torch.randn(length, 32, generator=torch.Generator().manual_seed(seed))


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    states = {} if optimizer is None else optimizer.state
    return sum(t.nbytes for s in states.values() for t in s.values() if t.dim())


Optimizer = torch.optim.Optimizer
Step = Callable[[nn.Module, int], Tensor]


def usual(model: nn.Module, number: int) -> Tensor:
    return squares(model(batch(seed=number)))


class Loop:
    """A training loop under a budget, beside a plain one."""

    def __init__(
        self,
        model: nn.Module,
        budget: float | str,
        make: Callable[[Any], Optimizer] = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        self.plain = copy.deepcopy(model)
        self.model = recollect.fit(model, budget=budget, **options)
        assert self.model is model
        self.optimizers = [make(each.parameters()) for each in (self.model, self.plain)]
        self.peaks: list[int] = []

    @property
    def plan(self) -> recollect.Plan | None:
        return vars(self.model)[OPTIONS].plan

    def run(self, step: Step = usual, steps: int = 5, every: int = 1, *, measured: int = 0) -> None:
        """Run steps. Their peaks are measured from the one with the number ``measured`` on.

        While they are, by a profiler, no other can measure the workspace of ops.
        ``every``: how many backwards there are for a step of the optimizer.
        """
        for number in range(steps):
            there = sum(grad.nbytes for grad in gradients(self.model) if grad is not None)
            for model in (self.plain, self.model):  # the batch is made for the first
                torch.manual_seed(number)
                if number < measured:
                    step(model, number).backward()
                    continue
                found = measure(
                    lambda model=model, number=number: step(model, number),
                    lambda loss: loss.backward(),
                    warm_up=False,
                )
            assert_identical(gradients(self.model), gradients(self.plain))
            if number >= measured:
                more = there + state_bytes(self.optimizers[0])
                self.peaks.append(found.peak + static_bytes(self.model) + more)
            if number % every == every - 1:
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        assert_identical(dict(self.model.state_dict()), dict(self.plain.state_dict()))
        assert dispatch_modes() == []

    def assert_kept(self, least: float = 0.85) -> None:
        """The budget is kept in every step, and made use of once there is a plan."""
        assert self.plan is not None
        budget = self.plan.budget
        assert max(self.peaks) <= budget
        assert self.plan.plain_peak > budget
        assert self.peaks[-1] > least * budget


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


@pytest.mark.parametrize("part", [0.65, 0.7, 0.9])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_first_step_is_planned_and_the_loop_goes_on(part: float, dropout: float) -> None:
    loop = Loop(net(dropout=dropout), part)
    loop.run()
    loop.assert_kept()
    plan = loop.plan
    assert plan is not None
    # Of the second step on the peak is known to the byte, but for the counters of the optimizer.
    if not dropout:  # whose generator states count
        assert 0 <= plan.predicted_peak - loop.peaks[-1] <= 8 * 50
    assert loop.model.calls == 5  # nothing runs twice


def test_the_workspaces_of_a_step_beside_the_users_profiler() -> None:
    torch.manual_seed(0)
    model = ConvNet(4, 16).to(memory_format=torch.channels_last)
    images = torch.randn(4, 3, 32, 32)
    loop = Loop(model, 0.7, torch.optim.SGD)
    loop.run(lambda model, _: squares(model(images)))  # each of them is measured by a profiler
    loop.assert_kept()
    assert loop.plan is not None
    assert loop.plan.predicted_peak == loop.peaks[-1]


def test_the_plan_is_that_of_the_same_step_planned_by_hand() -> None:
    loop = Loop(net(), 0.7, torch.optim.SGD)
    loop.run(steps=2)
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    by_hand = recollect.plan(
        model, batch(), 0.7, loss=squares, optimizer=optimizer, holds_output=False
    )
    assert loop.plan is not None
    assert loop.plan.plain_peak == by_hand.plain_peak
    assert loop.plan.base == by_hand.base
    assert loop.plan.made == by_hand.made


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_state_of_the_optimizer_counts(make: Any) -> None:
    loop = Loop(net(), 0.7, make)
    loop.run()
    loop.assert_kept(0.8)


@pytest.mark.parametrize(("accumulates", "forwards"), [(False, 9), (True, 65)])
def test_updates_by_hand(accumulates: bool, forwards: int) -> None:
    model, plain = net(), net()
    recollect.fit(model, budget=0.7)
    for number in range(forwards):
        assert vars(model)[OPTIONS].plan is None
        for each in (plain, model):
            torch.manual_seed(number)
            usual(each, number).backward()
            if not accumulates:
                with torch.no_grad():
                    for parameter in each.parameters():
                        parameter.sub_(parameter.grad, alpha=0.01)
                        parameter.grad = None
    assert vars(model)[OPTIONS].plan is not None
    assert_identical(gradients(model), gradients(plain))
    assert_identical(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_run_that_is_resumed() -> None:
    loop = Loop(net(), 0.7)
    for optimizer, model in zip(loop.optimizers, (loop.model, loop.plain), strict=True):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    loop.run()
    loop.assert_kept()


@pytest.mark.parametrize("every", [2, 3])
def test_gradients_that_accumulate(every: int) -> None:
    loop = Loop(net(), 0.8)
    loop.run(steps=5 * every, every=every)
    loop.assert_kept(0.6)


def test_batches_of_other_lengths() -> None:
    lengths = [128, 96, 64, 160, 160, 96, 128, 160, 40, 160]
    loop = Loop(net(), 0.8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", recollect.PlanWarning)
        loop.run(lambda model, n: squares(model(batch(lengths[n], n))), len(lengths))
    assert loop.plan is not None
    assert max(loop.peaks) <= loop.plan.budget


def test_a_smaller_batch_that_recurs_and_fits_runs_plain() -> None:
    loop = Loop(net(), 0.8)
    loop.run(steps=2)
    loop.run(lambda model, n: squares(model(batch(16, n))), 6)
    assert loop.plan is not None
    known = vars(loop.model)[OPTIONS]._kinds._known
    (variant,) = [each for (kind,), each in known.items() if kind.signature[0][0][0] == 16]
    assert variant.schedule is None


def test_losses_with_targets_and_a_part_of_the_outputs() -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        out = model(batch(seed=number))
        return F.cross_entropy(out[::2], torch.arange(64) % 8)

    loop = Loop(net(), 0.7)
    loop.run(step)
    loop.assert_kept()


def test_autocast_in_the_loop() -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return squares(model(batch(seed=number)).float())

    loop = Loop(net(), 0.8)
    loop.run(step, measured=1)
    loop.assert_kept()


def test_a_model_called_twice_in_a_step() -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        return squares(model(batch(seed=number)) - model(batch(seed=number + 1)))

    loop = Loop(net(), 0.7)
    loop.run(step)
    loop.assert_kept()


def test_two_models_that_are_fitted_each() -> None:
    torch.manual_seed(0)
    maker, critic = Net(3, dropout=0.1), Net(4)
    pairs = [(maker, critic), copy.deepcopy((maker, critic))]
    for model in (maker, critic):
        recollect.fit(model, budget=0.8)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", recollect.PlanWarning)
        for first, second in pairs:
            torch.manual_seed(3)
            optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (first, second)]
            for number in range(4):
                fake = first(batch(seed=number))
                real = (
                    second(batch(seed=number + 1)).mean() - second(fake @ torch.ones(8, 32)).mean()
                )
                real.backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            results.append([dict(each.state_dict()) for each in (first, second)])
    assert_identical(results[0], results[1])
    assert dispatch_modes() == []


def test_a_frozen_teacher_outside_of_no_grad_needs_no_plan() -> None:
    teacher = recollect.fit(net().requires_grad_(False), budget=0.8)
    loop = Loop(net(dropout=0.1), 0.8)
    loop.run(lambda model, number: squares(usual(model, number) - teacher(batch(seed=number))), 10)
    loop.assert_kept(0)
    assert vars(teacher)[OPTIONS].plan is None


@pytest.mark.parametrize("part", [0.7, 0.9])
def test_two_models_that_keep_less_when_the_other_keeps_more(part: float) -> None:
    """The first steps are traced while the other model has no plan, and keeps little."""
    torch.manual_seed(0)
    maker, critic = recollect.fit(net(layers=8), budget=part), recollect.fit(Net(4), budget="1GiB")
    models = [maker, critic]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in models]
    peaks: list[int] = []

    def update(optimizer: Optimizer, run: Callable[[], Tensor]) -> None:
        for model in models:
            model.zero_grad()
        memory = measure(run, Tensor.backward, warm_up=False)
        peaks.append(memory.peak + static_bytes(maker))
        optimizer.step()

    for number in range(8):
        x, real = batch(seed=number), batch(seed=number + 1)
        update(optimizers[1], lambda real=real: squares(critic(real)))
        update(optimizers[0], lambda x=x: squares(critic(maker(x).repeat(1, 4))))
    plan = vars(maker)[OPTIONS].plan
    assert plan.plain_peak > plan.budget
    assert max(peaks[1::2]) <= plan.budget
    assert vars(critic)[OPTIONS]._kinds.has_room_for_plain()


def test_another_model_that_keeps_too_much_is_named() -> None:
    models = [recollect.fit(net(layers=8), budget=0.7), recollect.fit(Net(8), budget="1GiB")]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in models]

    def train() -> None:
        for number in range(4):
            sum(squares(model(batch(seed=number))) for model in models).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    with pytest.warns(recollect.PlanWarning, match="another model under a plan runs inside of it"):
        train()


def test_a_model_that_is_frozen_while_another_is_trained() -> None:
    made = batch().clone().requires_grad_()

    def in_turn(model: nn.Module, number: int) -> Tensor:
        made.grad = None
        model.requires_grad_(number % 2 == 0)
        return squares(model(made))

    loop = Loop(net(), 0.8)
    loop.run(in_turn, steps=7)
    loop.assert_kept()


def test_a_model_that_is_frozen_passes_gradients_on() -> None:
    loop = Loop(net().requires_grad_(False), 0.8)
    loop.optimizers = []
    for number in range(10):
        x, y = (batch(seed=number).clone().requires_grad_() for _ in range(2))
        squares(loop.model(x)).backward()
        squares(loop.plain(y)).backward()
        assert_identical(x.grad, y.grad)
    assert loop.plan is not None


def test_evaluation_and_frozen_layers_between_steps() -> None:
    loop = Loop(net(), 0.7)
    loop.run(steps=2)
    for model in (loop.model, loop.plain):
        model.eval()
        with torch.no_grad():
            model(batch(300))
        model.train()
        model.blocks[0].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", recollect.PlanWarning)
        loop.run(steps=4)
    assert loop.plan is not None
    assert max(loop.peaks) <= loop.plan.budget


def test_a_forward_whose_output_is_dropped_is_no_step() -> None:
    loop = Loop(net(), 0.7)
    for model in (loop.model, loop.plain):
        model(batch())
    assert dispatch_modes() == []
    assert loop.plan is None
    loop.run()
    loop.assert_kept()


def test_a_backward_that_fails_is_no_step() -> None:
    loop = Loop(net(), 0.7)
    out = loop.model(batch())

    def fail(_: Tensor) -> None:
        raise ValueError("in backward")

    handle = loop.model.blocks[2].up.weight.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        squares(out).backward()
    handle.remove()
    loop.model.zero_grad()
    assert dispatch_modes() == []
    loop.run()
    loop.assert_kept()


def test_a_gradient_penalty_is_traced_to_its_end() -> None:
    """The graph that backward makes holds what it unpacked, though the output is gone."""
    x = batch(64).clone().requires_grad_()

    def penalty(model: nn.Module, _: int) -> Tensor:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        x.grad = None
        return (gradient.norm(dim=1) - 1).square().mean()

    loop = Loop(net(), 1.0, torch.optim.SGD)
    loop.run(penalty, 4, measured=1)
    assert loop.plan is not None
    # To the byte: the gradient of x is there before the step, and freed in it.
    assert loop.peaks == [loop.plan.plain_peak - x.nbytes] * 3


def test_an_output_that_is_dropped_in_another_thread() -> None:
    """The trace has ended, and those of other models may begin."""
    outputs = [recollect.fit(net(), budget=0.7)(batch())]
    thread = threading.Thread(target=outputs.clear)
    thread.start()
    thread.join()
    loop = Loop(net(), 0.7)
    loop.run()
    loop.assert_kept()


def test_backward_in_another_thread() -> None:
    loop = Loop(net(), 0.7)
    out = squares(loop.model(batch()))
    thread = threading.Thread(target=out.backward)
    thread.start()
    thread.join()
    del out
    loop.model.zero_grad()
    loop.run()
    assert loop.plan is not None


def test_a_loop_under_a_mode_of_the_user_is_right() -> None:
    model = net()
    plain = copy.deepcopy(model)
    recollect.fit(model, budget=0.7)
    from torch.utils.flop_counter import FlopCounterMode

    for _ in range(3):
        for each in (model, plain):
            with FlopCounterMode(display=False):
                squares(each(batch())).backward()
    assert_identical(gradients(model), gradients(plain))
    assert dispatch_modes() == []


def test_a_model_that_fits_runs_plain() -> None:
    loop = Loop(net(), "1GiB")
    loop.run()
    assert loop.plan is not None
    assert loop.plan.needed_schedule is None
    assert loop.peaks[-1] <= loop.plan.plain_peak


def test_where_all_steps_fit_no_schedule_is_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "solver", None)
    loop = Loop(net(), "auto")
    loop.run()
    assert loop.plan is not None
    assert loop.plan.needed_schedule is None
    assert "plain" in str(loop.plan)
    assert next(point.name for point in loop.plan.report.points) == "plain"


@pytest.mark.parametrize("every", [1, 2])
def test_larger_steps_after_one_that_fits_have_good_schedules(every: int) -> None:
    half = Loop(net(), "1GiB")
    half.run(steps=2)
    assert half.plan is not None
    loop = Loop(net(), int(1.4 * half.plan.plain_peak))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", recollect.PlanWarning)  # it is another step
        loop.run(lambda model, n: squares(model(batch(256 if n > 3 else 128, n))), 12, every)
    assert loop.plan is not None
    assert not loop.plan.is_solved
    assert max(loop.peaks) <= loop.plan.budget
    assert loop.peaks[-1] > 0.85 * loop.plan.budget


def test_a_budget_that_cannot_be_met_is_told_and_training_goes_on() -> None:
    loop = Loop(net(), 100_000)
    with pytest.warns(recollect.PlanWarning, match=r"the least that works is .*goes on") as caught:
        loop.run(steps=3)
    assert caught[0].filename == __file__
    plan = loop.plan
    assert plan is not None
    assert loop.peaks[-1] <= 1.001 * plan.predicted_peak


class Recurrent(nn.Module):
    """Its peak is one op's, so there is nothing to recompute instead."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 32, 2), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(8, 16, 32))[0])


def test_where_nothing_can_be_saved_steps_run_plain() -> None:
    torch.manual_seed(0)
    loop = Loop(Recurrent(), 0.9)
    with pytest.warns(recollect.PlanWarning, match=r"saves nothing.*Training goes on plain$"):
        loop.run(steps=4)
    assert loop.plan is not None
    assert loop.plan.predicted_peak == loop.plan.plain_peak > loop.plan.budget
    assert loop.plan.predicted_time == loop.plan.plain_time
    (variant,) = vars(loop.model)[OPTIONS]._kinds._known.values()
    assert variant.schedule is None


def test_the_least_that_is_told_has_room_for_gradients_that_are_there_in_forward() -> None:
    def clears_late(budget: float) -> tuple[Loop, list[str]]:
        loop = Loop(net(), budget)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(5):  # as the Trainer of Lightning does
                loss = usual(loop.model, number)
                loop.optimizers[0].zero_grad()
                loss.backward()
                loop.optimizers[0].step()
        return loop, [str(each.message) for each in caught]

    _, (first, *_) = clears_late(0.3)
    assert "gradients that the loop holds in forward" in first
    least = int(re.search(r"budget=(\d+)", first)[1])  # type: ignore[index]
    loop, told = clears_late(least)
    assert loop.plan is not None
    assert [each for each in told if "steps before there was a plan" not in each] == []


def test_gradients_that_nobody_clears_are_told_with_what_to_do() -> None:
    model = recollect.fit(net(), budget=0.5)
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            usual(model, number).backward()
            optimizer.step()
    text = str(caught[-1].message)
    assert "optimizer.zero_grad() before each forward" in text
    budget = int(re.search(r"recollect\.unwrap\(model\), .*\.fit\(model, budget=(\d+)\)$", text)[1])  # type: ignore[index]
    recollect.fit(recollect.unwrap(model), budget=budget)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            usual(model, number).backward()
            optimizer.step()
    assert [str(w.message) for w in caught if "steps before there was" not in str(w.message)] == []


def test_what_it_says(caplog: Any) -> None:
    stages: list[str] = []
    loop = Loop(net(), 0.7, progress=lambda what, done: stages.append(what))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("recollect")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        loop.run(steps=2)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert "solving" in stages
    (line,) = [line for line in lines if "to plan" in line]
    assert re.match(r"recollect: [\d.]+ MiB -> ", line)


def test_before_its_first_step_it_can_be_copied_pickled_and_unwrapped() -> None:
    model = recollect.fit(net(), budget=0.7)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert vars(each)[OPTIONS].plan is None
        squares(each(batch())).backward()
        torch.optim.SGD(each.parameters(), 0.1).step()
        squares(each(batch())).backward()
        assert vars(each)[OPTIONS].plan is not None
    assert recollect.unwrap(model) is model
    assert OPTIONS not in vars(model)
    assert model.state_dict().keys() == net().state_dict().keys()


def test_copies_of_a_planned_model_count_the_state_of_their_optimizer_once() -> None:
    loop = Loop(net(), 0.8)
    loop.run(steps=3)
    plan, peak = loop.plan, loop.peaks[-1]
    assert plan is not None
    for each in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        optimizer = torch.optim.AdamW(each.parameters())
        for number in range(4):  # a warning is an error
            found = measure(
                lambda each=each, number=number: usual(each, number),
                lambda loss: loss.backward(),
                warm_up=False,
            )
            before = static_bytes(each) + state_bytes(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        assert found.peak + before == peak <= plan.budget


def test_in_the_middle_of_its_first_step_it_can_be_unwrapped() -> None:
    model = recollect.fit(net(), budget=0.7)
    loss = squares(model(batch()))
    recollect.unwrap(model)
    assert dispatch_modes() == []
    loss.backward()
    plain = net()
    squares(plain(batch())).backward()
    assert_identical(gradients(model), gradients(plain))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget should be more than 0"),
        ({"budget": 0.7, "loss": squares}, r"loss: without a batch.*the loop's loss"),
        ({"budget": 0.7, "offload": "no"}, "offload should be True, False or 'auto'"),
    ],
)
def test_what_makes_no_sense_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recollect.fit(net(), **options)


@pytest.mark.parametrize("has_device", [False, True])
def test_offload_without_a_device_is_refused(
    has_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_device)
    model = net()
    with pytest.raises(ValueError, match=r"offload=True needs a CUDA device .* is on cpu"):
        recollect.fit(model, budget=0.7, offload=True)
        assert has_device  # the model may be moved to it before the first forward
        model(batch())
    assert dispatch_modes() == []


def test_what_is_no_module_or_is_checkpointed_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model should be an nn\.Module"):
        recollect.fit(torch.sin, budget=0.7)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="checkpointed or has a plan already"):
        recollect.fit(recollect.fit(net(), budget=0.7), budget=0.7)
    with pytest.raises(TypeError, match="progress should be True, False or a function"):
        recollect.fit(net(), budget=0.7, progress="yes")  # type: ignore[arg-type]


# --- what a reviewer found ------------------------------------------------------------------------


def _in_a_closure(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(steps):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss = usual(model, number)
            loss.backward()
            return loss

        optimizer.step(closure)


def _by_two_optimizers(model: nn.Module, steps: int) -> None:
    parameters = [*model.parameters()]
    optimizers = [torch.optim.AdamW(parameters[part::2]) for part in range(2)]
    for number in range(steps):
        usual(model, number).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _in_backward(model: nn.Module, steps: int) -> None:
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for number in range(steps):
        usual(model, number).backward()


class _OwnMomenta(torch.optim.SGD):
    """Keeps two tensors for each parameter in an attribute, not in its ``state``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if "momenta" not in vars(self):
            params = self.params = self.param_groups[0]["params"]
            self.momenta = {n: (p.clone(), p.clone()) for n, p in enumerate(params)}
        for parameter, (slow, fast) in zip(self.params, self.momenta.values(), strict=True):
            parameter.sub_(slow.lerp_(parameter.grad, 0.1) - fast.lerp_(parameter.grad, 0.2))


def _with_own_momenta(model: nn.Module, steps: int) -> None:
    optimizer = _OwnMomenta(model.parameters())
    for number in range(steps):
        usual(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "train", [_in_a_closure, _by_two_optimizers, _in_backward, _with_own_momenta]
)
def test_all_state_of_optimizers_counts(train: Callable[[nn.Module, int], None]) -> None:
    model, plain = net(), net()
    recollect.fit(model, budget=0.8)
    for each in (model, plain):
        train(each, 4)
    assert_identical(dict(model.state_dict()), dict(plain.state_dict()))
    plan = vars(model)[OPTIONS].plan
    weights = sum(p.nbytes for p in model.parameters())
    assert plan is not None
    assert 3 * weights <= plan.base <= 3 * weights + 4 * 60  # and the counts of steps


def test_one_optimizer_for_two_fitted_models() -> None:
    models = [recollect.fit(net(), budget=0.8) for _ in range(2)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], 0.1)
    for number in range(4):
        for model in models:
            usual(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(vars(model)[OPTIONS].plan is not None for model in models)
    assert dispatch_modes() == []


def test_an_output_that_is_kept_does_not_keep_the_trace() -> None:
    model = recollect.fit(net(), budget=0.7)
    kept = model(batch())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(6):
        usual(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert dispatch_modes() == []
    assert vars(model)[OPTIONS].plan is not None
    assert kept.requires_grad


def test_what_can_never_be_traced_is_told() -> None:
    model = recollect.fit(net(), budget=0.7)

    def train() -> None:
        for number in range(10):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                loss = usual(model, number)
            loss.backward()

    with pytest.warns(recollect.PlanWarning, match=r"no plan after 8 forwards.*saved-tensor hooks"):
        train()


def test_transforms_before_there_is_a_plan() -> None:
    model = recollect.fit(net(), budget=0.7)
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], module: nn.Module = model) -> Tensor:
        return squares(torch.func.functional_call(module, values, (batch(),)))

    plain = net()
    assert_identical(
        torch.func.grad(loss)(parameters),
        torch.func.grad(lambda values: loss(values, plain))(parameters),
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_transforms_between_a_traced_step_and_what_is_learned_from_it(steps: int) -> None:
    """As for gradients of single samples: torch.func has its own tensors in the model."""
    model, plain = recollect.fit(net(), budget=0.7), net()
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, plain)]

    def train(module: nn.Module, optimizer: Optimizer, length: int) -> list[Tensor]:
        squares(module(batch(length))).backward()
        optimizer.step()
        optimizer.zero_grad()
        parameters = {name: each.detach() for name, each in module.named_parameters()}
        return [*torch.func.grad(partial(_loss_of, module))(parameters).values()]

    # Of the second of two steps, the shape is new.
    ours, theirs = (
        [train(each, optimizer, 128 + 8 * number) for number in range(steps)]
        for each, optimizer in zip((model, plain), optimizers, strict=True)
    )
    assert_identical(ours, theirs)
    usual(model, 0).backward()
    assert vars(model)[OPTIONS].plan is not None
    assert dispatch_modes() == []


def _loss_of(model: nn.Module, values: dict[str, Tensor]) -> Tensor:
    return squares(torch.func.functional_call(model, values, (batch(16),)))


def test_a_thread_for_each_step_is_told() -> None:
    model = recollect.fit(net(), budget=0.7)

    def train() -> None:
        for number in range(33):
            thread = threading.Thread(target=lambda n=number: usual(model, n).backward())
            thread.start()
            thread.join()

    with pytest.warns(recollect.PlanWarning, match="32 forwards.*each ran in another thread"):
        train()


class Tangled(nn.Module):
    """Blocks that no container tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


def test_backwards_in_another_thread_make_no_plan_and_leave_no_mode() -> None:
    """Nothing of them can be traced, which is told once."""
    model = recollect.fit(net(), budget=0.8)
    plain = recollect.unwrap(copy.deepcopy(model))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]

    def train(number: int) -> None:
        for each in (model, plain):
            loss = squares(each(batch(seed=number)))
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert dispatch_modes() == []

    with pytest.warns(recollect.PlanWarning, match="in the thread that called it") as told:
        [train(number) for number in range(10)]
    assert len(told) == 1
    assert vars(model)[OPTIONS].plan is None
    assert_identical(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_later_step_makes_the_plan_if_planning_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """As when the cell of a notebook is stopped, and run again."""
    loop = Loop(net(), 0.8)

    def interrupt(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Planner, "of_traced", interrupt)
        loop.run(steps=1)
        with pytest.raises(error):
            loop.model(batch())
    assert dispatch_modes() == []
    assert loop.plan is None
    loop.run(measured=2)
    loop.assert_kept()


def test_first_steps_above_the_budget_are_told() -> None:
    torch.manual_seed(0)
    loop = Loop(Tangled(), 0.75, torch.optim.SGD)
    with pytest.warns(
        recollect.PlanWarning, match=r"steps before there was a plan took.*fit\(model, batch"
    ):
        loop.run(steps=3)
    assert loop.plan is not None
    assert loop.peaks[-1] <= loop.plan.budget


def test_first_steps_have_no_state_of_an_optimizer_yet() -> None:
    torch.manual_seed(0)
    loop = Loop(Tangled(), 0.9)
    loop.run(steps=3)  # a warning is an error
    assert loop.plan is not None
    assert max(loop.peaks) <= loop.plan.budget < loop.plan.plain_peak


def test_first_steps_whose_blocks_are_single_ops_with_several_results() -> None:
    """The first steps hold the output of an LSTM alone, and not what else its op returns."""
    torch.manual_seed(0)
    model = RecurrentLayers()
    recollect.fit(model, budget=0.6)
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(3):  # a warning would be an error
        squares(model(batch(640, number).view(40, 16, 32))).backward()
        optimizer.step()
        optimizer.zero_grad()


class RecurrentLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(32, 32, num_layers=2) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


def test_first_steps_that_accumulate_above_the_budget_are_told() -> None:
    torch.manual_seed(0)
    loop = Loop(Tangled(), 1.0, torch.optim.SGD)
    with pytest.warns(recollect.PlanWarning, match="steps before there was a plan took about"):
        loop.run(steps=3, every=2)
    assert loop.plan is not None
    assert loop.peaks[1] > loop.plan.budget >= loop.peaks[0]


class Tasks(nn.Module):
    """Has a head for each task, of which a step trains one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        widths = (32, 128, 256)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for width in widths
        )
        self.task = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[self.task](self.body(x)[:4])


def _task(model: nn.Module, number: int) -> Tensor:
    model.task = (0, 0, 1, 0, 2, 0, 0, 0)[number]
    return squares(model(batch(seed=1)))


def test_state_that_is_expected_of_an_optimizer_is_not_counted_twice() -> None:
    model = net()
    for block in model.blocks[:3]:
        block.requires_grad_(False)
    loop = Loop(model, 1.0)
    kinds = []
    for number in range(5):
        if number == 2:
            for each in (loop.model, loop.plain):
                each.requires_grad_(True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", recollect.PlanWarning)  # it is another step
            usual(loop.model, number).backward()
        loop.optimizers[0].step()
        loop.optimizers[0].zero_grad()
        kinds.append(vars(loop.model)[OPTIONS]._forwards.step)
    assert kinds[2] == kinds[3] == kinds[4]


@pytest.mark.parametrize("with_batch", [False, True])
def test_state_that_an_optimizer_has_later_counts(with_batch: bool) -> None:
    torch.manual_seed(0)
    loop = Loop(Tasks(), 0.75)
    if with_batch:
        recollect.unwrap(loop.model)
        optimizer = loop.optimizers[0]
        recollect.fit(loop.model, batch(seed=1), 0.75, loss=squares, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", recollect.PlanWarning)  # steps with other heads
        loop.run(_task, steps=8)
    assert loop.plan is not None
    assert loop.peaks[-1] <= loop.plan.budget


def test_a_part_in_torchscript() -> None:
    states = []
    for part in (None, 0.9):
        model = net()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.blocks[2] = torch.jit.script(model.blocks[2])
            if part is not None:
                recollect.fit(model, budget=part)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for number in range(3):
                usual(model, number).backward()
                optimizer.step()
                optimizer.zero_grad()
        states.append(dict(model.state_dict()))
    assert_identical(*states)
    assert vars(model)[OPTIONS].plan is not None
    told = [str(each.message) for each in caught]
    told = [each for each in told if "TorchScript, which changes its code" in each]
    assert len(told) == 1
    assert told[0].startswith("its blocks.2 and ")


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32, sparse=True)
        self.body = net()

    def forward(self, numbers: Tensor) -> Tensor:
        return self.body(self.embedding(numbers))


def test_sparse_gradients_that_accumulate() -> None:
    states = []
    for part in (None, 0.75):
        torch.manual_seed(0)
        model: nn.Module = Sparse()
        if part is not None:
            recollect.fit(model, budget=part)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(6):
            squares(model((torch.arange(128) + number) % 64)).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        states.append(dict(model.state_dict()))
    assert_identical(*states)
    assert vars(model)[OPTIONS].plan is not None


def test_functional_calls_with_values_that_are_no_leaves() -> None:
    states = []
    for part in (None, 0.9):
        model: nn.Module = net()
        if part is not None:
            recollect.fit(model, budget=part)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(12):
            values = {name: 2 * value for name, value in model.named_parameters()}
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # the gradients of others than leaves are not read
                out = torch.func.functional_call(model, values, (batch(seed=number),))
            squares(out).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(dict(model.state_dict()))
    assert_identical(*states)
    assert vars(model)[OPTIONS].plan is not None


def test_models_that_cannot_be_traced_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="has no parameters"):
        recollect.fit(nn.Sequential(nn.GELU()), budget=0.7)
    with pytest.raises(ValueError, match="lazy parameters without a shape"):
        recollect.fit(nn.Sequential(nn.LazyLinear(3)), budget=0.7)


def test_it_can_be_pickled_whatever_reports() -> None:
    model = recollect.fit(net(), budget=0.7, progress=lambda what, done: None)
    assert vars(pickle.loads(pickle.dumps(model)))[OPTIONS].plan is None


def test_a_model_is_freed_with_its_trace() -> None:
    model = recollect.fit(net(), budget=0.7)
    out = model(batch())
    alive = ref(model)
    del model
    gc.collect()
    del out
    gc.collect()
    assert alive() is None
    assert dispatch_modes() == []


_WITHOUT_COLLECTOR = """
import gc

import recollect
import torch
from torch import nn

class Penalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        out = self.layers(x.requires_grad_()).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

model = recollect.fit(Penalized(), budget=0.5)
gc.disable()
for _ in range(4):
    model.zero_grad()
    model(torch.randn(64, 16)).backward()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    print([each.shape for each in tensors if each.shape == (64, 32)])
"""


def test_traced_steps_leave_no_activations_to_the_garbage_collector() -> None:
    """Each step is traced, since forward goes backward inside of itself.

    In a process of its own, where the garbage collector is off from the first step on.
    """
    found = subprocess.run(
        [sys.executable, "-c", _WITHOUT_COLLECTOR], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == ["[]"] * 4


def test_forwards_of_one_backward_leave_no_mode() -> None:
    loop = Loop(net(), 0.8)
    for number in range(3):
        (usual(loop.model, number) + usual(loop.model, number + 3)).backward()
        assert dispatch_modes() == []
        loop.optimizers[0].step()
        loop.optimizers[0].zero_grad()
    assert loop.plan is not None


def test_an_output_that_is_dropped_in_the_backward_of_others_leaves_no_mode() -> None:
    model = recollect.fit(net(), budget=0.8)
    held = [model(batch())]
    other = torch.randn(3, requires_grad=True).exp()
    other.register_hook(lambda _: held.clear())
    other.sum().backward()
    assert dispatch_modes() == []


class Checkpointed(Net):
    """Checkpoints some of its blocks itself."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("budget", [0.9, "1GiB"])
def test_a_model_that_checkpoints_parts_of_itself_is_told_to_leave_it_to_the_plan(
    budget: float | str,
) -> None:
    """Unless the budget has room for the step as it is."""
    models = []
    for part in (None, budget):
        torch.manual_seed(0)
        model: nn.Module = Checkpointed(layers=3)
        if part is not None:
            recollect.fit(model, budget=part)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(4):
                usual(model, number).backward()
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)
    assert_identical(*(dict(each.state_dict()) for each in models))
    told = [str(each.message) for each in caught if "leave checkpointing" in str(each.message)]
    assert len(told) == (budget == 0.9)
    assert len(caught) == 0 or budget == 0.9
    assert all(" at 0x" not in each for each in told)


def test_a_backward_that_is_split_has_no_plan() -> None:
    """As by zero-bubble schedules of pipelines: gradients of activations first."""
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    recollect.fit(model, budget=0.8)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    messages = []
    for step in range(3):
        for each in (model, plain):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _split_step(each, step)
            messages += [str(w.message) for w in caught if w.category is recollect.PlanWarning]
        assert_identical([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    (message,) = messages
    assert "gradients of activations first" in message
    assert 'recollect.checkpointed(block, engine="replay")' in message
    assert vars(model)[OPTIONS].plan is None
    assert not dispatch_modes()


def _split_step(model: nn.Module, step: int) -> None:
    inputs: list[Tensor] = []
    handles = [
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for block in model.blocks  # type: ignore[union-attr]
    ]
    x = batch(seed=step).clone().requires_grad_()
    out = model(x)
    for handle in handles:
        handle.remove()
    edges = [get_gradient_edge(each) for each in inputs[1:]]
    inputs.clear()
    ones = torch.ones_like(out)
    given = torch.autograd.grad([out], [*edges, x], [ones], retain_graph=True)
    out.detach_()  # what is left begins at the edges
    parts = list(model.blocks[:-1].parameters())  # type: ignore[index,operator,union-attr]
    for block, edge, grad in zip(model.blocks, edges, given, strict=False):  # type: ignore[arg-type]
        own = [p for p in block.parameters() if any(p is part for part in parts)]
        for p, g in zip(
            own, torch.autograd.grad([edge], own, [grad], retain_graph=True), strict=True
        ):
            p.grad = g


@pytest.mark.filterwarnings("ignore:.torch.jit.trace.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("has_plan", [False, True])
def test_exporting_is_no_step(has_plan: bool) -> None:
    loop = Loop(nn.Sequential(*(Block(32, 0.0) for _ in range(6))), 0.7)
    if has_plan:
        loop.run(steps=2)
    x = batch()
    for program in (
        torch.export.export(loop.model, (x,)).module(),
        torch.export.export(loop.model, (x,), strict=True).module(),
        torch.jit.trace(loop.model, x),
    ):
        assert_identical(program(x), loop.plain(x))
    loop.run()
    loop.assert_kept()


class Skipping(Net):
    """Runs its first blocks alone."""

    depth = 5

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.depth]:
            x = block(x)
        return self.head(x)


def test_steps_that_differ_do_not_run_plain_after_a_short_one() -> None:
    """That which was traced was within the budget without a plan. Others are not."""
    loop = Loop(Skipping(), 0.8, torch.optim.SGD)
    depths = [5, 5, 6, 1, 6, 6]

    def step(model: nn.Module, number: int) -> Tensor:
        model.depth = depths[number]
        return usual(model, number)

    with pytest.warns(recollect.PlanWarning, match="forward makes") as told:
        loop.run(step, steps=len(depths))
    assert len(told) == 1
    assert loop.plan is not None
    assert max(loop.peaks[-2:]) < loop.plan.plain_peak
