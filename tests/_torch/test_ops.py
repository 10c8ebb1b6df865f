"""What the schema and the tags of an op say about it."""

import functools

import torch

from recollect._torch.dynamo import inductor_region_key
from recollect._torch.ops import (
    arguments_of,
    bare_op,
    has_tag,
    metadata_ops,
    packet_of,
    returned_aliases,
)


def test_metadata_ops_are_those_that_torch_ignores():
    assert metadata_ops() < torch.utils.checkpoint.SAC_IGNORED_OPS
    assert torch.ops.aten.sym_size.default in metadata_ops()


def test_schemas_and_tags_of_ops():
    aten, cond = torch.ops.aten, torch.ops.higher_order.cond
    (first, out) = arguments_of(aten.sin.out)
    assert first == (0, "self", "Tensor", False, False)
    assert out == (1, "out", "Tensor", True, True)
    assert "Generator" in arguments_of(aten.normal_.default)[3].type
    assert arguments_of(cond) == []
    assert returned_aliases(aten.topk.default) == [False, False]
    assert returned_aliases(aten.add_.Tensor) == [True]
    assert returned_aliases(cond) is None
    assert has_tag(aten.sin.default, torch.Tag.pointwise)
    assert not has_tag(aten.mm.default, torch.Tag.pointwise)
    assert not has_tag(cond, torch.Tag.pointwise)


def test_an_op_is_known_by_itself():
    op = torch.ops.higher_order.cond
    assert inductor_region_key(op, (1,)) is op
    assert bare_op(functools.reduce) is functools.reduce


def test_the_op_that_a_function_is_named_after():
    aten = torch.ops.aten
    assert packet_of(torch.mm) is aten.mm
    assert packet_of(torch.Tensor.mm) is aten.mm
    assert packet_of(torch.nn.functional.gelu) is aten.gelu
    assert packet_of(print) is None
    assert packet_of(3) is None
    assert packet_of(lambda x: x) is None
