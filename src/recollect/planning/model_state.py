"""What a step depends on beside its batch: autocast, train or eval mode, parameters and buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recollect.replay.call_mode import DEVICES, casts

__all__ = ["Differences", "ModelState", "differences", "facts_of", "has_modes", "other_model"]


@dataclass(frozen=True)
class ModelState:
    """The state of a model, without values."""

    #: Types of devices for which it is on, each with its dtype.
    autocast: tuple[tuple[str, str], ...]
    evaluating: tuple[str, ...]  #: the names of the modules that are in eval mode
    #: Parameters and buffers: name, shape and dtype, bytes, and whether it is trained.
    tensors: tuple[tuple[str, str, int, bool], ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """The state of ``model`` now."""
        evaluating = [name for name, module in model.named_modules() if not module.training]
        tensors = [
            (name, f"{list(t.shape)} {_short(t.dtype)}", t.numel() * t.dtype.itemsize, is_trained)
            for named, has_gradients in (
                (model.named_parameters(), True),
                (model.named_buffers(), False),
            )
            for name, t in named
            for is_trained in [has_gradients and t.requires_grad]
        ]
        return cls(_autocast(), tuple(evaluating), tuple(tensors))

    @property
    def by_name(self) -> dict[str, tuple[str, int, bool]]:
        """The entries of ``tensors``."""
        return {name: (text, size, trained) for name, text, size, trained in self.tensors}


def _autocast() -> tuple[tuple[str, str], ...]:
    if casts() is None:
        return ()
    on = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    return tuple((device, _short(torch.get_autocast_dtype(device))) for device in on)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    nn.FeatureAlphaDropout,
)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def has_modes(model: nn.Module) -> str | None:
    """A layer of the model that does more in train mode than in eval mode, if one is known."""
    for name, module in model.named_modules():
        drops = getattr(module, "p" if isinstance(module, _DROPOUTS) else "dropout", 0)
        if (isinstance(drops, float) and drops > 0) or isinstance(module, _NORMS):
            return f"{name} ({type(module).__name__})" if name else type(module).__name__
    return None


def facts_of(model: nn.Module) -> list[Any]:
    """What a `ModelState` is made from, quick to read and to compare.

    This runs at every call, and is written for speed.
    """
    modules: list[Any] = [model]
    parameters: list[Any] = []
    training: list[bool] = []
    for module in modules:  # which grows
        if module is None:
            continue
        attributes = module.__dict__
        training.append(attributes["training"])
        if own := attributes["_parameters"]:
            parameters += own.values()
        if children := attributes["_modules"]:
            modules += children.values()
    parameters = [each for each in parameters if each is not None]
    requires = [each.requires_grad for each in parameters]
    return [casts(), training, requires, [each.dtype for each in parameters]]


def other_model(planned: ModelState, model: nn.Module) -> str | None:
    """The first difference between ``model`` and the planned one; None if there is none."""
    ours = ModelState.of(model).by_name
    for name, text, _, is_trained in planned.tensors:
        if name not in ours:
            return f"it has no {name}, which was {text}"
        now, _, trained_now = ours.pop(name)
        if now != text:
            return f"its {name} is {now}, and was {text}"
        if trained_now != is_trained:
            return f"its {name} requires_grad is {trained_now}, and was {is_trained}"
    more = next(iter(ours), None)
    return None if more is None else f"it has {more} ({ours[more][0]}), which was not there"


@dataclass(frozen=True)
class Differences:
    """How a step differs from the planned one."""

    texts: tuple[str, ...]  #: the differences
    cures: tuple[str, ...]  #: how to make a plan for such steps
    nbytes: int = 0  #: bytes that are allocated throughout because of them


def differences(planned: ModelState, model: nn.Module) -> Differences | None:
    """How ``model`` differs now from the planned one; None if it does not."""
    texts: list[str] = []
    cures: list[str] = []
    now = ModelState.of(model)
    if now.autocast != planned.autocast:
        texts.append(f"autocast is {_said(now.autocast)}, and was {_said(planned.autocast)}")
        cures.append(_autocast_cure(now.autocast))
    for mode, here, there in (
        ("train", planned.evaluating, now.evaluating),
        ("eval", now.evaluating, planned.evaluating),
    ):
        others = [name for name in here if name not in set(there)]
        if others:
            texts.append(f"{_listed(others)} {_is(others)} in {mode} mode, and {_was(others)} not")
            cures.append(f"model.{mode}(), then recollect.plan(...)")
    nbytes = 0
    if now.tensors != planned.tensors:
        told, nbytes = _of_tensors(planned, now)
        texts += told
        if told:
            cures.append("recollect.plan(...) once the model is as it is trained")
    return Differences(tuple(texts), tuple(cures), nbytes) if texts else None


def _said(autocast: tuple[tuple[str, str], ...]) -> str:
    on = " and ".join(f"{dtype} on {device}" for device, dtype in autocast)
    return f"on ({on})" if on else "off"


def _autocast_cure(autocast: tuple[tuple[str, str], ...]) -> str:
    if not autocast:
        return "recollect.plan(...) without autocast"
    contexts = ", ".join(f"torch.autocast({device!r}, torch.{dtype})" for device, dtype in autocast)
    return f"with {contexts}: recollect.plan(...)"


def _of_tensors(planned: ModelState, now: ModelState) -> tuple[list[str], int]:
    """The differences in parameters and buffers, and the bytes that there are more."""
    before = planned.by_name
    after = now.by_name
    both = [name for name in after if name in before]
    texts = []
    for is_trained, what in (
        (True, "a gradient now, and required none"),
        (False, "no gradient now, and required one"),
    ):
        turned = [n for n in both if before[n][2] != after[n][2] and after[n][2] == is_trained]
        if turned:
            texts.append(f"{_listed(turned)} {'require' if len(turned) > 1 else 'requires'} {what}")
    others = [name for name in both if before[name][0] != after[name][0]]
    if others:
        name = others[0]
        also = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        texts.append(f"its {name} is {after[name][0]}, and was {before[name][0]}{also}")
    more = [name for name in after if name not in before]
    if more:
        texts.append(f"{_listed(more)} {_was(more)} not there")
    less = [name for name in before if name not in after]
    if less:
        texts.append(f"{_listed(less)} {_is(less)} not there any more")
    sums = [sum(size for _, size, _ in each.values()) for each in (after, before)]
    # Gradients are seen in backward. An optimizer mostly has two values for each parameter.
    trained = [n for n in after if after[n][2] and not (n in before and before[n][2])]
    return texts, max(0, sums[0] - sums[1]) + 2 * sum(after[name][1] for name in trained)


def _listed(names: list[str]) -> str:
    first = f"its {names[0]}" if names[0] else "the model"
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"


def _is(names: list[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _was(names: list[str]) -> str:
    return "were" if len(names) > 1 else "was"
