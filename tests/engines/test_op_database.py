"""Every differentiable op that PyTorch describes, in a region of its own, against plain autograd.

The op is the last thing its region does, so that early stop strikes inside it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests._support import Run, assert_identical, plain, reentrant, rerun

# Needs expecttest, which an interpreter that has only torch and pytest (`make test-gpu`) may lack.
op_db = pytest.importorskip(
    "torch.testing._internal.common_methods_invocations", exc_type=ImportError
).op_db

pytestmark = [
    pytest.mark.slow,
    # What the ops have to say about their samples (deprecations, beta features) is not our subject.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

SAMPLES = 2

NO_ORACLE = {
    "empty_like": "the result is uninitialised memory",
    "empty_strided": "the result is uninitialised memory",
    "new_empty": "the result is uninitialised memory",
    "new_empty_strided": "the result is uninitialised memory",
    "linalg.eig": "plain autograd refuses a loss that depends on the phase of the eigenvectors",
    "sparse.sampled_addmm": "torch cannot copy or compare its sparse inputs and gradients",
}
OPS = [
    pytest.param(
        op,
        id=op.full_name,
    )
    for op in op_db
    if torch.float64 in op.supported_backward_dtypes("cpu") and op.name not in NO_ORACLE
]


Region = Callable[..., tuple[Tensor, ...]]


def region_of(op: Any, sample: Any) -> tuple[Region, list[Tensor]]:
    """``op`` as a function of tensors alone, and fresh ones to call it with."""
    leaves, structure = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def region(*tensors: Tensor) -> tuple[Tensor, ...]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        first, args, kwargs = tree_unflatten(filled, structure)
        results = [r for r in tree_leaves(op(first, *args, **kwargs)) if isinstance(r, Tensor)]
        return tuple(r if r.layout is torch.strided else r.to_dense() for r in results)

    given = [leaves[place] for place in places]
    return region, [t.detach().clone().requires_grad_(t.requires_grad) for t in given]


def outcome(run: Run, op: Any, sample: Any) -> tuple[Any, Any]:
    """Outputs of the op, and the gradients of its inputs."""
    region, tensors = region_of(op, sample)
    torch.manual_seed(0)
    outputs = run(region, *tensors)
    torch.manual_seed(1)
    slopes = [torch.randn(out.shape, dtype=torch.float64) for out in outputs]
    pairs = [(out, slope.to(out.dtype)) for out, slope in zip(outputs, slopes, strict=True)]
    pairs = [(out, slope) for out, slope in pairs if out.requires_grad]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))
    return outputs, [tensor.grad for tensor in tensors]


def outputs_without_grad(op: Any, sample: Any) -> Any:
    """Some ops run another kernel when grad mode is off, and it rounds differently."""
    region, tensors = region_of(op, sample)
    torch.manual_seed(0)
    with torch.no_grad():
        return region(*tensors)


@pytest.mark.parametrize("op", OPS)
def test_op(op: Any) -> None:
    samples = islice(op.sample_inputs("cpu", torch.float64, requires_grad=True), SAMPLES)
    for sample in samples:
        outputs, gradients = outcome(plain, op, sample)
        assert_identical(outcome(rerun, op, sample), (outputs, gradients))
        expected = outputs_without_grad(op, sample), gradients
        assert_identical(outcome(reentrant, op, sample), expected)
