"""Which model a plan is for: told by its parameters and buffers, and not by their values."""

from __future__ import annotations

from torch import nn

__all__ = ["Identity", "difference", "identity_of"]

#: Names, shapes and types.
Identity = tuple[tuple[str, str], ...]


def identity_of(model: nn.Module) -> Identity:
    """What tells ``model`` from others."""
    named = [*model.named_parameters(), *model.named_buffers()]
    entries = [
        (name, f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
        for name, tensor in named
    ]
    trained = [(f"{n} requires_grad", str(p.requires_grad)) for n, p in model.named_parameters()]
    return (*entries, *trained)


def difference(planned: Identity, given: Identity) -> str | None:
    """How a model differs from the one that a plan is for; None if it does not."""
    theirs, ours = dict(planned), dict(given)
    for name, looks in theirs.items():
        if name not in ours:
            return f"it has no {name}, which was {looks}"
        if ours[name] != looks:
            return f"its {name} is {ours[name]}, and was {looks}"
    more = [name for name in ours if name not in theirs]
    return f"it has {more[0]} ({ours[more[0]]}), which was not there" if more else None
