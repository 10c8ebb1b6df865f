"""Every differentiable op that PyTorch describes, under each engine, against one plain run.

Plainly, something runs before the op and after it. Where the op is the last thing its region does,
so that early stop strikes inside it, its region is the op alone: it gets the same inputs and the
gradient that the plain run had there. Replay has what is around the op in its region, so that what
the op reads and what it makes are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from recollect import policy
from recollect.replay import recording_cache as library
from tests._support import Run, assert_identical, reentrant, rerun

# Needs expecttest, which an interpreter that has only torch and pytest (`make test-gpu`) may lack.
op_db = pytest.importorskip(
    "torch.testing._internal.common_methods_invocations", exc_type=ImportError
).op_db

set_rng_seed = pytest.importorskip("torch.testing._internal.common_utils").set_rng_seed

pytestmark = [
    # What the ops have to say about their samples (deprecations, beta features) is not our subject.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

aten = torch.ops.aten

#: Engines with the op alone in its region get two samples of it, replay the first.
SAMPLES = 2
#: What the floating-point inputs of each call are multiplied by: a domain is rarely left by that.
#: Replay gets a call for each: the first is recorded, the others are checked against that, and must
#: not be found to differ.
SCALES = (1.0, 0.96875, 0.9375)
#: With nothing said about what to keep, all results kept, and none.
RERUNS: list[Run] = [
    rerun,
    partial(rerun, policy=policy.everything()),
    partial(rerun, policy=policy.nothing()),
]
#: None, and one that keeps what the op under test makes but not what is around it.
REPLAY_POLICIES = (None, policy.recompute_ops(aten.alias_copy, aten.addcmul) | policy.everything())

NO_ORACLE = {
    "empty_like": "the result is uninitialised memory",
    "empty_strided": "the result is uninitialised memory",
    "new_empty": "the result is uninitialised memory",
    "new_empty_strided": "the result is uninitialised memory",
    "linalg.eig": "plain autograd refuses a loss that depends on the phase of the eigenvectors",
    "sparse.sampled_addmm": "torch cannot copy or compare its sparse inputs and gradients",
}

_SHAPES = "shapes inside depend on data"
_SPARSE = "a tensor of"
_LAZY = "conjugate and negative views"
#: Ops with which replay runs a region in another way, and what it says why.
NOT_CHECKED = {
    **({"combinations": _SHAPES} if torch.__version__ < "2.15" else {}),
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

OPS = [
    pytest.param(op, id=op.full_name)
    for op in op_db
    if torch.float64 in op.supported_backward_dtypes("cpu") and op.name not in NO_ORACLE
]
IN_PLACE = [each for each in OPS if each.values[0].inplace_variant is not None]


# --- regions --------------------------------------------------------------------------------------


class Region:
    """An op as a function of tensors alone.

    An object of its own for each policy, since recordings are found by the function.
    """

    def __init__(self, op: Callable[..., Any], sample: Any) -> None:
        self._op = op
        self._leaves, self._structure = tree_flatten((sample.input, sample.args, sample.kwargs))
        leaves = enumerate(self._leaves)
        self._places = [place for place, leaf in leaves if isinstance(leaf, Tensor)]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The op between others."""
        return tuple(map(after, self.op(*map(before, tensors))))

    def op(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The op by itself."""
        filled = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            filled[place] = tensor
        first, args, kwargs = tree_unflatten(filled, self._structure)
        results = [r for r in tree_leaves(self._op(first, *args, **kwargs)) if is_tensor(r)]
        return tuple(r if r.layout is torch.strided else r.to_dense() for r in results)

    def inputs(self, call: int = 0) -> list[Tensor]:
        """What to call it with."""
        given = [self._leaves[place] for place in self._places]
        scaled = [t.detach() * SCALES[call] if has_slope(t) else t.detach().clone() for t in given]
        return [s.requires_grad_(t.requires_grad) for s, t in zip(scaled, given, strict=True)]


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def has_slope(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def before(tensor: Tensor) -> Tensor:
    """The same numbers, made in the region. Autograd saves nothing of it, and hands the gradient
    through as it is."""
    if tensor.layout is not torch.strided:
        return tensor
    return aten.alias_copy(tensor) if has_slope(tensor) else tensor.clone()


def after(tensor: Tensor) -> Tensor:
    """Something of which autograd saves ``tensor``."""
    return torch.addcmul(tensor, tensor, tensor) if has_slope(tensor) else tensor


# --- what a call leaves behind --------------------------------------------------------------------


class Outcome(NamedTuple):
    """All that one call leaves behind."""

    outputs: tuple[Tensor, ...]
    gradients: list[Tensor | None]
    inputs: list[Tensor]
    forward_stream: Tensor  #: where the random stream stands after forward
    stream: Tensor  #: and after backward


class Plain(NamedTuple):
    """A plain run: what it leaves behind, and what it had around the op."""

    outcome: Outcome
    made: tuple[Tensor, ...]  #: by the op
    slopes: list[Tensor | None]  #: the gradient of each of those


def plainly(region: Region, call: int) -> Plain:
    made: tuple[Tensor, ...] = ()

    def run(_: Region, *inputs: Tensor) -> tuple[Tensor, ...]:
        nonlocal made
        made = region.op(*map(before, inputs))
        for each in made:
            if each.requires_grad:
                each.retain_grad()
        return tuple(map(after, made))

    outcome = outcome_in_the_middle(run, region, call)
    return Plain(outcome, tuple(each.detach() for each in made), [each.grad for each in made])


def outcome_in_the_middle(run: Run, region: Region, call: int) -> Outcome:
    """The region is the op and what is around it."""
    inputs = region.inputs(call)
    torch.manual_seed(call)
    outputs = run(region, *inputs)
    stream = torch.get_rng_state()
    slopes = [torch.randn(out.shape, dtype=torch.float64).to(out.dtype) for out in outputs]
    pairs = zip(outputs, slopes, strict=True)
    backward(outputs, [slope if out.requires_grad else None for out, slope in pairs])
    gradients = [each.grad for each in inputs]
    return Outcome(outputs, gradients, inputs, stream, torch.get_rng_state())


def outcome_at_the_end(run: Run, region: Region, right: Plain) -> Outcome:
    """The region is the op alone."""
    inputs = region.inputs()
    torch.manual_seed(0)
    outputs = run(region.op, *inputs)
    stream = torch.get_rng_state()
    backward(outputs, right.slopes)
    return Outcome(outputs, [each.grad for each in inputs], inputs, stream, torch.get_rng_state())


def backward(outputs: tuple[Tensor, ...], slopes: list[Tensor | None]) -> None:
    pairs = [pair for pair in zip(outputs, slopes, strict=True) if pair[1] is not None]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))


def run_without_grad(region: Region) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """What the op makes and leaves of its inputs.

    Some ops run another kernel when grad mode is off, and it rounds differently.
    """
    inputs = region.inputs()
    torch.manual_seed(0)
    with torch.no_grad():
        return region.op(*inputs), inputs


# --- the op alone in its region -------------------------------------------------------------------


def assert_rerun(op: Any, sample: Any, right: Plain) -> None:
    region = Region(op, sample)
    without_grad, inputs = run_without_grad(region)
    stream = right.outcome.forward_stream  # backward draws nothing
    expected = Outcome(right.made, right.outcome.gradients, inputs, stream, stream)
    for run in RERUNS:
        assert_identical(outcome_at_the_end(run, region, right), expected)
    expected = expected._replace(outputs=without_grad)
    assert_identical(outcome_at_the_end(reentrant, region, right), expected)


# --- replay ---------------------------------------------------------------------------------------


def assert_replayed(op: Any, sample: Any, expected: list[Plain]) -> set[str | None]:
    """All calls, under each policy. Returns why they were not checked."""
    found: set[str | None] = set()
    for chosen in REPLAY_POLICIES:
        differences, reasons = calls_of(Region(op, sample), expected, chosen)
        assert not differences
        found |= reasons
    return found


def calls_of(
    region: Region, expected: list[Plain], chosen: Any
) -> tuple[list[Any], set[str | None]]:
    """Make all calls. How they differed, if one was recorded anew; why they were not checked."""
    recordings, reasons = set(), set()
    run = partial(rerun, engine="replay", policy=chosen)
    for call, right in enumerate(expected):
        assert_identical(outcome_in_the_middle(run, region, call), right.outcome)
        reasons.add(reason_not_checked(region))
        recordings |= {entry.recording for entry in slots_of(region)} - {None}
    differences = [entry.difference for entry in slots_of(region)]
    return differences if len(recordings) > 1 else [], reasons


def slots_of(region: Region) -> list[library.CacheEntry]:
    return list(library._entries.get(region, {}).values())


def reason_not_checked(region: Region) -> str | None:
    """Why later calls are not checked against the first, if they are not."""
    if not slots_of(region):
        return "a tensor of another layout among the arguments"
    (entry,) = slots_of(region)
    if entry.fallback or entry.unsettled:
        return entry.fallback or entry.unsettled
    if entry.recording is None:
        return f"a difference: {entry.difference}"
    return entry.recording.reason


def assert_as_listed(op: Any, reasons: set[str | None]) -> None:
    known = NOT_CHECKED.get(op.name)
    unknown = [why for why in reasons - {None} if known is None or known not in why]
    assert unknown == []
    assert known is None or reasons != {None}, "no longer a limit: take it off the list"


# --- tests ----------------------------------------------------------------------------------------


def samples_of(op: Any, count: int) -> list[Any]:
    # Not by `op.sample_inputs`, which looks for a unittest in every frame: that takes longer than
    # all that is done with the samples.
    set_rng_seed(0)
    return list(islice(op.sample_inputs_func(op, "cpu", torch.float64, True), count))


@pytest.mark.parametrize("op", OPS)
def test_op(op: Any) -> None:
    for number, sample in enumerate(samples_of(op, SAMPLES)):
        right = plainly(Region(op, sample), 0)
        assert_rerun(op, sample, right)
        if number == 0:
            later = [plainly(Region(op, sample), call) for call in range(1, len(SCALES))]
            assert_as_listed(op, assert_replayed(op, sample, [right, *later]))


@pytest.mark.parametrize("op", IN_PLACE)
def test_op_in_place(op: Any) -> None:
    """On a tensor of the region's own."""
    for sample in samples_of(op, 1):
        region = Region(op.inplace_variant, sample)
        try:
            expected = [plainly(region, call) for call in range(len(SCALES))]
        except RuntimeError:  # as where the result has another shape or dtype
            continue
        assert_replayed(op.inplace_variant, sample, expected)
