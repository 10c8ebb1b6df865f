"""Plans for compiled models: applied, removed, saved, shown, refused."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import recollect
from tests._support import assert_identical
from tests.compiled._steps import Compiled, as_it_is
from tests.planning._models import made


@pytest.fixture
def compiled() -> Compiled:
    return Compiled("decoder_dropout", as_it_is)


def test_a_plan_has_all_that_other_plans_have(compiled: Compiled, tmp_path: Path):
    expected = compiled.outcome()
    plan = recollect.plan(compiled.model, compiled.batch, 0.7, loss=compiled.loss)
    assert "Plan for compiled Decoder on cpu" in str(plan)
    assert plan.gap >= 0
    assert plan.plain_peak == compiled.peak()
    assert {row.fate for row in plan.explain()} == {"kept", "recomputed"}
    assert {row.path for row in plan.explain()} >= {"layers.0.qkv", "layers.1.qkv"}
    plan.to_html(tmp_path / "plan.html")
    plan.save(tmp_path / "plan.json")
    loaded = recollect.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    loaded.apply(compiled.model)
    assert_identical(compiled.outcome(), expected)
    assert compiled.peak() <= plan.budget
    with pytest.raises(ValueError, match="a plan is applied to this"):
        plan.apply(compiled.model)
    recollect.unwrap(compiled.model)
    assert compiled.peak() == plan.plain_peak
    with pytest.raises(ValueError, match="no plan is applied"):
        plan.remove(compiled.model)


def test_fit_plans_and_applies(compiled: Compiled):
    before = compiled.peak()
    assert recollect.fit(compiled.model, compiled.batch, 0.6, loss=compiled.loss) is compiled.model
    assert compiled.peak() <= 0.6 * before
    with pytest.raises(ValueError, match="is checkpointed or has a plan already"):
        recollect.plan(compiled.model, compiled.batch, 0.6, loss=compiled.loss)


def test_a_model_that_is_compiled_in_place():
    def in_place(model: nn.Module) -> nn.Module:
        model.compile(backend="aot_eager", fullgraph=True)
        return model

    compiled = Compiled("decoder", in_place)
    expected = compiled.outcome()
    plan = recollect.plan(compiled.model, compiled.batch, 0.7, loss=compiled.loss)
    with plan.applied(compiled.model):
        assert_identical(compiled.outcome(), expected)
        assert compiled.peak() <= plan.budget


def test_what_cannot_be_planned_is_refused(compiled: Compiled):
    eager = torch.compile(compiled.bare, backend="eager")
    with pytest.raises(ValueError, match="compiled with backend='eager'"):
        recollect.plan(eager, compiled.batch, 0.7)


def test_a_model_that_the_compiler_leaves_as_it_is_is_refused():
    moe = made("moe")  # its graph breaks in a loop
    with pytest.raises(ValueError, match="this MoE is compiled, but no compiled graph"):
        recollect.plan(as_it_is(moe.model), moe.batch, 0.7, loss=moe.loss)


def test_a_plan_is_for_the_model_as_it_was_compiled(compiled: Compiled):
    plan = recollect.plan(compiled.model, compiled.batch, 0.7, loss=compiled.loss)
    with pytest.raises(ValueError, match="it is not compiled"):
        plan.apply(compiled.bare)
    with pytest.raises(ValueError, match="this plan is for backend='aot_eager'"):
        plan.apply(torch.compile(compiled.bare))
    eager = recollect.plan(compiled.bare, compiled.batch, 0.7, loss=compiled.loss)
    with pytest.raises(ValueError, match="this plan was made for a model that is not"):
        eager.apply(compiled.model)


def test_a_torch_that_is_not_known_is_told(compiled: Compiled, monkeypatch: pytest.MonkeyPatch):
    import torch._inductor.custom_graph_pass as changed

    monkeypatch.delattr(changed, "CustomPartitionerFn")
    with pytest.raises(recollect.CheckpointError, match="do not know torch"):
        recollect.plan(compiled.model, compiled.batch, 0.7)
    eager = recollect.plan(compiled.bare, compiled.batch, 0.7, loss=compiled.loss)
    assert eager.predicted_peak <= eager.budget


def test_nothing_is_compiled_again_after_the_plan(compiled: Compiled):
    plan = recollect.plan(compiled.model, compiled.batch, 0.7, loss=compiled.loss)
    plan.apply(compiled.model)
    with torch._dynamo.config.patch(error_on_recompile=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled.step(1)
        compiled.step(2)
