"""A byte budget for the ``Trainer`` of transformers."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from torch import nn

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "recollect.integrations.transformers needs transformers and accelerate: "
        "pip install 'recollect[transformers]'"
    ) from error

from recollect.compiled.lazy import LazyFit
from recollect.modules import OPTIONS, unwrap_module
from recollect.planning.api import fit
from recollect.planning.budget import check_budget
from recollect.planning.loop.runner import Runner
from recollect.planning.prepare import Offload, check_offload, is_gradient_checkpointing
from recollect.planning.progress import Progress

__all__ = ["FitCallback"]

_log = logging.getLogger("recollect")


class FitCallback(TrainerCallback):
    """Keeps the training steps of a ``Trainer`` within a memory budget.

    The plan is made from the trainer's own first step; see `recollect.fit`. Gradient checkpointing
    of the model is switched off while it trains: the plan takes its place.

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
        #: Whether the model had gradient checkpointing before, and with which keywords.
        self._was_checkpointing = False
        self._keywords: dict[str, Any] | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        assert model is not None
        if isinstance(vars(model).get(OPTIONS), (Runner, LazyFit)):
            unwrap_module(model)  # an earlier training that was interrupted
        if is_gradient_checkpointing(model):
            _log.info("gradient checkpointing is off while the model trains under a budget")
            self._was_checkpointing, self._keywords = True, _checkpointing_keywords(model)
            _switch(model, "gradient_checkpointing_disable")
        fit(model, budget=self._budget, **self._options)

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        assert model is not None
        unwrap_module(model)
        if self._was_checkpointing:
            _switch(model, "gradient_checkpointing_enable", self._keywords)
            self._was_checkpointing = False


def _switch(model: Any, name: str, *args: Any) -> None:
    """Call the method of this name, or the one that newer versions have in its place."""
    newer = name.replace("gradient_", "activation_")
    getattr(model, newer if hasattr(type(model), newer) else name)(*args)


def _checkpointing_keywords(model: nn.Module) -> dict[str, Any] | None:
    """What gradient checkpointing was enabled with, if known: layers hold it in a function."""
    held = (getattr(each, "_gradient_checkpointing_func", None) for each in model.modules())
    return next((dict(each.keywords) for each in held if isinstance(each, partial)), None)
