"""Checkpoints a module in place.

The module's class is replaced by a subclass whose ``forward`` is checkpointed; the options are on
the instance. Unlike an instance attribute ``forward`` this makes no reference cycle, and works in
shallow copies (as ``DataParallel`` makes them). If the instance already has its own ``forward``,
that one is checkpointed.

Frameworks read the signature of ``forward`` to choose columns of a data set, or arguments of
generation. So each replacement has the signature of the original.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from recollect.options import Options
from recollect.region import run_region

#: The attribute of checkpointed modules and functions that holds their options.
OPTIONS = "_recollect_options"
_INSTANCE_FORWARD = "_recollect_forward"

#: The options of a checkpointed module; or a function that is called instead of its forward, with
#: the forward, its arguments and its keyword arguments.
How = Options | Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])


def copy_signature(function: Callable[..., Any], wrapper: Wrapper) -> Wrapper:
    """Give ``wrapper``, which calls ``function``, its name, signature and documentation.

    But not the attributes that mark ``function`` as ours, or as torch's to unwrap.
    """
    functools.update_wrapper(wrapper, function)
    attributes = vars(wrapper)
    for name in [name for name in attributes if name == OPTIONS or name.startswith("_torch")]:
        del attributes[name]
    try:
        # For callers that do not follow ``__wrapped__``.
        attributes["__signature__"] = inspect.signature(function)
    except (TypeError, ValueError):  # of a function written in C, which has none to show
        attributes.pop("__signature__", None)
    return wrapper


class _Checkpointed:
    """Mixed in front of a module's class; the subclass has the ``forward``."""

    def __init_subclass__(cls) -> None:
        # Do not run the hook of the module's class: it is for subclasses that users write.
        pass

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The subclass cannot be found by name: pickle its base, and recreate it.
        make, args, *rest = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        base = type(self).__bases__[-1]
        plain = tuple(base if a is type(self) else a for a in args)
        has_forward = _INSTANCE_FORWARD in vars(self)
        return _remake, (base, vars(self).get(OPTIONS), make, plain, has_forward), *rest


def bound_to(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, the forward of ``module``, as a method of it.

    The ``forward`` that an instance has of its own need not be one.
    """
    if torch.compiler.is_dynamo_compiling() or getattr(function, "__self__", None) is module:
        return function
    return MethodType(partial(_call_own, function), module)


def _call_own(function: Callable[..., Any], _: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _run(module: nn.Module, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    how = module.__dict__.get(OPTIONS)
    if how is None:
        return function(*args, **kwargs)
    if type(how) is Options:
        return run_region(function, args, kwargs, how)
    return how(bound_to(module, function), args, kwargs)


class _Forwards:
    """The ``forward`` of the class of a module that has a ``forward`` of its own.

    Read from the class, it is that of the class, which the module's own may call.
    """

    def __init__(self, base: type) -> None:
        self._base = base
        self._usual = _forward_of(base)

    def __get__(self, module: nn.Module | None, cls: type) -> Callable[..., Any]:
        if module is None:
            return self._base.forward  # type: ignore[attr-defined, no-any-return]
        instance_forward = module.__dict__.get(_INSTANCE_FORWARD)
        if instance_forward is None:  # any more
            return partial(self._usual, module)
        # Made on each access: nothing may refer to the module. (`copy_signature` takes too long.)
        forward = partial(_run, module, instance_forward)
        if torch.compiler.is_dynamo_compiling():
            return forward
        return functools.update_wrapper(forward, instance_forward)


#: Attributes that a class does not inherit.
_OF_A_CLASS = ("__module__", "__qualname__", "__doc__", "__annotations__", "__firstlineno__")


def _checkpointed_class(base: type, *, has_forward: bool) -> type:
    """The class of a checkpointed instance of ``base``: the one that others have, if there are any.

    Only ``base`` itself knows of it: a table of classes would hold them, and with them all that
    their functions hold.
    """
    known: Any = None
    subclasses: list[Any] = type.__subclasses__(base)
    for cls in subclasses:
        of_instance = isinstance(vars(cls).get("forward"), _Forwards)
        if cls.__bases__ == (_Checkpointed, base) and of_instance is has_forward:
            known = cls
    if known is None:
        forward = _Forwards(base) if has_forward else _forward_of(base)
        names = {name: vars(base)[name] for name in _OF_A_CLASS if name in vars(base)}
        names |= {"__qualname__": base.__qualname__, "forward": forward}
        known = type(base.__name__, (_Checkpointed, base), names)
    elif not has_forward and known.forward.__wrapped__ is not base.forward:  # type: ignore[attr-defined]
        copy_signature(base.forward, known.forward)  # type: ignore[attr-defined]
    return known  # type: ignore[no-any-return]


def _forward_of(base: type) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Through ``base``, not ``super()``: this method may outlive the replaced class.
        attributes = self.__dict__
        of_class: Callable[..., Any] = base.forward  # type: ignore[attr-defined]
        if torch.compiler.is_dynamo_compiling():  # which cannot bind a function before torch 2.13
            function = attributes.get(_INSTANCE_FORWARD) or partial(of_class, self)
        else:
            function = attributes.get(_INSTANCE_FORWARD) or of_class.__get__(self)
        return _run(self, function, *args, **kwargs)

    return copy_signature(base.forward, forward)  # type: ignore[attr-defined]


def _remake(
    base: type,
    how: How | None,
    make: Callable[..., Any],
    args: tuple[Any, ...],
    has_forward: bool = False,
) -> Any:
    module = make(*args)
    module.__class__ = _checkpointed_class(base, has_forward=has_forward)
    if how is not None:
        module.__dict__[OPTIONS] = how
    return module


def wrap_module(module: nn.Module, how: How) -> nn.Module:
    """Checkpoint ``module.forward`` from now on."""
    if module.__dict__.get(OPTIONS) is not None:
        raise ValueError(
            f"this {type(module).__name__} is checkpointed already; call "
            "recollect.unwrap(module) first to change its options"
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise TypeError(
            f"function_or_module is a {type(module).__name__}, which has no forward; wrap its "
            "modules: for block in blocks: recollect.checkpointed(block)"
        )
    if isinstance(module, LazyModuleMixin):
        raise TypeError(
            f"this {type(module).__name__} replaces its class when it first runs; run it once, "
            "then wrap it"
        )
    instance_forward = module.__dict__.pop("forward", None)
    has_forward = instance_forward is not None
    if not isinstance(module, _Checkpointed):
        module.__class__ = _checkpointed_class(type(module), has_forward=has_forward)
    if has_forward:
        module.__dict__[_INSTANCE_FORWARD] = instance_forward
    module.__dict__[OPTIONS] = how
    return module


def unwrap_module(module: nn.Module) -> nn.Module:
    """Give ``module`` its own ``forward`` back."""
    how = module.__dict__.pop(OPTIONS, None)
    if how is None:
        raise ValueError(
            f"this {type(module).__name__} is not checkpointed: there is nothing to unwrap"
        )
    instance_forward = module.__dict__.pop(_INSTANCE_FORWARD, None)
    if instance_forward is not None:
        module.__dict__["forward"] = instance_forward
    if hasattr(how, "unwrapped"):  # a plan, which may have wrapped parts of the module besides
        how.unwrapped(module)
    # Another class may have been put on top since; ours then stays below, without effect.
    if _Checkpointed in type(module).__bases__:
        module.__class__ = type(module).__bases__[-1]
    return module
