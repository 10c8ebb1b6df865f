"""Which gradients a compiled backward makes before it begins (P2).

A compiled backward takes a whole tensor as the gradient of each output. Autograd has none for an
output that the loss does not use, and a single number, expanded, after a sum. The tensors that are
made in their place are part of no graph, and are freed after the kernel that reads them last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from recollect._torch.autograd import forms_of_outputs, node_behind
from recollect._torch.inductor import assumed, known_size
from recollect.compiled.joint import Joint

#: A node of autograd that runs a compiled backward, also in a profile.
BACKWARD = "CompiledFunctionBackward"


def note_tangents(
    results: Sequence[Any], joint: Joint, sizes: Mapping[Any, int], made: list[int]
) -> None:
    """Have the backward of a call add to ``made`` the numbers of the tangents that it makes.

    Args:
        results: What the call returned.
        joint: The joint graph.
        sizes: Its dynamic sizes, by `symbol_of`.
        made: An empty list.
    """
    node = node_behind(results, BACKWARD)
    if node is None:
        return
    with assumed(sizes):
        wanted = [_form(each.meta.get("val")) for each in joint.tangents]
    places = _places(forms_of_outputs(node), wanted)

    def before(gradients: Sequence[Any]) -> None:
        found = [None if place < 0 else gradients[place] for place in places]
        pairs = zip(found, wanted, strict=True)
        made[:] = [number for number, (each, form) in enumerate(pairs) if _form(each) != form]

    node.register_prehook(before)


def _form(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return None
    shape, stride = (tuple(map(known_size, each)) for each in (value.shape, value.stride()))
    return shape, value.dtype, stride


def _places(outputs: Sequence[Any], wanted: Sequence[Any]) -> list[int]:
    """By tangent: the output that it is the gradient of; both have the same order."""
    places, place = [], -1
    for form in wanted:
        rest = range(place + 1, len(outputs))
        found = next((n for n in rest if form is not None and outputs[n] == form[:2]), -1)
        places.append(found)
        place = max(place, found)
    return places
