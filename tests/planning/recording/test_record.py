"""Recording a step: it leaves no trace, counts all that is allocated, and can do without memory."""

from __future__ import annotations

import copy
import gc
import io
import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.graph.graph import Schedule
from recollect.graph.simulate import simulate, simulate_plain
from recollect.planning.planner import Planner
from recollect.planning.prepare import Request
from recollect.planning.recording import prices
from recollect.planning.recording.batch import split_batch
from recollect.planning.recording.prices import Prices
from recollect.planning.recording.record import (
    CannotPredict,
    find_blocks,
    predict_step,
    profile_step,
    trace_step,
)
from recollect.planning.recording.step import TrainingStep, default_loss
from tests._support import assert_identical, measure, sampled
from tests.planning._models import (
    CASES,
    ConvNet,
    Custom,
    Decoder,
    Hidden,
    Lstm,
    Made,
    made,
    squares,
    static_bytes,
    tokens,
)

pytestmark = pytest.mark.usefixtures("no_bound")


# --- no trace -------------------------------------------------------------------------------------


def _seen(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
    """All that a step could change."""
    modules = {
        name: (m.training, type(m), set(vars(m)) - {"_recollect_index"}, len(m._forward_hooks))
        for name, m in model.named_modules()
    }
    state = {} if optimizer is None else copy.deepcopy(optimizer.state_dict())
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        modules,
        state,
        torch.get_rng_state(),
        random.getstate(),
        gc.isenabled(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
    )


OPTIMIZERS = {
    "none": lambda model: None,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
}


@pytest.mark.parametrize("has_state", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("optimizer", sampled(OPTIMIZERS, usual=["none", "adamw"]))
@pytest.mark.parametrize("name", sampled(["decoder_dropout", "conv", "cast"], usual=["conv"]))
def test_nothing_is_left_changed(name: str, optimizer: str, has_state: bool) -> None:
    case = made(name)
    model = case.model
    optim = OPTIMIZERS[optimizer](model)
    if has_state:
        case.step(seed=2)
        if optim is not None:
            optim.step()
    identities = [(id(p), id(p.grad), p.data_ptr()) for p in model.parameters()]
    before = _seen(model, optim)
    made_by = Planner.of(Request(model, case.batch, case.loss, optim))
    made_by.trials.peak(Schedule(frozenset()))  # as plans are tried out
    assert_identical(_seen(model, optim), before)
    assert [(id(p), id(p.grad), p.data_ptr()) for p in model.parameters()] == identities


def test_the_tensors_of_the_optimizers_state_are_the_same_objects() -> None:
    case = made("decoder")
    optimizer = torch.optim.AdamW(case.model.parameters())
    case.step()
    optimizer.step()
    before = {p: {k: id(v) for k, v in state.items()} for p, state in optimizer.state.items()}
    Planner.of(Request(case.model, case.batch, case.loss, optimizer))
    after = {p: {k: id(v) for k, v in state.items()} for p, state in optimizer.state.items()}
    assert after == before


def test_training_goes_on_as_if_nothing_had_been_planned() -> None:
    losses = []
    for is_planned in (False, True):
        case = made("conv")
        optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
        found = []
        for number in range(4):
            if is_planned and number in (0, 2):
                Planner.of(Request(case.model, case.batch, case.loss, optimizer))
            optimizer.zero_grad()
            loss = case.loss_of(case.forward())
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append((found, case.model.state_dict()))
    assert_identical(losses[1], losses[0])


def test_eval_mode_and_no_grad_around_are_left_as_they_are() -> None:
    case = made("conv")
    case.model.eval()
    before = _seen(case.model, None)
    told = pytest.warns(recollect.PlanWarning, match="ConvNet is in eval mode")
    with torch.no_grad():
        with told:
            Planner.of(Request(case.model, case.batch, case.loss))
        assert not torch.is_grad_enabled()
    with torch.inference_mode(), told:
        Planner.of(Request(case.model, case.batch, case.loss))
    assert_identical(_seen(case.model, None), before)


def test_the_gradient_of_the_batch_is_left_as_it_was() -> None:
    case = made("custom")
    case.batch.requires_grad_()
    before = case.batch.grad = torch.ones_like(case.batch)
    Planner.of(Request(case.model, case.batch, case.loss))
    assert case.batch.grad is before
    assert bool((before == 1).all())


def test_attributes_and_lists_of_the_model_are_left_as_they_were() -> None:
    class Notes(Custom):
        def __init__(self) -> None:
            super().__init__(2)
            self.calls, self.norms_seen, self.last = [0], [], None
            self.leaf = torch.ones(48, requires_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            self.calls[0] += 1
            self.last = super().forward(x) * self.leaf
            self.norms_seen.append(self.last.norm())
            return self.last

    model = Notes()
    Planner.of(Request(model, torch.randn(8, 48), squares))
    assert (model.calls, model.norms_seen, model.last, model.leaf.grad) == ([0], [], None, None)


@pytest.mark.parametrize("fails_at", [1, 2, 5, 6, 7, 9])
def test_nothing_is_left_changed_by_a_step_that_fails(fails_at: int) -> None:
    case = made("conv")
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9)
    before = _seen(case.model, optimizer)
    calls = io.StringIO()  # a log, and hence not put back

    def loss(out: Tensor) -> Tensor:
        if calls.write(".") and len(calls.getvalue()) == fails_at:
            raise KeyError("on purpose")
        return squares(out)

    with pytest.raises(KeyError, match="on purpose"):
        recollect.plan(case.model, case.batch, 0.8, loss=loss, optimizer=optimizer)
    assert_identical(_seen(case.model, optimizer), before)


class Criterion(nn.Module):
    """A loss that has weights, statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.drop = nn.Dropout(0.5)

    def forward(self, out: Tensor) -> Tensor:
        return squares(self.drop(self.norm(out)))


def test_the_random_stream_is_left_where_it_was_if_only_the_loss_draws() -> None:
    case = made("conv")
    before = torch.get_rng_state()
    Planner.of(Request(case.model, case.batch, lambda out: squares(nn.functional.dropout(out))))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("is_a_function", [False, True])
def test_a_loss_with_weights_and_buffers_is_left_as_it_was(is_a_function: bool) -> None:
    case, criterion = made("conv"), Criterion()
    for parameter in criterion.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = _seen(criterion, None)
    Planner.of(Request(case.model, case.batch, criterion.forward if is_a_function else criterion))
    assert_identical(_seen(criterion, None), before)


def test_gradients_of_what_only_the_optimizer_has_are_left_as_they_were() -> None:
    case, criterion = made("conv"), Criterion().eval()
    optimizer = torch.optim.SGD([*case.model.parameters(), *criterion.parameters()], lr=0.1)
    before = _seen(criterion, optimizer)
    Planner.of(Request(case.model, case.batch, criterion, optimizer))
    assert_identical(_seen(criterion, optimizer), before)


def test_the_gradient_of_a_tensor_in_a_dict_of_the_model_is_left_as_it_was() -> None:
    class Table(Custom):
        def __init__(self) -> None:
            super().__init__(2)
            self.table = {"shift": torch.ones(48, requires_grad=True)}

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.table["shift"]

    model = Table()
    Planner.of(Request(model, torch.randn(8, 48), squares))
    assert model.table["shift"].grad is None


# --- what counts ----------------------------------------------------------------------------------


def _whole_step(case: Made, optimizer: torch.optim.Optimizer) -> int:
    """The peak of a step with its optimizer, whose state is there already."""

    def step() -> None:
        output = case.forward()  # held until the end, as by those who log it
        case.loss_of(output).backward()
        optimizer.step()
        del output
        optimizer.zero_grad()

    peak = measure(step, lambda _: None).peak
    return peak + static_bytes(case.model, optimizer)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["decoder", "conv", "lstm"])
def test_the_plain_peak_has_the_optimizer_in_it(name: str, foreach: bool) -> None:
    case = made(name)
    optimizer = torch.optim.AdamW(case.model.parameters(), foreach=foreach)
    made_by = Planner.of(Request(case.model, case.batch, case.loss, optimizer))
    assert made_by.plain_peak > Planner.of(Request(case.model, case.batch, case.loss)).plain_peak
    assert made_by.plain_peak == _whole_step(case, optimizer)
    assert simulate_plain(made_by.graph).peak == made_by.plain_peak


def test_what_a_step_of_the_optimizer_allocates_can_be_the_peak() -> None:
    # Of many weights and few results: copies of all weights at once.
    model = nn.Linear(256, 256)
    batch = torch.randn(2, 256)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    made_by = Planner.of(Request(model, batch, squares, optimizer))
    assert made_by.plain_peak == _whole_step(Made(model, batch, squares), optimizer)
    assert made_by.plain_peak > 5 * static_bytes(model)


# --- batches --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    a: int
    b: int


def test_a_tuple_is_arguments_a_dict_is_names_and_anything_else_the_argument() -> None:
    pair = Pair(1, 2)
    assert split_batch((1, 2)) == ((1, 2), {})
    assert split_batch({"a": 1}) == ((), {"a": 1})
    assert split_batch([1, 2]) == (([1, 2],), {})
    assert split_batch(pair) == ((pair,), {})
    assert split_batch(OrderedDict(a=1)) == ((), {"a": 1})
    assert split_batch(()) == ((), {})
    tensor = torch.ones(1)
    assert split_batch(tensor) == ((tensor,), {})


class Encoding(dict):
    """As tokenizers return: a dict with attributes."""


def test_batches_of_every_form_give_the_same_plan() -> None:
    torch.manual_seed(0)
    model, x = Decoder(2), tokens(2, 24)
    peaks = {
        form: Planner.of(Request(model, batch, squares)).plain_peak
        for form, batch in {
            "tensor": x,
            "tuple": (x,),
            "dict": {"tokens": x},
            "a dict of another class": Encoding(tokens=x),
        }.items()
    }
    assert len(set(peaks.values())) == 1, peaks


@dataclass
class Loss:
    loss: Any
    other: Tensor


def test_the_default_loss_in_all_its_cases() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    scalar = torch.tensor(4.0)
    assert default_loss(scalar) is not None
    assert default_loss(scalar).item() == 4
    assert default_loss(torch.tensor([[4.0]])).shape == ()
    assert default_loss(Loss(scalar, x)).item() == 4
    assert default_loss(Loss(torch.tensor([4.0]), x)).shape == ()
    assert default_loss(Loss(x, x)).item() == 15
    assert default_loss({"loss": scalar, "x": x}).item() == 4
    assert default_loss({"x": x, "n": 3, "where": torch.ones(2, dtype=torch.long)}).item() == 15
    assert default_loss([x, (x, {"y": x})]).item() == 45
    assert default_loss(x).item() == 15
    assert default_loss(x.bfloat16()).item() == 15


def test_a_dataclass_without_a_loss_has_its_floating_tensors_summed() -> None:
    # The contract: the output if it is a scalar, its `.loss`, else the sum of its floating tensors.
    assert default_loss(Loss(None, torch.ones(3))).item() == 3


def test_the_default_loss_refuses_what_has_no_floating_tensor() -> None:
    with pytest.raises(ValueError, match="loss: the model returned list without a floating tensor"):
        default_loss([torch.ones(2, dtype=torch.long), 3])


@pytest.mark.parametrize("name", ["with_loss", "loss_in_dict"])
def test_the_loss_of_a_model_that_computes_it_is_found(name: str) -> None:
    case = made(name)
    made_by = Planner.of(Request(case.model, case.batch))
    other = Planner.of(Request(case.model, case.batch, case.loss_of))
    assert made_by.plain_peak == other.plain_peak
    assert len(made_by.graph.saved) == len(other.graph.saved)


# --- without running it ---------------------------------------------------------------------------

_PREDICTABLE = [
    n for n in CASES if n not in ("moe", "lstm", "packed", "loss_in_dict", "decoder_dropout")
]


@pytest.mark.parametrize("optimizer", ["none", "adamw"])
@pytest.mark.parametrize("name", sampled(_PREDICTABLE, usual=("decoder", "conv", "custom", "cast")))
def test_a_predicted_step_is_the_real_one_in_bytes(name: str, optimizer: str) -> None:
    case = made(name)
    step = TrainingStep(
        case.model, *split_batch(case.batch), case.loss, OPTIMIZERS[optimizer](case.model)
    )
    with step.undone():
        predicted = predict_step(step).graph
    with step.undone():
        real = profile_step(step).graph
    assert [op.key for op in predicted.ops] == [op.key for op in real.ops]
    assert predicted.choices == real.choices
    assert predicted.base == real.base
    assert [v.nbytes for v in predicted.values] == [v.nbytes for v in real.values]
    assert simulate_plain(predicted).peak == simulate_plain(real).peak
    for kept in (frozenset[int](), frozenset(real.choices[::2])):
        ours, theirs = (simulate(graph, Schedule(kept)).peak for graph in (predicted, real))
        assert ours == theirs


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_predicted_step_counts_the_optimizers_state_once(optimizer: str) -> None:
    model = nn.Linear(128, 128)
    step = TrainingStep(model, (torch.randn(2, 128),), {}, squares, OPTIMIZERS[optimizer](model))
    with step.undone():
        predicted = predict_step(step)
    with step.undone():
        real = profile_step(step)
    assert predicted.graph.base == real.graph.base
    assert predicted.plain_peak == pytest.approx(real.plain_peak, rel=0.03)


def test_predicting_leaves_nothing_changed() -> None:
    case = made("conv")
    optimizer = torch.optim.AdamW(case.model.parameters())
    case.step()
    optimizer.step()
    before = _seen(case.model, optimizer)
    step = TrainingStep(case.model, case.batch, {}, case.loss, optimizer)
    with step.undone():
        predict_step(step)
    assert_identical(_seen(case.model, optimizer), before)


@pytest.mark.parametrize("make", sampled([Decoder, ConvNet, Hidden], usual=[ConvNet]))
def test_a_plan_for_a_model_without_memory_is_for_the_model_with_it(make: Any) -> None:
    torch.manual_seed(0)
    real = make()
    batch = torch.randn(4, 3, 16, 16) if make is ConvNet else tokens()

    def loss(out: Any) -> Tensor:
        return sum(map(squares, out)) if isinstance(out, list) else squares(out)

    with torch.device("meta"):
        model = make()
    frontier = recollect.frontier(model, batch.to("meta"), loss=loss)
    made_by = Planner.of(Request(real, batch, loss))
    assert frontier.plain_peak == made_by.plain_peak
    plan = frontier.plan_for(0.8)
    assert all(p.is_meta and p.grad is None for p in model.parameters())
    assert "not run" in str(plan)
    plan.apply(real)
    done = Made(real, batch, loss)
    done.step()
    real.zero_grad()
    peak = measure(done.forward, lambda out: loss(out).backward(), warm_up=False).peak
    assert plan.predicted_peak == pytest.approx(peak + static_bytes(real), rel=0.03)


@pytest.mark.parametrize("name", ["moe", "lstm"])
def test_what_depends_on_data_or_a_librarys_workspace_cannot_be_predicted(name: str) -> None:
    case = made(name)
    with (
        pytest.raises(CannotPredict, match="cannot be recorded without running it"),
        torch.random.fork_rng(),
    ):
        predict_step(TrainingStep(case.model, case.batch, {}, case.loss))
    case.step()  # and nothing is broken after that
    assert all(p.grad is not None and not p.grad.is_meta for p in case.model.parameters())


def test_a_model_without_memory_that_depends_on_data_says_that_it_cannot_be_planned() -> None:
    with torch.device("meta"):
        model = Lstm()
    with pytest.raises(CannotPredict, match=r"of this Lstm cannot be .* device that it trains on$"):
        recollect.plan(model, torch.randn(2, 4, 24, device="meta"), 0.5, loss=squares)


# --- times ----------------------------------------------------------------------------------------


def test_the_times_of_the_graph_add_up_to_the_measured_step() -> None:
    case = made("decoder")
    profile = Planner.of(
        Request(case.model, case.batch, case.loss)
    ).trials.profile  # as it was measured
    assert profile.seconds > 0
    assert profile.graph.plain_seconds == pytest.approx(profile.seconds)
    assert simulate_plain(profile.graph).seconds == pytest.approx(profile.seconds)


def test_a_memory_that_an_op_is_given_is_not_read_to_know_it_again() -> None:
    # Some ops of recurrent networks are given the memory of all weights.
    class Memory(torch.UntypedStorage):
        def __repr__(self) -> str:
            raise AssertionError("would take minutes on a device")

    assert [prices._description(each) for each in (Memory(64), 2)] == [64, "2"]


def test_a_model_whose_forward_runs_twice_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Custom(2)
            self.again = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            if not self.again:
                self.again = True
                x = self(x)
                self.again = False
            return x

    with pytest.raises(ValueError, match="a step calls this Twice 2 times"):
        recollect.plan(Twice(), torch.randn(8, 48), 0.9, loss=squares)


@pytest.mark.parametrize("name", CASES)
def test_lifetimes_do_not_depend_on_what_the_traced_step_keeps(name: str) -> None:
    # Blocks return what the model holds for longer than it reads it, such as in a loop's variable.
    case = made(name)
    args, kwargs = split_batch(case.batch, case.model)
    step = TrainingStep(case.model, args, kwargs, case.loss)
    prices = Prices(step.device)
    lives = []
    for blocks in ((), find_blocks(case.model)):
        torch.manual_seed(0)
        graph = trace_step(step, prices, blocks=blocks).graph
        lives.append([(each.nbytes, each.born, each.dies) for each in graph.storages])
        step.model.zero_grad()
    assert lives[1] == lives[0]


def test_a_step_on_the_meta_device_is_not_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shapes are those of a large device: running each op would take hours."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made_real: list[int] = []

    def real(fake: Tensor, device: torch.device) -> Tensor:
        made_real.append(fake.numel())
        return make_real(fake, device)

    make_real = prices._real
    monkeypatch.setattr(prices, "_real", real)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(50_000, 50_000), nn.ReLU(), nn.Linear(50_000, 50_000))
        steps = [TrainingStep(model, (torch.empty(rows, 50_000),), {}) for rows in (4_000, 8_000)]
    small, large = (predict_step(step).graph for step in steps)
    assert max(made_real, default=0) < 1 << 20
    products = [[op.seconds for op in each.ops if "mm" in op.name] for each in (small, large)]
    assert len(products[0]) == 2
    # The rate of products is measured for each of the two, by a clock that others disturb.
    for one, other in zip(*products, strict=True):
        assert 0 < one < other


def test_ops_that_are_priced_by_their_shapes_have_a_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(prices, "_LONG", 0.0)
    monkeypatch.setattr(prices, "_known", {})
    batch = torch.randn(4, 3, 16, 16)
    with torch.device("meta"):
        model = ConvNet()
    plain = Planner.of(Request(ConvNet(), batch, squares)).plain_peak
    monkeypatch.setattr(prices, "_known", {})
    step = TrainingStep(model, (batch.to("meta"),), {}, squares)
    assert simulate_plain(predict_step(step).graph).peak == plain
    assert all(each.timing is not None for each in prices._known.values())


# --- tensors without memory -----------------------------------------------------------------------


class Scaled(Tensor):
    """A tensor without memory of its own, as quantized ones are: its values are ``inner * 2``."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Scaled:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [each.inner * 2 if isinstance(each, cls) else each for each in args]
        return func(*values, **(kwargs or {}))


class MakesScaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            noise = torch.mm(Scaled(x.detach()), torch.eye(16)).sin()
        return self.linear(x + noise).sin()


def test_no_kernel_gets_a_tensor_without_memory() -> None:
    model = MakesScaled()
    twin = copy.deepcopy(model)
    recollect.fit(model, budget="1MiB")
    for _ in range(3):
        x = torch.randn(8, 16)
        model(x).sum().backward()
        twin(x).sum().backward()
    assert_identical([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
