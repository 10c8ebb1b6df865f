"""Running a model with some of its modules as regions of their own (P7).

Modules are checkpointed as a whole where that is faster, and the units of a sharded model are the
regions of its plan. A planned model may meet batches for which it runs otherwise. So a module is
wrapped for as long as the plan is applied, and is a region while the schedule in effect says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.modules.lazy import LazyModuleMixin

from recollect._torch.modules import FORWARD_HOOKS, GLOBAL_FORWARD_HOOKS, sharded_part
from recollect.checks.place import warn_user
from recollect.errors import PlanWarning
from recollect.modules import OPTIONS, unwrap_module, wrap_module
from recollect.options import Options
from recollect.region import run_region


class _OfPlan(Options):
    """Under a plan, what a module counts is what it counts in the plain step."""

    counters = "restored"


#: The engines that can run a module as a whole, and the options of a region for each.
ENGINES = {"rerun": _OfPlan(), "replay": _OfPlan(engine="replay")}
#: The same, but recomputed values are compared with those of forward.
CHECKED = {"rerun": _OfPlan(determinism_check="values"), "replay": ENGINES["replay"]}


#: Called in the place of the forward of a module: with its path, the forward and its arguments.
RunRegion = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _InEffect(threading.local):
    #: The modules that are regions in this thread, each with its options, or with what runs it.
    modules: Mapping[str, Options | RunRegion] = {}


_in_effect = _InEffect()


class ModuleRegion:
    """Called in the place of the forward of the module at ``path``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._was_warned = False

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        options = _in_effect.modules.get(self.path)
        if options is None or torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        if not isinstance(options, Options):
            with _only({}):
                return options(self.path, function, args, kwargs)
        part = _sharded_part(function)
        if part is not None:
            # To run it again communicates. The plan of another process may not have that.
            self._warn(part)
            return function(*args, **kwargs)
        # Modules inside are part of this region, and run again with it.
        with _only({}):
            return run_region(function, args, kwargs, options)

    def _warn(self, part: str) -> None:
        if not self._was_warned:
            self._was_warned = True
            warn_user(
                f"the plan is not in effect for {self.path}, and the step may exceed its budget: "
                f"it has {part}, and had none when it was planned",
                PlanWarning,
            )


def _sharded_part(function: Callable[..., Any]) -> str | None:
    if not (distributed.is_available() and distributed.is_initialized()):
        return None  # without looking at every parameter
    module = getattr(function, "__self__", None)
    return sharded_part(module) if isinstance(module, nn.Module) else None


def run_modules(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    engines: Mapping[str, str],
    *,
    is_checked: bool = False,
) -> Any:
    """Call the forward of a model with modules checkpointed that are wrapped.

    ``engines``: by path of a module. ``is_checked``: compare values, at the cost of time.
    """
    options = CHECKED if is_checked else ENGINES
    with _only({path: options[engine] for path, engine in engines.items()}):
        return function(*args, **kwargs)


def run_regions(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    paths: Iterable[str],
    run: RunRegion,
) -> Any:
    """Call the forward of a model, and ``run`` for each module at ``paths`` that is wrapped."""
    with _only(dict.fromkeys(paths, run)):
        return function(*args, **kwargs)


@contextmanager
def _only(modules: Mapping[str, Options | RunRegion]) -> Iterator[None]:
    """A context in which these modules are regions, and no others."""
    before, _in_effect.modules = _in_effect.modules, modules
    try:
        yield
    finally:
        _in_effect.modules = before


def callable_paths(model: nn.Module) -> set[str]:
    """The modules that can be checkpointed: not the model itself, nor lists of modules."""
    lists = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return {name for name, each in model.named_modules() if name and not isinstance(each, lists)}


#: The packages whose modules keep nothing from one call to the next that changes what they compute.
_KNOWN = ("torch", "transformers")
#: The base of the layers that transformers itself checkpoints.
_CHECKPOINTED_LAYER = "GradientCheckpointingLayer"


def may_run_twice(module: nn.Module) -> bool:
    """Whether a module is known to compute the same when it runs again in backward.

    That cannot be seen from outside: code may count its calls, or read what the loop has changed
    since. So this holds for torch's own layers, and for those that transformers checkpoints, as
    long as there is nothing else in them, nor hooks, which would run again too.
    """
    parts = [*module.modules()]
    is_layer = any(base.__name__ == _CHECKPOINTED_LAYER for base in type(module).__mro__)
    own = _KNOWN if is_layer else _KNOWN[:1]
    return not any(GLOBAL_FORWARD_HOOKS) and all(_is_known(part, own) for part in parts)


def _is_known(module: nn.Module, packages: tuple[str, ...]) -> bool:
    return (
        type(module).__module__.partition(".")[0] in packages
        and OPTIONS not in vars(module)
        and not isinstance(module, LazyModuleMixin)
        and not hasattr(module, "parametrizations")
        and not any(getattr(module, name) for name in FORWARD_HOOKS)
    )


def wrap_modules(model: nn.Module, paths: Iterable[str]) -> None:
    """Have the modules at ``paths`` be regions where `run_modules` or `run_regions` say so."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {id(modules[path]): (path, modules[path]) for path in paths if path in modules}
    found = {key: each for key, each in found.items() if not _is_wrapped(*each)}
    for path, module in found.values():
        if OPTIONS in vars(module):
            raise ValueError(
                f"model: its {path} is checkpointed already, and the plan checkpoints it too: "
                "recollect.unwrap it first"
            )
    for path, module in found.values():
        wrap_module(module, ModuleRegion(path))


def _is_wrapped(path: str, module: nn.Module) -> bool:
    how = vars(module).get(OPTIONS)
    return isinstance(how, ModuleRegion) and how.path == path


def unwrap_modules(model: nn.Module) -> None:
    """Undo `wrap_modules`."""
    for module in [*model.modules()]:
        if isinstance(vars(module).get(OPTIONS), ModuleRegion):
            unwrap_module(module)
