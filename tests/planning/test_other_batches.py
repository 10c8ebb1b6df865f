"""What happens in forward under a plan that was made for another batch, or is in the way."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

import recollect
from recollect.modules import OPTIONS


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
    assert len(vars(model)[OPTIONS]._known) <= 2  # with and without the argument


def test_what_forward_notes_is_noted_once(model):
    planned(model)
    model.seen.clear()
    model(torch.randn(258, 32))
    assert model.seen == [258]


def test_a_larger_batch_that_fits_without_a_plan_runs_without_one(model):
    planned(model, "1GiB")
    assert_as_plain(model, torch.randn(300, 32))
    (variant,) = vars(model)[OPTIONS]._known.values()
    assert variant.decisions is None


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


def test_a_compiled_model_is_refused(model):
    with pytest.raises(ValueError, match="it is compiled"):
        recollect.plan(torch.compile(model), torch.randn(256, 32), 0.8)


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
