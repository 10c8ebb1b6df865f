"""What is known of an op."""

import pytest
import torch
import torch.distributed._functional_collectives

from recollect.policy.op_info import _DISCRETE, ATTENTION, MATMULS, op_info

aten = torch.ops.aten
COND = torch.ops.higher_order.cond
PROFILER = torch.ops.profiler

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
def test_discrete_choices_are_kept_by_default(op):
    assert op_info(op).kept_by_default == "discrete"


@pytest.mark.parametrize("op", [aten.max.dim, aten.min.dim, aten.nonzero_static.default])
def test_other_discrete_choices_are_kept_by_default(op):
    assert op_info(op).kept_by_default == "discrete"


def test_communication_is_kept_by_default():
    collectives = torch.ops._c10d_functional
    for op in (collectives.all_reduce.default, collectives.wait_tensor.default):
        assert op_info(op).kept_by_default == "collective"


@pytest.mark.parametrize(
    "op", [aten.mm.default, aten.sin.default, aten.rand.default, aten.native_dropout.default]
)
def test_all_else_is_not_kept_by_default(op):
    assert op_info(op).kept_by_default is None


def test_random_ops_of_other_libraries_are_kept_by_default():
    with torch.library._scoped_library("recollect_tests", "FRAGMENT") as library:
        library.define("noise(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
        library.define("scale(Tensor x) -> Tensor")
        ops = torch.ops.recollect_tests
        assert op_info(ops.noise.default).kept_by_default == "random, by another library"
        assert op_info(ops.scale.default).kept_by_default is None


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
    assert op_info(op).allocates


@pytest.mark.parametrize("op", [aten.mm.default, aten.clone.default, aten.view.default])
def test_ops_that_make_no_memory_for_others(op):
    assert not op_info(op).allocates


@pytest.mark.parametrize(
    ("namespace", "is_known"), [("torchvision", True), ("bitsandbytes", True), ("mine", False)]
)
def test_ops_of_some_libraries_are_known_to_depend_on_their_arguments_alone(namespace, is_known):
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        library.define("recollect_test(Tensor x) -> Tensor")
        op = getattr(torch.ops, namespace).recollect_test.default
        assert op_info(op).is_pure((), {}) is is_known


# --- by schema and tags ---------------------------------------------------------------------------


def test_one_record_serves_an_op():
    assert op_info(aten.mm.default) is op_info(aten.mm.default)


def test_the_generator_of_a_call():
    own = torch.Generator()
    assert op_info(aten.poisson.default).generator((None, own), {}) is own
    assert op_info(aten.normal_.default).generator((None,), {"generator": own}) is own
    assert op_info(aten.mm.default).generator((1, own), {}) is None
    assert op_info(COND).generator((own,), {}) is None


@pytest.mark.parametrize("op", [aten.as_strided.default, aten.as_strided_.default])
def test_views_that_count_from_the_beginning_of_memory(op):
    assert op_info(op).has_absolute_offset((None, (1,), (1,), 0), {})
    assert op_info(op).has_absolute_offset((None, (1,), (1,)), {"storage_offset": 0})
    assert not op_info(op).has_absolute_offset((None, (1,), (1,)), {})
    assert not op_info(aten.view.default).has_absolute_offset((None, (1,)), {})


def test_pointwise_ops_are_known():
    assert op_info(aten.sin.default).is_pointwise
    assert not op_info(aten.mm.default).is_pointwise
    assert not op_info(aten.bernoulli.default).is_pointwise  # pointwise, and random
    assert not op_info(COND).is_pointwise


def test_ops_that_write_unseen_are_known():
    assert op_info(COND).writes_unseen
    assert not op_info(torch.ops.c10d.allreduce_.default).writes_unseen
    assert not op_info(PROFILER._record_function_exit._RecordFunction).writes_unseen
    assert not op_info(torch.ops.higher_order.flex_attention).writes_unseen
    assert not op_info(aten.mul_.Tensor).writes_unseen


@pytest.mark.parametrize(
    ("name", "writes"),
    [
        *(("allreduce_", True), ("broadcast_", True), ("_allgather_base_", True), ("recv_", True)),
        *(("send", False), ("barrier", False)),
    ],
)
def test_collectives_in_place_write_to_their_first_argument(name, writes):
    info = op_info(getattr(torch.ops.c10d, name).default)
    first, second = torch.ones(1), torch.ones(1)
    assert info.communicates
    assert info.writes == info.writes_uncounted == writes
    written = info.written(([first], [second]), {})
    assert [id(each) for each in written] == ([id(first)] if writes else [])


@pytest.mark.parametrize(
    ("op", "aliases", "written"),
    [
        (aten.sin.default, [False], []),
        (aten.add_.Tensor, [True], [(0, "self")]),
        (aten.sin.out, [True], [(1, "out")]),
        (aten.topk.default, [False, False], []),
        (aten.view.default, [True], []),
        (COND, None, []),
        # Its schema does not say so.
        (aten.native_batch_norm.default, [False] * 3, [(3, "running_mean"), (4, "running_var")]),
    ],
    ids=str,
)
def test_results_and_writes(op, aliases, written):
    info = op_info(op)
    assert (info.returned_aliases, info.written_arguments) == (aliases, written)
    assert info.writes == bool(written)


def test_running_statistics_are_written_to_in_training_only():
    info, x = op_info(aten.native_batch_norm.default), torch.ones(1)
    args = (x, None, None, x, x)
    assert len(info.written((*args, True, 0.1, 1e-5), {})) == 2
    assert info.written((*args, False, 0.1, 1e-5), {}) == []


ATTRIBUTES = (
    *("allocates", "can_be_kept", "has_dynamic_shape", "is_alias", "is_cast", "is_ignored"),
    *("is_inplace_view", "is_pointwise", "is_random", "is_view", "leaves_uninitialized"),
    *("overwrites", "reads_number", "runs_no_kernel", "writes", "writes_unseen"),
)


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        (aten.view.default, "is_alias is_view runs_no_kernel"),
        (aten._unsafe_view.default, "is_alias is_view runs_no_kernel"),
        (aten.detach.default, "is_alias is_ignored is_view runs_no_kernel"),
        (aten.t_.default, "is_alias is_inplace_view runs_no_kernel writes"),
        (aten.relu_.default, "is_alias is_pointwise writes"),
        (aten.zero_.default, "is_alias overwrites writes"),
        (aten.mm.out, "is_alias overwrites writes"),
        (aten.mm.default, "can_be_kept"),
        (aten.rand.default, "can_be_kept is_random"),
        # It refuses dropout, whatever its tag says.
        (aten._scaled_dot_product_flash_attention_for_cpu.default, "can_be_kept"),
        (aten._to_copy.default, "can_be_kept is_cast"),
        (aten.empty.memory_format, "allocates leaves_uninitialized"),
        (aten.item.default, "can_be_kept reads_number"),
        (aten.nonzero.default, "can_be_kept has_dynamic_shape"),
        # They are run for their effect.
        (torch.ops.c10d.allreduce_.default, "writes"),
        (PROFILER._record_function_enter_new.default, ""),
    ],
    ids=str,
)
def test_what_is_said_of_ops(op, attributes):
    info = op_info(op)
    assert [name for name in ATTRIBUTES if getattr(info, name)] == attributes.split()


# --- sets of ops ----------------------------------------------------------------------------------

#: Of other libraries, of other builds of torch, or of no dispatcher.
FOREIGN = ("flash_attn", "torch_attn", "xformers", "flex_attention", "_mps", "mkldnn")


def exists(name):
    return bool(torch._C._jit_get_schemas_for_operator(name))


@pytest.mark.parametrize("name", sorted(MATMULS | ATTENTION | _DISCRETE))
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
