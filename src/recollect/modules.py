"""Checkpointing a module in place.

The module's class is exchanged for a subclass whose ``forward`` is checkpointed; the options live on
the instance. Compared with an instance attribute ``forward`` this makes no cycle through the module,
follows shallow copies (as ``DataParallel`` makes them), and leaves parameters, buffers and hooks
where they are. An instance that already has a ``forward`` of its own keeps it: it is what gets
checkpointed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import nn

from recollect.options import Options
from recollect.region import run_region
from recollect.torch_private import hide_from_dynamo

__all__ = ["unwrap_module", "wrap_module"]

_OPTIONS = "_recollect_options"
_OWN_FORWARD = "_recollect_forward"


class _Checkpointed:
    """Mixed in front of a module's class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        attributes = self.__dict__
        function = attributes.get(_OWN_FORWARD) or super().forward  # type: ignore[misc]
        options = attributes.get(_OPTIONS)
        if options is None:
            return function(*args, **kwargs)
        return run_region(function, args, kwargs, options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The subclass cannot be found by name; pickle its base and make it again.
        make, args, *rest = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        base = type(self).__bases__[1]
        return _remake, (base, make, tuple(base if a is type(self) else a for a in args)), *rest


hide_from_dynamo(_Checkpointed.forward)

_subclasses: dict[type, type] = {}


def _checkpointed_class(base: type) -> type:
    subclass = _subclasses.get(base)
    if subclass is None:
        attributes = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        subclass = _subclasses[base] = type(base.__name__, (_Checkpointed, base), attributes)
    return subclass


def _remake(base: type, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    module = make(*args)
    module.__class__ = _checkpointed_class(base)
    return module


def wrap_module(module: nn.Module, options: Options) -> nn.Module:
    """Checkpoint ``module.forward`` from now on."""
    if _OPTIONS in module.__dict__:
        raise ValueError(
            f"this {type(module).__name__} is checkpointed already; recollect.unwrap(module) it "
            "first to change its options"
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise TypeError(
            f"function_or_module is a {type(module).__name__}, which has no forward; wrap what it "
            "holds: for block in blocks: recollect.checkpointed(block)"
        )
    if not isinstance(module, _Checkpointed):
        module.__class__ = _checkpointed_class(type(module))
    own_forward = module.__dict__.pop("forward", None)
    if own_forward is not None:
        module.__dict__[_OWN_FORWARD] = own_forward
    module.__dict__[_OPTIONS] = options
    return module


def unwrap_module(module: nn.Module) -> nn.Module:
    """Give ``module`` its own ``forward`` back."""
    if module.__dict__.pop(_OPTIONS, None) is None:
        raise ValueError(
            f"this {type(module).__name__} is not checkpointed: there is nothing to unwrap"
        )
    own_forward = module.__dict__.pop(_OWN_FORWARD, None)
    if own_forward is not None:
        module.__dict__["forward"] = own_forward
    # Somebody may have put a class of theirs on top since; ours then stays below, doing nothing.
    if type(module) is _subclasses.get(type(module).__bases__[-1]):
        module.__class__ = type(module).__bases__[-1]
    return module
