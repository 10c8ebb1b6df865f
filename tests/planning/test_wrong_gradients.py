"""What could go wrong without a word under a plan: each case against plain autograd, bit for bit.

A case is a model and what is done with it, step by step. It is played with a copy of the model that
has no plan, with one by whose plan everything is made again, and one that keeps some by chance.
"""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import recollect
from recollect.errors import InputChanged, PlanWarning
from recollect.graph.simulate import Outcome
from recollect.planning.loop import choice, runner
from recollect.planning.loop.live import LiveStep
from recollect.planning.planner import Planner
from recollect.planning.prepare import Request
from tests._support import Counted, assert_identical, gradients
from tests.planning._models import (
    Decoder,
    MoE,
    Swish,
    call,
    plan_that_keeps,
    squares,
    tokens,
)

Act = Callable[[nn.Module, int], Any]


def tight(model: nn.Module, batch: Any, loss: Any = squares) -> recollect.Plan:
    """A plan by which all that can be is made again."""
    return plan_that_keeps(0.0, model, batch, loss)


#: A plan is not in effect in such calls, and says so.
may_refuse = pytest.mark.filterwarnings("ignore:the plan is not in effect")


def played(model: nn.Module, act: Act, steps: int) -> list[Any]:
    """All that can be seen of some steps."""
    seen = []
    torch.manual_seed(3)
    random.seed(3)
    for number in range(steps):
        model.zero_grad()
        result = act(model, number)
        found = [None if g is None else g.clone() for g in gradients(model)]
        buffers = [buffer.clone() for buffer in model.buffers()]
        seen.append((result, found, buffers, torch.get_rng_state()))
    return seen


def same(
    make: Callable[[], nn.Module],
    batch: Any,
    act: Act | None = None,
    *,
    steps: int = 4,
    loss: Any = squares,
) -> nn.Module:
    """Assert that ``act`` comes to the same with a plan and without. Returns the planned model."""

    def usual(model: nn.Module, number: int) -> Any:
        value = loss(call(model, batch))
        value.backward()
        return value.detach()

    torch.manual_seed(0)
    plain = make()
    copies = [copy.deepcopy(plain) for _ in range(2)]
    expected = played(plain, act or usual, steps)
    for planned, part in zip(copies, (0.4, 0.0), strict=True):
        plan_that_keeps(part, planned, batch, loss).apply(planned)
        with pytest.MonkeyPatch.context() as patch:
            counted, traced = Counted(runner.run_planned), Counted(LiveStep.forward)
            patch.setattr(runner, "run_planned", counted)
            patch.setattr(LiveStep, "forward", partialmethod(traced))
            # Batches of other looks would run without a plan, which they fit.
            patch.setattr(choice, "simulate_plain", lambda _: OVER)
            found = played(planned, act or usual, steps)
        assert counted.started + traced.started >= steps  # by the plan, and not as without one
        assert_identical(found, expected)
    return planned


#: The plain step, as if it did not fit.
OVER = Outcome(1 << 60, 0.0, 0.0, 0.0, 0, (0, 0, 0, 0))


class Layers(nn.Module):
    """Layers of one width; ``between`` is what is done after each."""

    def __init__(self, layers: int = 5, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def between(self, x: Tensor, number: int) -> Tensor:
        return F.gelu(x)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = self.between(layer(x), number)
        return x


X = torch.randn(96, 32, generator=torch.Generator().manual_seed(7))


# --- random numbers -------------------------------------------------------------------------------


class Dropped(Layers):
    def between(self, x: Tensor, number: int) -> Tensor:
        return F.dropout(F.gelu(x), 0.3, self.training)


class Noisy(Layers):
    def between(self, x: Tensor, number: int) -> Tensor:
        noise = torch.randn_like(x) * torch.rand(())
        return torch.tanh(x) * noise + torch.bernoulli(torch.sigmoid(x.detach()))


class OfAGenerator(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.seed = 5

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.rand(x.shape, generator=generator)
        return x


@pytest.mark.parametrize("make", [Dropped, Noisy, OfAGenerator])
def test_the_same_random_numbers_are_drawn_and_no_more(make: Any) -> None:
    same(make, X)


def test_dropout_is_off_in_eval_and_on_again_after_it() -> None:
    def act(model: nn.Module, number: int) -> Any:
        model.train(number % 2 == 0)
        squares(model(X)).backward()

    same(Dropped, X, act, steps=6)


# --- buffers --------------------------------------------------------------------------------------


class Normed(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in self.layers)

    def between(self, x: Tensor, number: int) -> Tensor:
        return F.relu(self.norms[number](x), inplace=True)


def test_batch_norm_counts_a_batch_once() -> None:
    planned = same(Normed, X)
    assert planned.norms[0].num_batches_tracked.item() == 4


class Counts(Layers):
    """Writes to a buffer in forward, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(32))

    def between(self, x: Tensor, number: int) -> Tensor:
        self.calls += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return torch.sin(x * self.calls.clone()) + torch.cos(self.mean.clone() * x)


def test_buffers_that_forward_writes_to_and_reads() -> None:
    same(Counts, X)


class Replaces(Layers):
    """Puts another tensor in the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def between(self, x: Tensor, number: int) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.sin(x + self.mean)


def test_buffers_that_forward_replaces() -> None:
    same(Replaces, X)


@pytest.mark.parametrize("norm", ["spectral_norm", "weight_norm"])
def test_parametrizations(norm: str) -> None:
    """One of them takes a step of its power iteration in every forward."""

    def make() -> nn.Module:
        model = Layers()
        for layer in model.layers:
            getattr(nn.utils.parametrizations, norm)(layer)
        return model

    same(make, X)


# --- in place, and views --------------------------------------------------------------------------


class InPlace(Layers):
    def between(self, x: Tensor, number: int) -> Tensor:
        x = x.sigmoid_()
        y = x.clone()
        y.mul_(x).add_(1)
        y[:, ::2] = x[:, 1::2]
        y[0].zero_()
        y.masked_fill_(y > 1.5, 0.25)
        return y.tanh_()


class Views(Layers):
    def between(self, x: Tensor, number: int) -> Tensor:
        left, right = x.chunk(2, 1)
        both = torch.cat([right.t().contiguous().t(), left * right], 1)
        wide = both.unsqueeze(0).expand(3, -1, -1)
        return torch.sin(wide[number % 3]).view(-1, 4, 8).transpose(1, 2).reshape(96, 32)


class IntoAView(Layers):
    def between(self, x: Tensor, number: int) -> Tensor:
        y = torch.exp(-x * x) + 1
        rows = y.view(-1)[: 32 * 8]
        rows.mul_(2).sub_(0.5)
        y.select(1, 3).copy_(torch.sin(x[:, 4]))
        return y * y


class Filled(Layers):
    def between(self, x: Tensor, number: int) -> Tensor:
        out = torch.empty_like(x)
        for part in range(4):
            out[:, part * 8 : (part + 1) * 8] = torch.tanh(x[:, part * 8 : (part + 1) * 8])
        return out * x


class WritesAfterItWasSaved(Layers):
    """What autograd saves of an op is its result, which then goes on in place elsewhere."""

    def between(self, x: Tensor, number: int) -> Tensor:
        kept = torch.exp(x.clamp(max=1))
        other = kept.detach().clone()
        other.mul_(3)
        return kept * other.sigmoid_()


@pytest.mark.parametrize("make", [InPlace, Views, IntoAView, Filled, WritesAfterItWasSaved])
def test_ops_in_place_and_on_views(make: Any) -> None:
    same(make, X)


class WritesToItsInput(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        x.relu_()
        return super().forward(x) * x


def test_what_it_is_given_is_written_to_in_place() -> None:
    def act(model: nn.Module, number: int) -> Any:
        given = X * (number + 1)
        squares(model(given)).backward()
        return given

    same(WritesToItsInput, X, act)


class WritesToTheBatch(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


def test_the_batch_is_written_to_in_place() -> None:
    def act(model: nn.Module, number: int) -> Any:
        given = X.clone()
        squares(model(given)).backward()
        return given

    same(WritesToTheBatch, X.clone(), act)


def test_what_it_returns_is_written_to_afterwards() -> None:
    class Out(Layers):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            return h * 2 + h.sin()

    def act(model: nn.Module, number: int) -> Any:
        out = model(X)
        out.mul_(3).add_(1)
        squares(out).backward()
        return out.detach()

    same(Out, X, act)


class Both(Layers):
    """Returns what its own next op reads, but does not save."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layers[0](x)
        x = first + 1
        for layer in list(self.layers)[1:]:
            x = torch.tanh(layer(torch.sin(x)))
        return x, first


def test_a_hidden_result_is_written_to_afterwards() -> None:
    def loss(out: Any) -> Tensor:
        return squares(out[0]) + squares(out[1])

    def act(model: nn.Module, number: int) -> Any:
        last, first = model(X)
        first.zero_()
        (squares(last) + first.sum()).backward()

    same(Both, X, act, loss=loss)


def test_a_result_is_written_to_by_another_name_of_its_memory() -> None:
    # A write through a detached tensor: plain autograd does not save this one, and does not mind.
    def act(model: nn.Module, number: int) -> Any:
        last, first = model(X)
        first.detach().fill_(7)
        squares(last).backward()

    same(Both, X, act, loss=lambda out: squares(out[0]) + squares(out[1]))


# --- other branches, other constants --------------------------------------------------------------


class Branches(Layers):
    """Goes another way as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.way = 0

    def between(self, x: Tensor, number: int) -> Tensor:
        if (number + self.way) % 3 == 0:
            return torch.tanh(x) * x
        return F.gelu(x) if number % 2 else torch.sin(x)


def test_a_branch_that_is_another_one_at_every_step() -> None:
    def act(model: nn.Module, number: int) -> Any:
        model.way = number
        squares(model(X)).backward()

    same(Branches, X, act, steps=7)


class Routed(Layers):
    def between(self, x: Tensor, number: int) -> Tensor:
        chosen = x.detach().sum(1) > 0
        x = torch.where(chosen[:, None], torch.sin(x), x)
        some = x[chosen]
        return torch.index_add(torch.tanh(x), 0, chosen.nonzero()[:, 0], F.gelu(some))


def test_routing_by_data_that_changes() -> None:
    def act(model: nn.Module, number: int) -> Any:
        squares(model(X * (1 + number) + number)).backward()

    same(Routed, X, act, steps=6)


def test_experts_that_get_no_token_in_some_steps() -> None:
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(1))

    def act(model: nn.Module, number: int) -> Any:
        with torch.no_grad():
            for layer in model.layers:
                layer.gate.bias[number % 4] = -1e4 if number % 2 else 1e4
        squares(model(x)).backward()

    same(lambda: MoE(2), x, act, steps=6)


class Skips(Layers):
    """Leaves out layers, by Python's dice and by torch's."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number and (random.random() < 0.3 or torch.rand(()) < 0.3):
                continue
            x = x + torch.tanh(layer(x))
        return x * torch.sin(x)


def test_layers_that_are_left_out_by_chance() -> None:
    same(Skips, X, steps=8)


class Scaled(Layers):
    """Numbers that are others at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.power, self.held = 1.0, 2, torch.ones(32)

    def between(self, x: Tensor, number: int) -> Tensor:
        x = torch.tanh(x * self.scale).pow(self.power) + torch.full((32,), self.scale)
        return x * torch.tensor([self.scale] * 32) * self.held.sin()


def test_constants_that_are_others_at_every_step() -> None:
    def act(model: nn.Module, number: int) -> Any:
        model.scale = 1.0 + number / 4
        model.power = 2 + number % 2
        model.held = torch.full((32,), 0.1 * number + 0.3)
        squares(model(X)).backward()

    same(Scaled, X, act, steps=6)


def test_a_number_among_the_arguments() -> None:
    class Warm(Layers):
        def forward(self, x: Tensor, heat: float = 1.0) -> Tensor:
            return super().forward(x * heat) * heat

    def act(model: nn.Module, number: int) -> Any:
        squares(model(X, heat=1.0 + number % 3)).backward()

    same(Warm, (X,), act, steps=6)


class Cached(Layers):
    """Makes a table at its first call, and a larger one when that is too short."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def between(self, x: Tensor, number: int) -> Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x), dtype=torch.float32).mul(0.01).cos()
        return torch.sin(x * self.table[: len(x), None])


def test_a_table_that_is_made_when_it_is_needed() -> None:
    def act(model: nn.Module, number: int) -> Any:
        squares(model(X[: 24 * (1 + number % 4)])).backward()

    planned = same(Cached, X, act, steps=8)
    assert planned.table is not None


def test_planning_does_not_leave_the_table_behind() -> None:
    model = Cached()
    tight(model, X)
    assert model.table is None


# --- what is around -------------------------------------------------------------------------------


def test_autocast_around_some_steps() -> None:
    def act(model: nn.Module, number: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 1):
            loss = squares(model(X))
        loss.backward()

    same(Layers, X, act, steps=6)


def test_part_of_forward_without_gradients() -> None:
    class Partly(Layers):
        def between(self, x: Tensor, number: int) -> Tensor:
            with torch.no_grad():
                target = torch.softmax(x, 1)
            return torch.tanh(x) * target + torch.sin(x).detach() * x

    same(Partly, X)


def test_a_frozen_step_between_others() -> None:
    def act(model: nn.Module, number: int) -> Any:
        model.layers[number % 5].requires_grad_(False)
        squares(model(X)).backward()
        model.requires_grad_(True)

    same(Layers, X, act, steps=6)


def test_without_gradients_between_steps() -> None:
    def act(model: nn.Module, number: int) -> Any:
        with torch.no_grad():
            looked = model(X)
        with torch.inference_mode():
            model(X)
        squares(model(X)).backward()
        return looked

    same(Dropped, X, act)


def test_checkpointing_of_torch_inside() -> None:
    class Inside(Layers):
        def between(self, x: Tensor, number: int) -> Tensor:
            return torch.utils.checkpoint.checkpoint(
                lambda y: torch.sin(F.dropout(y, 0.2)) * y, x, use_reentrant=False
            )

    same(Inside, X)


def test_a_functional_call_with_other_weights() -> None:
    def act(model: nn.Module, number: int) -> Any:
        others = {name: p.detach() * 2 for name, p in model.named_parameters()}
        for tensor in others.values():
            tensor.requires_grad_()
        squares(torch.func.functional_call(model, others, X)).backward()
        squares(model(X)).backward()
        return [tensor.grad for tensor in others.values()]

    same(Layers, X, act)


@may_refuse
def test_gradients_of_functions_by_torch_func() -> None:
    def act(model: nn.Module, number: int) -> Any:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        one = torch.func.grad(lambda w: squares(torch.func.functional_call(model, w, X)))(weights)
        squares(model(X)).backward()
        return one

    same(Layers, X, act)


@may_refuse
def test_hooks_of_saved_tensors_around() -> None:
    def act(model: nn.Module, number: int) -> Any:
        with torch.autograd.graph.save_on_cpu():
            loss = squares(model(X))
        loss.backward()

    same(Dropped, X, act)


# --- weights --------------------------------------------------------------------------------------


def test_weights_updated_between_forward_and_backward_are_found_out() -> None:
    torch.manual_seed(0)
    model = Layers()
    tight(model, X).apply(model)
    for _ in range(3):
        loss = squares(model(X))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        assert isinstance(caught.value, InputChanged) or "modified by an inplace" in str(
            caught.value
        )
        model.zero_grad()


def test_a_weight_that_only_recomputation_reads_is_found_out_too() -> None:
    # A bias is not saved: plain autograd does not mind. To make its result again is not possible.
    torch.manual_seed(0)
    model = Layers()
    tight(model, X).apply(model)
    for _ in range(3):
        loss = squares(model(X))
        with torch.no_grad():
            for layer in model.layers:
                layer.bias.add_(1)
        with pytest.raises(InputChanged):
            loss.backward()
        model.zero_grad()


def test_a_batch_written_to_between_forward_and_backward_is_found_out() -> None:
    torch.manual_seed(0)
    model = Layers()
    x = X.clone()
    tight(model, x).apply(model)
    for _ in range(3):
        loss = squares(model(x))
        x.add_(1)
        with pytest.raises(RuntimeError):
            loss.backward()
        model.zero_grad()


def test_a_buffer_written_to_between_forward_and_backward_is_found_out_or_does_no_harm() -> None:
    class Shifted(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(32))

        def between(self, x: Tensor, number: int) -> Tensor:
            return torch.sin(x + self.shift)

    torch.manual_seed(0)
    plain = Shifted()
    planned = copy.deepcopy(plain)
    tight(planned, X).apply(planned)
    for _ in range(3):
        squares(plain(X)).backward()
        loss = squares(planned(X))
        planned.shift.add_(1)
        with pytest.raises(InputChanged):
            loss.backward()
        planned.shift.sub_(1)
        planned.zero_grad()
        squares(planned(X)).backward()
        assert_identical(gradients(planned), gradients(plain))
        plain.zero_grad()
        planned.zero_grad()


def test_the_optimizer_steps_inside_of_backward() -> None:
    """Each weight is updated as soon as its gradient is there: right, or found out."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Decoder(3)

    batch = tokens(2, 24)

    def train(model: nn.Module) -> list[float]:
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        losses = []
        for _ in range(4):
            loss = squares(model(batch))
            losses.append(loss.item())
            loss.backward()
        for handle in handles:
            handle.remove()
        return losses

    plain, planned = make(), make()
    tight(planned, batch).apply(planned)
    expected = train(plain)
    try:
        found = train(planned)
    except InputChanged:
        return
    assert found == expected


def test_a_module_used_twice() -> None:
    class Twice(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in [*self.layers, *self.layers]:
                x = torch.tanh(layer(x)) * x
            return x

    same(Twice, X)


def test_one_weight_in_two_modules() -> None:
    def make() -> nn.Module:
        model = Layers()
        model.layers[3].weight = model.layers[0].weight
        return model

    same(make, X)


def test_a_layer_is_replaced_after_the_plan_was_applied() -> None:
    def act(model: nn.Module, number: int) -> Any:
        if number == 1:
            torch.manual_seed(9)
            model.layers[2] = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        if number == 3:
            del model.layers[0]
        squares(model(X)).backward()

    same(Layers, X, act, steps=5)


def test_the_dtype_changes_after_the_plan_was_applied() -> None:
    def act(model: nn.Module, number: int) -> Any:
        dtype = torch.float64 if number % 2 else torch.float32
        model.to(dtype)
        squares(model(X.to(dtype))).backward()

    same(Layers, X, act)


def test_weights_are_loaded_between_steps() -> None:
    def act(model: nn.Module, number: int) -> Any:
        state = {name: t * 1.1 for name, t in model.state_dict().items()}
        model.load_state_dict(state, assign=number % 2 == 0)
        squares(model(X)).backward()

    same(Layers, X, act)


# --- backward -------------------------------------------------------------------------------------


def test_backward_twice_through_what_was_retained() -> None:
    def act(model: nn.Module, number: int) -> Any:
        loss = squares(model(X))
        loss.backward(retain_graph=True)
        once = [g.clone() for g in gradients(model)]
        loss.backward()
        return once

    same(Dropped, X, act)


def test_gradients_asked_for_by_name() -> None:
    def act(model: nn.Module, number: int) -> Any:
        x = X.clone().requires_grad_()
        out = model(x)
        first = torch.autograd.grad(squares(out), [x, model.layers[2].weight], retain_graph=True)
        second = torch.autograd.grad(out.sum(), [model.layers[0].bias])
        return first, second

    same(Dropped, X, act)


def test_a_gradient_penalty() -> None:
    class Smooth(Layers):
        def between(self, x: Tensor, number: int) -> Tensor:
            return torch.tanh(x) * torch.sin(x)

    def act(model: nn.Module, number: int) -> Any:
        x = X.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(squares(out), x, create_graph=True)
        (squares(out) + slope.square().sum()).backward()
        return x.grad

    same(Smooth, X, act)


def test_a_hessian_vector_product() -> None:
    def act(model: nn.Module, number: int) -> Any:
        loss = squares(model(X))
        weights = list(model.parameters())
        first = torch.autograd.grad(loss, weights, create_graph=True)
        return torch.autograd.grad(sum(g.sum() for g in first), weights)

    same(Dropped, X, act)


def test_gradients_accumulate() -> None:
    def act(model: nn.Module, number: int) -> Any:
        for part in X.chunk(3):
            squares(model(part)).backward()

    same(Dropped, X, act)


def test_two_forwards_before_their_backwards() -> None:
    def act(model: nn.Module, number: int) -> Any:
        first, second, third = (squares(model(X * n)) for n in (1, 2, 3))
        if number % 2:
            second.backward()
            (third * first).backward()
        else:
            (first + second + third).backward()

    same(Dropped, X, act)


def test_what_it_returned_is_given_to_it_again() -> None:
    def act(model: nn.Module, number: int) -> Any:
        squares(model(model(X))).backward()

    with warnings.catch_warnings():  # the plan is for one forward, and the first step has two
        warnings.simplefilter("ignore", PlanWarning)
        same(Dropped, X, act)


def test_hooks_on_parameters_and_results() -> None:
    def act(model: nn.Module, number: int) -> Any:
        seen: list[Any] = []
        handles = [
            model.layers[1].weight.register_hook(lambda g: g * 2),
            model.layers[2].register_forward_hook(lambda m, a, out: seen.append(out)),
            model.layers[3].register_full_backward_hook(lambda m, i, o: seen.append(o[0])),
            model.register_forward_pre_hook(lambda m, a: (a[0] * 0.5,)),
            model.register_forward_hook(lambda m, a, out: out * 2),
        ]
        loss = squares(model(X)) + squares(seen[0])
        loss.backward()
        for handle in handles:
            handle.remove()
        return [each.detach().clone() for each in seen]

    same(Dropped, X, act)


def test_a_hook_on_what_is_between() -> None:
    class Clipped(Layers):
        def between(self, x: Tensor, number: int) -> Tensor:
            x = torch.sin(x)
            if x.requires_grad:
                x.register_hook(lambda g: g.clamp(-1e-4, 1e-4))
            return x

    same(Clipped, X)


def test_retained_gradients_of_what_is_between() -> None:
    class Kept(Layers):
        def between(self, x: Tensor, number: int) -> Tensor:
            x = torch.sin(x)
            if number == 2:
                self.middle = x
                if x.requires_grad:
                    x.retain_grad()
            return x * x

    def act(model: nn.Module, number: int) -> Any:
        squares(model(X)).backward()
        return model.__dict__.pop("middle").grad

    same(Kept, X, act)


# --- arguments ------------------------------------------------------------------------------------


def test_tensors_with_names_alone() -> None:
    class Named(Layers):
        def forward(self, *, x: Tensor, mask: Tensor | None = None) -> Tensor:
            out = super().forward(x)
            return out if mask is None else torch.sin(out) * mask

    mask = (torch.rand(96, 32, generator=torch.Generator().manual_seed(2)) > 0.5).float()

    def act(model: nn.Module, number: int) -> Any:
        x = X.clone().requires_grad_()
        squares(model(mask=mask * number, x=x)).backward()
        squares(model(x=x)).backward()
        return x.grad

    same(Named, {"x": X, "mask": mask}, act)


def test_a_tensor_of_the_surroundings() -> None:
    region_state = {"shift": X.mean(0).requires_grad_()}

    class Closed(Layers):
        def between(self, x: Tensor, number: int) -> Tensor:
            return torch.sin(x * region_state["shift"])

    def act(model: nn.Module, number: int) -> Any:
        region_state["shift"] = (X.mean(0) * (number + 1)).requires_grad_()
        squares(model(X)).backward()
        return region_state["shift"].grad.clone()

    same(Closed, X, act)


def test_tensors_in_nested_arguments() -> None:
    class Nested(Layers):
        def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
            x, (y, extra) = batch["x"], batch["rest"]
            out = super().forward(x * y) + extra["z"]
            return {"out": [out, torch.sin(out)], "n": 3}

    def loss(out: Any) -> Tensor:
        return squares(out["out"][0]) + squares(out["out"][1])

    def batch(number: int) -> Any:
        return ({"x": X, "rest": (X + number, {"z": X * number})},)

    def act(model: nn.Module, number: int) -> Any:
        loss(model(*batch(number))).backward()

    same(Nested, batch(1), act, loss=loss)


# --- ops ------------------------------------------------------------------------------------------


class Several(Layers):
    """Ops of more than one result."""

    def between(self, x: Tensor, number: int) -> Tensor:
        top, where = x.topk(8, 1)
        ordered, _ = x.sort(1)
        best, _ = x.max(1, keepdim=True)
        var, mean = torch.var_mean(x, 1, keepdim=True)
        rest = torch.cummax(x, 1).values + ordered.cumsum(1) * 0.01
        return rest * var + mean * best + torch.scatter(x, 1, where, torch.tanh(top))


class Complex(Layers):
    def between(self, x: Tensor, number: int) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1)
        spectrum = spectrum * torch.exp(1j * spectrum.abs())
        return torch.fft.irfft(spectrum.conj(), n=32, dim=1) * x


class OwnFunctions(Layers):
    def between(self, x: Tensor, number: int) -> Tensor:
        return Swish.apply(torch.sin(x)) * Swish.apply(x)


class Algebra(Layers):
    def between(self, x: Tensor, number: int) -> Tensor:
        square = x.t() @ x / 96 + torch.eye(32)
        q, _ = torch.linalg.qr(square)
        return torch.linalg.solve(square, (x @ q).t()).t().sin()


@pytest.mark.parametrize("make", [Several, Complex, OwnFunctions, Algebra])
def test_ops_of_other_kinds(make: Any) -> None:
    same(make, X)


def test_sparse_gradients() -> None:
    class Sparse(Decoder):
        def __init__(self) -> None:
            super().__init__(3)
            self.embed = nn.Embedding(96, 32, sparse=True)

    same(Sparse, tokens(2, 24))


def test_checking_values_of_nan() -> None:
    class Broken(Layers):
        def between(self, x: Tensor, number: int) -> Tensor:
            return torch.sqrt(x) * torch.log(x)

    same(Broken, X)


# --- what goes wrong ------------------------------------------------------------------------------


class Fails(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.at = -1

    def between(self, x: Tensor, number: int) -> Tensor:
        if number == self.at:
            raise KeyError("on purpose")
        return F.dropout(torch.sin(x), 0.2) * x


def test_an_exception_in_forward_and_the_steps_after_it() -> None:
    def act(model: nn.Module, number: int) -> Any:
        if number % 2 == 0:
            model.at = number
            with pytest.raises(KeyError):
                model(X)
            model.at = -1
        squares(model(X)).backward()

    same(Fails, X, act, steps=5)


def test_an_exception_in_backward_and_the_steps_after_it() -> None:
    def act(model: nn.Module, number: int) -> Any:
        def fail(grad: Tensor) -> None:
            raise KeyError("on purpose")

        handle = model.layers[2].weight.register_hook(fail)
        with pytest.raises(KeyError):
            squares(model(X)).backward()
        handle.remove()
        model.zero_grad()
        squares(model(X)).backward()

    same(Fails, X, act)


def test_a_forward_without_backward_changes_nothing_for_the_next_step() -> None:
    def act(model: nn.Module, number: int) -> Any:
        first = model(X)
        squares(model(X * 2)).backward()
        return first.detach()

    same(Dropped, X, act)


# --- threads --------------------------------------------------------------------------------------


def test_backward_in_another_thread() -> None:
    def act(model: nn.Module, number: int) -> Any:
        loss = squares(model(X))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    same(Dropped, X, act)


def test_one_model_in_several_threads() -> None:
    torch.manual_seed(0)
    plain = Layers()
    planned = copy.deepcopy(plain)
    tight(planned, X).apply(planned)
    parts = [X * (n + 1) for n in range(4)]
    expected = [torch.autograd.grad(squares(plain(x)), list(plain.parameters())) for x in parts]
    found: dict[int, Any] = {}
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                loss = squares(planned(parts[number]))
                found[number] = torch.autograd.grad(loss, list(planned.parameters()))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for number in range(4):
        assert_identical(list(found[number]), list(expected[number]))


# --- what is not seen -----------------------------------------------------------------------------

_LIBRARY = torch.library.Library("recollect_planned", "DEF")
_LIBRARY.define("noise(Tensor x) -> Tensor")
_LIBRARY.impl("noise", lambda x: x + torch.rand_like(x), "CompositeExplicitAutograd")


class OfALibrary(Layers):
    """An op that draws, and does not say so."""

    def between(self, x: Tensor, number: int) -> Tensor:
        return F.gelu(x) * torch.ops.recollect_planned.noise(x.detach()).sin()


class ByPosition(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        self.generator.manual_seed(5)
        return super().forward(x)

    def between(self, x: Tensor, number: int) -> Tensor:
        return F.gelu(x) * torch.poisson(x.detach().exp(), self.generator)


class WrittenElsewhere(Layers):
    """A worker that fills what the model has made."""

    def between(self, x: Tensor, number: int) -> Tensor:
        scale = torch.ones(x.shape[-1])
        thread = threading.Thread(target=scale.mul_, args=(number + 2.0,))
        thread.start()
        thread.join()
        return F.gelu(x * scale)


class Switching(Layers):
    def between(self, x: Tensor, number: int) -> Tensor:
        torch._C._set_mkldnn_enabled(number % 2 == 0)
        try:
            return F.gelu(x).sin()
        finally:
            torch._C._set_mkldnn_enabled(True)


class FromTheBeginning(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * x.as_strided(x.shape, x.stride(), 2))


@pytest.mark.parametrize("make", [OfALibrary, ByPosition, WrittenElsewhere, Switching])
def test_what_is_not_seen_when_it_is_recorded(make: Callable[[], nn.Module]) -> None:
    same(make, X)


def test_an_input_that_begins_elsewhere_in_its_memory() -> None:
    whole = torch.randn(X.numel() + 64, generator=torch.Generator().manual_seed(8))

    def act(model: nn.Module, number: int) -> Any:
        x = whole[number // 2 * 7 :][: X.numel()].view(X.shape)
        loss = squares(model(x))
        loss.backward()
        return loss.detach()

    same(FromTheBeginning, whole[: X.numel()].view(X.shape), act)


def test_ops_of_other_libraries_are_forced() -> None:
    graph = Planner.of(Request(OfALibrary(), X, squares)).graph
    # Or what is made of their results, which is as large.
    forced = [op.name for op in graph.ops if op.forced]
    assert forced == ["aten::sin"] * 5
