"""torch.compile: regions in compiled code, compiled code in regions."""

import functools
import shutil
from collections import Counter

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils import checkpoint as torch_checkpoint

import recollect
from recollect import CheckpointPolicy, compat, policy

aten = torch.ops.aten


class Graphs:
    """A backend that keeps the forward and backward graphs and runs them as they are."""

    def __init__(self):
        self.forward = []
        self.backward = []
        self.backend = aot_autograd(
            fw_compiler=functools.partial(self._keep, self.forward),
            bw_compiler=functools.partial(self._keep, self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    @staticmethod
    def _keep(graphs, graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    def ops(self):
        """Ops of all forward graphs, ops of all backward graphs."""
        return [
            Counter(
                str(node.target)
                for graph in graphs
                for node in graph.graph.nodes
                if node.op == "call_function"
            )
            for graphs in (self.forward, self.backward)
        ]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def leaves():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(2)]


def block(x, w):
    return torch.sigmoid(torch.sin(x @ w) @ w).exp()


checkpointed_block = recollect.checkpointed(block)


def through(region, function=block):
    """A step whose middle is the region."""

    def step(x, w):
        return region(function, x + 1, w).cos()

    return step


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def gradients(step, inputs):
    torch.manual_seed(3)
    out = step(*inputs)
    return [out.detach(), *torch.autograd.grad(out.sum(), inputs)]


def assert_same(ours, expected):
    assert len(ours) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def compiled_ops(step, calls=3):
    """Compile ``step`` in one graph, check it against eager, and return the ops of its graphs."""
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(step, backend=graphs.backend, fullgraph=True)
    inputs = leaves()
    expected = gradients(through(plain), inputs)
    for _ in range(calls):
        assert_same(gradients(compiled, inputs), expected)
    assert (len(graphs.forward), len(graphs.backward)) == (1, 1)
    return graphs.ops()


def selective(module, policy):
    make = functools.partial(module.create_selective_checkpoint_contexts, policy)
    return functools.partial(module.checkpoint, use_reentrant=False, context_fn=make)


def keep_mm(ctx, op, *args, **kwargs):
    if op is aten.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.MUST_RECOMPUTE


def torch_keep_mm(ctx, op, *args, **kwargs):
    return torch_checkpoint.CheckpointPolicy[keep_mm(ctx, op).name]


def recompute_all(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


def torch_recompute_all(ctx, op, *args, **kwargs):
    return torch_checkpoint.CheckpointPolicy.MUST_RECOMPUTE


def torch_region(function, *args):
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


# --- a region in compiled code --------------------------------------------------------------------

REGIONS = {
    "checkpoint": (recollect.checkpoint, torch_region),
    "compat": (functools.partial(compat.checkpoint, use_reentrant=False), torch_region),
    "checkpointed": (lambda _, *args: checkpointed_block(*args), torch_region),
    "options": (
        functools.partial(
            recollect.checkpoint, preserve_rng_state=False, early_stop=False, debug=True
        ),
        torch_region,
    ),
    "policy list": (
        functools.partial(recollect.checkpoint, policy=[aten.mm]),
        selective(torch_checkpoint, [aten.mm.default]),
    ),
    "policy function": (
        functools.partial(recollect.checkpoint, policy=keep_mm),
        selective(torch_checkpoint, torch_keep_mm),
    ),
    "policy that recomputes": (
        functools.partial(recollect.checkpoint, policy=recompute_all),
        selective(torch_checkpoint, torch_recompute_all),
    ),
    "context_fn": (
        selective(recollect, [aten.mm]),
        selective(torch_checkpoint, [aten.mm.default]),
    ),
    "compat context_fn": (
        selective(compat, [aten.mm.default]),
        selective(torch_checkpoint, [aten.mm.default]),
    ),
}


@functools.cache
def ops_of_torchs(name):
    _, theirs = REGIONS[name]
    return compiled_ops(through(theirs), calls=1)


@pytest.mark.parametrize("name", REGIONS)
def test_the_compiler_makes_of_a_region_what_it_makes_of_torchs(name):
    ours, _ = REGIONS[name]
    assert compiled_ops(through(ours)) == ops_of_torchs(name)


def test_the_compiler_does_the_same_while_installed():
    expected = {name: ops_of_torchs(name) for name in REGIONS}
    with recollect.installed():
        ours = {name: compiled_ops(through(region)) for name, (region, _) in REGIONS.items()}
    assert ours == expected


def test_a_region_is_recomputed_in_the_compiled_backward():
    _, without = compiled_ops(through(plain), calls=1)
    forward, backward = compiled_ops(through(recollect.checkpoint), calls=1)
    assert forward["aten.mm.default"] == 2
    assert without["aten.mm.default"] == 4
    assert backward["aten.mm.default"] == 4 + 2
    assert backward["aten.sin.default"] == without["aten.sin.default"] + 1


@pytest.mark.parametrize("policy", [[aten.mm], (aten.mm.default,), keep_mm, torch_keep_mm])
def test_what_a_policy_keeps_is_not_recomputed_in_the_compiled_backward(policy):
    region = functools.partial(recollect.checkpoint, policy=policy)
    _, backward = compiled_ops(through(region), calls=1)
    assert backward["aten.mm.default"] == 4
    assert backward["aten.sigmoid.default"] == 1


def test_torchs_own_function_while_installed_is_recomputed_too():
    with recollect.installed():
        _, backward = compiled_ops(through(torch_region), calls=1)
    assert backward["aten.mm.default"] == 4 + 2


def test_a_reentrant_region_is_left_to_the_compiler():
    region = functools.partial(recollect.checkpoint, engine="reentrant")
    _, backward = compiled_ops(through(region), calls=1)
    assert backward["aten.mm.default"] == 4 + 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x, *, scale=1.0):
        return torch.sin(self.up(x)).exp() * scale


def model_gradients(model, run):
    model.zero_grad()
    run(torch.linspace(-1, 1, 8).reshape(2, 4)).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("policy", [None, [aten.addmm]], ids=str)
def test_a_wrapped_module_in_a_compiled_model(policy):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    expected = model_gradients(model, model)
    for part in model:
        recollect.checkpointed(part, policy=policy)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True)
    for _ in range(3):
        assert_same(model_gradients(model, compiled), expected)
    _, backward = graphs.ops()
    assert len(graphs.backward) == 1
    assert backward["aten.addmm.default"] == (2 if policy is None else 0)
    assert backward["aten.sin.default"] == 2


def compiled_from_outside(model, backend):
    return torch.compile(model, backend=backend, fullgraph=True)


def compiled_in_place(model, backend):
    model.compile(backend=backend, fullgraph=True)
    return model


@pytest.mark.parametrize("compiled", [compiled_from_outside, compiled_in_place])
def test_a_wrapped_module_is_itself_what_is_compiled(compiled):
    torch.manual_seed(0)
    model = Block()
    expected = model_gradients(model, model)
    graphs = Graphs()
    run = compiled(recollect.checkpointed(model), graphs.backend)
    for _ in range(2):
        assert_same(model_gradients(model, run), expected)
    _, backward = graphs.ops()
    assert backward["aten.addmm.default"] == 1


def test_a_wrapped_function_is_itself_what_is_compiled():
    graphs = Graphs()
    compiled = torch.compile(recollect.checkpointed(block), backend=graphs.backend, fullgraph=True)
    inputs = leaves()
    assert_same(gradients(compiled, inputs), gradients(block, inputs))
    _, backward = graphs.ops()
    assert backward["aten.mm.default"] == 4 + 2


def test_keywords_and_nested_regions_in_compiled_code():
    def inner(x, *, scale):
        return x.sin() * scale

    def nested(x, w):
        return recollect.checkpoint(inner, x @ w, scale=2.0).exp()

    def flat(x, w):
        return inner(x @ w, scale=2.0).exp()

    inputs = leaves()
    compiled = torch.compile(
        through(recollect.checkpoint, nested), backend="aot_eager", fullgraph=True
    )
    assert_same(gradients(compiled, inputs), gradients(through(plain, flat), inputs))


def test_sequential_in_compiled_code():
    def step(x, w):
        parts = [torch.sin, lambda x: x @ w, torch.cos]
        return recollect.checkpoint_sequential(parts, 2, x)

    inputs = leaves()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert_same(gradients(compiled, inputs), gradients(step, inputs))


# --- options in compiled code ---------------------------------------------------------------------

POLICIES = {
    "none": (None, True),
    "list": ([aten.mm], False),
    "save_ops": (policy.save_ops(aten.mm), False),
    "recompute_ops": (policy.recompute_ops(aten.mm), True),
    "matmuls": (policy.matmuls(), False),
    "nothing": (policy.nothing(), True),
}


def called_torchs(function, *args, **options):
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **options)


@pytest.mark.parametrize("engine", [None, "rerun", "replay"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_means_the_same_with_every_engine(name, engine):
    given, is_rerun = POLICIES[name]
    region = functools.partial(recollect.checkpoint, policy=given, engine=engine)
    _, backward = compiled_ops(through(region), calls=1)
    assert backward["aten.mm.default"] == (4 + 2 if is_rerun else 4)
    wrapped = recollect.checkpointed(block, policy=given, engine=engine)
    assert compiled_ops(through(lambda _, *args: wrapped(*args)), calls=1)[1] == backward


@pytest.mark.parametrize("name", POLICIES)
def test_the_options_of_install_are_heeded_in_compiled_code(name):
    given, is_rerun = POLICIES[name]
    with recollect.installed(policy=given, engine="replay"):
        _, backward = compiled_ops(through(called_torchs), calls=1)
        _, ours = compiled_ops(through(recollect.checkpoint), calls=1)
    assert backward["aten.mm.default"] == (4 + 2 if is_rerun else 4)
    assert ours["aten.mm.default"] == 4 + 2  # they are for torch's functions
    _, after = compiled_ops(through(called_torchs), calls=1)
    assert after["aten.mm.default"] == 4 + 2


@pytest.mark.parametrize("options", [{"policy": [aten.mm]}, {"engine": "replay"}], ids=str)
def test_our_options_in_a_call_of_torchs_function_while_installed(options):
    region = functools.partial(called_torchs, **options)
    with recollect.installed():
        _, backward = compiled_ops(through(region), calls=1)
    assert backward["aten.mm.default"] == (4 if "policy" in options else 4 + 2)


def test_a_parameter_of_the_function_is_not_taken_for_an_option():
    def with_policy(x, w, *, policy):
        return block(x, w) if policy == 3 else x

    with recollect.installed():
        region = functools.partial(called_torchs, policy=3)
        compiled_ops(through(lambda _, *args: region(with_policy, *args)), calls=1)


@pytest.mark.parametrize("engine", [None, "replay"])
def test_compiled_code_says_that_it_offloads_nothing_and_keeps_the_result(engine):
    given = policy.offload_ops(aten.mm)
    region = functools.partial(recollect.checkpoint, policy=given, engine=engine)
    with pytest.warns(UserWarning, match="offload_ops.*compiled code offloads nothing"):
        _, backward = compiled_ops(through(region), calls=1)
    assert backward["aten.mm.default"] == 4


def test_compiled_code_says_that_modules_are_not_offloaded():
    model = recollect.checkpointed(
        nn.Sequential(Block(), nn.Tanh()), policy=policy.offload_modules("0.up")
    )
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True)
    with pytest.warns(UserWarning, match="offload_modules.*compiled code offloads nothing"):
        compiled(torch.ones(2, 4)).sum().backward()
    _, backward = graphs.ops()
    assert backward["aten.addmm.default"] == 0


@pytest.mark.parametrize(
    "options",
    [{"offload_inputs": True}, {"policy": [aten.mm], "store": recollect.store.HostStore()}],
    ids=["offload_inputs", "store"],
)
def test_compiled_code_says_that_it_holds_nothing_elsewhere(options):
    region = functools.partial(recollect.checkpoint, **options)
    with pytest.warns(UserWarning, match="have no effect in compiled code"):
        compiled_ops(through(region), calls=1)
    wrapped = recollect.checkpointed(block, **options)
    with pytest.warns(UserWarning, match="have no effect in compiled code"):
        compiled_ops(through(lambda _, *args: wrapped(*args)), calls=1)
    with (
        recollect.installed(**options),
        pytest.warns(UserWarning, match="have no effect in compiled code"),
    ):
        compiled_ops(through(called_torchs), calls=1)


# --- graph breaks ---------------------------------------------------------------------------------

# Dynamo reads `.grad` of what crosses a graph break, and torch warns about that.
BREAKS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def called(function, policy):
    return functools.partial(recollect.checkpoint, function, policy=policy)


def wrapped(function, policy):
    return recollect.checkpointed(function, policy=policy)


def wrapped_module(function, policy):
    class Region(nn.Module):
        def forward(self, x, w):
            return function(x, w)

    return recollect.checkpointed(Region(), policy=policy)


@BREAKS
@pytest.mark.parametrize("form", [called, wrapped, wrapped_module])
@pytest.mark.parametrize("policy", [None, [aten.mm]], ids=str)
def test_a_region_that_breaks_the_graph_runs_in_eager(policy, form):
    seen = []

    def breaking(x, w):
        y = x @ w
        torch._dynamo.graph_break()
        seen.append(recollect.is_recomputing())
        return (y.sin() @ w).exp()

    region = form(breaking, policy)

    def step(x, w):
        return region(x + 1, w).cos()

    inputs = leaves()
    expected = gradients(through(plain, breaking), inputs)
    compiled = torch.compile(step, backend="aot_eager")
    for _ in range(3):
        seen.clear()
        assert_same(gradients(compiled, inputs), expected)
        assert seen == [False, True]


@BREAKS
def test_a_graph_break_beside_a_region_leaves_the_region_compiled():
    def step(x, w):
        x = x + 1
        torch._dynamo.graph_break()
        return recollect.checkpoint(block, x, w).cos()

    graphs = Graphs()
    inputs = leaves()
    compiled = torch.compile(step, backend=graphs.backend)
    for _ in range(2):
        assert_same(gradients(compiled, inputs), gradients(through(plain), inputs))
    _, backward = graphs.ops()
    assert backward["aten.mm.default"] == 4 + 2


# --- compiled code in a region --------------------------------------------------------------------

EAGER_REGIONS = {
    "checkpoint": recollect.checkpoint,
    "policy": functools.partial(recollect.checkpoint, policy=[aten.mm]),
    "debug": functools.partial(recollect.checkpoint, debug=True, early_stop=False),
    "compat": functools.partial(compat.checkpoint, use_reentrant=False),
}


@pytest.mark.parametrize("region", EAGER_REGIONS.values(), ids=EAGER_REGIONS)
def test_compiled_code_in_a_region_is_right_and_compiled_once(region):
    graphs = Graphs()
    compiled = torch.compile(block, backend=graphs.backend, fullgraph=True)
    inputs = leaves()
    expected = gradients(block, inputs)
    for _ in range(3):
        assert_same(gradients(functools.partial(region, compiled), inputs), expected)
    assert (len(graphs.forward), len(graphs.backward)) == (1, 1)


def test_compiled_code_in_a_reentrant_region_is_compiled_for_both_grad_modes():
    counter = CompileCounter()
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    x, w = leaves()
    with torch._dynamo.config.patch(error_on_recompile=False):
        for _ in range(3):
            x.grad = w.grad = None
            recollect.checkpoint(compiled, x, w, engine="reentrant").sum().backward()
    assert counter.frame_count == 2  # forward runs without grad, the rerun with it
    assert_same([x.grad, w.grad], torch.autograd.grad(block(x, w).sum(), [x, w]))


def test_a_compiled_module_can_be_wrapped():
    torch.manual_seed(0)
    inner = Block()
    expected = model_gradients(inner, inner)
    counter = CompileCounter()
    model = recollect.checkpointed(torch.compile(inner, backend=counter))
    for _ in range(3):
        assert_same(model_gradients(inner, model), expected)
    assert recollect.unwrap(model) is model
    assert_same(model_gradients(inner, model), expected)
    assert counter.frame_count == 1


# --- the default backend --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("policy", [None, [aten.mm]], ids=str)
def test_with_inductor(policy):
    def dropped(x, w):
        return torch.nn.functional.dropout(block(x, w), 0.5)

    region = functools.partial(recollect.checkpoint, policy=policy)
    inputs = leaves()
    expected = gradients(torch.compile(through(plain, dropped), fullgraph=True), inputs)
    torch._dynamo.reset()
    compiled = torch.compile(through(region, dropped), fullgraph=True)
    for _ in range(2):
        for ours, theirs in zip(gradients(compiled, inputs), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


class Registers(nn.Module):
    """Gives itself a module in each call, as some models do with rotary embeddings."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.act = nn.ReLU()
        return self.act(self.linear(x))


def compilations(model, run):
    """How many graphs are compiled for twelve equal steps."""
    torch._dynamo.reset()
    counter = CompileCounter()
    with torch._dynamo.config.patch(error_on_recompile=False):
        compiled = torch.compile(model, backend=counter)
        for _ in range(12):
            run(compiled)
    return counter.frame_count


def region_elsewhere():
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    recollect.checkpoint(block, torch.randn(2, 4, requires_grad=True)).sum().backward()


def test_a_region_elsewhere_causes_no_recompilation():
    def run(model):
        model(torch.ones(2, 4)).sum().backward()

    expected = compilations(Registers(), run)
    region_elsewhere()
    assert compilations(Registers(), run) == expected


def test_a_region_between_two_calls_causes_no_recompilation():
    def run(model):
        model(torch.ones(2, 4)).sum().backward()

    def run_with_region(model):
        run(model)
        region_elsewhere()

    assert compilations(Registers(), run_with_region) == compilations(Registers(), run)


def test_a_region_elsewhere_causes_no_recompilation_of_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    ids = torch.arange(8).reshape(2, 4)

    def run(model):
        model(input_ids=ids, labels=ids).loss.backward()

    expected = compilations(transformers.LlamaForCausalLM(config), run)
    region_elsewhere()
    assert compilations(transformers.LlamaForCausalLM(config), run) == expected


def test_the_reentrant_engine_adds_no_graphs_to_a_compiled_backward():
    from torch._dynamo import compiled_autograd

    graphs: list[torch.fx.GraphModule] = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    x = torch.rand(4, 4, requires_grad=True)
    torch.compiler.reset()
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend=backend)):
        recollect.checkpoint(lambda x: x.sin().sum(), x, use_reentrant=True).backward()
    assert torch.equal(x.grad, x.detach().cos())
    ops = [[node.target for node in g.graph.find_nodes(op="call_method")] for g in graphs]
    if torch.__version__.startswith("2.13"):  # others leave the function to eager code
        assert ["sin", "sum"] in ops
    assert ["detach"] not in ops
