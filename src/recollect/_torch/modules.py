"""`nn.Module`: hooks, compiled modules, the code of a call."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any

import torch

from recollect._torch.modes import any_autocast_enabled
from recollect.errors import StopRecompute

#: The attributes of a module that hold its forward hooks, and how to call each.
FORWARD_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)

#: The same for the hooks of all modules.
GLOBAL_FORWARD_HOOKS: tuple[dict[int, Any], ...] = (
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_hooks_with_kwargs,
    torch.nn.modules.module._global_forward_hooks_always_called,
)


def global_hooks() -> list[Any]:
    """The dictionaries of hooks that run for every module, and for every optimizer."""
    # The module of the latter is shadowed by a class in its package.
    optimizers: Any = sys.modules[torch.optim.Optimizer.__module__]
    return [
        *GLOBAL_FORWARD_HOOKS,
        torch.nn.modules.module._global_backward_pre_hooks,
        torch.nn.modules.module._global_backward_hooks,
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    ]


def hook_module(
    module: torch.nn.Module, key: int, before: Callable[..., None], after: Callable[..., None]
) -> None:
    """Call ``before`` and ``after`` around each call of ``module``, until `unhook_module`.

    ``after`` is called when the module raises, too. ``key`` tells this pair from others.
    """
    module._forward_pre_hooks[key] = before
    module._forward_hooks[key] = after
    module._forward_hooks_always_called[key] = True


def unhook_module(module: torch.nn.Module, key: int) -> None:
    """Undo `hook_module`."""
    for name in FORWARD_HOOKS:
        getattr(module, name).pop(key, None)


#: The code that calls the forward hooks of a module.
_HOOKED_CALL: CodeType = torch.nn.Module._call_impl.__code__


def call_skipped_hooks(traceback: TracebackType | None) -> None:
    """Call the hooks with ``always_call=True`` of the modules that a ``BaseException`` ended.

    torch calls them only for an ``Exception``. As there, the inner modules come first, and an
    error in a hook is a warning.
    """
    ended = []
    while traceback is not None:
        if traceback.tb_frame.f_code is _HOOKED_CALL:
            ended.append(traceback.tb_frame.f_locals)
        traceback = traceback.tb_next
    for values in reversed(ended):
        if values.get("called_always_called_hooks") is not None:  # else it had no hooks
            _call_skipped(values)


def _call_skipped(values: dict[str, Any]) -> None:
    """The same for one call of a module, given its local variables."""
    module = values["self"]
    own = [getattr(module, FORWARD_HOOKS[number]) for number in (1, 3, 4)]
    called, result = values["called_always_called_hooks"], values.get("result")
    for hooks, with_kwargs, always in (GLOBAL_FORWARD_HOOKS[1:], own):
        for key, hook in list(hooks.items()):
            if key not in always or key in called:
                continue
            called.add(key)  # an outer region that stops here too finds the same frames
            given = (values["args"], values["kwargs"]) if key in with_kwargs else (values["args"],)
            try:
                changed = hook(module, *given, result)
            except StopRecompute:  # the hook saves tensors for backward
                pass
            except Exception as error:  # noqa: BLE001  as torch does
                warnings.warn(
                    "a forward hook with always_call=True raised an error after the "
                    f"recomputation had stopped early: {error!r}",
                    stacklevel=2,
                )
            else:
                result = result if changed is None else changed


#: The layers with batch statistics.
BATCH_NORMS = (
    *(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm),
)


def is_torch_nn(module: torch.nn.Module) -> bool:
    """Whether ``torch.nn`` defines the class of ``module``."""
    return (type(module).__module__ or "").startswith("torch.nn.")


def misses_fast_path(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention module, which calls ``function``, took a fast path without our mode.

    Where any function mode is active, torch's modules in eval mode do without it.
    """
    if function is not torch.nn.functional.multi_head_attention_forward:
        return False
    values = (*args, *kwargs.values())
    return (
        not kwargs.get("training", True)
        and args[0] is args[1] is args[2]
        and torch.backends.mha.get_fastpath_enabled()
        and not any_autocast_enabled()
        and not (
            torch.is_grad_enabled()
            and any(each.requires_grad for each in values if isinstance(each, torch.Tensor))
        )
    )


#: The attribute of a module that holds what it calls after ``module.compile()``.
COMPILED_CALL = "_compiled_call_impl"


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` returned."""
    return hasattr(module, "_orig_mod") or module.__dict__.get(COMPILED_CALL) is not None


def compiled_in(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that run, with their hooks, in compiled code when ``module`` is called."""
    if module._compiled_call_impl is not None:  # module.compile()
        return list(module.modules())
    if type(module).__module__.startswith("torch._dynamo."):  # torch.compile(module)
        return [each for each in module.modules() if each is not module]
    return []


def sharded_part(module: torch.nn.Module) -> str | None:
    """Which parameters of ``module`` are sharded between processes, in words; None if none are."""
    dtensor = known_class("torch.distributed.tensor", "DTensor")
    if dtensor is not None and any(isinstance(each, dtensor) for each in module.parameters()):
        return "a parameter of type DTensor"
    fsdp = known_class("torch.distributed.fsdp", "FullyShardedDataParallel")
    if fsdp is not None and any(isinstance(each, fsdp) for each in module.modules()):
        return "parameters that FullyShardedDataParallel gathers"
    return None


def known_class(module: str, name: str) -> Any:
    """A class of torch, if its module was imported; otherwise no instance can exist."""
    return getattr(sys.modules.get(module), name, None)


#: The code of ``nn.Module.__call__``; its first local is ``self``. (A patched ``__call__`` calls
#: it.)
MODULE_CALL: CodeType = torch.nn.Module._wrapped_call_impl.__code__
