"""Hiding from the compiler, and what it is told."""

import pytest
import torch

from recollect._torch import dynamo
from recollect._torch.dynamo import (
    dynamo_callback,
    hide_from_dynamo,
    is_nonstrict_tracing,
    is_tracing,
    nested_trace_policy,
    never_traced,
    run_without_dynamo,
    tag_recompute_nodes,
    traced_graph,
)


def test_nothing_is_compiling_here():
    assert not is_tracing()
    assert not is_nonstrict_tracing()
    assert dynamo_callback() is None
    assert traced_graph() is None
    assert nested_trace_policy() is None


def test_tracing_is_noticed():
    from torch.fx.experimental.proxy_tensor import make_fx

    seen = []

    def function(x):
        seen.append((is_tracing(), traced_graph() is not None))
        return x.sin()

    make_fx(function)(torch.ones(2))
    assert seen == [(True, True)]


def test_nodes_are_tagged_for_the_partitioner():
    from torch._functorch import partitioners

    graph = torch.fx.symbolic_trace(lambda x: x + 1).graph
    nodes = list(graph.nodes)
    tag_recompute_nodes(nodes[:1], "MUST_SAVE", 7)
    tag_recompute_nodes(nodes[1:2], "PREFER_RECOMPUTE", None)
    policy = partitioners.CheckpointPolicy
    assert nodes[0].meta == {"recompute": policy.MUST_SAVE, "ac_graph_id": 7}
    assert nodes[1].meta["recompute"] is policy.PREFER_RECOMPUTE
    assert "ac_graph_id" not in nodes[1].meta


def test_a_hidden_function_is_run_as_it_is():
    def function(x):
        return torch.compiler.is_compiling()

    hidden = hide_from_dynamo(function)
    assert hidden is function
    assert torch.compile(hidden, backend="eager")(torch.ones(1)) is False
    torch._dynamo.reset()


def test_running_without_dynamo():
    def add(x, *, other):
        return x + other

    assert run_without_dynamo(add, 1, other=2) == 3


def test_what_is_never_traced_says_why_where_there_is_to_be_one_graph():
    def inner(x):
        return x + 1

    never_traced(inner, "for a reason of its own")
    torch.compiler.reset()
    assert torch.compile(lambda x: inner(x) * 2, backend="eager")(torch.ones(1)) == 4
    with pytest.raises(torch._dynamo.exc.Unsupported, match="for a reason of its own"):
        torch.compile(lambda x: inner(x) * 2, backend="eager", fullgraph=True)(torch.ones(1))
    torch.compiler.reset()


def test_dynamo_knows_torchs_checkpoint_while_another_is_in_its_place(monkeypatch):
    from torch._dynamo.variables import builder

    theirs = torch.utils.checkpoint.checkpoint
    before = builder.is_utils_checkpoint
    dynamo.know_checkpoint(theirs)
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", print)
    assert builder.is_utils_checkpoint(theirs)
    assert not builder.is_utils_checkpoint(print)
    assert dynamo.torch_checkpoint() is theirs
    dynamo.forget_checkpoint()
    assert builder.is_utils_checkpoint is before
    assert dynamo.torch_checkpoint() is print


def test_a_function_that_is_called_while_it_is_traced():
    calls = []

    @dynamo.called_while_traced
    def note():
        calls.append(1)

    @torch.compile(backend="eager", fullgraph=True)
    def function(x):
        note()
        return x + 1

    for _ in range(3):
        function(torch.ones(1))
    assert calls == [1]
    torch.compiler.reset()
