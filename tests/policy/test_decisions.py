"""Decisions about ops: pure, so checked without running any."""

import pytest
import torch
from torch.utils import checkpoint as torch_checkpoint

from recollect import CheckpointPolicy, SelectiveCheckpointContext
from recollect.policy.decisions import as_decision, checked_ops

aten = torch.ops.aten


def test_members_have_the_names_and_values_of_torch():
    ours = {member.name: member.value for member in CheckpointPolicy}
    assert ours == {member.name: member.value for member in torch_checkpoint.CheckpointPolicy}


@pytest.mark.parametrize("member", CheckpointPolicy)
def test_both_enums_are_understood(member):
    assert as_decision(member, aten.mm.default) is member
    assert as_decision(torch_checkpoint.CheckpointPolicy[member.name], aten.mm.default) is member


@pytest.mark.parametrize(
    ("value", "decision"),
    [(True, CheckpointPolicy.MUST_SAVE), (False, CheckpointPolicy.PREFER_RECOMPUTE)],
)
def test_bools_are_short_for_decisions(value, decision):
    assert as_decision(value, aten.mm.default) is decision


@pytest.mark.parametrize("value", [None, 0, 1, "MUST_SAVE", CheckpointPolicy])
def test_anything_else_is_refused_with_the_name_of_the_op(value):
    with pytest.raises(ValueError, match=r"returned .* for aten\.mm\.default"):
        as_decision(value, aten.mm.default)


def test_packets_are_expanded_in_place():
    expanded = checked_ops([aten.sin.default, aten.clamp, aten.mm.default], "policy")
    clamps = [getattr(aten.clamp, name) for name in aten.clamp.overloads()]
    assert aten.clamp.Tensor in clamps
    assert expanded == [aten.sin.default, *clamps, aten.mm.default]


def test_ops_are_overloads_or_higher_order():
    given = [aten.mm.default, torch.ops.higher_order.cond]
    assert checked_ops(given, "policy", packets=False) == given
    with pytest.raises(ValueError, match=r"got: aten\.mm of type.*torch\.ops\.aten\.mm\.default"):
        checked_ops([aten.mm.default, aten.mm], "policy", packets=False)


def test_the_context_is_made_as_torch_makes_it():
    context = SelectiveCheckpointContext(is_recompute=True, op_output=3)
    assert (context.is_recompute, context.op_output) == (True, 3)
    with pytest.raises(TypeError):
        SelectiveCheckpointContext(True)
