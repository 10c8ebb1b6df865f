"""The layers of docs/internals.md, checked by reading the imports of every module."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "recollect"
INTERNALS = PACKAGE.parents[1] / "docs" / "internals.md"

LAYERS = [
    {"_version", "errors", "settings", "observer", "_torch", "graph"},
    {"state", "checks", "policy", "store", "naming", "report"},
    {"rerun", "replay"},
    {"options", "region", "modules"},
    {"api", "compat", "explaining", "installing"},
    {"planning", "compiled"},
    {"__init__", "_exports"},
    {"cli", "integrations", "__main__"},
]

PATHS = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")
}
TREES = {name: ast.parse(path.read_text()) for name, path in PATHS.items()}

#: Private for torch's taste, yet documented: the version counter of a tensor.
PUBLIC_IN_SPITE_OF_THEIR_NAME = {"_version"}


def layer(name):
    """The number of the layer that holds the module ``name``, such as ``state/rng``."""
    first = name.partition("/")[0]
    (number,) = [number for number, names in enumerate(LAYERS) if first in names]
    return number


def imports(name):
    """The modules of recollect that the module ``name`` imports, at whatever depth of its code."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {_module(n) for n in names if n.partition(".")[0] == "recollect"}
    return found


def _module(dotted):
    """The module behind a dotted name, whose last part may be something inside the module."""
    path = dotted.removeprefix("recollect").removeprefix(".").replace(".", "/")
    while path and path not in TREES and f"{path}/__init__" not in TREES:
        path = path.rpartition("/")[0]
    return path if path in TREES else f"{path}/__init__".removeprefix("/")


def test_every_module_has_a_layer():
    assert {name.partition("/")[0] for name in TREES} == set().union(*LAYERS)


@pytest.mark.parametrize("name", sorted(TREES))
def test_a_module_imports_from_its_own_layer_and_below(name):
    assert [other for other in imports(name) if layer(other) > layer(name)] == []


def test_imports_make_no_circle():
    order = list(TopologicalSorter({name: imports(name) for name in TREES}).static_order())
    assert set(order) == set(TREES)


def test_the_table_in_the_docs_is_the_one_that_is_enforced():
    rows = re.findall(r"^\| (\d) \| `(\w+)` \|", INTERNALS.read_text(), re.MULTILINE)
    documented = {(int(number), name) for number, name in rows}
    names = set().union(*LAYERS) - {"__init__"}
    assert documented == {(layer(name), name) for name in names}


def test_the_steps_of_the_drawings_are_cited_where_the_code_is():
    drawn = set(re.findall(r"^([RP]\d+) ", INTERNALS.read_text(), re.MULTILINE))
    drawn |= set(re.findall(r"  ([RP]\d+)  ", INTERNALS.read_text()))
    cited = {step for tree in TREES.values() for step in _cited(tree)}
    assert {"R1", "R10", "P1", "P8"} <= drawn
    assert cited == drawn


def _cited(tree):
    first_line = (ast.get_docstring(tree) or "").partition("\n")[0]
    return re.findall(r"\(([RP]\d+)\)", first_line)


PURE = ("graph/", "planning/solving/", "report/")


@pytest.mark.parametrize("name", sorted(name for name in TREES if name.startswith(PURE)))
def test_what_plans_and_shows_is_pure(name):
    nodes = [
        node for node in ast.walk(TREES[name]) if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    names = {
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in nodes
        for alias in node.names
    }
    assert not {each for each in names if each.partition(".")[0] in ("torch", "numpy")}
    assert all(other.startswith(PURE) for other in imports(name))


def private_uses(tree):
    """Dotted names below ``torch`` with a private part, and attributes such as _torchdynamo_..."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            dotted = [ast.unparse(node)]
        else:
            continue
        for name in dotted:
            parts = name.split(".")
            of_torch = parts[0].startswith("torch") and any(map(_is_private, parts))
            # Beside torch's own names, marks that it looks for on objects of others.
            if of_torch or parts[-1].startswith("_torch"):
                yield name


def _is_private(part):
    dunder = part.startswith("__") and part.endswith("__")
    return part.startswith("_") and not dunder and part not in PUBLIC_IN_SPITE_OF_THEIR_NAME


@pytest.mark.parametrize("name", sorted(name for name in TREES if not name.startswith("_torch/")))
def test_private_names_of_torch_are_used_in_their_package_only(name):
    assert list(private_uses(TREES[name])) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch._ops", {"torch._ops"}),
        ("from torch.overrides import _x", {"torch.overrides._x"}),
        ("torch._C.f()", {"torch._C", "torch._C.f"}),
        ("f._torchdynamo_x = 1", {"f._torchdynamo_x"}),
        ("torch.Tensor.__add__, tensor._version, self._own", set()),
    ],
)
def test_the_search_for_private_names_finds_them(source, found):
    assert set(private_uses(ast.parse(source))) == found
