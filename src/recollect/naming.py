"""Names for tensors inside a region, for policies to refer to."""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from recollect._torch.dynamo import tag_in_trace


class Listener(Protocol):
    """Receives the names that tensors are given."""

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """``tensor`` is called ``name``."""


class _Listening(threading.local):
    #: The region that is running forward, if it has a policy.
    listener: Listener | None = None


listening = _Listening()


def tag(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Name a tensor inside a checkpointed region, for ``policy.save_named``.

    Returns the tensor itself. Outside of a region with a policy nothing happens::

        def forward(self, x):
            queries = recollect.tag(self.q(x), "queries")
    """
    if not isinstance(tensor, torch.Tensor) or not isinstance(name, str):
        raise TypeError(
            "tag() takes a tensor and its name, such as recollect.tag(x, 'queries'), but got "
            f"{type(tensor).__name__} and {name!r}"
        )
    if torch.compiler.is_dynamo_compiling():
        return tag_in_trace(tensor, name)
    if listening.listener is not None:
        listening.listener.name(tensor, name)
    return tensor
