"""Checkpointing a module in place.

The module's class is exchanged for a subclass whose ``forward`` is checkpointed; the options live
on the instance. Compared with an instance attribute ``forward`` this makes no cycle through the
module, follows shallow copies (as ``DataParallel`` makes them), and leaves parameters, buffers and
hooks where they are. An instance that already has a ``forward`` of its own keeps it: it is what
gets checkpointed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from recollect.options import Options
from recollect.region import run_region

__all__ = ["OPTIONS", "bound_to", "unwrap_module", "wrap_module"]

#: The attribute that marks what is checkpointed, and holds how.
OPTIONS = "_recollect_options"
_OWN_FORWARD = "_recollect_forward"

#: By which options a module is checkpointed; or what is called in the place of its forward, with
#: that, its arguments and its keyword arguments.
How = Options | Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Checkpointed:
    """Mixed in front of a module's class; the subclass has the ``forward``."""

    def __init_subclass__(cls) -> None:
        # Nobody has derived from the module's class: what it does about that is not for us.
        pass

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The subclass cannot be found by name: pickle its base, and make it again.
        make, args, *rest = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        base = type(self).__bases__[-1]
        plain = tuple(base if a is type(self) else a for a in args)
        return _remake, (base, vars(self).get(OPTIONS), make, plain), *rest


def bound_to(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, the forward of ``module``, such that it is known whose it is.

    That of an instance need not be a method.
    """
    if torch.compiler.is_dynamo_compiling() or getattr(function, "__self__", None) is module:
        return function
    return MethodType(partial(_call_own, function), module)


def _call_own(function: Callable[..., Any], _: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_subclasses: dict[type, type] = {}


def _checkpointed_class(base: type) -> type:
    if base in _subclasses:
        return _subclasses[base]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # By way of ``base`` and not of ``super()``: this method may outlive the exchange of class.
        attributes = self.__dict__
        own: Callable[..., Any] = base.forward  # type: ignore[attr-defined]
        if torch.compiler.is_dynamo_compiling():  # which cannot bind a function before torch 2.13
            function = attributes.get(_OWN_FORWARD) or partial(own, self)
        else:
            function = attributes.get(_OWN_FORWARD) or own.__get__(self)
        how = attributes.get(OPTIONS)
        if how is None:
            return function(*args, **kwargs)
        if type(how) is Options:
            return run_region(function, args, kwargs, how)
        return how(bound_to(self, function), args, kwargs)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "forward": forward}
    _subclasses[base] = type(base.__name__, (_Checkpointed, base), names)
    return _subclasses[base]


def _remake(base: type, how: How | None, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    module = make(*args)
    module.__class__ = _checkpointed_class(base)
    if how is not None:
        module.__dict__[OPTIONS] = how
    return module


def wrap_module(module: nn.Module, how: How) -> nn.Module:
    """Checkpoint ``module.forward`` from now on."""
    if OPTIONS in module.__dict__:
        raise ValueError(
            f"this {type(module).__name__} is checkpointed already; recollect.unwrap(module) it "
            "first to change its options"
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise TypeError(
            f"function_or_module is a {type(module).__name__}, which has no forward; wrap what it "
            "holds: for block in blocks: recollect.checkpointed(block)"
        )
    if isinstance(module, LazyModuleMixin):
        raise TypeError(
            f"this {type(module).__name__} will exchange its class when it first runs; run it "
            "once, then wrap it"
        )
    if not isinstance(module, _Checkpointed):
        module.__class__ = _checkpointed_class(type(module))
    own_forward = module.__dict__.pop("forward", None)
    if own_forward is not None:
        module.__dict__[_OWN_FORWARD] = own_forward
    module.__dict__[OPTIONS] = how
    return module


def unwrap_module(module: nn.Module) -> nn.Module:
    """Give ``module`` its own ``forward`` back."""
    if module.__dict__.pop(OPTIONS, None) is None:
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
