"""A step under a plan that is not the planned one is within the budget, or a warning says why.

Each case makes a plan, then trains on in another way than it was made for. Asserted of every step:
gradients are those of the plain model bit for bit, and the measured peak is within the budget, or
a warning said so. And of ordinary training: that there are no warnings.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
import warnings
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from recollect.modules import OPTIONS
from recollect.planning.loop import watch
from recollect.planning.recording.step import default_loss
from tests._support import assert_identical, gradients, measure, sampled
from tests.planning._models import CASES, MoE, made, squares, static_bytes

pytestmark = pytest.mark.usefixtures("no_bound")


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks, one after the other, as often as it is told."""

    def __init__(self, layers: int = 4, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))

    def forward(self, x: Tensor, times: int = 1, step: int = 0) -> Tensor:
        for _ in range(times):
            for block in self.blocks:
                x = block(x)
        return x * (1 + step)


def net(layers: int = 8, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(layers, **options)


@cache
def batch(length: int = 128, width: int = 32, seed: int = 1) -> Tensor:
    """Always the same object: what a step is given is there before it."""
    return torch.randn(length, width, generator=torch.Generator().manual_seed(seed))


@dataclass
class Run:
    """Steps under a plan."""

    peaks: list[int]
    messages: list[str]
    budget: int

    @property
    def over(self) -> list[float]:
        """How far each step was over the budget, as a multiple of it."""
        return [round(peak / self.budget, 3) for peak in self.peaks if peak > self.budget]


def train(
    model: nn.Module,
    steps: int = 4,
    call: Callable[[nn.Module, int], Any] = lambda model, _: model(batch()),
    loss: Callable[[Any], Tensor] = squares,
) -> Run:
    """Run steps of a model under a plan; each compared with the plain model's.

    The warnings that there are come once, point here, and are about plans.
    """
    runner = vars(model)[OPTIONS]
    messages: list[str] = []
    peaks = []
    for number in range(steps):
        expected = _plain_gradients(model, number, call, loss)
        model.zero_grad()
        torch.manual_seed(number)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", ".*Profiler clears events")  # torch 2.11, once
            found = measure(
                lambda number=number: call(model, number),
                lambda out: loss(out).backward(),
                warm_up=False,
            )
        assert_identical(gradients(model), expected)
        for each in caught:
            assert each.category is recollect.PlanWarning, each.message
            assert each.filename == __file__
        messages += [str(each.message) for each in caught]
        peaks.append(found.peak + static_bytes(model))
        if peaks[-1] > runner.plan.budget:
            assert messages, (
                f"step {number} took {peaks[-1] / runner.plan.budget:.3f} of the budget"
            )
    model.zero_grad()
    assert len(set(messages)) == len(messages)
    return Run(peaks, messages, runner.plan.budget)


def _plain_gradients(
    model: nn.Module,
    seed: int,
    call: Callable[[nn.Module, int], Any],
    loss: Callable[[Any], Tensor],
) -> list[Tensor | None]:
    twin = copy.deepcopy(model)
    recollect.unwrap(twin)
    twin.zero_grad()
    torch.manual_seed(seed)
    loss(call(twin, seed)).backward()
    return gradients(twin)


def planned(model: nn.Module, given: Any, part: float = 0.6, **options: Any) -> recollect.Plan:
    """Apply a plan for a part of what the plain step takes, or for the least that works."""
    frontier = recollect.frontier(model, given, loss=squares, **options)
    plan = frontier.plan_for(max(int(part * frontier.plain_peak), frontier.least))
    plan.apply(model)
    return plan


@cache
def _usual_plan() -> recollect.Plan:
    return planned(net(), batch())


def usual() -> tuple[Net, recollect.Plan]:
    """A model with a plan: made once, for one like it."""
    model, plan = net(), _usual_plan()
    return plan.apply(model), plan


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """No warnings in here: they are errors in these tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_an_integer_that_decides_how_much_is_computed() -> None:
    model = net()
    planned(model, (batch(), 1))
    run = train(model, call=lambda model, n: model(batch(), 4))
    (message,) = run.messages
    assert "this step is not the one that the plan was made for: forward makes " in message
    assert re.search(r"forward makes [\d.]+ KiB in blocks\.\d, and made", message)
    assert run.over[0] > 1.3
    assert run.peaks[-1] < 0.7 * run.peaks[0]  # what follows is recomputed more


def test_a_number_that_decides_nothing() -> None:
    model = net()
    planned(model, {"x": batch(), "step": 3})
    run = train(model, steps=10, call=lambda model, n: model(x=batch(), step=n))
    assert run.messages == []
    assert run.over == []


# --- batches --------------------------------------------------------------------------------------


@dataclass
class Data:
    x: Tensor
    name: str = "a"


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.inner = {"x": [x]}
        self.me = self
        self.count = 0

    @property
    def x(self) -> Tensor:
        return self.inner["x"][0]


class Encoding(UserDict):  # type: ignore[type-arg]
    """As tokenizers give."""

    def __getattr__(self, name: str) -> Any:
        if name in ("data", "__setstate__") or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


class Mapped(Mapping):  # type: ignore[type-arg]
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getitem__(self, name: str) -> Tensor:
        if name != "x":
            raise KeyError(name)
        return self.x

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


Named = namedtuple("Named", ["x"])  # noqa: PYI024 - as users have it
HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Data,
    "slots": Slotted,
    "object": Plain,
    "userdict": lambda x: Encoding(x=x),
    "mapping": Mapped,
    "namedtuple": Named,
    "nested": lambda x: Data([Data(x)]),  # type: ignore[arg-type]
}


class Holding(Net):
    def forward(self, held: Any) -> Tensor:
        x = held.x
        while not isinstance(x, Tensor):
            x = x[0].x
        return super().forward(x)


@pytest.mark.parametrize("kind", HOLDERS)
def test_tensors_wherever_they_are_in_a_batch(kind: str) -> None:
    hold = HOLDERS[kind]
    torch.manual_seed(0)
    model = Holding()
    planned(model, hold(batch()))
    assert train(model, 2, lambda model, _: model(hold(batch(96)))).messages == []
    run = train(model, call=lambda model, _: model(hold(batch(512))))
    assert run.messages or not run.over
    assert len(run.messages) <= 1


def test_an_argument_that_was_not_there() -> None:
    model, _ = usual()
    run = train(model, call=lambda model, _: model(batch(), times=3))
    (message,) = run.messages
    assert "in the batch there is times, and was nothing more" in message
    with silence():
        train(model, call=lambda model, _: model(batch(), step=3))


# --- the model, and what is around it -------------------------------------------------------------


def test_parameters_that_are_unfrozen() -> None:
    model = net()
    model.requires_grad_(False)
    model.blocks[-1].requires_grad_(True)
    planned(model, batch(), 0.9)
    assert train(model).messages == []
    model.requires_grad_(True)
    run = train(model)
    (message,) = run.messages
    assert "its blocks.0.norm.weight and 41 more require a gradient now" in message
    assert "recollect.plan(...) once the model is as it is trained" in message


def test_parameters_that_are_frozen() -> None:
    model, _ = usual()
    model.blocks[0].requires_grad_(False)
    run = train(model)
    assert run.messages == []
    assert run.over == []


@pytest.mark.parametrize("is_planned_in_it", [False, True])
def test_autocast(is_planned_in_it: bool) -> None:
    model = net()
    on, off = (torch.autocast("cpu", torch.bfloat16, enabled=is_on) for is_on in (True, False))
    with on if is_planned_in_it else off:
        planned(model, batch(), 0.5)

    def call(model: nn.Module, is_on: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            return model(batch())

    assert train(model, call=lambda model, _: call(model, is_planned_in_it)).messages == []
    # While a profiler measures, nobody else can measure the workspace of ops in another dtype.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", recollect.PlanWarning)
        squares(call(model, not is_planned_in_it)).backward()
        model.zero_grad()
    run = train(model, call=lambda model, _: call(model, not is_planned_in_it))
    for message in run.messages:
        if is_planned_in_it:
            assert "autocast is off, and was on (bfloat16 on cpu)" in message
            assert "recollect.plan(...) without autocast" in message
        else:
            assert "autocast is on (bfloat16 on cpu), and was off" in message
            assert "with torch.autocast('cpu', torch.bfloat16): recollect.plan(...)" in message


def test_casts_of_weights_are_a_part_of_every_step_that_is_planned() -> None:
    model = net(width=128)
    with torch.autocast("cpu", torch.bfloat16):
        planned(model, batch(64, 128), 1.0)

    def call(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch(64, 128))

    run = train(model, call=lambda model, _: call(model))
    assert run.over == run.messages == []


def test_planned_in_eval_mode_and_trained_in_train_mode() -> None:
    model = net(dropout=0.5).eval()
    with pytest.warns(recollect.PlanWarning, match=r"in eval mode.*model\.train\(\)") as caught:
        plan = recollect.plan(model, batch(), 0.5, loss=squares)
    assert caught[0].filename == __file__
    plan.apply(model)
    assert train(model).messages == []
    run = train(model.train())
    for message in run.messages:
        assert "the model and 41 more are in train mode, and were not" in message


def test_planned_in_eval_mode_without_anything_that_depends_on_it() -> None:
    model = net().eval()
    planned(model, batch())
    assert train(model.train()).messages == []


def test_another_dtype() -> None:
    model, _ = usual()
    model.double()
    run = train(model, call=lambda model, _: model(batch().double()))
    (message,) = run.messages
    assert "its blocks.0.norm.weight is [32] float64, and was [32] float32" in message


def test_parameters_that_are_added() -> None:
    model, _ = usual()
    model.blocks.append(Block(32))
    run = train(model)
    assert run.messages == []  # it is traced, and recomputes more
    assert run.over == []
    model.blocks.extend(Block(32) for _ in range(16))
    (message,) = train(model).messages
    assert "its blocks.8.norm.weight and 101 more were not there" in message


# --- steps that depend on data --------------------------------------------------------------------


class Masked(Net):
    """Computes where a mask is set."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x[mask])


def test_a_mask_that_lets_more_through() -> None:
    torch.manual_seed(0)
    model = Masked()
    few = torch.arange(512) < 100
    planned(model, (batch(512), few))
    assert train(model, call=lambda model, n: model(batch(512), few)).messages == []
    masks = [torch.arange(512) < 100 + 100 * n for n in range(4)]
    run = train(model, call=lambda model, n: model(batch(512), masks[n]))
    (message,) = run.messages
    assert "this step is not the one that the plan was made for" in message


class LayerDrop(Net):
    """Leaves layers out by chance, all but the first."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(len(self.blocks)) < torch.tensor([1.0] + [0.6] * (len(self.blocks) - 1))
        for block, is_kept in zip(self.blocks, kept, strict=True):
            if is_kept or not self.training:
                x = block(x)
        return x


@pytest.mark.parametrize("seed", range(3))
def test_layers_that_are_left_out_by_chance(seed: int) -> None:
    torch.manual_seed(0)
    model = LayerDrop(6)
    torch.manual_seed(seed)
    planned(model, batch(), 0.7)
    run = train(model, 12)
    assert len(run.messages) <= 2


@pytest.mark.slow
def test_wav2vec2_as_it_comes() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=128,
        conv_dim=(32,) * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        layerdrop=0.3,
        mask_time_prob=0.0,  # which draws from numpy, and needs longer inputs
    )
    model = transformers.Wav2Vec2Model(config).train()
    sound = torch.randn(2, 8000)

    def loss(out: Any) -> Tensor:
        return squares(out.last_hidden_state)

    frontier = recollect.frontier(model, sound, loss=loss)
    frontier.plan_for(max(frontier.least, int(0.7 * frontier.plain_peak))).apply(model)
    run = train(model, 8, lambda model, _: model(sound), loss)
    assert len(run.messages) <= 2


def test_tokens_that_go_to_other_experts() -> None:
    torch.manual_seed(0)
    model = MoE()
    batches = [batch(4 * 32, seed=n).view(4, 32, 32) for n in range(8)]
    planned(model, batches[0], 0.8)
    run = train(model, 8, lambda model, n: model(batches[n]))
    assert not run.messages or max(run.peaks) > 0.98 * run.budget  # it was near


class Now(Net):
    """Does more in one step of five."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        return super().forward(x, 4 if step % 5 == 4 else 1)


def test_a_step_now_and_then_that_does_more() -> None:
    torch.manual_seed(0)
    model = Now()
    planned(model, (batch(), 0))
    run = train(model, 8, lambda model, n: model(batch(), n))
    assert run.messages
    assert run.peaks[4] == max(run.peaks)


def test_a_forward_that_is_set_on_the_instance() -> None:
    model, plan = net(), _usual_plan()
    own = model.forward

    def forward(x: Tensor) -> Tensor:  # no method of anybody's
        return own(x)

    model.forward = forward
    expected = _gradients_alone(model)
    plan.apply(model)
    for _ in range(3):
        with silence():
            found = measure(
                lambda: model(batch()), lambda out: squares(out).backward(), warm_up=False
            )
        assert found.peak + static_bytes(model) <= plan.budget
        assert_identical(gradients(model), expected)
        model.zero_grad()


def _gradients_alone(model: nn.Module) -> list[Tensor | None]:
    squares(model(batch())).backward()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


# --- torch.compile --------------------------------------------------------------------------------


BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _compiled_steps(run: Callable[[Tensor], Any], model: nn.Module, plan: recollect.Plan) -> None:
    """Steps by what was compiled: within the budget, warned once, gradients those of plain."""
    expected = _plain_gradients(model, 0, lambda model, _: model(batch()), squares)
    messages = []
    for _ in range(4):
        model.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = measure(
                lambda: run(batch()), lambda out: squares(out).backward(), warm_up=False
            )
        messages += [each for each in caught if each.category is recollect.PlanWarning]
        assert_identical(gradients(model), expected)
        assert found.peak + static_bytes(model) <= plan.budget
    (warning,) = messages
    assert "torch.compile leaves its forward as it is" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.usefixtures("dynamo")
@BACKENDS
def test_a_planned_model_that_is_compiled(backend: str) -> None:
    model, plan = usual()
    _compiled_steps(torch.compile(model, backend=backend), model, plan)


@pytest.mark.usefixtures("dynamo")
@BACKENDS
def test_a_planned_model_that_is_compiled_in_place(backend: str) -> None:
    model, plan = usual()
    model.compile(backend=backend)
    _compiled_steps(model, model, plan)


@pytest.mark.usefixtures("dynamo")
@BACKENDS
def test_a_planned_model_inside_of_compiled_code(backend: str) -> None:
    model, plan = usual()

    def run(x: Tensor) -> Tensor:
        return model(x.sin().asin()) * 1.0

    expected = copy.deepcopy(model)
    recollect.unwrap(expected)
    squares(expected(batch().sin().asin()) * 1.0).backward()
    with pytest.warns(recollect.PlanWarning, match="torch.compile leaves its forward as it is"):
        squares(torch.compile(run, backend=backend)(batch())).backward()
    assert_identical(gradients(model), gradients(expected))
    assert plan.budget < plan.plain_peak


@pytest.mark.usefixtures("dynamo")
def test_a_model_that_was_compiled_before_the_plan_is_applied() -> None:
    model = net()
    compiled = torch.compile(model, backend="eager")
    compiled(batch())
    plan = planned(model, batch())
    _compiled_steps(compiled, model, plan)


@pytest.mark.usefixtures("dynamo")
def test_a_planned_model_in_one_graph() -> None:
    model, _ = usual()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"runs under a plan of recollect"):
        compiled(batch())


@pytest.mark.usefixtures("dynamo")
def test_a_planned_model_is_compiled_where_there_is_no_backward() -> None:
    model, _ = usual()
    with torch.no_grad(), silence():
        torch.compile(model, backend="eager", fullgraph=True)(batch())


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_a_plan_is_not_applied_to_what_is_compiled(how: str) -> None:
    model = net()
    plan = _usual_plan()
    if how == "torch.compile":
        compiled: Any = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
        compiled = model
    with pytest.raises(ValueError, match=r"it is compiled.*to the model that it was"):
        plan.apply(compiled)


# --- two forwards ---------------------------------------------------------------------------------


def test_two_forwards_before_backward() -> None:
    model, _ = usual()
    run = train(model, call=lambda model, _: (model(batch()), model(batch(seed=2))), loss=_of_two)
    first, second = run.messages  # there is no room for both
    assert "while an earlier one still waits for its backward" in first
    assert "it calls the model 2 times before backward" in second
    assert run.over


def _of_two(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return squares(outputs[0] - outputs[1])


def test_one_forward_after_the_other() -> None:
    """Not a second forward: no warning."""
    model = net()
    planned(model, batch(), 0.8)  # with room for gradients that accumulate
    with silence():
        for _ in range(2):  # accumulation: backward after each
            squares(model(batch())).backward()
        loss = squares(model(batch()))
        loss.backward()
        squares(model(batch())).backward()  # the old loss is still there
        model(batch())  # its graph is dropped
        out = model(batch())
        squares(out).backward(retain_graph=True)
        squares(out).backward()
        squares(model(batch())).backward()
        with torch.no_grad():
            outputs = [model(batch()) for _ in range(3)]
        squares(model(batch())).backward()
        assert len(outputs) == 3
        loss = squares(model(batch()))
        loss.backward(retain_graph=True)
        del loss
        squares(model(batch())).backward()
    x = batch().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(squares(model(x)), x, create_graph=True)
    with pytest.warns(recollect.PlanWarning, match=r"a tensor .* that requires grad"):
        gradient.square().sum().backward()
    with silence():
        squares(model(batch())).backward()


class Adversaries(nn.Module):
    """A GAN: the critic is called twice before a backward, and once through the generator."""

    def __init__(self, maker: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.maker, self.critic = maker, critic

    def losses(self) -> Iterator[Tensor]:
        fake = self.maker(batch(seed=2))
        yield squares(self.critic(batch()) - 1) + squares(self.critic(fake.detach()))
        yield squares(self.critic(fake) - 1)


def test_adversaries() -> None:
    torch.manual_seed(0)
    plain = Adversaries(Net(2), Net(8))
    models = copy.deepcopy(plain)
    plan = recollect.plan(models.critic, batch(), 0.7, loss=squares)
    plan.apply(models.critic)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _train_adversaries(models)
    assert "still waits for its backward" in str(caught[0].message)
    assert all(each.category is recollect.PlanWarning for each in caught)
    _train_adversaries(plain)
    assert_identical(gradients(models), gradients(plain))


def _train_adversaries(models: Adversaries) -> None:
    for _ in range(2):
        for loss in models.losses():
            models.zero_grad()
            loss.backward()


def test_two_forwards_that_fit() -> None:
    model = net(2)
    plain_peak = recollect.frontier(model, batch(), loss=squares).plain_peak
    recollect.fit(model, batch(), 3 * plain_peak, loss=squares)
    with silence():
        squares(model(batch()) - model(batch(seed=2))).backward()


def test_two_forwards_where_one_fits_without_a_plan() -> None:
    model = net()
    recollect.fit(model, batch(), 1.0, loss=squares)
    run = train(model, call=lambda model, _: (model(batch()), model(batch(seed=2))), loss=_of_two)
    assert "while an earlier one still waits for its backward" in run.messages[0]
    assert not [peak for peak in run.peaks[2:] if peak > run.budget]  # planned as a whole
    model.zero_grad()
    with silence():  # nobody waits any more
        for _ in range(2):
            squares(model(batch())).backward()
            model.zero_grad()
            model(batch())


# --- gradients that are there ---------------------------------------------------------------------


def accumulate(
    model: nn.Module, steps: int = 3, given: Tensor | None = None, to_none: bool = True
) -> Run:
    """Steps with gradients that are there from the second on; the peak with all of them."""
    budget = vars(model)[OPTIONS].plan.budget
    twin = recollect.unwrap(copy.deepcopy(model))
    x = batch() if given is None else given
    peaks = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            there = sum(grad.nbytes for grad in gradients(model) if grad is not None)
            found = measure(lambda: model(x), lambda out: squares(out).backward(), warm_up=False)
            squares(twin(x)).backward()
            assert_identical(gradients(model), gradients(twin))
            if not to_none:
                model.zero_grad(set_to_none=False)
                twin.zero_grad(set_to_none=False)
            peaks.append(there + found.peak + static_bytes(model))
    model.zero_grad()
    return Run(peaks, [str(each.message) for each in caught], budget)


@pytest.mark.parametrize("to_none", [True, False], ids=["accumulation", "zeros"])
def test_gradients_that_are_there(to_none: bool) -> None:
    model = net()
    planned(model, batch(), 0.8)
    run = accumulate(model, 4, to_none=to_none)
    assert run.messages == []
    assert run.over == []
    assert run.peaks[1] < run.peaks[2]  # the first was traced, with the least memory
    assert run.peaks[2] > 0.85 * run.budget
    assert train(model, 2).messages == []  # and without them the plan is as it was


@pytest.mark.parametrize("name", sampled(CASES, usual=["conv", "custom", "moe"]))
def test_gradients_that_are_there_in_models_of_all_kinds(name: str) -> None:
    case = made(name)
    frontier = recollect.frontier(case.model, case.batch, loss=case.loss)
    plan = frontier.plan_for(max(int(0.8 * frontier.plain_peak), frontier.least))
    plan.apply(case.model)
    loss = case.loss or default_loss
    there, over = 0, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            found = measure(case.forward, lambda out: loss(out).backward(), warm_up=False)
            over.append((there + found.peak + static_bytes(case.model)) / plan.budget)
            there = sum(grad.nbytes for grad in gradients(case.model) if grad is not None)
    assert max(over) <= 1 or any(each.category is recollect.PlanWarning for each in caught)


def test_gradients_for_which_there_is_no_room() -> None:
    model = net()
    planned(model, batch(), 0.1)  # the least that works
    run = accumulate(model)
    (message,) = run.messages
    assert "263.00 KiB of gradients are there when forward begins" in message
    assert "recollect.plan(...) after a backward" in message
    assert accumulate(model, given=batch(48)).over == []


def test_gradients_that_were_there_when_the_plan_was_made() -> None:
    model = net()
    squares(model(batch())).backward()
    plan = recollect.plan(model, batch(), 0.8, loss=squares)
    assert plan.gradients == sum(p.nbytes for p in model.parameters())
    model.zero_grad()
    plan.apply(model)
    run = accumulate(model)
    assert run.messages == []
    assert run.over == []


def test_gradients_and_a_plan_without_its_step() -> None:
    model, plan = usual()
    recollect.unwrap(model)
    pickle.loads(pickle.dumps(plan)).apply(model)
    run = accumulate(model)
    assert run.messages == []
    assert run.over == []


def test_outputs_that_are_kept_without_a_backward() -> None:
    model, _ = usual()
    outputs = [model(batch())]
    with pytest.warns(recollect.PlanWarning, match="If there is no backward, delete the output"):
        outputs.append(model(batch()))


# --- what CUDA's allocator has counted ------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What an allocator counts at most; as if the model were on its device."""
    found = [0]
    monkeypatch.setattr(watch.PeakWatch, "read", lambda self, _: found[0])
    monkeypatch.setattr(watch, "_peak_on", lambda _: found[0])
    return found


def test_a_step_above_the_budget_is_told_once(counted: list[int]) -> None:
    model, plan = usual()
    vars(model)[OPTIONS]._peaks._device = torch.device("cuda", 0)
    with silence():
        out = squares(model(batch()))
        counted[0] = 2 * plan.budget
        out.backward()
    with pytest.warns(recollect.PlanWarning, match="more than its budget of") as caught:
        model(batch())
    assert caught[0].filename == __file__
    with silence():
        out = squares(model(batch()))
        counted[0] *= 2
        out.backward()
        model(batch())


def test_what_is_done_between_steps_is_not_the_plans(counted: list[int]) -> None:
    model, plan = usual()
    vars(model)[OPTIONS]._peaks._device = torch.device("cuda", 0)
    with silence():
        for _ in range(3):
            out = squares(model(batch()))
            counted[0] = plan.budget // 2  # somebody had it counted anew
            out.backward()
            counted[0] = 3 * plan.budget  # an evaluation
            model.zero_grad()
        model(batch())


# --- nothing to tell ------------------------------------------------------------------------------


def test_ordinary_training() -> None:
    model = net(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = recollect.plan(model, batch(), 0.7, loss=squares, optimizer=optimizer)
    plan.apply(model)
    with silence():
        for number in range(10):
            for length in (128, 64, 100):  # smaller ones, accumulated
                squares(model(batch(length))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 3 == 0:
                model.eval()
                with torch.no_grad():
                    model(batch(512))
                squares(model(batch(64))).backward()  # of the inputs, say
                optimizer.zero_grad()
                model.train()


def test_a_step_above_the_budget_makes_later_ones_keep_less(counted: list[int]) -> None:
    model, plan = usual()
    runner = vars(model)[OPTIONS]
    runner._peaks._device = torch.device("cuda", 0)
    out = squares(model(batch()))
    counted[0] = int(1.1 * plan.budget)
    out.backward()
    model.zero_grad()
    expected = _plain_gradients(model, 0, lambda model, _: model(batch()), squares)
    with pytest.warns(recollect.PlanWarning, match="Later steps keep less and recompute more"):
        found = measure(lambda: model(batch()), lambda out: squares(out).backward(), warm_up=False)
    assert_identical(gradients(model), expected)
    assert found.peak + static_bytes(model) <= plan.predicted_peak / 1.08
