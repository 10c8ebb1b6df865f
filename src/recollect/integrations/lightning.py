"""A byte budget for the ``Trainer`` of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

try:
    from lightning.pytorch import Callback, LightningModule
except ImportError as error:
    raise ImportError(
        "recollect.integrations.lightning needs lightning: pip install 'recollect[lightning]'"
    ) from error

from recollect._torch.inductor import compile_in_place, method_settings
from recollect.modules import OPTIONS, bound_to, copy_signature, unwrap_module
from recollect.planning.api import fit, lazy_runner
from recollect.planning.budget import check_budget
from recollect.planning.prepare import Offload, check_offload
from recollect.planning.progress import Progress
from recollect.report.units import argument_text

__all__ = ["Fit"]

_STEP = "training_step"


class Fit(Callback):
    """Keeps the training steps of a Lightning ``Trainer`` within a memory budget.

    The plan is made from the trainer's own first step; see `recollect.fit`. With automatic
    optimization all of ``training_step`` is planned, the loss too. With manual optimization, where
    it runs backward itself, say which module it calls.

    Args:
        budget: As in `recollect.fit`: ``"22GiB"``, or ``"auto"`` for the memory of the device.
        module: The name of the module to plan, such as ``"model"``, in place of ``training_step``.
        offload: As in `recollect.fit`.
        progress: As in `recollect.fit`: True shows what is being done.

    Example::

        trainer = Trainer(callbacks=[Fit("22GiB")])
        trainer.fit(module, loader)
    """

    def __init__(
        self,
        budget: float | str = "auto",
        *,
        module: str | None = None,
        offload: Offload = "auto",
        progress: bool | Progress | None = None,
    ) -> None:
        check_budget(budget)
        check_offload(offload)
        if module is not None and not isinstance(module, str):
            raise TypeError(
                "module should be the name of a module of the LightningModule, such as 'model', "
                f"but got {argument_text(module)}"
            )
        self._budget = budget
        self._module = module
        self._options: dict[str, Any] = {"offload": offload, "progress": progress}
        #: While a model is planned: ends that.
        self._undo: Callable[[], None] | None = None

    def __repr__(self) -> str:
        module = "" if self._module is None else f", module={self._module!r}"
        return f"Fit({self._budget!r}{module})"

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        for other in trainer.callbacks:
            if isinstance(other, Fit) and other is not self and self._overlaps(other):
                raise ValueError(
                    f"callbacks: {self} and {other} are both for the same modules, which can have "
                    "one budget only. Leave one of them out, or have each name another module: "
                    "Fit(budget, module=...)"
                )
        if self._module is not None:
            found = self._found(pl_module)
            fit(found, budget=self._budget, **self._options)
            self._undo = partial(_unwrap, found)
        elif pl_module.automatic_optimization:
            self._undo = self._fit_step(pl_module)
        else:
            raise ValueError(
                f"Fit: {type(pl_module).__name__} has manual optimization, and training_step runs "
                "backward itself. Name the module to plan: "
                f"Fit(budget, module=...), one of {_names_in(pl_module)}"
            )

    def _fit_step(self, pl_module: LightningModule) -> Callable[[], None]:
        """Have ``training_step`` run under a plan. Returns what ends that."""
        own, step = vars(pl_module).get(_STEP), pl_module.training_step
        planned: Callable[..., Any]
        if method_settings(own) is not None:  # the trainer was given torch.compile(module)
            method = _CompiledMethod(pl_module, step)
            fit(method, budget=self._budget, **self._options)
            planned, end = _called(method), partial(_unwrap, method)
        else:
            runner = lazy_runner(pl_module, self._budget, **self._options)
            planned = _planned(runner, bound_to(pl_module, step))
            end = partial(runner.unwrapped, pl_module)
        pl_module.training_step = copy_signature(step, planned)

        def undo() -> None:
            vars(pl_module).pop(_STEP, None)
            if own is not None:
                vars(pl_module)[_STEP] = own
            end()

        return undo

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def on_exception(
        self, trainer: Any, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.on_train_end(trainer, pl_module)

    def _overlaps(self, other: Fit) -> bool:
        """Whether a module is planned by both."""
        if self._module is None or other._module is None:
            return True
        one, two = sorted((self._module, other._module))
        return f"{two}.".startswith(f"{one}.")

    def _found(self, pl_module: LightningModule) -> nn.Module:
        assert self._module is not None
        try:
            found: nn.Module = pl_module.get_submodule(self._module)
        except AttributeError:
            raise ValueError(
                f"Fit: module={self._module!r} is none of the modules of "
                f"{type(pl_module).__name__}: {_names_in(pl_module)}"
            ) from None
        return found


def _names_in(module: nn.Module) -> str:
    return ", ".join(repr(name) for name, _ in module.named_children())


def _unwrap(module: nn.Module) -> None:
    if OPTIONS in vars(module):  # else somebody has unwrapped it
        unwrap_module(module)


class _CompiledMethod(nn.Module):
    """A compiled method of a module, as a module that is compiled: it can be planned for."""

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.train(module.training)
        found = method_settings(method)
        assert found is not None
        self._method, *settings = found
        compile_in_place(self, *settings)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return self._method(*args, **kwargs)


def _called(method: _CompiledMethod) -> Callable[..., Any]:
    def training_step(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return training_step


def _planned(runner: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    def training_step(*args: Any, **kwargs: Any) -> Any:
        return runner(step, args, kwargs)

    return training_step
