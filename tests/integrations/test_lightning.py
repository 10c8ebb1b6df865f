"""Lightning's ``Trainer`` under a budget: bitwise the plain run, planned from its own steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from recollect.compiled.registered import backend
from recollect.modules import OPTIONS
from tests._support import assert_identical

lightning = pytest.importorskip("lightning.pytorch")
Fit = pytest.importorskip("recollect.integrations.lightning").Fit

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(5)
        ]
        self.model = nn.Sequential(*blocks, nn.Dropout(0.1))
        self.steps = 0

    def training_step(self, batch: Any, number: int) -> Tensor:
        x, y = batch
        self.steps += 1
        loss = F.mse_loss(self.model(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:  # type: ignore[override]
        x, y = batch
        self.steps += 1
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self.model(x), y))
        optimizer.step()


class Watch(lightning.Callback):
    def __init__(self, find: Any) -> None:
        self.find = find
        self.plan: recollect.Plan | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.plan = self.find(pl_module)


def _step_of(module: Any) -> Any:
    """What runs ``training_step`` under a plan."""
    return module.training_step.__closure__[0].cell_contents


def loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(2, 256, 32, generator=generator) for _ in range(6)]
    return torch.utils.data.DataLoader([(x, y) for x, y in rows], batch_size=None)


def trained(make: Any, callbacks: list[Any], **options: Any) -> Any:
    lightning.seed_everything(0, verbose=False)
    module = make()
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(module, loader())
    return module


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}]
)
def test_all_of_the_training_step_is_planned(options: Any) -> None:
    plain = trained(Module, [], **options)
    watch = Watch(lambda module: _step_of(module).plan)
    module = trained(Module, [Fit(0.8), watch], **options)
    assert_identical(dict(module.state_dict()), dict(plain.state_dict()))
    assert module.steps == 6
    assert watch.plan is not None
    assert watch.plan.predicted_peak <= watch.plan.budget
    weights = sum(parameter.nbytes for parameter in module.parameters())
    assert watch.plan.base > 3 * weights  # with the state of the optimizer
    assert "training_step" not in vars(module)


class Unlogged(Module):
    """The compiler cannot take in what Lightning logs."""

    def training_step(self, batch: Any, number: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.model(x), y)


def test_a_compiled_module_is_planned() -> None:
    def make() -> Any:
        module = Unlogged()
        made.append(module)
        return torch.compile(module, backend=backend)

    made: list[Any] = []
    trained(make, [], max_epochs=2)
    watch = Watch(lambda module: vars(_step_of(module))[OPTIONS].plan)
    fit = Fit(0.8)
    trained(make, [fit, watch], max_epochs=2)
    plain, module = made
    assert_identical(dict(module.state_dict()), dict(plain.state_dict()))
    assert watch.plan is not None
    assert watch.plan.compiled is not None
    assert watch.plan.measured_peak is not None
    assert watch.plan.measured_peak <= watch.plan.budget < watch.plan.plain_peak


def test_manual_optimization_names_a_module() -> None:
    plain = trained(Manual, [])
    watch = Watch(lambda module: vars(module.model)[OPTIONS].plan)
    module = trained(Manual, [Fit(0.8, module="model"), watch])
    assert_identical(dict(module.state_dict()), dict(plain.state_dict()))
    assert watch.plan is not None
    assert OPTIONS not in vars(module.model)


def test_what_cannot_be_planned_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"manual optimization.*Fit\(budget, module=\.\.\.\), one of 'model'"
    ):
        trained(Manual, [Fit(0.8)])
    with pytest.raises(
        TypeError, match=r"the name of a module .*, such as 'model', but got Linear"
    ):
        Fit(0.8, module=nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="module='net' is none of the modules of Module: 'model'"):
        trained(Module, [Fit(0.8, module="net")])
    with pytest.raises(ValueError, match="budget should be more than 0"):
        Fit(0)
    with pytest.raises(ValueError, match="offload should be True, False or 'auto'"):
        Fit(0.7, offload="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ofload"):
        Fit(0.7, ofload=False)  # type: ignore[call-arg]


@pytest.mark.parametrize("modules", [(None, None), (None, "model"), ("model", "model.0")])
def test_two_budgets_for_one_module_are_refused(modules: Any) -> None:
    fits = [Fit(part, module=each) for part, each in zip((0.7, 0.8), modules, strict=True)]
    for callbacks in (fits, fits[::-1]):
        with pytest.raises(ValueError, match=r"Fit\(0\.[78].*\) and Fit\(0\.[78].* are both for"):
            trained(Module, callbacks)


def test_each_of_two_modules_has_a_budget() -> None:
    plain = trained(Module, [])
    module = trained(Module, [Fit(0.8, module="model.0"), Fit(0.7, module="model.1")])
    assert_identical(dict(module.state_dict()), dict(plain.state_dict()))
    assert all(OPTIONS not in vars(each) for each in module.modules())


class Unwrap(lightning.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if OPTIONS in vars(pl_module.model):
            recollect.unwrap(pl_module.model)


def test_a_module_that_was_unwrapped_meanwhile() -> None:
    module = trained(Module, [Fit(0.8, module="model"), Unwrap()])
    assert OPTIONS not in vars(module.model)


class Broken(Module):
    def setup(self, stage: str) -> None:
        raise KeyError("of the user")


@pytest.mark.parametrize("options", [{}, {"module": "model"}])
def test_an_error_before_training_begins_is_not_hidden(options: Any) -> None:
    with pytest.raises(KeyError, match="of the user"):
        trained(Broken, [Fit(0.8, **options)])


class WithOwnStep(Module):
    def __init__(self) -> None:
        super().__init__()
        self.training_step = self.other_step

    def other_step(self, batch: Any, number: int) -> Any:
        return 2 * Module.training_step(self, batch, number)


def test_a_training_step_of_the_object_itself_stays() -> None:
    plain, module = trained(WithOwnStep, []), trained(WithOwnStep, [Fit(0.8)])
    assert_identical(dict(module.state_dict()), dict(plain.state_dict()))
    assert module.training_step == module.other_step


class WithFunction(Module):
    def __init__(self) -> None:
        super().__init__()
        self.training_step = lambda batch, batch_idx: Module.training_step(self, batch, batch_idx)


def test_a_training_step_that_is_no_method() -> None:
    plain, module = trained(WithFunction, []), trained(WithFunction, [Fit(0.8)])
    assert_identical(dict(module.state_dict()), dict(plain.state_dict()))
