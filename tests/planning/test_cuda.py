"""Plans on a CUDA device: the budget is what `torch.cuda.max_memory_allocated` says."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import planning
from recollect.graph.simulate import simulate, simulate_plain
from recollect.planning import ways
from recollect.planning.planner import Planner
from recollect.planning.prepare import Request
from recollect.planning.recording.memory_events import allocated_by
from recollect.planning.recording.prices import Prices
from tests.planning._models import (
    Case,
    ConvNet,
    Decoder,
    EncoderDecoder,
    Made,
    MoE,
    squares,
    tokens,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class Recurrent(nn.Module):
    """Recurrent layers, one after the other. Of several in one `nn.LSTM` nothing can be freed."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))[0]
        return x


def _normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _half(kind: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: kind(*args, **kwargs).bfloat16()


def _text(batch: int = 16, time: int = 512) -> Tensor:
    return tokens(batch, time).cuda()


#: Of every kind, and large enough that what libraries allocate for themselves is little.
CASES = {
    "decoder": Case(_half(Decoder, 8, 512), _text),
    "dropout": Case(_half(Decoder, 8, 512, dropout=0.1), _text),
    "encoder_decoder": Case(
        _half(EncoderDecoder, 6, 512),
        lambda: (_normal(16, 512, 512)(), _normal(16, 384, 512)()),
    ),
    "conv": Case(_half(ConvNet, 6, 64), _normal(32, 3, 64, 64)),
    "moe": Case(_half(MoE, 6, 512), _normal(16, 512, 512)),
    "lstm": Case(lambda: Recurrent(6, 256), lambda: torch.randn(64, 128, 256, device="cuda")),
}


def made(name: str) -> Made:
    torch.manual_seed(0)
    case = CASES[name]
    return Made(case.make().cuda(), case.batch(), case.loss)


@pytest.fixture(params=CASES)
def each(request: pytest.FixtureRequest) -> Made:
    return made(request.param)


@pytest.fixture
def dropout() -> Made:
    return made("dropout")


@pytest.fixture
def reproducible(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have sums added up in one order: the usual kernels of backward take any."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def peak(made: Made) -> int:
    made.model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    made.step(3)
    found = torch.cuda.max_memory_allocated()
    made.model.zero_grad()
    return found


def fresh_copy(model: nn.Module) -> nn.Module:
    """A copy whose recurrent layers have their weights in one memory, as cuDNN wants them."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return copied


def state_after(made: Made) -> list[Tensor]:
    """Gradients and buffers, after a step."""
    made.model.zero_grad()
    made.step(3)
    gradients = [parameter.grad for parameter in made.model.parameters()]
    return [each.clone() for each in [*gradients, *made.model.buffers()]]


@pytest.mark.usefixtures("no_bound")
@pytest.mark.parametrize("offload", [False, "auto"], ids=["here", "offload"])
@pytest.mark.parametrize("number", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_the_peak_obeys_budgets(each: Made, offload: Any, number: int) -> None:
    frontier = recollect.frontier(each.model, each.batch, loss=each.loss, offload=offload)
    low, high = frontier.least, frontier.plain_peak
    assert low < 0.7 * high
    last = float("inf")
    for n in range(number):
        budget = low + (high - low) * n // (number - 1)
        plan = frontier.plan_for(budget)
        with plan.applied(each.model):
            found = [peak(each) for _ in range(3)]
        assert max(found) <= budget
        assert plan.predicted_peak == pytest.approx(max(found), rel=0.03)
        # With offload, the schedule is chosen that was measured to be the faster one of two.
        assert plan.predicted_time <= last * (1.02 if offload else 1)
        last = plan.predicted_time


@pytest.mark.usefixtures("no_bound", "reproducible")
@pytest.mark.parametrize("offload", [False, "auto"], ids=["here", "offload"])
def test_gradients_and_buffers_are_those_of_plain(each: Made, offload: Any) -> None:
    twin = Made(fresh_copy(each.model), each.batch, each.loss)
    frontier = recollect.frontier(each.model, each.batch, loss=each.loss, offload=offload)
    frontier.plan_for((frontier.least + frontier.plain_peak) // 2).apply(each.model)
    for _ in range(3):
        for ours, theirs in zip(state_after(each), state_after(twin), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.alone
def test_the_simulator_knows_what_offload_takes(dropout: Made) -> None:
    planner = Planner.of(Request(dropout.model, dropout.batch, squares))
    with planner.step.undone():
        measured = planner.step.measured_peak()
    # A free block that is larger than what was asked for counts as it is.
    assert simulate_plain(planner.graph).peak == pytest.approx(measured, rel=0.001, abs=1 << 21)
    assert measured <= planner.plain_peak
    sent = [s for s in planner.solver.frontier() if s.schedule.offloaded]
    assert sent
    for solution in sent[:: max(1, len(sent) // 4)]:
        simulated = simulate(planner.graph, solution.schedule).peak
        # A checked call may have one more tensor on its way back than the simulator counts.
        assert planner.trials.peak(solution.schedule) == pytest.approx(simulated, rel=0.05)


def test_an_optimizer_counts_and_is_left_alone(dropout: Made) -> None:
    model = dropout.model
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())
    plan = recollect.plan(model, dropout.batch, 0.8, loss=squares, optimizer=optimizer)
    assert not optimizer.state
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    plan.apply(model)
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        dropout.step()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.cuda.max_memory_allocated() <= plan.budget


def test_a_model_that_does_not_fit_is_predicted_and_then_fits() -> None:
    torch.manual_seed(0)
    model: nn.Module = Decoder(12, 512).cuda().bfloat16()
    base = torch.cuda.memory_allocated()
    _, total = torch.cuda.mem_get_info()
    plain = recollect.frontier(model, _text(), loss=squares).plain_peak
    torch.cuda.empty_cache()
    limit = base + (plain - base) * 2 // 3
    large = Made(model, _text(24), squares)
    torch.cuda.set_per_process_memory_fraction(limit * 1.15 / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            large.step()
        model.zero_grad()
        torch.cuda.empty_cache()
        plan = recollect.plan(model, large.batch, limit, loss=squares)
        assert plan.plain_peak > limit
        plan.apply(model)
        for _ in range(3):
            assert peak(large) <= limit
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_workspaces_of_other_streams_do_not_count() -> None:
    weight = torch.randn(512, 512, device="cuda")
    for _ in range(8):  # each stream leaves a workspace of cuBLAS behind
        with torch.cuda.stream(torch.cuda.Stream()):
            weight @ weight
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    small = Made(Decoder(4, 128).cuda(), tokens(8, 128).cuda(), squares)
    frontier = recollect.frontier(small.model, small.batch, loss=small.loss, offload=False)
    assert torch.cuda.memory_allocated() < before
    assert frontier.least < 0.9 * frontier.plain_peak


# --- batches of other shapes ----------------------------------------------------------------------

LARGER: dict[str, Callable[[], Any]] = {
    "decoder": lambda: _text(20),
    "dropout": lambda: _text(16, 640),
    "encoder_decoder": lambda: (_normal(20, 512, 512)(), _normal(20, 384, 512)()),
    "conv": _normal(40, 3, 64, 64),
}


@pytest.mark.alone
@pytest.mark.usefixtures("no_bound", "reproducible")
@pytest.mark.parametrize("name", LARGER)
def test_a_larger_batch_keeps_the_budget_bit_for_bit(name: str) -> None:
    case = made(name)
    plan = recollect.plan(case.model, case.batch, 0.8, loss=case.loss)
    twin = Made(fresh_copy(case.model), LARGER[name](), case.loss)
    case.batch = twin.batch
    plan.apply(case.model)
    static = sum(p.nbytes for p in twin.model.parameters()) + sum(
        b.nbytes for b in twin.model.buffers()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", recollect.PlanWarning)
        for _ in range(3):
            assert peak(case) - static <= plan.budget  # the twin is there too
            peak(twin)  # which counts as many batches in its buffers
    for ours, theirs in zip(state_after(case), state_after(twin), strict=True):
        assert torch.equal(ours, theirs)


# --- the workspace of ops that must not run twice -------------------------------------------------


def _ops() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    image = torch.randn(8, 32, 64, 64, device="cuda")
    weight, matrix = torch.randn(32, 32, 3, 3, device="cuda"), torch.randn(512, 512, device="cuda")
    conv = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    looks = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    aten = torch.ops.aten
    return {
        "conv": (aten.convolution.default, (image, weight, None, *conv)),
        "conv_backward": (
            aten.convolution_backward.default,
            (image, image, weight, [32], *conv, [True, True, True]),
        ),
        "mm": (aten.mm.default, (matrix, matrix)),
        "sort": (aten.sort.default, (matrix,)),
        "attention": (aten._scaled_dot_product_flash_attention.default, (looks, looks, looks)),
    }


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", ["conv", "conv_backward", "mm", "sort", "attention"])
def test_a_workspace_is_that_of_later_runs(name: str, *, is_first: bool) -> None:
    op, args = _ops()[name]
    device = torch.device("cuda", torch.cuda.current_device())
    if not is_first:
        op(*args)
    highest = torch.cuda.max_memory_allocated()
    found = Prices(device, once=True)
    with torch.no_grad():
        price, *_ = [found.run(op, args, {})[0] for _ in range(3)]
    found.finish()
    assert torch.cuda.max_memory_allocated() >= highest  # the peak is the user's to reset
    out = []
    peak, left = allocated_by(lambda: out.append(op(*args)), device)
    assert price is not None
    assert abs(price.workspace - (peak - left)) < 1 << 20  # a block may be as much larger


# --- steps that are not the planned one -----------------------------------------------------------


def test_a_step_above_the_budget_is_told_at_the_next_forward() -> None:
    case = made("decoder")
    plan = recollect.plan(case.model, case.batch, 0.7, loss=case.loss)
    plan.apply(case.model)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        case.step()
        case.model.zero_grad()
    # What the plan cannot know: something is held beside the step.
    room = plan.budget - torch.cuda.memory_allocated()
    other = torch.empty(room * 9 // 10, dtype=torch.uint8, device="cuda")
    case.step()
    case.model.zero_grad()
    peak = torch.cuda.max_memory_allocated()
    assert peak > plan.budget
    with pytest.warns(recollect.PlanWarning, match="the last step under the plan took") as messages:
        case.step()
    assert len(messages) == 1
    case.model.zero_grad()
    case.step()  # once is enough
    assert torch.cuda.max_memory_allocated() >= peak  # nobody has reset it
    del other


@pytest.mark.parametrize("offload", [False, "auto"])
def test_ordinary_training_is_not_told_of(offload: Any) -> None:
    case = made("dropout")
    optimizer = torch.optim.AdamW(case.model.parameters())
    plan = recollect.plan(
        case.model, case.batch, 0.7, loss=case.loss, optimizer=optimizer, offload=offload
    )
    plan.apply(case.model)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(6):  # warnings are errors in these tests
        case.step()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.cuda.max_memory_allocated() <= plan.budget


def test_autocast_that_was_not_planned_on_a_device() -> None:
    torch.manual_seed(0)
    model, batch = Decoder(8, 512).cuda(), _text()
    plan = recollect.plan(model, batch, 0.6, loss=squares)
    plan.apply(model)
    messages: list[str] = []
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.autocast("cuda", torch.bfloat16):
                out = model(batch)
            squares(out).backward()
        del out
        model.zero_grad()
        messages += [str(each.message) for each in caught]
        assert messages or torch.cuda.max_memory_allocated() <= plan.budget


# --- times and the output -------------------------------------------------------------------------


def test_what_steps_took_is_measured(dropout: Made) -> None:
    plan = recollect.plan(dropout.model, dropout.batch, 0.7, loss=squares)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.predicted_peak <= plan.budget
    assert plan.measured_time is not None
    assert plan.measured_plain_time is not None
    assert plan.measured_time > 0
    assert plan.measured_plain_time > 0


def test_ops_are_priced_by_the_time_of_the_device() -> None:
    found = Prices(torch.device("cuda"))
    wide = torch.ones(4096, 4096, device="cuda")
    calls = [
        found.run(torch.ops.aten.mm.default, (wide, wide), {})[0],
        found.run(torch.ops.aten.relu.default, (wide,), {})[0],
        found.run(torch.ops.aten.relu.default, (wide[:1],), {})[0],
    ]
    found.finish()
    assert all(call.timing is not None and call.seconds > 0 for call in calls)


@pytest.mark.usefixtures("no_bound")
@pytest.mark.parametrize("holds", [True, False])
def test_the_budget_is_kept_in_loops_that_hold_the_output_and_that_do_not(holds: bool) -> None:
    torch.manual_seed(0)
    model, batch = _half(Decoder, 4, 256)().cuda(), _text()
    head = nn.Linear(96, 8192, bias=False).cuda().bfloat16()
    whole = nn.Sequential(model, head)

    def loss(out: Tensor) -> Tensor:
        return out.sum()

    def step() -> int:
        whole.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        if holds:
            out = whole(batch)
            loss(out).backward()
        else:
            loss(whole(batch)).backward()
        return torch.cuda.max_memory_allocated()

    frontier = recollect.frontier(whole, batch, loss=loss, holds_output=holds)
    assert frontier.plain_peak == pytest.approx(max(step() for _ in range(3)), rel=0.03)
    whole.zero_grad()
    plan = frontier.plan_for((frontier.least + frontier.plain_peak) // 2)
    with plan.applied(whole):  # in which warnings are errors
        assert max(step() for _ in range(3)) <= plan.budget
    whole.zero_grad()


@pytest.mark.parametrize("engine", ["rerun", "replay"])
def test_modules_checkpointed_as_a_whole_are_a_plan(
    dropout: Made, monkeypatch: pytest.MonkeyPatch, reproducible: None, engine: str
) -> None:
    free = {(f"layers.{number}", engine): 0.0 for number in range(8)}
    monkeypatch.setattr(ways, "_LITTLE", -1.0)  # they are priced however little the engine costs
    monkeypatch.setattr(ways, "_module_costs", lambda *_: free)
    monkeypatch.setattr(planning.planner, "_CLEARLY_SLOWER", 1.0)  # and taken
    plan = recollect.plan(dropout.model, dropout.batch, 0.7, loss=squares, offload=False)
    assert plan.schedule.modules
    twin = Made(fresh_copy(dropout.model), dropout.batch, dropout.loss)
    with plan.applied(dropout.model):
        assert max(peak(dropout) for _ in range(3)) <= plan.budget
        for ours, theirs in zip(state_after(dropout), state_after(twin), strict=True):
            assert torch.equal(ours, theirs)
