"""Every differentiable op that PyTorch describes, in the middle of a replayed region.

Something runs before the op and after it, so that what it reads and what it makes are had again. A
region is called three times, with other numbers each time: the first call is recorded, the others
are checked against that, and must not be found to differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from recollect import policy
from recollect.engines.replay import library
from tests._support import assert_identical

database = pytest.importorskip("tests.engines.test_op_database")

pytestmark = database.pytestmark

aten = torch.ops.aten

SAMPLES = 1
#: What the floating-point inputs of each call are multiplied by: a domain is rarely left by that.
SCALES = (1.0, 0.96875, 0.9375)
#: None, and one that keeps what the op under test makes but not what is around it.
POLICIES = (None, policy.recompute_ops(aten.lerp, aten.addcmul) | policy.everything())

_SHAPES = "shapes inside depend on data"
_SPARSE = "a tensor of"
_LAZY = "conjugate and negative views"
#: Ops with which a region is run in another way, and what the engine says why.
NOT_CHECKED = {
    "combinations": _SHAPES,
    "fft.hfft": _LAZY,
    "fft.hfft2": _LAZY,
    "fft.hfftn": _LAZY,
    "fft.ifft": _LAZY,
    "fft.ihfft": _LAZY,
    "linalg.lstsq": _SHAPES,
    "masked_select": _SHAPES,
    "nn.functional.ctc_loss": _SHAPES,
    "sparse.mm": _SPARSE,
    "to_sparse": _SPARSE,
}


class Region:
    """An op between others. An object of its own, since recordings are found by the function."""

    def __init__(self, op: Callable[..., Any], sample: Any) -> None:
        self.op, self.given = database.region_of(op, sample)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(after, self.op(*map(before, tensors))))

    def tensors(self, call: int) -> list[Tensor]:
        """What to call it with."""
        scaled = [t.detach() * SCALES[call] if has_slope(t) else t.clone() for t in self.given]
        return [s.requires_grad_(t.requires_grad) for s, t in zip(scaled, self.given, strict=True)]


def before(tensor: Tensor) -> Tensor:
    """The same numbers, made in the region. Autograd saves nothing of it."""
    if tensor.layout is not torch.strided:
        return tensor
    return tensor.lerp(tensor, 0.5) if has_slope(tensor) else tensor.clone()


def after(tensor: Tensor) -> Tensor:
    """Something of which autograd saves ``tensor``."""
    return torch.addcmul(tensor, tensor, tensor) if has_slope(tensor) else tensor


def has_slope(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def outcome(region: Region, call: int, options: dict[str, Any] | None) -> Any:
    """All that one call leaves behind."""
    tensors = region.tensors(call)
    torch.manual_seed(call)
    if options is None:
        outputs = region(*tensors)
    else:
        outputs = recollect.checkpoint(region, *tensors, engine="replay", **options)
    stream = torch.get_rng_state()
    slopes = [torch.randn(out.shape, dtype=torch.float64).to(out.dtype) for out in outputs]
    pairs = [pair for pair in zip(outputs, slopes, strict=True) if pair[0].requires_grad]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))
    streams = stream, torch.get_rng_state()
    return outputs, [tensor.grad for tensor in tensors], tensors, streams


def slots_of(region: Region) -> list[library.Slot]:
    return list(library._slots.get(region, {}).values())


def reason_not_checked(region: Region) -> str | None:
    """Why later calls are not checked against the first, if they are not."""
    if not slots_of(region):
        return "a tensor of another layout among the arguments"
    (slot,) = slots_of(region)
    if slot.fallback or slot.unsettled:
        return slot.fallback or slot.unsettled
    if slot.recording is None:
        return f"a difference: {slot.difference}"
    return slot.recording.reason


def assert_replayed(op: Callable[..., Any], sample: Any, expected: list[Any]) -> set[str | None]:
    """All calls, under each policy. Returns why they were not checked."""
    found: set[str | None] = set()
    for chosen in POLICIES:
        differences, reasons = calls_of(Region(op, sample), expected, chosen)
        assert not differences
        found |= reasons
    return found


def calls_of(region: Region, expected: list[Any], chosen: Any) -> tuple[list[Any], set[str | None]]:
    """Make all calls. How they differed, if one was recorded anew; why they were not checked."""
    recordings, reasons = set(), set()
    for call, right in enumerate(expected):
        assert_identical(outcome(region, call, {"policy": chosen}), right)
        reasons.add(reason_not_checked(region))
        recordings |= {slot.recording for slot in slots_of(region)} - {None}
    differences = [slot.difference for slot in slots_of(region)]
    return differences if len(recordings) > 1 else [], reasons


def plainly(op: Callable[..., Any], sample: Any) -> list[Any]:
    return [outcome(Region(op, sample), call, None) for call in range(len(SCALES))]


def samples_of(op: Any) -> Iterator[Any]:
    return islice(op.sample_inputs("cpu", torch.float64, requires_grad=True), SAMPLES)


@pytest.mark.parametrize("op", database.OPS)
def test_op(op: Any) -> None:
    reasons = set()
    for sample in samples_of(op):
        reasons |= assert_replayed(op, sample, plainly(op, sample))
    assert_as_listed(op, reasons)


def assert_as_listed(op: Any, reasons: set[str | None]) -> None:
    known = NOT_CHECKED.get(op.name)
    unknown = [why for why in reasons - {None} if known is None or known not in why]
    assert unknown == []
    assert known is None or reasons != {None}, "no longer a limit: take it off the list"


IN_PLACE = [each for each in database.OPS if each.values[0].inplace_variant is not None]


@pytest.mark.parametrize("op", IN_PLACE)
def test_op_in_place(op: Any) -> None:
    """On a tensor of the region's own."""
    for sample in samples_of(op):
        try:
            expected = plainly(op.inplace_variant, sample)
        except RuntimeError:  # as where the result has another shape or dtype
            continue
        assert_replayed(op.inplace_variant, sample, expected)
