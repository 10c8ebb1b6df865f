"""Names for tensors inside a region, for policies to refer to."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from recollect._torch.dynamo import tag_in_trace
from recollect.report.units import argument_text

#: Called with a tensor and its name.
Listener = Callable[[torch.Tensor, str], None]


class _Listening(threading.local):
    #: Of the region that is running forward, if its policy has rules about names.
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
            f"{argument_text(tensor)} and {argument_text(name)}"
        )
    if torch.compiler.is_dynamo_compiling():
        return tag_in_trace(tensor, name)
    if listening.listener is not None:
        listening.listener(tensor, name)
    return tensor
