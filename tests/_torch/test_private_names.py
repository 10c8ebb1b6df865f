"""Private names of torch: a release that drops or changes one fails here, by name."""

import ast
import importlib
from pathlib import Path

import pytest
import torch

import recollect._torch

PACKAGE = Path(recollect._torch.__file__).parent
SOURCES = {path.stem: path.read_text() for path in PACKAGE.glob("*.py")}

#: Looked up with a fallback: absent from torch 2.11.
OPTIONAL = {
    "torch._C._autograd._make_saved_tensor",
    "torch.compiler._is_non_strict_tracing",
    "torch._higher_order_ops.wrap.inductor_compiled_code",
}


def relied_upon():
    """Every dotted name below torch that the sources of ``_torch`` use."""
    names = set()
    for node in [node for source in SOURCES.values() for node in ast.walk(ast.parse(source))]:
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "torch":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            for alias, name in (("_autograd.", "torch._C._autograd."), *ALIASES):
                if dotted.startswith(alias):
                    dotted = name + dotted.removeprefix(alias)
            if dotted.startswith("torch."):
                names.add(dotted)
    return sorted(names)


ALIASES = (
    ("_C.", "torch._C."),
    ("_device.", "torch.utils._device."),
    ("_python_dispatch.", "torch.utils._python_dispatch."),
    ("forward_ad.", "torch.autograd.forward_ad."),
    ("_eval_frame.", "torch._C._dynamo.eval_frame."),
    ("partitioners.", "torch._functorch.partitioners."),
    ("pyfunctorch.", "torch._functorch.pyfunctorch."),
    ("_functorch.", "torch._C._functorch."),
)


def find(dotted):
    """The object behind a dotted name, importing modules on the way."""
    found, path = torch, "torch"
    for part in dotted.split(".")[1:]:
        path += f".{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", relied_upon())
def test_the_name_exists(name):
    try:
        find(name)
    except (AttributeError, ModuleNotFoundError):
        pytest.fail(f"torch {torch.__version__} has no {name}")


def test_the_search_for_names_finds_them():
    names = relied_upon()
    assert len(names) > 30
    assert {
        "torch._C._set_grad_enabled",
        "torch._C._autograd._push_saved_tensors_default_hooks",
        "torch._C._dynamo.eval_frame.get_eval_frame_callback",
        "torch._ops.OpOverload",
    } <= set(names)


@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_what_came_with_torch_2_12_is_found_there(name):
    if torch.__version__ >= "2.12":
        find(name)
