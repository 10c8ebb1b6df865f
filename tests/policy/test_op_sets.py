"""Which ops are of which sort: the names are those that torch has."""

import pytest
import torch
import torch.distributed._functional_collectives

from recollect.policy import op_sets
from recollect.policy.op_sets import ATTENTION, MATMULS, allocates, not_to_be_repeated

aten = torch.ops.aten
#: Of other libraries, of other builds of torch, or of no dispatcher.
FOREIGN = ("flash_attn", "torch_attn", "xformers", "flex_attention", "_mps", "mkldnn")


def exists(name):
    return bool(torch._C._jit_get_schemas_for_operator(name))


@pytest.mark.parametrize("name", sorted(MATMULS | ATTENTION | op_sets._DISCRETE))
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


DISCRETE = {
    "topk": aten.topk.default,
    "sort": aten.sort.default,
    "stable sort": aten.sort.stable,
    "multinomial": aten.multinomial.default,
    "nonzero": aten.nonzero.default,
    "bincount": aten.bincount.default,
    "argmax": aten.argmax.default,
    "unique": aten._unique2.default,
    "searchsorted": aten.searchsorted.Tensor,
}


@pytest.mark.parametrize("op", DISCRETE.values(), ids=DISCRETE)
def test_discrete_choices_are_not_repeated(op):
    assert not_to_be_repeated(op) == "discrete"


@pytest.mark.parametrize("op", [aten.max.dim, aten.min.dim, aten.nonzero_static.default])
def test_other_discrete_choices_are_not_repeated(op):
    assert not_to_be_repeated(op) == "discrete"


def test_communication_is_not_repeated():
    collectives = torch.ops._c10d_functional
    for op in (collectives.all_reduce.default, collectives.wait_tensor.default):
        assert not_to_be_repeated(op) == "collective"


@pytest.mark.parametrize(
    "op", [aten.mm.default, aten.sin.default, aten.rand.default, aten.native_dropout.default]
)
def test_all_else_may_be_repeated(op):
    assert not_to_be_repeated(op) is None


def test_random_ops_of_other_libraries_are_not_repeated():
    with torch.library._scoped_library("recollect_tests", "FRAGMENT") as library:
        library.define("noise(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
        library.define("scale(Tensor x) -> Tensor")
        ops = torch.ops.recollect_tests
        assert not_to_be_repeated(ops.noise.default) == "random, by another library"
        assert not_to_be_repeated(ops.scale.default) is None


@pytest.mark.parametrize(
    "op",
    [
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.zeros.default,
        aten.zeros_like.default,
        aten.ones.default,
        aten.full.default,
        aten.new_zeros.default,
    ],
)
def test_ops_that_make_memory(op):
    assert allocates(op)


@pytest.mark.parametrize("op", [aten.mm.default, aten.clone.default, aten.view.default])
def test_ops_that_make_no_memory_for_others(op):
    assert not allocates(op)


@pytest.mark.parametrize(
    ("namespace", "is_known"), [("torchvision", True), ("bitsandbytes", True), ("mine", False)]
)
def test_ops_of_some_libraries_are_known_to_depend_on_their_arguments_alone(namespace, is_known):
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        library.define("recollect_test(Tensor x) -> Tensor")
        op = getattr(torch.ops, namespace).recollect_test.default
        assert op_sets.is_function(op) is is_known
