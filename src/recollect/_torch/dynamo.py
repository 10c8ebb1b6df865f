"""`torch.compile`: hiding from it, tracing, tags for the partitioner."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
import torch.fx.traceback
import torch.utils.checkpoint

F = TypeVar("F", bound=Callable[..., Any])

_eval_frame = torch._C._dynamo.eval_frame


def hide_from_dynamo(function: F) -> F:
    """Keep dynamo from compiling ``function`` as a frame of its own.

    Needed when a graph break leaves the call to eager code while dynamo still watches new frames.
    Dynamo may still inline the function into a larger graph: so it finds a region in compiled code.
    """
    return _hide(function, _eval_frame._FrameAction.DEFAULT)


def hide_with_calls(function: F) -> F:
    """The same for ``function`` and all that it calls.

    For what autograd calls: dynamo watches while backward runs in a function that it compiled.
    """
    return _hide(function, _eval_frame._FrameAction.SKIP)


def _hide(function: F, called: Any) -> F:
    assert isinstance(function, FunctionType)
    code: CodeType = function.__code__
    strategy = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, called)
    _eval_frame.set_code_exec_strategy(code, strategy)
    return function


def never_traced(function: F, reason: str | None = None) -> F:
    """Keep dynamo from tracing ``function`` at all: it is called as it is.

    ``reason``: the message if ``fullgraph=True`` forbids that.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return hide_from_dynamo(function)


def called_while_traced(function: F) -> F:
    """Have dynamo call ``function`` when it traces a call of it: its result is a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_BUILDER = "torch._dynamo.variables.builder"


class _WhenLoaded(MetaPathFinder):
    """Has ``act`` called once the part of dynamo that knows torch's checkpoint is loaded."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The usual spec of that module, with another loader; None for others."""
        if name != _BUILDER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._act()

            loader.exec_module = exec_module
        return spec


class _Known:
    """The function dynamo treats as torch's checkpoint, if not the one in torch's module."""

    checkpoint: Callable[..., Any] | None = None
    #: How dynamo itself knows it.
    test: Callable[[Any], bool] | None = None
    #: Waits for dynamo to be loaded.
    finder: _WhenLoaded | None = None


def torch_checkpoint() -> Callable[..., Any]:
    """The function that dynamo turns into a region of its graph."""
    return _Known.checkpoint or torch.utils.checkpoint.checkpoint


def know_checkpoint(function: Callable[..., Any]) -> None:
    """Have dynamo know torch's own ``function`` as such while another one is in torch's module.

    It takes whatever is there for torch's, and would never look into ours. If dynamo is not loaded
    yet, which takes long, it is told when it is.
    """
    if _BUILDER not in sys.modules:
        forget_checkpoint()
        _Known.finder = _WhenLoaded(lambda: know_checkpoint(function))
        sys.meta_path.insert(0, _Known.finder)
        return
    names = vars(sys.modules[_BUILDER])
    if _Known.test is None and "is_utils_checkpoint" in names:  # torch 2.11 to 2.15
        _Known.test = staticmethod(names["is_utils_checkpoint"])
        _Known.checkpoint = staticmethod(function)
        names["is_utils_checkpoint"] = lambda obj: obj is function


def forget_checkpoint() -> None:
    """Undo `know_checkpoint`."""
    if _Known.finder in sys.meta_path:
        sys.meta_path.remove(_Known.finder)
    if _Known.test is not None:
        vars(sys.modules[_BUILDER])["is_utils_checkpoint"] = _Known.test
        _Known.checkpoint = _Known.test = None


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


#: The callback that would compile a new frame; None if dynamo is off.
dynamo_callback: Callable[[], Any] = _eval_frame.get_eval_frame_callback


def run_without_dynamo(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with dynamo switched off."""
    import torch._dynamo

    return torch._dynamo.disable(_call, wrapping=False)(function, args, kwargs)


def outside_of_compiler(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """``function`` with dynamo off, even if compiled code calls it.

    Modules compiled by themselves still are. ``reason``: as in `never_traced`.
    """

    def outside(*args: Any, **kwargs: Any) -> Any:
        if dynamo_callback() is None:
            return function(*args, **kwargs)
        return run_without_dynamo(function, *args, **kwargs)

    return never_traced(outside, reason)


#: Whether ops are traced by running eager code unchanged (torch >= 2.12).
is_nonstrict_tracing: Callable[[], bool] = getattr(
    torch.compiler, "_is_non_strict_tracing", lambda: False
)


_is_scripting: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


# Where dynamo traces it, torch.compiler.is_exporting() is True always (torch 2.11).
@hide_from_dynamo
@called_while_traced
def is_exporting() -> bool:
    """Whether `torch.export` or `torch.jit.trace` makes a program of what runs."""
    return torch.compiler.is_exporting() or _is_scripting()


def is_tracing() -> bool:
    """Whether a compiler is tracing ops into a graph, and will place recomputation itself."""
    proxy = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return proxy is not None and not is_nonstrict_tracing()


def is_compiling() -> bool:
    """Whether a compiler runs this code, to trace it or to analyse it."""
    is_analysed = torch._guards.TracingContext.try_get() is not None
    return is_tracing() or (is_analysed and not is_nonstrict_tracing())


def nested_trace_policy() -> Callable[[], AbstractContextManager[Any]] | None:
    """A context for a rerun, in which nested tracing is allowed as in forward (torch >= 2.12)."""
    if not is_nonstrict_tracing():
        return None
    import torch._dynamo

    allowed = torch._dynamo.config.error_on_nested_fx_trace
    return lambda: torch._dynamo.config.patch(error_on_nested_fx_trace=allowed)


def traced_graph() -> Any:
    """The graph being traced, or None."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


_current_meta = torch.fx.traceback.get_current_meta


def traced_modules() -> list[str]:
    """The paths of the modules that call the op being traced, the outermost first."""
    stack = _current_meta().get("nn_module_stack", {})
    return [re.sub(r"^L\['\w+'\]\.?", "", str(path)) for path, _ in stack.values()]


_TAG = "recollect.tag"


def traced_tag() -> str | None:
    """The name given by `tag_in_trace` to the result of the op being traced."""
    custom: dict[str, str] = _current_meta().get("custom") or {}
    return custom.get(_TAG)


def tag_in_trace(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """An alias of ``tensor`` with a name in the graph; for code that dynamo compiles."""
    with torch.fx.traceback.annotate({_TAG: name}):
        alias: torch.Tensor = torch.ops.aten.alias.default(tensor)
        return alias


def tag_recompute_nodes(nodes: list[Any], policy: str, graph_id: int | None) -> None:
    """Tell the partitioner what to do with the nodes that one op was traced into."""
    from torch._functorch import partitioners

    policies = vars(partitioners)["CheckpointPolicy"]  # the enum that it compares with
    # Before torch 2.12 there is no offload: keep what should be offloaded.
    member = getattr(policies, policy, policies.MUST_SAVE)
    for node in nodes:
        node.meta["recompute"] = member
        if graph_id is not None:
            node.meta["ac_graph_id"] = graph_id


def inductor_region_key(op: Any, args: tuple[Any, ...]) -> Any:
    """The key of ``op`` for selective checkpointing; for a compiled region, that of its code.

    All compiled regions call one higher-order op (torch >= 2.12). Each needs a queue of its own, or
    skipping one in the recomputation would shift the results of the others.
    """
    from torch._higher_order_ops import wrap

    compiled = getattr(wrap, "inductor_compiled_code", None)
    if compiled is None or op is not compiled or not args:
        return op
    return op, wrap._resolve_inductor_callable(args[0]).idx
