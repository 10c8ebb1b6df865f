"""The compiled modules of a model, and how they are compiled again with a backend of ours (P7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from recollect._torch.inductor import (
    UnknownTorch,
    backend_in,
    backend_name,
    called_around,
    called_by_compiler,
    check_names,
    compiled_with,
    compiler_context,
    is_compiled_here,
    set_called_by_compiler,
    shares_code,
    wraps_compiled,
)
from recollect.compiled.backend import Compiler
from recollect.errors import CheckpointError


@dataclass(frozen=True)
class Site:
    """A compiled module in a model."""

    path: str  #: its name in the model
    module: nn.Module  #: the module
    compiler: Compiler  #: what it was compiled with


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
        if any(module is site.module for site in found):
            continue  # it is in several places
        if is_compiled_here(module) and not wraps_compiled(module):
            backend = backend_in(compiler_context(module))
            compiler = Compiler.of(backend)
            if compiler is None:
                which = f"its {path}" if path else "it"
                raise ValueError(
                    f"model: {which} is compiled with backend="
                    f"{backend_name(backend)!r}, which does not support plans. Compile it with "
                    "backend='inductor' (the default), 'recollect' or 'aot_eager'"
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


#: What compiled modules call.
Called = dict[nn.Module, Any]


def wrapped(called: Called, wrap: Callable[[int, Callable[..., Any]], Any]) -> Called:
    """What modules call, wrapped. ``wrap``: from the number of a module and what it calls."""
    return {
        module: called_around(each, partial(wrap, number))
        for number, (module, each) in enumerate(called.items())
    }


def called_now(sites: Sequence[Site]) -> Called:
    """What the modules call now."""
    return {site.module: called_by_compiler(site.module) for site in sites}


def prepare(
    sites: Sequence[Site],
    make_backend: Callable[[Compiler, int], Callable[..., Any]],
    variants: Sequence[int] | None = None,
) -> Called:
    """What the modules call if they are compiled with backends of ours.

    Sites of one variant that were compiled alike have one backend, and share their code.
    """
    called: Called = {}
    backends: list[tuple[Compiler, int, Any]] = []
    made: list[tuple[Site, Any, Any]] = []
    for number, site in enumerate(sites):
        variant = 0 if variants is None else variants[number]
        known = [b for c, v, b in backends if v == variant and c == site.compiler]
        backend = known[0] if known else make_backend(site.compiler, variant)
        backends.append((site.compiler, variant, backend))
        alike = [c for s, b, c in made if b is backend and shares_code(s.module, site.module)]
        called[site.module] = compiled_with(site.module, backend, alike[0] if alike else None)
        if not alike:
            with installed({site.module: called[site.module]}):
                made.append((site, backend, compiler_context(site.module)))
    return called


@contextmanager
def installed(called: Called) -> Iterator[None]:
    """A context in which compiled modules call something else."""
    before = {module: called_by_compiler(module) for module in called}
    install(called)
    try:
        yield
    finally:
        install(before)


def install(called: Called) -> None:
    """Have compiled modules call something else from now on."""
    for module, each in called.items():
        set_called_by_compiler(module, each)
