"""A byte budget for the ``Trainer`` of transformers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "recollect.integrations.transformers needs transformers and accelerate: "
        "pip install 'recollect[transformers]'"
    ) from error

from recollect.compiled.applied import Installed
from recollect.compiled.lazy import LazyFit
from recollect.modules import OPTIONS, unwrap_module
from recollect.planning.api import fit
from recollect.planning.budget import check_budget
from recollect.planning.loop.runner import Runner
from recollect.planning.prepare import Offload, check_offload, is_gradient_checkpointing
from recollect.planning.progress import Progress

__all__ = ["FitCallback"]

_log = logging.getLogger("recollect")
#: What marks a model that has a plan, or will have one.
_RUNNERS = (Runner, Installed)


@dataclass
class _Fitted:
    """What a callback has done to a model, until training ends."""

    by: FitCallback
    state: Any  #: a weak reference to the state of the training
    #: Whether the model had gradient checkpointing before, and with which keywords.
    was_checkpointing: bool
    keywords: dict[str, Any] | None
    runs_by: Any = None  #: what runs its forward


#: By model. After an error or Ctrl-C a trainer does not call ``on_train_end``.
_fitted: WeakKeyDictionary[nn.Module, _Fitted] = WeakKeyDictionary()


class FitCallback(TrainerCallback):
    """Keeps the training steps of a ``Trainer`` within a memory budget.

    The plan is made from the trainer's own first step; see `recollect.fit`. Gradient checkpointing
    of the model is switched off while it trains: the plan takes its place.

    Both are undone when training ends. A training that ends by an error, or by Ctrl-C, does not
    tell its callbacks: the model keeps its plan until the next training with a `FitCallback`. To
    use it otherwise, call ``recollect.unwrap(model)``.

    Args:
        budget: As in `recollect.fit`: ``"22GiB"``, or ``"auto"`` for the memory of the device.
        offload: As in `recollect.fit`.
        progress: As in `recollect.fit`: True shows what is being done.

    Example::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[FitCallback("22GiB")])
        trainer.train()
    """

    def __init__(
        self,
        budget: float | str = "auto",
        *,
        offload: Offload = "auto",
        progress: bool | Progress | None = None,
    ) -> None:
        check_budget(budget)
        check_offload(offload)
        self._budget = budget
        self._options: dict[str, Any] = {"offload": offload, "progress": progress}

    def __repr__(self) -> str:
        return f"FitCallback({self._budget!r})"

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        assert model is not None
        earlier = _fitted.get(model)
        _undo(model)  # of an earlier training that was interrupted, unless it is this one
        if earlier is not None and earlier.state() is state:
            raise ValueError(
                f"callbacks: {earlier.by} and {self} are both for this {type(model).__name__}, "
                "which can have one budget only. Leave one of them out"
            )
        if isinstance(vars(model).get(OPTIONS), _RUNNERS):
            raise ValueError(
                f"model: this {type(model).__name__} was fitted before, by recollect.fit(...) or "
                f"plan.apply(...), and {self} would replace that. Leave the callback out, or "
                "recollect.unwrap(model) before trainer.train()"
            )
        is_on = is_gradient_checkpointing(model)
        keywords = _checkpointing_keywords(model) if is_on else None
        _fitted[model] = fitted = _Fitted(self, ref(state), is_on, keywords)
        try:
            if is_on:
                _log.info("gradient checkpointing is off while the model trains under a budget")
                _switch(model, "gradient_checkpointing_disable")
            fit(model, budget=self._budget, **self._options)
        except BaseException:
            _undo(model)
            raise
        fitted.runs_by = vars(model)[OPTIONS]

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        assert model is not None
        _undo(model)


def _undo(model: nn.Module) -> None:
    """Have a model be as it was before a callback fitted it, if one did."""
    fitted = _fitted.pop(model, None)
    if fitted is None:
        return
    now = vars(model).get(OPTIONS)
    # A model that is found to be compiled is handed over to the planner of those.
    if now is not None and (now is fitted.runs_by or isinstance(now, LazyFit)):
        unwrap_module(model)
    if fitted.was_checkpointing:
        _switch(model, "gradient_checkpointing_enable", fitted.keywords)


def _switch(model: Any, name: str, *args: Any) -> None:
    """Call the method of this name, or the one that newer versions have in its place."""
    newer = name.replace("gradient_", "activation_")
    getattr(model, newer if hasattr(type(model), newer) else name)(*args)


def _checkpointing_keywords(model: nn.Module) -> dict[str, Any] | None:
    """What gradient checkpointing was enabled with, if known: layers hold it in a function."""
    held = (getattr(each, "_gradient_checkpointing_func", None) for each in model.modules())
    return next((dict(each.keywords) for each in held if isinstance(each, partial)), None)
