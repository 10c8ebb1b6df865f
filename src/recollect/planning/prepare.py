"""Checks what `recollect.plan` is given, and makes the training step of it (P1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from recollect._torch.devices import profiler_is_on
from recollect.checks.place import warn_user
from recollect.errors import PlanWarning
from recollect.graph.graph import Link
from recollect.modules import OPTIONS
from recollect.planning.distributed import check_not_distributed
from recollect.planning.recording.batch import check_batch, cut_off, signature_of_batch, split_batch
from recollect.planning.recording.model_state import ModelState, check_model, find_mode_layer
from recollect.planning.recording.sampling import measured_link
from recollect.planning.recording.step import Loss, TrainingStep

Offload = bool | Literal["auto"]


@dataclass(frozen=True)
class Request:
    """What `recollect.plan` is given, but for the budget. See there."""

    model: nn.Module
    batch: Any
    loss: Loss | None = None
    optimizer: Optimizer | None = None
    offload: Offload = "auto"
    holds_output: bool = True


class Prepared(NamedTuple):
    """A step that can be recorded, with the state of its model and the signature of its batch."""

    step: TrainingStep
    link: Link | None  #: if results may be offloaded
    state: ModelState
    signature: tuple[Any, ...]


def prepare(request: Request) -> Prepared:
    """The step of a request, checked, and what is known before it is recorded."""
    step = prepare_step(request)
    link = link_for(step, request.offload)
    if step.on_cuda:
        # cuBLAS keeps a workspace for every stream. Those of streams that the step does not use
        # would count in the peak of every plan.
        step.free_memory()
    state = ModelState.of(request.model)
    return Prepared(step, link, state, signature_of_batch(step.args, step.kwargs))


def prepare_step(request: Request) -> TrainingStep:
    """The step of a request, checked."""
    model, batch, holds_output = request.model, request.batch, request.holds_output
    check_offload(request.offload)
    if holds_output not in (True, False):
        raise ValueError(f"holds_output should be True or False, but is {holds_output!r}")
    check_unplanned(model)
    check_batch(batch, model)
    args, kwargs = cut_off(*split_batch(batch, model))
    check_model(model)
    _check_trained(model)
    step = TrainingStep(
        *(model, args, kwargs, request.loss, request.optimizer),
        holds_output=holds_output,
        batch=batch,
    )
    step.check_call()
    if profiler_is_on():
        raise RuntimeError(
            "a torch profiler is running, and planning needs the profiler to measure memory: make "
            "the plan before yours starts, or after it has ended"
        )
    _warn_of_eval(model)
    return step


def _check_trained(model: nn.Module) -> None:
    """Refuse a model without a trained parameter.

    A step of a loop that was traced needs no such check: it had a backward, and the loop may have
    frozen the parameters since, as those do that train two networks in turn.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"model: no parameter of this {type(model).__name__} requires a gradient, so there "
            "is no backward to plan for. Set requires_grad_(True) on what is to be trained"
        )


def link_for(step: TrainingStep, offload: Offload) -> Link | None:
    """The link to the host, if results may be offloaded."""
    if offload is True:
        check_can_offload(step.device, is_shared=step.is_shared)
    return measured_link(step.device) if offload and not step.is_shared else None


def check_can_offload(device: torch.device, *, is_shared: bool) -> None:
    """Refuse ``offload=True`` where plans do not offload. ``is_shared``: as a `TrainingStep`."""
    if is_shared:
        raise ValueError(
            "offload=True: plans for a model that is sharded by fully_shard, or has DTensor "
            "parameters, do not offload. Leave it out"
        )
    if device.type != "cuda":
        raise ValueError(
            f"offload=True needs a CUDA device to offload from, but the model is on {device}. "
            "Leave it out"
        )


def _warn_of_eval(model: nn.Module) -> None:
    """Warn if the model is in eval mode, and does more in train mode."""
    layer = None if model.training else find_mode_layer(model)
    if layer is not None:
        warn_user(
            f"this {type(model).__name__} is in eval mode, so the plan is for a step in eval mode. "
            f"In train mode its {layer} does more, and the step takes more memory. To train in "
            "train mode, call model.train() and then recollect.plan(...)",
            PlanWarning,
        )


def check_offload(offload: Any) -> None:
    """Refuse what does not say whether to offload."""
    if offload not in (True, False, "auto"):
        raise ValueError(f"offload should be True, False or 'auto', but is {offload!r}")


def is_gradient_checkpointing(model: Any) -> bool:
    """Whether the checkpointing of a transformers model is on. Newer versions rename it."""
    if hasattr(type(model), "is_activation_checkpointing"):
        return bool(model.is_activation_checkpointing)
    return bool(getattr(model, "is_gradient_checkpointing", False))


def check_unplanned(model: Any, *, runs_steps: bool = True) -> None:
    """Refuse a model with checkpointed parts: they would hide what there is to plan.

    ``runs_steps``: whether planning runs steps of its own.
    """
    if not isinstance(model, nn.Module):
        return  # `TrainingStep` refuses it
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "model: it is compiled by TorchScript, which hides its operations. Plan for the module "
            "that it was made from"
        )
    _check_parameters(model, runs_steps=runs_steps)
    check_not_distributed(model, runs_steps=runs_steps)
    if is_gradient_checkpointing(model):
        raise ValueError(
            f"model: gradient checkpointing is on in this {type(model).__name__}, and a plan takes "
            "its place. Switch it off: model.gradient_checkpointing_disable()"
        )
    for name, module in model.named_modules():
        if vars(module).get(OPTIONS) is not None:
            what, which = (f"its {name}", _in_python(name)) if name else ("it", "model")
            raise ValueError(
                f"model: {what} is checkpointed or has a plan already, which a new plan would "
                f"replace. Undo that first: recollect.unwrap({which})"
            )


def _check_parameters(model: nn.Module, *, runs_steps: bool) -> None:
    """Refuse a model whose parameters cannot be trained."""
    parameters = [*model.parameters()]
    if any(map(is_lazy, parameters)):
        raise ValueError(
            f"model: this {type(model).__name__} has lazy parameters without a shape. Call it once "
            "with a batch under torch.no_grad(), then plan"
        )
    if not parameters and not runs_steps:  # else `TrainingStep` refuses it
        raise ValueError(
            f"model: this {type(model).__name__} has no parameters, so there is nothing to train"
        )
    trained = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
    inference = (name for name, each in trained if each.is_inference())
    if (name := next(inference, None)) is not None:
        raise ValueError(
            f"model: {name} was made under torch.inference_mode, and torch does not train such a "
            "parameter. Make the model outside of it"
        )


def _in_python(path: str) -> str:
    """The expression for the part of a model with this name."""
    parts = path.split(".")
    return (
        f"model.{path}" if all(map(str.isidentifier, parts)) else f'model.get_submodule("{path}")'
    )
