"""What a step holds around its compiled graphs (P2).

A plan decides about the graphs. What runs between them, the loss and the optimizer among it, is as
it is: only its bytes count, as a profiler sees them.

A compiled backward takes a whole tensor as the gradient of each output. Autograd has none for an
output that the loss does not use, and a single number, expanded, after a sum. The tensors that are
made in their place are part of no graph, and are freed after the kernel that reads them last
(`note_tangents`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from recollect._torch.autograd import forms_of_outputs, node_behind
from recollect._torch.inductor import assumed, known_size
from recollect.compiled.joint import Joint
from recollect.planning.recording.memory_events import profiled

#: How autograd's function of AOTAutograd is called in a profile.
_FORWARD = "CompiledFunction"
_MEMORY = "[memory]"


class Stretch(NamedTuple):
    """The time before a call of a compiled graph, or after the last one.

    In bytes that were allocated since the step began.
    """

    most: int  #: the most that was allocated in it
    end: int  #: what was allocated at its end
    call: tuple[bool, int] | None  #: the call: whether it is backward, and its number in forward


@dataclass(frozen=True)
class Timeline:
    """What a step holds, in bytes that were allocated since it began."""

    stretches: Sequence[Stretch]  #: before each call of a compiled graph, and after the last
    peak: int  #: the most at any time, inside of the graphs too


def measured_timeline(run: Callable[[], Any], device: torch.device) -> Timeline | None:
    """Run a step, and measure what it holds around its compiled graphs; None: it cannot be told."""
    found = profiled(run)
    return None if found is None else timeline_of(found.events(), device)


def timeline_of(events: Iterable[Any], device: torch.device) -> Timeline:
    """What a step has held, by the events of a profiler."""
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    marks: list[tuple[int, int, Any]] = []
    numbers: dict[int, int] = {}
    for event in events:
        name, start = event.name(), event.start_ns()
        if name == _MEMORY:
            is_here = device.index is None or event.device_index() in (device.index, -1)
            if event.device_type() == kind and is_here:
                marks.append((start, 1, event.nbytes()))
        elif name in (_FORWARD, BACKWARD):
            marks.append((start, 2, event))
            marks.append((start + event.duration_ns(), 0, None))
    level = most = peak = 0
    depth = 0
    stretches: list[Stretch] = []
    for _, order, what in sorted(marks, key=lambda mark: mark[:2]):
        if order == 1:
            level += what
            peak = max(peak, level)
            most = max(most, level) if not depth else level
        elif order == 2:
            depth += 1
            is_backward = what.name() == BACKWARD
            if not is_backward:
                numbers[what.sequence_nr()] = len(numbers)
            number = numbers.get(what.sequence_nr(), -1)
            stretches.append(Stretch(most, level, (is_backward, number)))
        else:
            depth -= 1
            most = level
    return Timeline([*stretches, Stretch(most, level, None)], peak)


# --- tangents ------------------------------------------------------------------------------------

#: A node of autograd that runs a compiled backward, also in a profile.
BACKWARD = "CompiledFunctionBackward"


def note_tangents(
    results: Sequence[Any], joint: Joint, sizes: Mapping[Any, int], made: list[int]
) -> None:
    """Have the backward of a call put into ``made`` the numbers of the tangents that it makes.

    ``results``: what the call returned; ``sizes``: its dynamic sizes, by `symbol_of`.
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
