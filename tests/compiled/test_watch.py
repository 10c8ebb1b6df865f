"""Steps that do not run by the plan of a compiled model are told, each kind of them."""

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn

import recollect
from tests._support import assert_identical
from tests.compiled._steps import Compiled
from tests.planning._models import tokens


def static(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager", dynamic=False)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def planned(how: Callable[[nn.Module], nn.Module]) -> tuple[Compiled, recollect.Plan]:
    compiled = Compiled("decoder", how)
    return compiled, recollect.plan(compiled.model, compiled.batch, 0.75, loss=compiled.loss)


@pytest.fixture(scope="module")
def whole() -> tuple[Compiled, recollect.Plan]:
    """A compiled model, and a plan for it."""
    return planned(static)


@pytest.fixture
def fitted(whole: tuple[Compiled, recollect.Plan]) -> Iterator[Compiled]:
    """The same with the plan applied."""
    compiled, plan = whole
    compiled.batch = tokens(batch=4)
    with plan.applied(compiled.model):
        yield compiled


# --- the compiler gives up ------------------------------------------------------------------------


def test_more_versions_than_the_compiler_makes(fitted: Compiled):
    with torch._dynamo.config.patch(recompile_limit=2):
        for size in (4, 3):
            fitted.batch = tokens(batch=size)
            fitted.step()
        fitted.batch = tokens(batch=2)
        with pytest.warns(recollect.PlanWarning, match=r"none of its compiled.*recompile_limit"):
            fitted.step()


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 goes on with all parts")
def test_a_part_that_the_compiler_gives_up():
    def broken(model: nn.Module) -> nn.Module:
        model.layers[-1].register_forward_hook(_break)
        return static(model)

    compiled, plan = planned(broken)
    with plan.applied(compiled.model):
        compiled.step()
        compiled.bare.head.requires_grad_(False)  # what a part of the code is guarded by
        with (
            torch.compiler.set_stance("eager_on_recompile"),
            pytest.warns(recollect.PlanWarning, match=r"has run \d of \d compiled graphs"),
        ):
            compiled.step()


def _break(module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
    torch._dynamo.graph_break()


def test_a_compiler_that_is_switched_off(fitted: Compiled):
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.warns(recollect.PlanWarning, match="set_stance"),
    ):
        fitted.step()


# --- the code of the plan is passed by ------------------------------------------------------------


def compiled_once_more(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="aot_eager")


def wrapped_model(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return model._orig_mod


@pytest.mark.parametrize("other", [compiled_once_more, wrapped_model])
def test_another_way_to_the_model(other, fitted: Compiled):
    function = other(fitted.model)
    with pytest.warns(recollect.PlanWarning, match="without the code of its plan"):
        fitted.loss_of(function(fitted.batch)).backward()


def test_a_model_that_is_compiled_in_place_once_more():
    compiled, plan = planned(in_place)
    plan.apply(compiled.model)
    compiled.model.compile(backend="aot_eager")
    with pytest.warns(recollect.PlanWarning, match="without the code of its plan"):
        compiled.step()


def test_a_plan_is_in_effect_when_compiled_code_calls_the_model(
    whole: tuple[Compiled, recollect.Plan], fitted: Compiled
):
    _, plan = whole
    inner = fitted.model
    fitted.model = torch.compile(lambda x: inner(x) + 0, backend="aot_eager")
    try:
        assert fitted.peak() <= plan.budget < plan.plain_peak
    finally:
        fitted.model = inner


def test_steps_of_many_forms_are_by_the_code_of_the_plan(fitted: Compiled):
    model, batch, loss = fitted.model, fitted.batch, fitted.loss_of
    for _ in range(2):
        loss(model(batch)).backward()
        fitted.bare.zero_grad()
        with torch.no_grad():
            model(batch)
        model(batch)  # and no backward
        torch.autograd.grad(loss(model(batch)), [*fitted.bare.parameters()])


def test_more_forwards_than_were_planned_are_told(fitted: Compiled):
    model, batch, loss = fitted.model, fitted.batch, fitted.loss_of
    first = model(batch)
    with pytest.warns(recollect.PlanWarning, match="2 forwards wait for their backward"):
        second = model(batch)
    (loss(first) + loss(second)).backward()
    fitted.bare.zero_grad()


def test_a_graph_that_is_retained_is_by_the_code_of_the_plan(
    whole: tuple[Compiled, recollect.Plan],
):
    compiled, plan = whole
    with (
        torch._functorch.config.patch(donated_buffer=False),
        plan.applied(compiled.model),
    ):
        for _ in range(3):
            loss = compiled.loss_of(compiled.forward())
            loss.backward(retain_graph=True)
            loss.backward()
            compiled.bare.zero_grad()


# --- copies ---------------------------------------------------------------------------------------


def test_a_copy_of_a_wrapped_model_keeps_the_plan(
    whole: tuple[Compiled, recollect.Plan], fitted: Compiled
):
    _, plan = whole
    expected = fitted.outcome()
    other = copy.copy(fitted)
    other.model = copy.deepcopy(fitted.model)
    other.bare = other.model._orig_mod
    assert_identical(other.outcome(), expected)
    assert other.peak() <= plan.budget < plan.plain_peak


def test_a_copy_of_a_model_that_is_compiled_in_place_is_told():
    compiled, plan = planned(in_place)
    with plan.applied(compiled.model):
        with pytest.warns(recollect.PlanWarning, match="the copy is not compiled, and has no plan"):
            copied = copy.deepcopy(compiled.model)
        assert not vars(copied).get("_compiled_call_impl")
        copied.compile(backend="aot_eager")
        plan.apply(copied)
        compiled.model = compiled.bare = copied
        assert compiled.peak() <= plan.budget < plan.plain_peak


# --- steps that are not as planned ----------------------------------------------------------------


def test_gradients_that_accumulate_are_told(fitted: Compiled):
    fitted.step()
    with pytest.warns(recollect.PlanWarning, match="gradients are there when forward begins"):
        fitted.forward()
    fitted.bare.zero_grad()


def test_a_plan_that_is_made_with_gradients_counts_them():
    compiled = Compiled("decoder", static)
    compiled.step()
    plan = recollect.plan(compiled.model, compiled.batch, 0.8, loss=compiled.loss)
    with plan.applied(compiled.model):
        for _ in range(2):
            compiled.loss_of(compiled.forward()).backward()


def test_autocast_that_was_not_planned_is_told(fitted: Compiled):
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.warns(recollect.PlanWarning, match="autocast is on"),
    ):
        fitted.step()


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_a_smaller_batch_between_leaves_the_budget(dynamic: bool | None):
    compiled, plan = planned(lambda m: torch.compile(m, backend="aot_eager", dynamic=dynamic))
    with plan.applied(compiled.model), warnings.catch_warnings():
        warnings.simplefilter("error", recollect.PlanWarning)
        for size in (4, 3, 2, 4):
            compiled.batch = tokens(batch=size)
            assert compiled.peak() <= plan.budget < plan.plain_peak


def test_a_dimension_that_is_marked_as_dynamic():
    compiled = Compiled("decoder", lambda m: torch.compile(m, backend="aot_eager"))
    torch._dynamo.mark_dynamic(compiled.batch, 0)
    plan = recollect.plan(compiled.model, compiled.batch, 0.75, loss=compiled.loss)
    with plan.applied(compiled.model):
        for size in (4, 3):
            compiled.batch = tokens(batch=size)
            assert compiled.peak() <= plan.budget < plan.plain_peak
        compiled.batch = tokens(batch=6)
        with pytest.warns(recollect.PlanWarning, match="larger ones than it was split"):
            compiled.step()
