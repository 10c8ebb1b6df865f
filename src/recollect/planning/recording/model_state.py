"""Compares the state of a model: autocast, train or eval mode, parameters and buffers (P8)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.jit import ScriptModule

from recollect._torch.fsdp import shards_of
from recollect._torch.modules import BATCH_NORMS, COMPILED_CALL, is_compiled
from recollect._torch.tensors import local_tensors
from recollect.replay.function_call import casts
from recollect.report.units import argument_text, bytes_text


def check_model(model: Any) -> None:
    """Refuse anything but a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model should be an nn.Module, but got {argument_text(model)}. Pass the module to "
            "train, as the first argument"
        )
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        raise TypeError(
            f"model: a {type(model).__name__} has no forward. Pass the module that calls its parts"
        )


class _TensorSummary(NamedTuple):
    text: str  #: its shape and dtype
    nbytes: int
    is_trained: bool


@dataclass(frozen=True)
class ModelState:
    """The state of a model, without values."""

    autocast: tuple[tuple[str, str], ...]  #: device types with autocast, each with its dtype
    evaluating: tuple[str, ...]  #: the names of the modules in eval mode
    #: Parameters and buffers: the name and the fields of `_TensorSummary`.
    tensors: tuple[tuple[str, str, int, bool], ...]
    compiled: tuple[str, ...] = ()  #: the names of the modules that are compiled

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """The state of ``model`` now."""
        named = [(name, each, each.requires_grad) for name, each in named_parameters(model)]
        named += [(name, each, False) for name, each in model.named_buffers()]
        tensors = (
            (name, f"{list(each.shape)} {_short(each.dtype)}", _nbytes(each), is_trained)
            for name, each, is_trained in named
        )
        evaluating = (name for name, module in model.named_modules() if not module.training)
        compiled = (name for name, module in model.named_modules() if is_compiled(module))
        return cls(_autocast(), tuple(evaluating), tuple(tensors), tuple(compiled))

    @property
    def by_name(self) -> dict[str, _TensorSummary]:
        """Parameters and buffers by name."""
        return {entry[0]: _TensorSummary(*entry[1:]) for entry in self.tensors}


def _autocast() -> tuple[tuple[str, str], ...]:
    return tuple((device, _short(dtype)) for device, is_on, dtype in casts() or () if is_on)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


#: How many amounts of gradients are told apart.
_GRADIENT_CASES = 16

_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    nn.FeatureAlphaDropout,
)


def find_mode_layer(model: nn.Module) -> str | None:
    """The first layer that does more in train mode than in eval mode; None if none is known."""
    for name, module in model.named_modules():
        drops = getattr(module, "p" if isinstance(module, _DROPOUTS) else "dropout", 0)
        if (isinstance(drops, float) and drops > 0) or isinstance(module, BATCH_NORMS):
            return f"{name} ({type(module).__name__})" if name else type(module).__name__
    return None


def named_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of ``model``, sharded ones even where FSDP has gathered them just now."""
    shards = shards_of(model)
    sharded = {} if shards is None else shards.sharded()
    for name, parameter in model.named_parameters():
        yield name, sharded.get(id(parameter), parameter)


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    """`named_parameters` without names."""
    return [parameter for _, parameter in named_parameters(model)]


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    """All gradients, with those that FSDP has yet to reduce, in the parts that are here."""
    shards = shards_of(model)
    found = [grad for each in parameters_of(model) if (grad := _gradient(each)) is not None]
    found += [] if shards is None else shards.gradients()
    return [part for gradient in found for part in local_tensors(gradient)]


def facts_of(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """The contents of a `ModelState` as lists, and the parameters.

    Written for speed, since this runs at every call.
    """
    modules: list[Any] = [model]
    parameters: list[Any] = []
    training: list[bool] = []
    compiled: list[bool] = []
    for module in modules:  # the list grows in this loop
        if module is None:
            continue
        attributes = module.__dict__
        if "training" not in attributes or "_parameters" not in attributes:  # of TorchScript
            training.append(module.training)
            parameters += module.parameters(recurse=False)
            modules += module.children()
            continue
        training.append(attributes["training"])
        compiled.append(attributes.get(COMPILED_CALL) is not None)
        if own := attributes["_parameters"]:
            parameters += own.values()
        if children := attributes["_modules"]:
            modules += children.values()
    parameters = [each for each in parameters if each is not None]
    if (shards := shards_of(model)) is not None:  # as in `named_parameters`
        sharded = shards.sharded()
        parameters = [sharded.get(id(each), each) for each in parameters]
    requires = [each.requires_grad for each in parameters]
    dtypes = [each.dtype for each in parameters]
    return [casts(), training, requires, dtypes, compiled], parameters


def extra_gradient_bytes(model: nn.Module, parameters: list[Any], planned: int) -> int:
    """The bytes of gradients beyond the planned ones, rounded up: close numbers are one case."""
    gradients = {id(each): _gradient(each) for each in parameters}
    more = sum(_nbytes(grad) for grad in gradients.values() if grad is not None) - planned
    if (shards := shards_of(model)) is not None:
        more += sum(map(_nbytes, shards.gradients()))
    if more <= 0:
        return 0
    trained = {id(each): _nbytes(each) for each in parameters if each.requires_grad}
    unit = max(1, sum(trained.values()) // _GRADIENT_CASES)
    return -(-more // unit) * unit


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter. What `functional_call` puts in its place may be no leaf."""
    return parameter.grad if parameter.is_leaf else None


def _nbytes(tensor: torch.Tensor) -> int:
    """The bytes that this process has of ``tensor``."""
    if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(each.nbytes for each in local_tensors(tensor))


def first_difference(planned: ModelState, model: nn.Module) -> str | None:
    """The first difference of parameters and buffers from the planned model's; None if equal."""
    ours = ModelState.of(model).by_name
    for name, before in planned.by_name.items():
        if name not in ours:
            return f"it has no {name}, which was {before.text}"
        now = ours.pop(name)
        if now.text != before.text:
            return f"its {name} is {now.text}, and was {before.text}"
        if now.is_trained != before.is_trained:
            return f"its {name} requires_grad is {now.is_trained}, and was {before.is_trained}"
    return next((f"it has {n} ({t.text}), which was not there" for n, t in ours.items()), None)


def newly_compiled(planned: ModelState, model: nn.Module) -> str | None:
    """The modules that were compiled since a plan was made, in words."""
    names = [name for name in ModelState.of(model).compiled if name not in planned.compiled]
    return next(iter(_clause(names, "was", "were", "compiled after the plan was made")), None)


@dataclass(frozen=True)
class Differences:
    """How a step differs from the planned one."""

    texts: tuple[str, ...] = ()  #: the differences
    cures: tuple[str, ...] = ()  #: how to make a plan for such steps
    nbytes: int = 0  #: bytes that are allocated throughout because of them
    #: Those of them that an optimizer will have, if it is like most.
    for_optimizer: int = 0
    #: Those that it has yet to make, in its next step.
    yet_to_come: int = field(default=0, compare=False)


def compare_state(planned: ModelState, model: nn.Module) -> Differences | None:
    """How the state of ``model`` differs from the planned one; None if it does not."""
    texts: list[str] = []
    cures: list[str] = []
    now = ModelState.of(model)
    if now.autocast != planned.autocast:
        texts.append(
            f"autocast is {_in_words(now.autocast)}, and was {_in_words(planned.autocast)}"
        )
        cures.append(_autocast_cure(now.autocast))
    for mode, here, there in (
        ("train", planned.evaluating, now.evaluating),
        ("eval", now.evaluating, planned.evaluating),
    ):
        others = [name for name in here if name not in set(there)]
        if others:
            was = "were" if len(others) > 1 else "was"
            texts += _clause(others, "is", "are", f"in {mode} mode, and {was} not")
            cures.append(f"model.{mode}(), then recollect.plan(...)")
    nbytes = for_optimizer = 0
    if now.tensors != planned.tensors:
        tensor_texts, nbytes, for_optimizer = _compare_tensors(planned.by_name, now.by_name)
        texts += tensor_texts
        if tensor_texts:
            cures.append("recollect.plan(...) once the model is as it is trained")
    if not texts:
        return None
    return Differences(tuple(texts), tuple(cures), nbytes + for_optimizer, for_optimizer)


def with_state(found: Differences | None, grown: int, unit: int) -> Differences | None:
    """``found`` with ``grown`` bytes of optimizer state added since the plan was made.

    What is beyond those that were expected is rounded up to an eighth or to ``unit``: close numbers
    are one case. A few bytes, such as counts of steps, are none.
    """
    guessed = 0 if found is None else found.for_optimizer
    more = grown - guessed
    if more <= unit // 32:
        return found and replace(found, yet_to_come=max(0, -more))
    found = found or Differences()
    unit = max(1, unit, 1 << max(0, more.bit_length() - 4))
    more = -(-more // unit) * unit
    text = f"optimizers have {bytes_text(guessed + more)} more of state"
    cure = "recollect.plan(...) once all parameters have been updated"
    return replace(
        found,
        texts=(*found.texts, text),
        cures=(*found.cures, cure),
        nbytes=found.nbytes + more,
        for_optimizer=guessed + more,
    )


def scripted_parts(model: nn.Module) -> str | None:
    """The parts of ``model`` that are TorchScript, in words."""
    parts = [name for name, each in model.named_modules() if isinstance(each, ScriptModule)]
    return next(iter(_clause(parts, "is", "are", "TorchScript")), None)


def _in_words(autocast: tuple[tuple[str, str], ...]) -> str:
    on = " and ".join(f"{dtype} on {device}" for device, dtype in autocast)
    return f"on ({on})" if on else "off"


def _autocast_cure(autocast: tuple[tuple[str, str], ...]) -> str:
    if not autocast:
        return "recollect.plan(...) without autocast"
    contexts = ", ".join(f"torch.autocast({device!r}, torch.{dtype})" for device, dtype in autocast)
    return f"with {contexts}: recollect.plan(...)"


def _compare_tensors(
    before: dict[str, _TensorSummary], now: dict[str, _TensorSummary]
) -> tuple[list[str], int, int]:
    """The differences of parameters and buffers, the bytes that are added, and those of states."""
    both = [name for name in now if name in before]
    newly_trained = [n for n in both if now[n].is_trained and not before[n].is_trained]
    newly_frozen = [n for n in both if before[n].is_trained and not now[n].is_trained]
    added = [name for name in now if name not in before]
    removed = [name for name in before if name not in now]
    texts = [
        *_clause(newly_trained, "requires", "require", "a gradient now, and required none"),
        *_clause(newly_frozen, "requires", "require", "no gradient now, and required one"),
    ]
    others = [name for name in both if before[name].text != now[name].text]
    if others:
        name = others[0]
        also = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        texts.append(f"its {name} is {now[name].text}, and was {before[name].text}{also}")
    texts += _clause(added, "was", "were", "not there")
    texts += _clause(removed, "is", "are", "not there any more")
    growth = sum(t.nbytes for t in now.values()) - sum(t.nbytes for t in before.values())
    # Gradients are counted in backward. Most optimizers have two values for each parameter.
    trained = [*newly_trained, *(name for name in added if now[name].is_trained)]
    return texts, max(0, growth), 2 * sum(now[name].nbytes for name in trained)


def _clause(names: list[str], verb: str, plural: str, rest: str) -> list[str]:
    """A clause about parameters or modules, if there are any."""
    if not names:
        return []
    first = f"its {names[0]}" if names[0] else "the model"
    more = len(names) - 1
    return [f"{first} and {more} more {plural} {rest}" if more else f"{first} {verb} {rest}"]
