"""What the schema and the tags of an op say about it."""

import functools

import torch

from recollect._torch.dynamo import inductor_region_key
from recollect._torch.ops import (
    argument_names,
    bare_op,
    dropout_of,
    effects_of,
    generator_position,
    is_pointwise,
    metadata_ops,
    offset_position,
    packet_of,
    writes_unseen,
)


def test_arguments_are_found_by_schema():
    aten = torch.ops.aten
    assert generator_position(aten.poisson.default) == (1, "generator")
    assert generator_position(aten.normal_.default) == (3, "generator")
    assert generator_position(aten.mm.default) is None
    assert generator_position(torch.ops.higher_order.cond) is None
    assert offset_position(aten.as_strided.default) == (3, "storage_offset")
    assert offset_position(aten.as_strided_.default) == (3, "storage_offset")
    assert offset_position(aten.view.default) is None
    place = dropout_of(aten._scaled_dot_product_flash_attention.default)
    assert place == (3, "dropout_p")


def test_pointwise_ops_are_known():
    aten = torch.ops.aten
    assert is_pointwise(aten.sin.default)
    assert not is_pointwise(aten.mm.default)
    assert not is_pointwise(aten.bernoulli.default)  # pointwise, and random
    assert not is_pointwise(torch.ops.higher_order.cond)


def test_ops_that_write_unseen_are_known():
    assert writes_unseen(torch.ops.c10d.allreduce_.default)
    assert writes_unseen(torch.ops.higher_order.cond)
    assert not writes_unseen(torch.ops.higher_order.flex_attention)
    assert not writes_unseen(torch.ops.aten.mul_.Tensor)


def test_metadata_ops_are_those_that_torch_ignores():
    assert metadata_ops() < torch.utils.checkpoint.SAC_IGNORED_OPS
    assert torch.ops.aten.sym_size.default in metadata_ops()


def test_what_a_schema_says_an_op_does():
    aten = torch.ops.aten
    assert effects_of(aten.sin.default) == ([True], [])
    assert effects_of(aten.add_.Tensor) == ([False], [(0, "self")])
    assert effects_of(aten.sin.out) == ([False], [(1, "out")])
    assert effects_of(aten.topk.default) == ([True, True], [])
    assert effects_of(aten.view.default) == ([False], [])
    assert effects_of(torch.ops.higher_order.cond) is None


def test_an_op_is_known_by_itself():
    op = torch.ops.higher_order.cond
    assert inductor_region_key(op, (1,)) is op
    assert bare_op(functools.reduce) is functools.reduce


def test_names_of_arguments():
    aten = torch.ops.aten
    assert argument_names(aten.view.default) == ["self", "size"]
    assert argument_names(aten.slice_backward.default, lists=True) == ["input_sizes"]
    assert argument_names(aten.full.default, lists=True) == ["size"]
    assert argument_names(aten.unfold.default, lists=True) == []
    assert argument_names(aten.upsample_nearest2d.default, lists=True) == ["output_size"]


def test_the_op_that_a_function_is_named_after():
    aten = torch.ops.aten
    assert packet_of(torch.mm) is aten.mm
    assert packet_of(torch.Tensor.mm) is aten.mm
    assert packet_of(torch.nn.functional.gelu) is aten.gelu
    assert packet_of(print) is None
    assert packet_of(3) is None
    assert packet_of(lambda x: x) is None
