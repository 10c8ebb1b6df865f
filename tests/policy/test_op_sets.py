"""Sets of ops: the names are those that torch has."""

import pytest
import torch

from recollect.policy.op_sets import ATTENTION, DISCRETE, MATMULS

aten = torch.ops.aten
#: Of other libraries, of other builds of torch, or of no dispatcher.
FOREIGN = ("flash_attn", "torch_attn", "xformers", "flex_attention", "_mps", "mkldnn")


def exists(name):
    return bool(torch._C._jit_get_schemas_for_operator(name))


@pytest.mark.parametrize("name", sorted(MATMULS | ATTENTION | DISCRETE))
def test_each_name_is_that_of_an_op(name):
    if any(part in name for part in FOREIGN):
        pytest.skip("not of this torch")
    assert exists(name)


@pytest.mark.parametrize("op", ["mm", "addmm", "bmm", "baddbmm", "mv", "linear", "_scaled_mm"])
def test_products_are_products(op):
    assert f"aten::{op}" in MATMULS


def test_attention_is_attention():
    kernels = [name for name in dir(aten) if name.startswith("_scaled_dot_product")]
    forward = {f"aten::{name}" for name in kernels if "backward" not in name}
    assert {name for name in forward if name.endswith(("attention", "for_cpu"))} <= ATTENTION
