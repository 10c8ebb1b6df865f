"""Putting recollect in the place of torch.utils.checkpoint, and taking it out without a trace."""

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

import recollect
from recollect import compat
from recollect.rerun import selective
from tests._support import sampled

NAMES = [*compat.__all__, "_infer_device_type", "_checkpoint_without_reentrant_generator"]
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
