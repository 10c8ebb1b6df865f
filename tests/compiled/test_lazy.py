"""Compiled models that are fitted without a batch: planned from the loop's own steps, or told."""

import copy
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.compiled import loop
from recollect.compiled.applied import Applied
from recollect.compiled.lazy import LazyFit
from recollect.compiled.timeline import Timeline
from recollect.graph.graph import Schedule
from recollect.modules import OPTIONS
from tests._support import assert_identical, measure
from tests.compiled._steps import Compiled, as_it_is, in_blocks
from tests.planning._models import static_bytes, tokens

#: By then a plan was made, tried and settled.
SETTLED = 10


def as_is(model: nn.Module) -> nn.Module:
    return model


def static(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager", dynamic=False)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def fit_of(compiled: Compiled) -> LazyFit:
    found = vars(compiled.model).get(OPTIONS) or vars(compiled.bare)[OPTIONS]
    assert isinstance(found, LazyFit)
    return found


def loop_peak(compiled: Compiled) -> int:
    """The peak of a step as in `train`, where only autograd holds what the model returns."""
    memory = measure(lambda: compiled.loss_of(compiled.forward()), Tensor.backward, warm_up=False)
    compiled.bare.zero_grad()
    return static_bytes(compiled.bare) + memory.peak


def train(compiled: Compiled, steps: int = SETTLED, parts: int = 1) -> list[Tensor]:
    """Train, with so many forwards and backwards to a step. Returns the parameters."""
    optimizer = torch.optim.SGD(compiled.bare.parameters(), lr=1e-3, momentum=0.9)
    for number in range(steps):
        for part in range(parts):
            torch.manual_seed(10 * number + part)
            compiled.loss_of(compiled.forward()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in compiled.bare.parameters()]


@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("decoder_dropout", as_it_is),
        ("decoder", in_blocks),
        *(
            pytest.param(case, as_it_is, marks=pytest.mark.slow)
            for case in ("encoder_decoder", "conv", "moe")
        ),
    ],
)
def test_the_loop_is_planned_and_nothing_else_changes(
    case: str, how: Callable[[nn.Module], nn.Module]
):
    compiled = Compiled(case, how)
    plain = compiled.peak()
    expected = train(compiled)
    compiled = Compiled(case, how)
    assert recollect.fit(compiled.model, budget=0.8) is compiled.model
    assert_identical(train(compiled), expected)
    plan = fit_of(compiled).plan
    assert plan is not None
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget < plan.plain_peak
    assert plan.from_loop
    assert "a step of the loop ran under this plan" in str(plan).replace("\n", " ")
    # What it measured has the state of the optimizer besides.
    state = sum(parameter.nbytes for parameter in compiled.bare.parameters())
    assert loop_peak(compiled) + state == plan.measured_peak
    recollect.unwrap(compiled.model)
    assert compiled.peak() == plain


def test_a_model_that_is_moved_after_it_was_fitted_is_measured_where_it_runs(
    monkeypatch: pytest.MonkeyPatch,
):
    compiled = Compiled("decoder", as_it_is)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(loop, "device_of", lambda _: torch.device("cuda", 0))
        recollect.fit(compiled.model, budget=0.8)
    train(compiled)
    plan = fit_of(compiled).plan
    assert plan is not None
    state = sum(parameter.nbytes for parameter in compiled.bare.parameters())
    assert loop_peak(compiled) + state == plan.measured_peak


@pytest.mark.parametrize("how", [as_it_is, in_place, in_blocks])
def test_a_fitted_model_that_is_compiled_afterwards(how: Callable[[nn.Module], nn.Module]):
    compiled = Compiled("decoder", as_is)
    recollect.fit(compiled.bare, budget=0.8)
    compiled.model = how(compiled.bare)
    train(compiled, SETTLED + 1)
    plan = fit_of(compiled).plan
    assert plan is not None
    assert plan.compiled is not None
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget < plan.plain_peak
    expected = compiled.outcome()
    recollect.unwrap(compiled.bare)
    assert_identical(compiled.outcome(), expected)
    assert (vars(compiled.bare).get("_compiled_call_impl") is not None) is (how is in_place)


def test_code_that_is_compiled_around_a_fitted_model():
    def around(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def scaled(x: Tensor) -> Tensor:
            return 2 * model(x)

        return torch.compile(scaled, backend="aot_eager")

    compiled = Compiled("decoder", as_is)
    compiled.model = around(compiled.bare)
    expected = train(compiled)
    torch.compiler.reset()  # that code would do for the fitted model
    compiled = Compiled("decoder", as_is)
    compiled.model = around(recollect.fit(compiled.bare, budget=0.8))
    assert_identical(train(compiled, SETTLED), expected)
    plan = vars(compiled.bare)[OPTIONS].plan
    assert plan is not None
    assert plan.compiled is not None
    assert plan.measured_peak <= plan.budget < plan.plain_peak


def test_the_first_step_in_a_function_that_is_compiled_and_calls_backward():
    compiled = Compiled("decoder", as_is)
    expected = compiled.outcome()
    recollect.fit(compiled.bare, budget=0.8)
    step = torch.compile(
        lambda: compiled.loss_of(compiled.forward()).backward(), backend="aot_eager"
    )
    torch.manual_seed(1)
    step()
    gradients = [parameter.grad for parameter in compiled.bare.parameters()]
    assert_identical([*gradients, torch.rand(1)], expected)
    recollect.unwrap(compiled.bare)


def test_a_model_that_is_compiled_in_place_and_once_more():
    compiled = Compiled("decoder", lambda model: as_it_is(in_place(model)))
    recollect.fit(compiled.model, budget=0.8)
    train(compiled)
    plan = fit_of(compiled).plan
    assert plan is not None
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget < plan.plain_peak
    recollect.unwrap(compiled.model)


def test_the_largest_shapes_are_planned():
    def dynamic(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="aot_eager", dynamic=True)

    def train_sizes(compiled: Compiled) -> list[Tensor]:
        for size in (4, 3, 4, 2, 4, 3, 4):
            compiled.batch = tokens(batch=size)
            found = train(compiled, 1)
        return found

    expected = train_sizes(Compiled("decoder", dynamic))
    compiled = Compiled("decoder", dynamic)
    recollect.fit(compiled.model, budget=0.8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", recollect.PlanWarning)
        assert_identical(train_sizes(compiled), expected)
    plan = fit_of(compiled).plan
    assert plan is not None
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget < plan.plain_peak
    assert compiled.peak() <= plan.budget


def test_a_model_that_is_not_called_as_it_was_fitted_is_told():
    compiled = Compiled("decoder", as_it_is)
    recollect.fit(compiled.model, budget=0.8)
    with pytest.warns(recollect.PlanWarning, match="without the code of its plan"):
        compiled.bare(compiled.batch).sum().backward()


def test_steps_in_which_nothing_is_compiled_are_told():
    compiled = Compiled("decoder", as_it_is)
    recollect.fit(compiled.model, budget=0.8)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.warns(recollect.PlanWarning, match=r"has run none of its compiled graphs"),
        pytest.warns(recollect.PlanWarning, match=r"or nothing is \(TORCH_LOGS"),
    ):
        train(compiled, SETTLED)


def test_a_compiler_that_gives_up_before_there_is_a_plan_is_told():
    compiled = Compiled("decoder", static)
    recollect.fit(compiled.model, budget=0.8)
    with torch._dynamo.config.patch(recompile_limit=2):
        for size in (1, 2):
            compiled.batch = tokens(batch=size)
            train(compiled, 1)
        compiled.batch = tokens(batch=4)
        with (
            pytest.warns(recollect.PlanWarning, match=r"none of its compiled.*recompile_limit"),
            pytest.warns(recollect.PlanWarning, match="so there is no plan"),
        ):
            train(compiled, SETTLED)


class Region(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return recollect.checkpoint(self.block, x)


def test_blocks_that_run_again_in_checkpointed_regions():
    def in_regions(model: nn.Module) -> nn.Module:
        first, *others = in_blocks(model).layers  # type: ignore[union-attr]
        model.layers = nn.ModuleList([first, *map(Region, others)])
        return model

    expected = train(Compiled("decoder", in_regions))
    compiled = Compiled("decoder", in_regions)
    recollect.fit(compiled.model, budget=0.8)
    assert_identical(train(compiled), expected)
    plan = fit_of(compiled).plan
    assert plan is not None
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget < plan.plain_peak


def test_a_step_that_compiles_in_backward_leaves_no_profiler_on():
    compiled = Compiled("decoder", as_it_is)
    recollect.fit(compiled.model, budget=0.8)
    train(compiled, 1)

    def compiles(_: Tensor) -> None:
        steps = fit_of(compiled)._steps
        assert steps._profilers
        assert steps._notes.on_compile is not None
        steps._notes.on_compile()  # as a backend does

    compiled.bare.head.weight.register_hook(compiles)
    train(compiled, 1)
    with torch.autograd.profiler.profile():
        pass  # else it is an error


def test_the_first_steps_save_little():
    compiled = Compiled("decoder", as_it_is)
    plain = compiled.peak()
    recollect.fit(compiled.model, budget=0.8)
    compiled.step()
    assert compiled.peak() < 0.8 * plain
    assert fit_of(compiled).plan is None  # no optimizer has made a step


def test_gradients_that_accumulate_are_counted():
    compiled = Compiled("decoder", as_it_is)
    recollect.fit(compiled.model, budget=0.8)
    train(compiled, SETTLED, parts=2)
    plan = fit_of(compiled).plan
    assert plan is not None
    weights = sum(parameter.nbytes for parameter in compiled.bare.parameters())
    assert plan.gradients == weights
    assert plan.base >= 3 * weights
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget


def test_a_budget_that_cannot_be_met_is_told():
    compiled = Compiled("decoder", as_it_is)
    recollect.fit(compiled.model, budget=0.1)
    with (
        pytest.warns(recollect.PlanWarning, match="Training goes on under the plan of the least"),
        pytest.warns(recollect.PlanWarning, match="more than the budget .* is the least of the"),
    ):
        train(compiled)
    plan = fit_of(compiled).plan
    assert plan is not None
    assert plan.measured_peak == plan.predicted_peak > plan.budget


def test_a_step_that_takes_more_than_simulated_is_told_and_mended(
    monkeypatch: pytest.MonkeyPatch,
):
    known = loop.LoopTrials._try

    def hopeful(self: loop.LoopTrials, schedule: Schedule) -> int:
        expected = known(self, schedule)
        return expected if self.code else int(0.9 * expected)  # before a plan was measured

    monkeypatch.setattr(loop.LoopTrials, "_try", hopeful)
    compiled = Compiled("decoder", as_it_is)
    recollect.fit(compiled.model, budget=0.8)
    with pytest.warns(recollect.PlanWarning, match="a step under the plan took"):
        train(compiled, SETTLED)
    plan = fit_of(compiled).plan
    assert plan is not None
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget


def test_steps_that_cannot_be_measured_are_told():
    compiled = Compiled("decoder", as_it_is)
    recollect.fit(compiled.model, budget=0.8)
    with (
        torch.autograd.profiler.profile(),
        pytest.warns(recollect.PlanWarning, match="another profiler is on"),
    ):
        train(compiled, 10)
    train(compiled, 3)
    assert fit_of(compiled).plan is not None


def test_a_copy_before_there_is_a_plan_is_told():
    compiled = Compiled("decoder", as_it_is)
    recollect.fit(compiled.model, budget=0.8)
    with pytest.warns(recollect.PlanWarning, match="copied or pickled before its plan is made"):
        copied = copy.deepcopy(compiled.model)
    assert vars(copied).get(OPTIONS) is None


def test_a_backend_without_a_place_for_a_plan_is_told():
    compiled = Compiled("decoder", as_is)
    recollect.fit(compiled.bare, budget=0.8)
    compiled.model = torch.compile(compiled.bare, backend="eager")
    with pytest.warns(recollect.PlanWarning, match="compiled with backend='eager'"):
        compiled.step()


# What is saved depends on times that are measured here. A first plan may take a little too much: it
# is told, and corrected.
@pytest.mark.filterwarnings("ignore:a step under the plan took")
def test_several_forwards_before_a_backward_are_planned_together():
    compiled = Compiled("decoder", as_it_is)
    recollect.fit(compiled.model, budget=0.8)
    optimizer = torch.optim.SGD(compiled.bare.parameters(), lr=1e-3)
    for _ in range(SETTLED):
        first, second = compiled.forward(), compiled.forward()
        (compiled.loss_of(first) + compiled.loss_of(second)).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = fit_of(compiled).plan
    assert plan is not None
    assert plan.compiled is not None
    assert plan.compiled.forwards == 2
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget < plan.plain_peak


def test_what_torch_compile_is_given_may_be_copied() -> None:
    pytest.importorskip("lightning.fabric.wrappers")  # from now on torch.compile copies it
    compiled = Compiled("decoder", as_it_is)
    recollect.fit(compiled.model, budget=0.8)  # a warning would be an error


def test_the_log_says_what_was_predicted_and_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    logger = logging.getLogger("recollect")
    monkeypatch.setattr(logger, "info", lambda text, *args: lines.append(text % args))
    compiled = Compiled("decoder", as_it_is)
    recollect.fit(compiled.model, budget=0.8)
    train(compiled)
    found = [each for each in lines if "for the compiled step" in each]
    assert "(predicted)" in found[0]
    assert "(measured)" in found[-1]


def test_what_takes_the_least_stays_if_no_plan_keeps_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = Compiled("decoder", as_it_is)
    took: list[int] = []
    judge = LazyFit._judge

    def judge_more(self: LazyFit, model: nn.Module, applied: Applied, timeline: Timeline) -> None:
        base = self._steps.updates.base_bytes(model, self._steps.gradients)
        took.append(applied.plan.budget + 50_000 + 1000 * len(took))
        judge(self, model, applied, replace(timeline, peak=took[-1] - base))

    monkeypatch.setattr(LazyFit, "_judge", judge_more)
    recollect.fit(compiled.model, budget=0.8)
    with (
        pytest.warns(recollect.PlanWarning, match="Those that follow save less"),
        pytest.warns(recollect.PlanWarning, match="the least of the plans that were compiled"),
    ):
        train(compiled, SETTLED)
    plan = fit_of(compiled).plan
    assert plan is not None
    assert len(took) == 3
    assert plan.measured_peak == plan.predicted_peak == min(took)
