"""The same policies under torch.compile: one graph, no recompilation, the same kept results."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
from torch import nn

import recollect
from recollect import policy
from tests._support import sampled
from tests.rerun.selective._helpers import Block, again, leaves, limit, seeded, square, total
from tests.test_compile import Graphs

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def program(x, w):
    h = recollect.tag((x @ w).sin() @ w, "h")
    return ((h.cos() @ w).sin() @ w).exp()


def compiled_backward(function, inputs, given, calls=3):
    """The ops of the compiled backward. One graph each way, and the gradients are checked."""
    graphs = Graphs()

    def step(*inputs):
        return recollect.checkpoint(function, *[t + 1 for t in inputs], policy=given).cos()

    def plain(*inputs):
        return function(*[t + 1 for t in inputs]).cos()

    weights = list(function.parameters()) if isinstance(function, nn.Module) else []
    compiled = torch.compile(step, backend=graphs.backend, fullgraph=True)
    wanted = [*inputs, *weights]
    expected = torch.autograd.grad(total(plain(*inputs)), wanted)
    for _ in range(calls):
        out = compiled(*inputs)
        for ours, theirs in zip(torch.autograd.grad(total(out), wanted), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert (len(graphs.forward), len(graphs.backward)) == (1, 1)
    return graphs.ops()[1]


#: Products of the gradient itself; four more if all are run again.
OWN = 8

CASES = {
    "nothing": (policy.nothing(), 4),
    "matmuls": (policy.matmuls(), 0),
    "save_ops": (policy.save_ops(aten.mm), 0),
    "list": ([aten.mm], 0),
    "function": (lambda ctx, op, *_, **__: op is aten.mm.default, 0),
    "recompute_ops": (policy.recompute_ops(aten.mm), 4),
    "recompute before save": (policy.recompute_ops(aten.mm) | policy.matmuls(), 4),
    "everything": (policy.everything(), 0),
    "every second": (policy.every_nth(aten.mm, 2), 2),
    "every third": (policy.every_nth(aten.mm, 3), 3),
    "every fourth": (policy.every_nth(aten.mm, 4), 3),
    "name": (policy.save_named("h"), 3),
    "name before recompute": (policy.save_named("h") | policy.recompute_ops(aten.mm), 3),
    "combined": (policy.save_named("h") | policy.every_nth(aten.mm, 3), 2),
}


USUAL = ("nothing", "matmuls", "function", "recompute before save", "every third", "combined")


@pytest.mark.parametrize("name", sampled(CASES, usual=USUAL))
# A rule that another leaves nothing to do says so.
@pytest.mark.filterwarnings("ignore:the policy's .* matched nothing")
def test_what_is_kept_is_not_run_again(name):
    given, run_again = CASES[name]
    backward = compiled_backward(program, square(), given)
    # The last product of the region is needed for the gradient of `exp`.
    assert backward["aten.mm.default"] == OWN + run_again


def test_a_rule_before_a_name_wins():
    given = policy.recompute_ops(aten.mm) | policy.save_named("h")
    assert compiled_backward(program, square(), given)["aten.mm.default"] == OWN + 4


@pytest.mark.parametrize(
    ("patterns", "addmm"),
    [
        (["attn.wo"], 5),
        pytest.param(["*.wo"], 5, marks=pytest.mark.slow),
        pytest.param(["attn"], 2, marks=pytest.mark.slow),
        pytest.param(["mlp"], 4, marks=pytest.mark.slow),
        (["mlp.up", "attn.w?"], 1),
        pytest.param(["attn", "mlp"], 0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("make", [policy.save_modules])
def test_what_runs_inside_modules_is_kept(patterns, addmm, make):
    backward = compiled_backward(seeded(Block), leaves((2, 3, 8)), make(*patterns))
    assert backward["aten.addmm.default"] == addmm


@pytest.mark.parametrize(
    "pattern", sampled(["layers.*.attn.wo", "attn.wo", "layers.1.*"], usual=["layers.1.*"])
)
def test_each_block_of_a_compiled_model_is_a_region(pattern):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = recollect.checkpoint(layer, x, policy=given)
            return x

    given = policy.save_modules(pattern)
    model = seeded(Model)
    (x,) = leaves((2, 3, 8))
    plain = copy.deepcopy(model)
    expected_out = x
    for layer in plain.layers:
        expected_out = layer(expected_out)
    expected = torch.autograd.grad(total(expected_out), [x, *plain.parameters()])
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True)
    for _ in range(2):
        actual = torch.autograd.grad(total(compiled(x)), [x, *model.parameters()])
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert (len(graphs.forward), len(graphs.backward)) == (1, 1)
    kept = 6 if pattern == "layers.1.*" else 2
    assert graphs.ops()[1]["aten.addmm.default"] == 12 - kept


@pytest.mark.parametrize("name", ["matmuls", "every second", "name"])
def test_checkpointed_functions_and_modules(name):
    given, run_again = CASES[name]

    class Part(nn.Module):
        def forward(self, x, w):
            return program(x, w)

    for region in (
        recollect.checkpointed(program, policy=given),
        recollect.checkpointed(Part(), policy=given),
    ):
        torch._dynamo.reset()
        graphs = Graphs()
        compiled = torch.compile(
            lambda x, w, region=region: region(x + 1, w).cos(),
            backend=graphs.backend,
            fullgraph=True,
        )
        inputs = square()
        expected = torch.autograd.grad(total(program(inputs[0] + 1, inputs[1]).cos()), inputs)
        for _ in range(2):
            actual = torch.autograd.grad(total(compiled(*inputs)), inputs)
            for ours, theirs in zip(actual, expected, strict=True):
                torch.testing.assert_close(ours, theirs)
        assert graphs.ops()[1]["aten.mm.default"] == OWN + run_again


def test_one_policy_in_eager_and_in_compiled_code():
    given = policy.every_nth(aten.mm, 2) | policy.save_ops(aten.exp)
    for _ in range(2):
        torch._dynamo.reset()
        assert compiled_backward(program, square(), given)["aten.mm.default"] == OWN + 2
        assert again(program, square(), given, early_stop=False)[aten.mm.default] == 2


@pytest.mark.parametrize("n", [2, 3])
def test_counts_begin_anew_in_each_region_of_a_graph(n):
    given = policy.every_nth(aten.mm, n)

    def three(x, w):
        for _ in range(3):
            x = (x @ w).sin()
        return x

    def step(x, w):
        x = recollect.checkpoint(three, x + 1, w, policy=given)
        return recollect.checkpoint(three, x * 2, w, policy=given).cos()

    graphs = Graphs()
    compiled = torch.compile(step, backend=graphs.backend, fullgraph=True)
    compiled(*square()).sum().backward()
    assert graphs.ops()[1]["aten.mm.default"] == 2 * (6 + 3 - 1)


def test_tag_outside_of_regions_compiles_to_nothing_that_costs():
    graphs = Graphs()

    def step(x, w):
        return recollect.tag(x @ w, "h").sin()

    compiled = torch.compile(step, backend=graphs.backend, fullgraph=True)
    inputs = square()
    expected = torch.autograd.grad(total(step(*inputs)), inputs)
    for ours, theirs in zip(
        torch.autograd.grad(total(compiled(*inputs)), inputs), expected, strict=True
    ):
        assert torch.equal(ours, theirs)
    assert set(graphs.ops()[0]) <= {
        "aten.mm.default",
        "aten.sin.default",
        "aten.alias.default",
        "aten.cos.default",
        "aten.permute.default",
        "aten.t.default",
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(policy.save_named("nobody"), "The names are: h", id="name"),
        pytest.param(
            policy.save_modules("nobody"),
            "matches no module",
            id="module",
        ),
    ],
)
def test_an_unknown_pattern_is_loud(given, message):
    block = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

    def step(x):
        return recollect.checkpoint(lambda x: recollect.tag(block(x), "h").sin(), x, policy=given)

    with pytest.raises(Exception, match=message):
        torch.compile(step, backend="aot_eager", fullgraph=True)(*square(1)).sum().backward()


def test_choices_are_kept_in_compiled_code():
    def function(x):
        values, indices = x.sin().sort(-1)
        return values.exp() * indices

    backward = compiled_backward(function, square(1), policy.nothing())
    assert backward["aten.sort.default"] == 0


def test_dropout_in_compiled_code_is_that_of_forward():
    def function(x, w):
        return torch.nn.functional.dropout((x @ w).sin(), 0.5) @ w

    given = policy.matmuls()

    def step(x, w):
        return recollect.checkpoint(function, x, w, policy=given)

    x, w = square()
    torch.manual_seed(0)
    out = torch.compile(step, backend="aot_eager", fullgraph=True)(x, w)
    torch.manual_seed(0)
    plain = torch.compile(function, backend="aot_eager", fullgraph=True)(x, w)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(
        torch.autograd.grad(total(out), [x, w]), torch.autograd.grad(total(plain), [x, w])
    )


@limit("dynamo cannot make a policy")
def test_a_policy_may_be_made_inside_compiled_code():
    def step(x, w):
        return recollect.checkpoint(program, x, w, policy=policy.matmuls())

    inputs = square()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        torch.autograd.grad(total(compiled(*inputs)), inputs),
        torch.autograd.grad(total(program(*inputs)), inputs),
    )
