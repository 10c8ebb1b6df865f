"""Refuses a loss or an optimizer that a step cannot use, and says how to pass one that it can."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from recollect.report.units import argument_text


def refusal_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why ``function`` does not take such arguments; None if it does, or if that is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it has no signature
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def takes_batch(loss: Any, batch: Any) -> bool:
    """Whether a loss is ``loss(output, batch)``, and not ``loss(output)``: by its parameters."""
    forms = "loss=lambda output: ... or loss=lambda output, batch: ..."
    if not callable(loss):
        raise TypeError(
            f"loss should be a function of the model's output, or of that and the batch, {forms}, "
            f"but got {argument_text(loss)}"
        )
    name = getattr(loss, "__name__", type(loss).__name__)
    function = loss.forward if isinstance(loss, nn.Module) else loss
    if refusal_of(function, (None,), {}) is None:
        return False
    refusal = refusal_of(function, (None, None), {})
    if refusal is not None:
        raise TypeError(
            f"loss is called with the output of the model, or with that and the batch, and {name} "
            f"takes neither ({refusal}): {forms}"
        )
    if not isinstance(batch, Tensor) and str(getattr(loss, "__module__", "")).startswith(
        "torch.nn."
    ):
        raise TypeError(
            f"loss: {name} has two parameters, so it would be called with the output of the model "
            f"and the batch, which is a {type(batch).__name__} and not the target. Say which part "
            f"is: loss=lambda output, batch: {name}(output, ...), or have it know the target: "
            "loss=lambda output: criterion(output, target)"
        )
    return True


def check_loss(loss: Any, model: nn.Module) -> None:
    """Refuse a loss that backward cannot start from."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(
            f"loss should give one number to call backward on, but gave {what}. {_loss_fix(loss)}"
        )
    if not loss.requires_grad:
        raise ValueError(
            f"loss: the loss of this {type(model).__name__} depends on nothing that requires a "
            "gradient, so there is no backward to plan for. Does forward or the loss function run "
            "under torch.no_grad, or detach its result?"
        )


def _loss_fix(loss: Any) -> str:
    """How to make a loss of what a loss function has returned."""
    if loss is None:
        return "Does the loss function end without a return? Return the loss"
    if isinstance(loss, (int, float)):
        return "Return the tensor: leave out .item() or float()"
    return "Reduce it: loss=lambda output: ....mean()"


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuse what is no optimizer, needs a closure, or trains another model."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer should be a torch.optim.Optimizer, but got {argument_text(optimizer)}. "
            "Pass the one of the loop, such as torch.optim.AdamW(model.parameters())"
        )
    # The method of its class: schedulers replace it by one that says that it takes `self`.
    refusal = refusal_of(type(optimizer).step, (optimizer,), {})
    if refusal is not None:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} needs a closure ({refusal}), and calls the "
            "model an unknown number of times: that is not one step. Leave it out, "
            "recollect.plan(model, batch, budget): its state is then not counted"
        )
    steps = {id(each) for group in optimizer.param_groups for each in group["params"]}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if trained and not any(id(parameter) in steps for parameter in trained):
        raise ValueError(
            f"optimizer: this {type(optimizer).__name__} has none of the parameters of this "
            f"{type(model).__name__} that are trained. Was it made for another model, or before "
            "the parameters were replaced? Make it from this one: "
            f"{type(optimizer).__name__}(model.parameters(), ...)"
        )
