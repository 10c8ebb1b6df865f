"""Which cause is named for which signs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recollect.checks.causes import (
    OTHER_WAY,
    Evidence,
    TensorSpec,
    likely_cause,
    likely_cause_of_values,
)


def look(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> TensorSpec:
    return TensorSpec(shape, dtype, device)


HALF = look(4, 8, dtype=torch.bfloat16)
SOMETHING = (look(4, 8), look(8, 4))

CASES: dict[str, tuple[Evidence, str, str]] = {
    "sharded": (
        Evidence(look(8, 8), look(0)),
        "freed by sharding",
        "checkpoint(block, x), not checkpoint(block.forward, x)",
    ),
    "sharded in forward": (Evidence(look(0), look(8)), "freed by sharding", "fully_shard("),
    "autocast": (
        Evidence(look(4, 8), HALF),
        "float32 and the other in bfloat16",
        'with torch.autocast("cpu", torch.bfloat16):',
    ),
    "autocast elsewhere": (
        Evidence(look(2, dtype=torch.float16), look(2, device=torch.device("cuda", 1))),
        "in float16",
        'with torch.autocast("cuda", torch.float16):',
    ),
    "compiled": (
        Evidence(*SOMETHING, savers=frozenset({"addmm", "CompiledFunction"})),
        "two graphs",
        "torch._dynamo.mark_dynamic(x, 0)",
    ),
    "cache": (
        Evidence(*SOMETHING, cache="past_key_values (DynamicCache)"),
        "past_key_values (DynamicCache)",
        "use_cache=False",
    ),
    "cache before routing": (Evidence(look(4, 8), look(8, 8), cache="cache"), "cache", "use_cache"),
    "routing": (
        Evidence(look(5, 8), look(6, 8)),
        "routed",
        "policy=[torch.ops.aten.topk, torch.ops.aten.sort, torch.ops.aten.nonzero]",
    ),
    "routing of no token": (Evidence(look(0, 8), look(6, 8)), "routed", "policy="),
    "eval mode": (
        Evidence(*SOMETHING, module=nn.Linear(1, 1).eval()),
        "Linear is in eval mode",
        "model.eval() after loss.backward()",
    ),
    "counter": (
        Evidence(look(4), None, counts_differ=True),
        "a counter",
        "if not recollect.is_recomputing()",
    ),
    "counter, more": (Evidence(None, look(4), counts_differ=True), "a counter", "is_recomputing"),
    "other": (Evidence(*SOMETHING), "has changed since forward", "checkpoint(block, x, mask)"),
    "other dimension": (Evidence(look(4, 8), look(4, 9)), "has changed since", "as an argument"),
    "in training mode": (
        Evidence(*SOMETHING, module=nn.Linear(1, 1)),
        "has changed since",
        "as an argument",
    ),
    "both precise": (
        Evidence(look(2), look(2, dtype=torch.float64)),
        "has changed since",
        "as an argument",
    ),
    "counts differ and shapes too": (
        Evidence(*SOMETHING, counts_differ=True),
        "has changed since",
        "as an argument",
    ),
}


@pytest.mark.parametrize(("evidence", "sentence", "fix"), CASES.values(), ids=CASES)
def test_likely_cause(evidence: Evidence, sentence: str, fix: str) -> None:
    cause = likely_cause(evidence)
    assert sentence in cause.sentence
    assert fix in cause.fix
    assert str(cause) == f"Likely cause: {cause.sentence}\nFix: {cause.fix}"


def test_other_values_have_their_own_causes() -> None:
    assert "preserve_rng_state=True" in likely_cause_of_values(random=True).fix
    assert "use_deterministic_algorithms(True)" in likely_cause_of_values(random=False).fix
    assert "another way" in OTHER_WAY.sentence


def test_the_ops_in_the_advice_exist() -> None:
    for name in ("topk", "sort", "nonzero"):
        assert isinstance(getattr(torch.ops.aten, name), torch._ops.OpOverloadPacket)


def test_a_look_in_words() -> None:
    assert str(look(4, 8)) == "float32 [4, 8]"
    assert str(look(dtype=torch.int64, device=torch.device("cpu"))) == "int64 []"
    assert str(look(2, device=torch.device("cuda:1"))) == "float32 [2] on cuda:1"


def test_devices_are_compared_where_both_are_known() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert look(2, device=cpu).differs_from(look(2, device=cuda))
    assert not look(2).differs_from(look(2, device=cuda))
    assert look(2).differs_from(look(3))
