"""Steps under a plan that was made for another batch: traced while the loop runs them."""

from __future__ import annotations

import collections
import copy
import functools
import random
import threading
import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

import recollect
from recollect._torch.tensors import fakes_left
from recollect.modules import OPTIONS
from recollect.planning.recording import record
from recollect.planning.recording.fakes import no_fakes_left
from recollect.planning.recording.record import predict_step
from recollect.planning.solving.solve import Solver
from tests._support import assert_identical, gradients, measure
from tests.planning._models import made, squares, static_bytes, tokens

pytestmark = pytest.mark.usefixtures("no_bound")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(4)]
        self.layers = nn.ModuleList(layers)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, step: int = 0) -> torch.Tensor:
        self.seen.append(len(x))
        for layer in self.layers:
            x = x + layer(x)
        return x * (1 + step)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def planned(model: Net, budget: float = 0.8, **options: object) -> recollect.Plan:
    plan = recollect.plan(model, torch.randn(256, 32), budget, **options)
    plan.apply(model)
    return plan


def assert_as_plain(model: Net, x: torch.Tensor, **kwargs: int) -> None:
    twin = copy.deepcopy(model)
    vars(twin).pop(OPTIONS, None)
    for each in (twin, model):
        each.zero_grad()
        each(x, **kwargs).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_loss_with_targets_of_the_planned_batch(model):
    targets = torch.randint(0, 32, (256,))
    planned(model, loss=lambda out: F.cross_entropy(out, targets))
    assert_as_plain(model, torch.randn(260, 32))


def test_a_model_that_was_frozen_since(model):
    planned(model)
    model.requires_grad_(False)
    x = torch.randn(300, 32, requires_grad=True)
    twin = copy.deepcopy(model)
    vars(twin).pop(OPTIONS)
    (expected,) = torch.autograd.grad(twin(x).sum(), x)
    model(x).sum().backward()
    assert torch.equal(x.grad, expected)


def test_a_number_that_is_another_in_every_step(model):
    planned(model)
    for step in range(5):
        assert_as_plain(model, torch.randn(256, 32), step=step)
    assert len(vars(model)[OPTIONS]._kinds._known) <= 2  # with and without the argument


def test_what_forward_notes_is_noted_once(model):
    planned(model)
    model.seen.clear()
    model(torch.randn(258, 32))
    assert model.seen == [258]


def test_a_larger_batch_that_fits_without_a_plan_runs_without_one(model):
    planned(model, "1GiB")
    assert_as_plain(model, torch.randn(300, 32))
    (variant,) = vars(model)[OPTIONS]._kinds._known.values()
    assert variant.schedule is None
    assert_as_plain(model, torch.randn(300, 32))


def test_hooks_see_tensors_with_values_alone(model):
    features, gradients = [], []
    model.layers[1].register_forward_hook(lambda *call: features.append(call[2]))
    model.layers[2].register_full_backward_hook(lambda *call: gradients.append(call[2][0]))
    nn.utils.parametrizations.weight_norm(model.layers[0][0])
    planned(model)
    features.clear()
    gradients.clear()
    model(torch.randn(261, 32)).sum().backward()
    assert [(type(x), len(x)) for x in features + gradients] == [(torch.Tensor, 261)] * 2


def test_another_plan_is_not_removed(model):
    first, second = (recollect.plan(model, torch.randn(256, 32), part) for part in (0.8, 0.9))
    first.apply(model)
    with pytest.raises(ValueError, match="another plan is applied"):
        second.remove(model)
    first.remove(model)


def test_a_plan_that_is_not_in_effect_says_so(model):
    planned(model)
    x = torch.randn(256, 32)
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        with pytest.warns(UserWarning, match="the plan is not in effect") as caught:
            model(x)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)  # once is enough


def test_a_profiler_of_the_users_goes_on(model):
    planned(model)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        model(torch.randn(259, 32)).sum().backward()
    assert any("backward" in event.name.lower() for event in profiler.events())


def test_under_a_profiler_there_is_no_plan(model):
    with (
        profile(activities=[ProfilerActivity.CPU], acc_events=True),
        pytest.raises(RuntimeError, match="a torch profiler is running"),
    ):
        recollect.plan(model, torch.randn(256, 32), 0.8)


def test_another_thread_may_use_the_model_meanwhile(model):
    planned(model)
    x = torch.randn(256, 32)
    expected = model(x).detach()
    wrong: list[str] = []
    is_done = threading.Event()

    def use() -> None:
        while not is_done.is_set():
            out = model(x)
            if type(out) is not torch.Tensor or not torch.equal(out, expected):
                wrong.append(str(type(out)))
            del out  # or the next forward begins while this one waits, which is told

    thread = threading.Thread(target=use)
    thread.start()
    try:
        for length in range(257, 262):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model(torch.randn(length, 32)).sum().backward()
    finally:
        is_done.set()
        thread.join()
    assert not wrong
    assert all(p.grad is not None for p in model.parameters())


# --- the budget -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part", "other"),
    [
        ("decoder", 0.7, tokens(5, 48)),
        ("decoder", 0.8, tokens(4, 64)),
        ("decoder_dropout", 0.8, tokens(6, 48)),
        ("conv", 0.8, torch.randn(5, 3, 16, 16)),
        ("with_loss", 0.8, {"tokens": tokens(5, 52), "labels": tokens(5, 52)}),
        ("encoder_decoder", 0.8, (torch.randn(5, 24, 32), torch.randn(5, 22, 32))),
    ],
)
def test_a_larger_batch_keeps_the_budget_bit_for_bit(name: str, part: float, other: Any) -> None:
    case = made(name)
    plan = recollect.plan(case.model, case.batch, part, loss=case.loss, offload=False)
    twin = copy.deepcopy(case)
    case.batch = twin.batch = other
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.apply(case.model)
        for seed in range(3):
            for each in (case, twin):
                each.model.zero_grad()
                torch.manual_seed(seed)
                if name == "conv" and not seed:
                    # While a profiler measures, nobody else can measure the workspace of ops.
                    case.loss_of(each.forward()).backward()
                    continue
                run = measure(each.forward, lambda out: case.loss_of(out).backward(), warm_up=False)
                if each is case:
                    assert run.peak + static_bytes(each.model) <= plan.budget
                elif seed:
                    assert run.peak + static_bytes(each.model) > plan.budget
            assert_identical(gradients(case.model), gradients(twin.model))


def test_targets_of_the_planned_batch_do_not_count_as_small(model):
    # The loss has a large part in the peak, and its targets are those of the planned batch.
    vocabulary = nn.Linear(32, 2048)
    net = nn.Sequential(model, vocabulary)
    targets = torch.randint(0, 2048, (256,))
    plan = recollect.plan(
        net, torch.randn(256, 32), 0.95, loss=lambda out: F.cross_entropy(out, targets)
    )
    plan.apply(net)
    more = torch.randint(0, 2048, (2048,))

    def step() -> int:
        net.zero_grad()
        backward = lambda out: F.cross_entropy(out, more).backward()  # noqa: E731 - one of two
        x = torch.randn(2048, 32)
        return measure(lambda: net(x), backward, warm_up=False).peak + static_bytes(net)

    with pytest.warns(recollect.PlanWarning, match="the batch is larger.*and the budget is"):
        assert step() > plan.budget


def test_a_plan_that_was_loaded_runs_with_the_least_memory(tmp_path):
    case = made("decoder")
    plan = recollect.plan(case.model, case.batch, 0.95, loss=case.loss)
    plan.save(tmp_path / "plan.json")
    peaks = []
    for each in (plan, recollect.Plan.load(tmp_path / "plan.json")):
        with warnings.catch_warnings(), each.applied(case.model):
            warnings.simplefilter("ignore", recollect.PlanWarning)
            case.batch = tokens(8, 48)
            for _ in range(2):
                case.model.zero_grad()
                run = measure(case.forward, lambda o: case.loss_of(o).backward(), warm_up=False)
            peaks.append(run.peak)
            case.batch = tokens()
    assert peaks[1] <= peaks[0]


def test_nothing_is_solved_or_run_on_fakes_in_a_step(model, monkeypatch):
    planned(model)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("in the middle of a step")

    monkeypatch.setattr(Solver, "__init__", never)
    monkeypatch.setattr(record, "fake_tensors", never)
    assert_as_plain(model, torch.randn(300, 32))


# --- what code remembers and draws ----------------------------------------------------------------


@functools.cache
def _cached(length: int) -> torch.Tensor:
    return torch.linspace(0, 1, length)[:, None]


@functools.cache
def _unrelated(number: int) -> int:
    return number


_GLOBAL: dict[int, torch.Tensor] = {}
_ORDERED: collections.OrderedDict[int, torch.Tensor] = collections.OrderedDict()
_NESTED: dict[str, dict[int, torch.Tensor]] = {"tables": {}}


def _memoized(memo: dict[int, torch.Tensor], length: int) -> torch.Tensor:
    if length not in memo:
        memo[length] = torch.linspace(0, 1, length)[:, None]
    return memo[length]


def _enclosed() -> Any:
    memo: dict[int, torch.Tensor] = {}
    return lambda length: _memoized(memo, length)


def _forget() -> None:
    enclosed = MEMOS["closure"].__closure__[0].cell_contents
    for memo in (_GLOBAL, _ORDERED, _NESTED["tables"], enclosed):
        memo.clear()


MEMOS: dict[str, Any] = {
    "lru_cache": _cached,
    "global": lambda length: _memoized(_GLOBAL, length),
    "ordered": lambda length: _memoized(_ORDERED, length),
    "nested": lambda length: _memoized(_NESTED["tables"], length),
    "closure": _enclosed(),
}


class Remembering(nn.Module):
    """Everyday code: tables by length, numbers drawn outside of torch, counters, meters."""

    def __init__(self, memo: Any) -> None:
        super().__init__()
        self.memo = memo
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(4)
        )
        self.own = random.Random(0)
        self.calls = 0
        self.last: collections.deque[int] = collections.deque(maxlen=4)
        self.meter = types.SimpleNamespace(total=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last.append(len(x))
        self.meter.total += float(x.shape[0])
        noise = random.random() + float(np.random.rand()) + self.own.random()
        x = x + self.memo(len(x)) * noise
        for layer in self.layers:
            x = x + layer(x)
        return x

    def state(self) -> Any:
        return self.calls, list(self.last), self.meter.total, self.own.random()


@pytest.mark.parametrize("memo", MEMOS)
def test_training_goes_on_as_plain_with_batches_of_all_sizes(memo: str) -> None:
    results = []
    for is_planned in (False, True):
        _forget()
        torch.manual_seed(0)
        net = Remembering(MEMOS[memo])
        if is_planned:
            recollect.plan(net, torch.randn(256, 32), 0.8).apply(net)
            torch.manual_seed(0)
            fresh = Remembering(MEMOS[memo])
            net.load_state_dict(fresh.state_dict())
            net.calls, net.own, net.meter.total = 0, random.Random(0), 0.0
            net.last.clear()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        for length in (256, 300, 300, 200, 320, 256):
            optimizer.zero_grad()
            net(torch.randn(length, 32)).square().mean().backward()
            assert {type(p.grad) for p in net.parameters()} == {torch.Tensor}
            optimizer.step()
        streams = random.random(), float(np.random.rand()), torch.rand(1)
        results.append((dict(net.state_dict()), net.state(), streams))
    assert_identical(results[1], results[0])
    assert type(MEMOS[memo](300)) is torch.Tensor


def test_a_forward_that_was_wrapped_on_the_instance() -> None:
    # As accelerate's `prepare` does for mixed precision.
    case = made("decoder")
    plain = copy.deepcopy(case.model)
    for net in (case.model, plain):
        forward = torch.autocast("cpu", torch.bfloat16)(net.forward.__func__)
        net.forward = types.MethodType(forward, net)
    recollect.plan(case.model, case.batch, 0.8, loss=case.loss).apply(case.model)
    for length in (48, 80, 80):
        batch = tokens(4, length)
        for net in (case.model, plain):
            net.zero_grad()
            squares(net(batch)).backward()
        assert_identical(gradients(case.model), gradients(plain))
    assert not torch.is_autocast_enabled("cpu")


# --- tensors without values -----------------------------------------------------------------------


#: What is said of who holds a table, where it cannot be put back.
HOLDERS = {
    "global": "the global variable '_GLOBAL' of",
    "ordered": "the global variable '_ORDERED' of",
    "nested": "the global variable '_NESTED' of",
    "closure": "the variable 'memo' around the function _enclosed.<locals>.<lambda>",
}


def _plan_or_why_not(net: nn.Module, batch: torch.Tensor) -> recollect.Plan | str:
    try:
        return recollect.plan(net, batch, 0.8)
    except recollect.CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("memo", MEMOS)
def test_a_plan_on_the_meta_device_leaves_no_tensor_without_values(memo: str) -> None:
    _forget()
    length = 500 + [*MEMOS].index(memo)  # which no other test has
    with torch.device("meta"):
        net, batch = Remembering(MEMOS[memo]), torch.empty(length, 32)
    state = random.getstate()
    _unrelated(3)
    plan = _plan_or_why_not(net, batch)
    assert _unrelated.cache_info().currsize == 1  # of the same module, and left alone
    if isinstance(plan, str):
        assert HOLDERS[memo] in plan
        with pytest.raises(RuntimeError, match="the model uses a tensor without values"):
            MEMOS[memo](length) + 1
        _forget()
        return
    assert random.getstate() == state
    assert (net.calls, list(net.last)) == (0, [])
    real = Remembering(MEMOS[memo])
    plan.apply(real)
    for count in (length, length + 40):
        x = torch.randn(count, 32)
        out = real(x)
        out.sum().backward()
        assert type(out) is torch.Tensor
        assert {type(p.grad) for p in real.parameters()} == {torch.Tensor}
    assert not fakes_left()


def test_who_holds_a_tensor_without_values_is_told() -> None:
    class Holder:
        table: torch.Tensor

    holder = Holder()
    message = "'table' of a Holder still holds one"
    with (
        pytest.raises(recollect.CheckpointError, match=message),
        no_fakes_left(),
        record.fake_tensors(),
    ):
        holder.table = torch.ones(3)
    with pytest.raises(RuntimeError, match="Clear that cache"):
        holder.table + 1


# --- a step for which there is no room ------------------------------------------------------------


def test_a_step_that_does_not_fit_is_traced_with_little_kept(monkeypatch):
    case = made("decoder")
    expected = recollect.plan(case.model, case.batch, 0.6, loss=case.loss)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for all that")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("no need for tensors without values")

    monkeypatch.setattr(record, "profile_step", full)
    monkeypatch.setattr(record, "predict_step", never)
    plan = recollect.plan(case.model, case.batch, expected.budget, loss=case.loss)
    assert plan.plain_peak == expected.plain_peak
    assert plan.predicted_peak <= plan.budget
    assert "There was no room for the plain step" in str(plan.report.notes)
    monkeypatch.setattr(record, "predict_step", predict_step)
    monkeypatch.setattr(record, "profile_with_least", full)
    predicted = recollect.plan(case.model, case.batch, expected.budget, loss=case.loss)
    assert predicted.predicted_peak <= predicted.budget
    assert not fakes_left()


@pytest.mark.parametrize("updates", [False, True])
def test_parameters_can_be_swapped_after_each_step(model: Net, updates: bool) -> None:
    """Nobody has a weak reference to them, for which `torch.utils.swap_tensors` refuses."""
    recollect.fit(model, budget=0.9)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(4):
        model(torch.randn(256, 32)).sum().backward()
        if updates:
            optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
