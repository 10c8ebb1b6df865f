"""The public surface: complete, honest, and free of side effects on import."""

import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch.utils import checkpoint as torch_checkpoint

import recollect
from recollect import policy, store
from recollect.options import Options

#: Without those of frameworks that are not installed.
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(recollect.__path__, "recollect.")
    if not info.name.startswith("recollect.integrations.")
    or importlib.util.find_spec(info.name.rpartition(".")[2])
)

MODERN = {
    "Explanation",
    "Frontier",
    "InfeasibleBudget",
    "LargestBatch",
    "Plan",
    "PlanWarning",
    "Policy",
    "RecollectWarning",
    "checkpointed",
    "explain",
    "fit",
    "frontier",
    "install",
    "installed",
    "is_recomputing",
    "largest_batch",
    "plan",
    "policy",
    "set_checkpoint_version_guard",
    "store",
    "tag",
    "uninstall",
    "unwrap",
}


def test_the_package_exports_the_contract():
    assert set(recollect.__all__) == set(torch_checkpoint.__all__) | MODERN


def test_everything_public_in_the_package_is_exported():
    public = {
        name
        for name, value in vars(recollect).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    } | {"policy", "store"}  # which are modules, and public
    assert public == set(recollect.__all__)


def test_only_public_names_are_listed():
    listed = {name for name in dir(recollect) if not name.startswith("__")}
    assert listed == {*recollect.__all__, "compat"}


def test_every_module_is_imported_by_its_name():
    script = f"""
import sys
import recollect
for name in {MODULES!r}:
    if not name.endswith("__main__"):  # which runs
        exec(f"import {{name}} as found")
        assert found is sys.modules[name], name
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_functions_stay_functions():
    for name in MODULES:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    modules = {
        name for name in recollect.__all__ if isinstance(getattr(recollect, name), ModuleType)
    }
    assert modules == {"policy", "store"}


@pytest.mark.parametrize("name", ["recollect", *MODULES])
def test_all_is_complete_and_without_repeats(name):
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert len(exported) == len(set(exported))
    assert [each for each in exported if not hasattr(module, each)] == []


@pytest.mark.parametrize("name", recollect.__all__)
def test_exported_names_are_documented(name):
    value = getattr(recollect, name)
    if name != "SAC_IGNORED_OPS":  # a set of ops
        assert value.__doc__


def test_torch_is_imported_when_something_is_used_and_not_before():
    script = """
import sys
import recollect
assert recollect.__version__
assert not hasattr(recollect, "__wrapped__")
assert "torch" not in sys.modules
try:
    recollect.fitt
except AttributeError as error:
    assert str(error) == "module 'recollect' has no attribute 'fitt'"
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("first", ["installing", "compat", "policy", "planning.api", "cli"])
def test_any_module_may_be_the_first(first):
    script = f"import recollect.{first}; import recollect; assert recollect.fit and recollect.store"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_first_use_may_be_inside_of_compiled_code():
    script = """
import recollect
import torch
@torch.compile(backend="eager", fullgraph=True)
def run(x):
    return recollect.checkpoint(torch.sin, x)
x = torch.ones(4, requires_grad=True)
run(x).sum().backward()
assert torch.equal(x.grad, torch.cos(x))
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_documentation_begins_with_fit():
    assert recollect.__doc__.index("fit(") < recollect.__doc__.index("``checkpoint``")


def test_importing_changes_nothing_and_loads_no_compiler():
    script = """
import sys, warnings
warnings.simplefilter("error")
import torch, torch.utils.checkpoint as ckpt
before, modules = dict(vars(ckpt)), set(sys.modules)
import recollect
recollect.fit
assert dict(vars(ckpt)) == before
heavy = ("torch._dynamo", "torch._inductor")
added = [name for name in set(sys.modules) - modules if name.startswith(heavy)]
assert not added, added
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (policy.matmuls() | policy.save_ops(torch.ops.aten.mm), "matmuls() | save_ops(aten.mm)"),
        (store.HostStore(), None),
        (recollect.GraphExecGroup(), None),
        (
            recollect.SelectiveCheckpointContext(is_recompute=False, op_output=torch.ones(9, 9)),
            "SelectiveCheckpointContext(is_recompute=False)",
        ),
        (recollect.explain(torch.sin, torch.ones(4, requires_grad=True)), None),
        (recollect.explain(torch.sin, torch.ones(4, requires_grad=True)).totals, None),
        (Options(), "Options()"),
        (Options(engine="replay", early_stop=False), "Options(early_stop=False, engine='replay')"),
        (recollect.InfeasibleBudget("too little", least=3), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_representation_is_one_short_line(value, text):
    assert "\n" not in repr(value)
    assert len(repr(value)) < 120
    assert text is None or repr(value) == text


def test_a_name_that_was_patched_before_the_first_use_stays() -> None:
    code = (
        "import recollect; recollect.fit = 1; recollect.plan; assert recollect.fit == 1; "
        "assert not hasattr(recollect, 'a.b')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
