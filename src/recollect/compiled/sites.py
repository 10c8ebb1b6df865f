"""The compiled modules of a model, and how they are compiled again with a backend of ours (P7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recollect._torch.inductor import (
    UnknownTorch,
    backend_in,
    backend_name,
    called_by_compiler,
    check_names,
    compiled_with,
    compiler_context,
    is_compiled_here,
    set_called_by_compiler,
    shares_code,
)
from recollect.compiled.backend import Compiler
from recollect.errors import CheckpointError


@dataclass(frozen=True)
class Site:
    """A compiled module in a model.

    Args:
        path: Its name in the model.
        module: The module.
        compiler: What it was compiled with.
    """

    path: str
    module: nn.Module
    compiler: Compiler


def has_sites(model: nn.Module) -> bool:
    """Whether calling ``model`` enters the compiler somewhere."""
    return any(is_compiled_here(module) for module in model.modules())


def is_compiled_throughout(model: nn.Module) -> bool:
    """Whether a model is compiled, or most of what it trains is in compiled modules."""
    if is_compiled_here(model):
        return True
    compiled = [module for module in model.modules() if is_compiled_here(module)]
    inside = {id(p): p.numel() for each in compiled for p in each.parameters()}
    return bool(compiled) and 2 * sum(inside.values()) > sum(
        parameter.numel() for parameter in model.parameters()
    )


def model_name(model: nn.Module) -> str:
    """The name of the class of a model, also if it is wrapped by ``torch.compile``."""
    return type(getattr(model, "_orig_mod", model)).__name__


def find_sites(model: nn.Module) -> list[Site]:
    """The outermost compiled modules of a model."""
    _check_torch()
    found: list[Site] = []
    pending = [("", model)]
    while pending:
        path, module = pending.pop(0)
        if is_compiled_here(module):
            backend = backend_in(compiler_context(module))
            compiler = Compiler.of(backend)
            if compiler is None:
                raise ValueError(
                    f"model: {_named(path)} is compiled with backend="
                    f"{backend_name(backend)!r}, in which a plan has no place. Compile it with "
                    "backend='inductor' (the default) or 'aot_eager'"
                )
            found.append(Site(path, module, compiler))
        else:
            children = module.named_children()
            pending += [(f"{path}.{name}" if path else name, child) for name, child in children]
    return found


def _check_torch() -> None:
    try:
        check_names()
    except UnknownTorch as error:
        raise CheckpointError(
            f"model: it is compiled, and plans for compiled models do not know torch "
            f"{torch.__version__} ({error}). Plan for the model that it was made from, which needs "
            "nothing of the compiler"
        ) from error


def _named(path: str) -> str:
    return f"its {path}" if path else "it"


#: By number of a site: what its module calls.
Called = dict[int, Any]


def prepare(sites: Sequence[Site], backend_for: Callable[[int], Callable[..., Any]]) -> Called:
    """What the modules call if the site of each number is compiled with its backend.

    Sites that were compiled alike, and have the same backend, share their code.
    """
    called: Called = {}
    made: list[tuple[Site, Any, Any]] = []
    for number, site in enumerate(sites):
        backend = backend_for(number)
        like = next(
            (
                context
                for other, used, context in made
                if used is backend and shares_code(other.module, site.module)
            ),
            None,
        )
        called[number] = compiled_with(site.module, backend, like)
        if like is None:
            with installed(sites, {number: called[number]}):
                made.append((site, backend, compiler_context(site.module)))
    return called


@contextmanager
def installed(sites: Sequence[Site], called: Called) -> Iterator[None]:
    """A context in which the compiled modules call something else."""
    before = {number: called_by_compiler(sites[number].module) for number in called}
    install(sites, called)
    try:
        yield
    finally:
        install(sites, before)


def install(sites: Sequence[Site], called: Called) -> None:
    """Have the compiled modules call something else from now on."""
    for number, each in called.items():
        set_called_by_compiler(sites[number].module, each)
