"""What a step depends on beside its batch: autocast, train or eval, and what is trained."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recollect.planning.identity import Identity, identity_of
from recollect.replay.call_mode import DEVICES, casts

__all__ = ["Conditions", "Differences", "differences", "facts_of", "has_modes"]


@dataclass(frozen=True)
class Conditions:
    """Those under which a plan was made.

    Args:
        autocast: Types of devices for which it is on, each with its dtype.
        evaluating: The names of the modules that are in eval mode.
    """

    autocast: tuple[tuple[str, str], ...]
    evaluating: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Conditions:
        """Those that there are now."""
        evaluating = [name for name, module in model.named_modules() if not module.training]
        return cls(_autocast(), tuple(evaluating))


def _autocast() -> tuple[tuple[str, str], ...]:
    if casts() is None:
        return ()
    on = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    return tuple((device, _short(torch.get_autocast_dtype(device))) for device in on)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_modes(model: nn.Module) -> str | None:
    """A layer of the model that does more in train mode than in eval mode, if one is known."""
    for name, module in model.named_modules():
        drops = getattr(module, "p" if isinstance(module, _DROPOUTS) else "dropout", 0)
        if (isinstance(drops, float) and drops > 0) or isinstance(module, _NORMS):
            return f"{name} ({type(module).__name__})" if name else type(module).__name__
    return None


_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    nn.FeatureAlphaDropout,
)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def facts_of(model: nn.Module) -> list[Any]:
    """All that `Conditions` and `Identity` are made of, quick to have and to compare.

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


@dataclass(frozen=True)
class Differences:
    """How a step differs from the one planned for.

    Args:
        texts: Each of them, in words.
        cures: For each, how to make a plan that knows it.
        nbytes: The bytes that are there throughout for it.
    """

    texts: tuple[str, ...]
    cures: tuple[str, ...]
    nbytes: int = 0


def differences(conditions: Conditions, identity: Identity, model: nn.Module) -> Differences | None:
    """How ``model`` differs now from what a plan was made for; None if it does not."""
    texts: list[str] = []
    cures: list[str] = []
    now = Conditions.of(model)
    if now.autocast != conditions.autocast:
        texts.append(f"autocast is {_said(now.autocast)}, and was {_said(conditions.autocast)}")
        cures.append(_autocast_cure(now.autocast))
    for mode, cure, here, there in (
        ("train", "model.train()", conditions.evaluating, now.evaluating),
        ("eval", "model.eval()", now.evaluating, conditions.evaluating),
    ):
        others = [name for name in here if name not in set(there)]
        if others:
            texts.append(f"{_listed(others)} {_is(others)} in {mode} mode, and {_was(others)} not")
            cures.append(f"{cure}, then recollect.plan(...)")
    before, after = dict(identity), dict(identity_of(model))
    nbytes = 0
    if before != after:
        nbytes = max(0, _nbytes(after) - _nbytes(before))
        told = _parameters(before, after)
        texts += told
        if told:
            cures.append("recollect.plan(...) once the model is as it is trained")
        trained = [n for n in _trained(after) if n not in _trained(before)]
        # Their gradients are seen in backward. An optimizer mostly has two values for each.
        nbytes += 2 * sum(_size(after[name]) for name in trained if name in after)
    return Differences(tuple(texts), tuple(cures), nbytes) if texts else None


def _said(autocast: tuple[tuple[str, str], ...]) -> str:
    on = " and ".join(f"{dtype} on {device}" for device, dtype in autocast)
    return f"on ({on})" if on else "off"


def _autocast_cure(autocast: tuple[tuple[str, str], ...]) -> str:
    if not autocast:
        return "recollect.plan(...) without autocast"
    contexts = ", ".join(f"torch.autocast({device!r}, torch.{dtype})" for device, dtype in autocast)
    return f"with {contexts}: recollect.plan(...)"


_REQUIRES = " requires_grad"


def _trained(identity: dict[str, str]) -> list[str]:
    names = [name for name, value in identity.items() if value == "True"]
    return [name.removesuffix(_REQUIRES) for name in names if name.endswith(_REQUIRES)]


def _parameters(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What has become of parameters and buffers, in words."""
    texts = []
    was, now = set(_trained(before)), set(_trained(after))
    kept = [name for name in after if name in before and not name.endswith(_REQUIRES)]
    more = [name for name in after if name not in before and not name.endswith(_REQUIRES)]
    less = [name for name in before if name not in after and not name.endswith(_REQUIRES)]
    unfrozen = [name for name in kept if name in now - was]
    frozen = [name for name in kept if name in was - now]
    others = [name for name in kept if before[name] != after[name]]
    for names, what in (
        (unfrozen, "a gradient now, and required none"),
        (frozen, "no gradient now, and required one"),
    ):
        if names:
            texts.append(f"{_listed(names)} {'require' if len(names) > 1 else 'requires'} {what}")
    if others:
        name = others[0]
        also = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        texts.append(f"its {name} is {after[name]}, and was {before[name]}{also}")
    if more:
        texts.append(f"{_listed(more)} {_was(more)} not there")
    if less:
        texts.append(f"{_listed(less)} {_is(less)} not there any more")
    return texts


def _nbytes(identity: dict[str, str]) -> int:
    return sum(_size(value) for name, value in identity.items() if not name.endswith(_REQUIRES))


def _size(looks: str) -> int:
    """The bytes of a tensor by its entry in an `Identity`: ``[3, 4] float32``."""
    shape, _, name = looks.rpartition(" ")
    size: int = getattr(torch, name).itemsize
    for length in json.loads(shape):
        size *= length
    return size


def _listed(names: list[str]) -> str:
    first = f"its {names[0]}" if names[0] else "the model"
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"


def _is(names: list[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _was(names: list[str]) -> str:
    return "were" if len(names) > 1 else "was"
