"""Putting recollect in the place of torch.utils.checkpoint, and taking it out without a trace."""

import importlib.util
import subprocess
import sys
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from recollect import compat
from recollect.rerun import selective
from tests._support import sampled

NAMES = [*compat.__all__, "_infer_device_type", "_checkpoint_without_reentrant_generator"]
if torch.__version__ >= "2.15":
    NAMES.append("_checkpoint_without_reentrant_generator_impl")
THEIRS = {name: getattr(torch_checkpoint, name) for name in NAMES}

FROM_TORCH = """
import torch.utils.checkpoint
import torch.utils.checkpoint as whole
from torch.utils.checkpoint import checkpoint as ckpt, CheckpointError
from torch.utils.checkpoint import noop_context_fn, SAC_IGNORED_OPS, _infer_device_type
"""

FROM_RECOLLECT = """
from recollect.compat import checkpoint
from recollect import CheckpointPolicy as Policy
"""


@pytest.fixture(autouse=True)
def restored():
    yield
    recollect.uninstall()
    assert torch_checkpoint.checkpoint is THEIRS["checkpoint"]


@pytest.fixture
def make_module(tmp_path):
    """Writes a module to disk and imports it, for the duration of a test."""
    made = []

    def make(name, source):
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        made.append(name)
        spec.loader.exec_module(module)
        return module

    yield make
    for name in made:
        del sys.modules[name]


OWN = {"recollect", "hypothesis"}


def snapshot():
    """Every attribute of every loaded module but ours, and hypothesis's, which keeps times."""
    return {
        (name, attribute): id(value)
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] not in OWN
        for attribute, value in list(vars(module).items())
    }


def assert_from(module, source):
    """The names of FROM_TORCH in ``module`` are those of ``source``."""
    assert module.ckpt is source.checkpoint
    assert module.CheckpointError is source.CheckpointError
    assert module.noop_context_fn is source.noop_context_fn
    assert module.SAC_IGNORED_OPS is source.SAC_IGNORED_OPS
    assert module._infer_device_type is source._infer_device_type
    assert module.whole is torch_checkpoint


class Theirs:
    """torch's own names, for ``assert_from``."""

    __getattr__ = staticmethod(THEIRS.__getitem__)


THEIR_MODULE = Theirs()


def names_in_torch():
    return {name: getattr(torch_checkpoint, name) for name in NAMES}


def test_every_name_of_torch_is_replaced_and_restored():
    recollect.install()
    assert names_in_torch() == {name: getattr(compat, name) for name in NAMES}
    recollect.uninstall()
    assert names_in_torch() == THEIRS


def test_the_dispatch_modes_that_others_subclass_are_ours():
    with recollect.installed():
        assert torch_checkpoint._CachingTorchDispatchMode is selective.RecordMode
        assert torch_checkpoint._CachedTorchDispatchMode is selective.RecomputeMode


def test_nothing_else_changes_and_everything_is_put_back():
    before = snapshot()
    recollect.install()
    during = snapshot()
    changed = {key for key in before if before[key] != during[key]}
    # How the compiler knows torch's function, if it is loaded.
    changed.discard(("torch._dynamo.variables.builder", "is_utils_checkpoint"))
    modes = {"_CachingTorchDispatchMode", "_CachedTorchDispatchMode"}
    home = {("torch.utils.checkpoint", name) for name in modes.union(NAMES)}
    assert home <= changed
    assert {before[key] for key in changed} == {before[key] for key in home}
    assert during.keys() == before.keys()
    recollect.uninstall()
    assert snapshot() == before


def test_modules_that_took_names_before(make_module):
    module = make_module("took_names_before", FROM_TORCH)
    assert_from(module, THEIR_MODULE)
    recollect.install()
    assert_from(module, compat)
    recollect.uninstall()
    assert_from(module, THEIR_MODULE)


def test_modules_that_take_names_while_installed(make_module):
    recollect.install()
    module = make_module("took_names_while_installed", FROM_TORCH)
    assert_from(module, compat)
    recollect.uninstall()
    assert_from(module, THEIR_MODULE)
    recollect.install()
    assert_from(module, compat)


@pytest.mark.parametrize("when", ["before", "while installed"])
def test_modules_that_ask_for_recollect_keep_it(make_module, when):
    if when == "before":
        module = make_module("asked_for_recollect", FROM_RECOLLECT)
        recollect.install()
    else:
        recollect.install()
        module = make_module("asked_for_recollect", FROM_RECOLLECT)
    recollect.uninstall()
    assert module.checkpoint is compat.checkpoint
    assert module.Policy is recollect.CheckpointPolicy


def test_a_module_without_source_is_restored():
    module = sys.modules["without_source"] = ModuleType("without_source")
    try:
        with recollect.installed():
            module.checkpoint = torch_checkpoint.checkpoint
            assert module.checkpoint is compat.checkpoint
        assert module.checkpoint is THEIRS["checkpoint"]
    finally:
        del sys.modules["without_source"]


def test_both_are_idempotent():
    before = snapshot()
    recollect.uninstall()
    assert snapshot() == before
    recollect.install()
    during = snapshot()
    recollect.install()
    assert snapshot() == during
    recollect.uninstall()
    recollect.uninstall()
    assert snapshot() == before


def test_installed_nests():
    with recollect.installed():
        with recollect.installed():
            assert torch_checkpoint.checkpoint is compat.checkpoint
        assert torch_checkpoint.checkpoint is compat.checkpoint
    assert torch_checkpoint.checkpoint is THEIRS["checkpoint"]


def test_installed_inside_install_leaves_it_installed():
    recollect.install()
    with recollect.installed():
        pass
    assert torch_checkpoint.checkpoint is compat.checkpoint


def test_installed_restores_after_an_exception():
    with pytest.raises(LookupError), recollect.installed():
        raise LookupError
    assert torch_checkpoint.checkpoint is THEIRS["checkpoint"]


def test_uninstall_inside_installed_is_not_undone():
    with recollect.installed():
        recollect.uninstall()
        assert torch_checkpoint.checkpoint is THEIRS["checkpoint"]
    assert torch_checkpoint.checkpoint is THEIRS["checkpoint"]


def test_a_region_goes_backward_after_uninstall_and_after_install():
    x = torch.linspace(-1, 1, 5).requires_grad_()

    def region():
        return torch_checkpoint.checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False)

    def gradient(out):
        return torch.autograd.grad(out.sum(), x)[0]

    plain = gradient(x.sin().exp())
    with recollect.installed():
        out = region()
    assert torch.equal(gradient(out), plain)
    out = region()
    with recollect.installed():
        assert torch.equal(gradient(out), plain)


# --- options --------------------------------------------------------------------------------------


def runs(call=None, **options):
    """How often a region runs in forward and backward; and the matrix products of backward."""
    count = []
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)

    def region(x):
        count.append(1)
        return (x @ w).sin()

    out = (call or torch_checkpoint.checkpoint)(region, x, **options)
    with Ops() as ops:
        out.sum().backward()
    plain = torch.autograd.grad((x @ w).sin().sum(), w)[0]
    assert torch.equal(w.grad, plain)
    return len(count), ops.names.count("aten::mm")


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


RERUN, REPLAY, KEPT = (2, 3), (1, 3), (2, 2)


def test_the_options_of_install_are_those_of_all_calls():
    recollect.install()
    assert runs(use_reentrant=False) == RERUN
    recollect.install(engine="replay")
    assert runs(use_reentrant=False) == REPLAY
    assert runs() == REPLAY  # and no warning about use_reentrant
    recollect.install()  # changes nothing
    assert runs(use_reentrant=False) == REPLAY
    recollect.install(policy=recollect.policy.matmuls())
    assert runs(use_reentrant=False) == KEPT
    recollect.install(engine="replay", policy=recollect.policy.matmuls())
    assert runs(use_reentrant=False) == (1, 2)
    recollect.uninstall()
    recollect.install()
    assert runs(use_reentrant=False) == RERUN


def test_the_options_of_a_block_end_with_it():
    with recollect.installed(engine="replay"):
        assert runs(use_reentrant=False) == REPLAY
        with recollect.installed(engine="rerun"):
            assert runs(use_reentrant=False) == RERUN
            with recollect.installed():
                assert runs(use_reentrant=False) == RERUN
        assert runs(use_reentrant=False) == REPLAY
    assert torch_checkpoint.checkpoint is THEIRS["checkpoint"]
    assert runs(compat.checkpoint, use_reentrant=False) == RERUN
    recollect.install()
    with recollect.installed(engine="replay"):
        assert runs(use_reentrant=False) == REPLAY
    assert runs(use_reentrant=False) == RERUN


def test_what_a_call_says_wins():
    recollect.install(engine="replay", policy=recollect.policy.matmuls())
    with pytest.warns(UserWarning, match=r"install\(engine=\.\.\., policy=\.\.\.\) has no effect"):
        assert runs(use_reentrant=True) == RERUN
    assert runs(use_reentrant=False, context_fn=compat.noop_context_fn) == (1, 2)
    contexts = partial(compat.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    assert runs(use_reentrant=False, context_fn=contexts) == KEPT
    assert runs(use_reentrant=False, debug=True) == KEPT
    assert runs(use_reentrant=False, determinism_check="none") == KEPT
    assert runs(engine="rerun", policy=None) == RERUN
    assert runs(engine="reentrant") == RERUN
    recollect.install(engine="reentrant")
    assert runs() == RERUN
    assert runs(use_reentrant=False, debug=True) == RERUN


def test_a_call_may_have_options_of_ours():
    recollect.install()
    assert runs(engine="replay") == REPLAY
    assert runs(engine="replay", policy=recollect.policy.matmuls(), early_stop=False) == (1, 2)
    with pytest.raises(ValueError, match=r"engine should be one of .* but got 'replya'"):
        runs(engine="replya")
    with pytest.raises(ValueError, match="use_reentrant=True contradicts engine='replay'"):
        runs(engine="replay", use_reentrant=True)
    recollect.uninstall()
    with pytest.raises(TypeError, match="unexpected keyword argument 'engine'"):
        runs(compat.checkpoint, engine="replay", use_reentrant=False)


def test_a_parameter_of_the_function_is_the_functions():
    seen = []

    class Layer(nn.Module):
        def forward(self, x, engine=None, **more):
            seen.append((engine, sorted(more)))
            return x.sin()

    layer, x = Layer(), torch.ones(2, requires_grad=True)
    recollect.install()
    for call in (layer, layer.__call__, layer.forward, partial(layer.__call__)):
        torch_checkpoint.checkpoint(
            call, x, engine="diesel", policy=None, other=1, use_reentrant=False
        )
    assert seen == [("diesel", ["other"])] * 4


def test_the_options_are_checked_before_anything_changes():
    before = snapshot()
    with pytest.raises(ValueError, match="engine should be one of"):
        recollect.install(engine="replya")
    with (
        pytest.raises(ValueError, match="store has no effect"),
        recollect.installed(store=Memory()),
    ):
        raise AssertionError
    assert snapshot() == before
    recollect.install(engine="replay")
    with pytest.raises(ValueError, match="engine should be one of"):
        recollect.install(engine="replya")
    assert runs(use_reentrant=False) == REPLAY


class Memory(recollect.store.Store):
    def put(self, tensor):
        return tensor

    def get(self, handle):
        return handle


def test_a_sequence_has_them_too():
    count = []
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    model[0].register_forward_hook(lambda *_: count.append(1))
    recollect.install(engine="replay")
    for options in ({}, {"use_reentrant": False}):
        x = torch.ones(2, 3, requires_grad=True)
        torch_checkpoint.checkpoint_sequential(model, 2, x, **options).sum().backward()
    assert len(count) == 2


@pytest.mark.parametrize("when", ["installed", "called"])
def test_the_layers_of_transformers(when):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.arange(1, 13).reshape(2, 6)
    count = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: count.append(1))

    def step():
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = step()
    options = {"engine": "replay"}
    with recollect.installed(**(options if when == "installed" else {})):
        model.gradient_checkpointing_enable(None if when == "installed" else options)
        count.clear()
        for _ in range(3):
            assert all(map(torch.equal, step(), plain))
    assert len(count) == 3


# --- torch.distributed, which takes names at import -----------------------------------------------


class Recorder(nn.Module):
    """Says in which engine it is being run again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.recomputing = []

    def forward(self, x):
        self.recomputing.append(recollect.is_recomputing())
        return self.linear(x).sin()


def wrapped(module):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module)


def composed(module):
    from torch.distributed._composable import checkpoint

    checkpoint(module)
    return module


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [wrapped, composed])
def test_distributed_checkpointing_is_routed(make):
    def step():
        torch.manual_seed(0)
        recorder = Recorder()
        model = make(recorder)
        model(torch.ones(2, 4)).sum().backward()
        return recorder.recomputing, recorder.linear.weight.grad

    torch.manual_seed(0)
    plain = Recorder()
    plain(torch.ones(2, 4)).sum().backward()

    step()  # the modules are imported now
    with recollect.installed():
        step()  # and torch has noted what it looks up once
    before = snapshot()
    with recollect.installed():
        runs, grad = step()
    assert runs == [False, True]
    assert torch.equal(grad, plain.linear.weight.grad)
    assert snapshot() == before
    runs, grad = step()
    assert runs == [False, False]  # torch's again, which does not tell
    assert torch.equal(grad, plain.linear.weight.grad)


# --- the order of imports -------------------------------------------------------------------------

USE = """
import torch
out = ckpt(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False)
from recollect import compat
assert ckpt is compat.checkpoint
"""

ORDERS = {
    "theirs first": "from torch.utils.checkpoint import checkpoint as ckpt\n"
    "import recollect; recollect.install()" + USE,
    "ours first": "import recollect; recollect.install()\n"
    "from torch.utils.checkpoint import checkpoint as ckpt" + USE,
    "the wrapper first": "import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as w\n"
    "import recollect; recollect.install()\n"
    "ckpt = w.torch_utils_checkpoint" + USE,
    "the wrapper last": "import recollect; recollect.install()\n"
    "import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as w\n"
    "ckpt = w.torch_utils_checkpoint" + USE,
}


@pytest.mark.parametrize("order", sampled(ORDERS, usual=["ours first", "the wrapper first"]))
def test_the_order_of_imports_does_not_matter(order):
    subprocess.run([sys.executable, "-c", ORDERS[order]], check=True)


COMPILED = """
import sys
import torch, torch.utils.checkpoint, recollect
assert "torch._dynamo.variables.builder" not in sys.modules
recollect.install()
assert "torch._dynamo.variables.builder" not in sys.modules
layer = torch.nn.Linear(4, 4)

@torch.compile(backend="aot_eager", fullgraph=True)
def region(x):
    return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, engine="replay")

region(torch.randn(2, 4)).sum().backward()
recollect.uninstall()
torch.compiler.reset()
torch.compile(
    lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False),
    backend="aot_eager",
    fullgraph=True,
)(torch.randn(2, 4)).sum().backward()
"""


def test_a_compiler_that_is_loaded_later_knows_our_options():
    subprocess.run([sys.executable, "-c", COMPILED], check=True)
