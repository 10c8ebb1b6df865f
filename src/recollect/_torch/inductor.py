"""`torch.compile` from the outside: its compiled modules, its backends and its partitioner.

Tried on torch 2.11, 2.13 and 2.15. Everything is imported when it is used: most programs compile
nothing.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import fx, nn

F = TypeVar("F", bound=Callable[..., Any])

#: The function that splits a joint graph: into the graph of forward and that of backward.
Split = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


class UnknownTorch(Exception):
    """This release of torch has changed something that compiled plans rely on."""


# --- modules --------------------------------------------------------------------------------------


def _is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile(module)`` returned."""
    return "_orig_mod" in module._modules


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called: copies of the module are not compiled then."""
    return module.__dict__.get("_compiled_call_impl") is not None


def is_compiled_here(module: nn.Module) -> bool:
    """Whether calling ``module`` enters the compiler."""
    return _is_wrapper(module) or is_compiled_in_place(module)


def wraps_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` was given a module on which ``compile()`` was called.

    It has nothing to compile then: that module runs its own code.
    """
    inner = module._modules.get("_orig_mod")
    return inner is not None and is_compiled_in_place(inner)


def break_when_traced(module: nn.Module) -> Callable[[], None]:
    """Have code that is compiled around ``module`` call what `set_called_by_compiler` was given.

    Else it takes in the forward of a module that is compiled in place. Returns what ends this.
    """
    if _is_wrapper(module):
        return lambda: None
    # With a hook, dynamo goes through `__call__`, which looks for compiled code; else it does not.
    return module.register_forward_pre_hook(_no_hook).remove


def _no_hook(_module: nn.Module, _args: Any) -> None:
    pass


def compiler_context(module: nn.Module) -> Any:
    """The settings of the compiler for a compiled module."""
    if _is_wrapper(module):
        return module.__dict__["dynamo_ctx"]
    function: Any = module._compiled_call_impl
    try:
        names = function.__code__.co_freevars
        return function.__closure__[names.index("self")].cell_contents
    except (AttributeError, ValueError) as error:
        raise UnknownTorch("module.compile() does not keep its settings where it did") from error


def backend_in(context: Any) -> Any:
    """The backend that a compiled module was given."""
    return _backend_of(context.callback)


def _backend_of(callback: Any) -> Any:
    backend = callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def called_by_compiler(module: nn.Module) -> Any:
    """The compiled function of a module, for `set_called_by_compiler` to restore."""
    if _is_wrapper(module):
        return module.__dict__["dynamo_ctx"], module.__dict__["forward"]
    return module._compiled_call_impl


def set_called_by_compiler(module: nn.Module, called: Any) -> None:
    """Have a compiled module call something else, of `compiled_with` or `called_by_compiler`."""
    if _is_wrapper(module):
        module.__dict__["dynamo_ctx"], module.__dict__["forward"] = called
    else:
        module._compiled_call_impl = called


def compiled_with(module: nn.Module, backend: Callable[..., Any], like: Any = None) -> Any:
    """The compiled function that a module would have with ``backend``.

    ``like``: the `compiler_context` of another module that was, to share its code.
    """
    if like is None:
        own = compiler_context(module)
        options = {"fullgraph": own.fullgraph, "dynamic": own._dynamic}
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # torch >= 2.13
            options["isolate_recompiles"] = True
        else:
            _forget_compiled(module)
        make = functools.partial(torch.compile, backend=backend, **options)
    else:
        make = like
    if _is_wrapper(module):
        made = make(module._modules["_orig_mod"])
        return made.__dict__["dynamo_ctx"], made.__dict__["forward"]
    return make(module._call_impl)


def method_settings(function: Any) -> tuple[Callable[..., Any], Any, bool | None] | None:
    """Of a function that ``torch.compile`` returned: the original, its backend and ``dynamic``."""
    original: Any = getattr(function, "_torchdynamo_orig_callable", None)
    if original is None:
        return None
    closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "self" not in closure:
        raise UnknownTorch("a compiled function does not keep its settings where it did")
    context = closure["self"].cell_contents
    return original, backend_in(context), context._dynamic


def settings_in(callback: Any) -> tuple[Any, bool | None] | None:
    """The backend and ``dynamic`` of the compiler at work, by its `dynamo_callback`."""
    from torch._dynamo import config

    if not hasattr(callback, "_torchdynamo_orig_backend"):
        return None  # it only runs what was compiled before
    is_static = config.assume_static_by_default
    dynamic = None if config.automatic_dynamic_shapes else False
    return _backend_of(callback), dynamic if is_static else True


def compile_in_place(module: nn.Module, backend: Any, dynamic: bool | None) -> None:
    """As ``module.compile(backend=backend, dynamic=dynamic)``, for a backend as torch has it."""
    import torch._dynamo

    compiled = torch._dynamo.optimize(backend=backend, dynamic=dynamic)
    module._compiled_call_impl = compiled(module._call_impl)


def drop_compiled(module: nn.Module) -> None:
    """Undo `compile_in_place`."""
    module._compiled_call_impl = None


def called_around(called: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """The result of `compiled_with` with its function wrapped."""
    return (called[0], wrap(called[1])) if isinstance(called, tuple) else wrap(called)


def function_of(called: Any) -> Callable[..., Any]:
    """The function in what `compiled_with` or `called_by_compiler` returned."""
    function: Callable[..., Any] = called[1] if isinstance(called, tuple) else called
    return function


def shares_code(module: nn.Module, other: nn.Module) -> bool:
    """Whether two compiled modules were compiled in the same way."""
    contexts = [compiler_context(each) for each in (module, other)]
    first, second = [(c.fullgraph, c._dynamic, backend_in(c)) for c in contexts]
    return first[:2] == second[:2] and bool(first[2] == second[2])


def _forget_compiled(module: nn.Module) -> None:
    """Forget earlier code of a module: the compiler stops at 8 versions, of all backends."""
    from torch._dynamo.eval_frame import remove_from_cache

    inner = module._modules["_orig_mod"] if _is_wrapper(module) else module
    remove_from_cache(inner)


# --- backends -------------------------------------------------------------------------------------


def inductor_options(backend: Any) -> dict[str, Any] | None:
    """The options of Inductor, if that is the backend."""
    is_inductor = getattr(backend, "compiler_name", None) == "inductor"
    return dict(backend.config) if is_inductor and hasattr(backend, "config") else None


def aot_arguments(backend: Any) -> dict[str, Any] | None:
    """The arguments of AOTAutograd, if the backend is made of that and runs ops as they are."""
    from torch._dynamo.backends import common, debugging

    function = getattr(backend, "compiler_fn", backend)
    if function is debugging.aot_eager:
        return {
            "fw_compiler": debugging.boxed_nop,
            "bw_compiler": debugging.boxed_nop,
            "partition_fn": min_cut,
            "keep_inference_input_mutations": True,
        }
    return dict(function.kwargs) if isinstance(function, common.AotAutograd) else None


def backend_name(backend: Any) -> str:
    """The user-facing name of a backend."""
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
    return str(name or type(backend).__name__)


def compile_by_inductor(
    graph: fx.GraphModule, inputs: Any, options: Mapping[str, Any], split: Any
) -> Callable[..., Any]:
    """Compile a graph of dynamo, with ``split`` of `partitioner` as partitioner."""
    from torch._inductor.compile_fx import compile_fx

    patches = {**options, "custom_partitioner_fn": split}
    return compile_fx(graph, inputs, config_patches=patches)  # type: ignore[return-value]


def run_as_it_is(
    graph: fx.GraphModule, inputs: Any, arguments: Mapping[str, Any], split: Split
) -> Callable[..., Any]:
    """Have AOTAutograd split a graph of dynamo, and run its ops one by one."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config

    # The key of its cache does not know the partitioner.
    with config.patch(enable_autograd_cache=False):
        compiled: Callable[..., Any] = aot_autograd(**{**arguments, "partition_fn": split})(
            graph, inputs
        )
    return compiled


def takes_list(function: F) -> F:
    """Have AOTAutograd call ``function`` with a list of arguments, which it may empty."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def backend_of(name: str, compile_graph: Callable[..., Any], split: Split) -> Any:
    """A backend of torch.compile: ``split`` splits joint graphs, ``compile_graph`` compiles."""
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=compile_graph, partition_fn=split, keep_inference_input_mutations=True
    )
    backend.__name__ = name
    return backend


def partitioner(split: Split, uuid: Callable[[], str]) -> Any:
    """``split`` in the form that Inductor takes. ``uuid``: identifies it in Inductor's caches.

    It becomes a value of Inductor's config, which is deeply copied for every compilation, pickled
    for the keys of its caches, and written into what reproduces a failure.
    """
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return split(gm, joint_inputs, **kwargs)

        def uuid(self) -> Any:
            return uuid()

        def __deepcopy__(self, memo: Any) -> Any:
            return self

        def __reduce__(self) -> Any:
            return str, (uuid(),)

        def __repr__(self) -> str:
            return "None"

    return Partitioner()


# --- joint graphs ---------------------------------------------------------------------------------


def simplify(graph: fx.GraphModule) -> None:
    """Remove what is unused or there twice, as `min_cut` does first."""
    from torch._functorch import config
    from torch._functorch.compile_utils import fx_graph_cse

    graph.graph.eliminate_dead_code()
    if config.cse:
        graph.graph = fx_graph_cse(graph.graph)


def copied(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of a joint graph, for `min_cut` to change. Its nodes have the same names."""
    return fx.GraphModule(graph, copy.deepcopy(graph.graph))


def min_cut(
    graph: fx.GraphModule, inputs: Any, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph as torch does: it chooses for all nodes that are not tagged."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(graph, inputs, **kwargs)


def default_partition(
    graph: fx.GraphModule, inputs: Any, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph so that forward saves what eager code would, and nothing runs again."""
    from torch._functorch import partitioners

    return partitioners.default_partition(graph, inputs, **kwargs)


def fuses() -> Callable[[fx.Node], bool]:
    """A function: whether Inductor computes a node in the kernel of those that read it."""
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list().is_fusible


#: Sizes that dynamic ones are taken to have, by symbol, in the place of those that were met.
_assumed: dict[Any, int] = {}


def known_size(number: Any) -> int:
    """A size, or what was met where it is dynamic; 0 if nothing is known."""
    if isinstance(number, int):
        return number
    node = number.node
    if _assumed:
        size = node.expr.xreplace(_assumed)
        if not getattr(size, "free_symbols", ()):
            return int(size)
    return int(node.hint) if node.has_hint() else 0


def is_same_size(first: Any, second: Any) -> bool:
    """Whether two sizes, or two tuples of values with sizes, are the same for all dynamic sizes.

    Unlike ``==``, this does not have the compiler check the answer at each call.
    """
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(is_same_size, first, second))
    if isinstance(first, torch.SymInt) and isinstance(second, torch.SymInt):
        return bool(first.node.expr == second.node.expr)
    are_numbers = not isinstance(first, torch.SymInt) and not isinstance(second, torch.SymInt)
    return are_numbers and bool(first == second)


def graph_inputs(graph: fx.GraphModule) -> list[torch.Tensor]:
    """The tensors that a graph of dynamo takes, as fakes: with dynamic sizes as symbols."""
    nodes = graph.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value") for node in nodes]
    return [each for each in values if isinstance(each, torch.Tensor)]


def symbol_of(size: torch.SymInt) -> Any:
    """What a dynamic size is known by in all graphs that are made of one."""
    return size.node.expr


@contextmanager
def assumed(sizes: Mapping[Any, int]) -> Iterator[None]:
    """A context in which dynamic sizes are these. ``sizes``: by `symbol_of`."""
    _assumed.update(sizes)
    try:
        yield
    finally:
        for symbol in sizes:
            _assumed.pop(symbol, None)


def assumed_shapes(
    tensors: Sequence[torch.Tensor], least: Sequence[Any]
) -> AbstractContextManager[None]:
    """A context in which dynamic sizes of ``tensors`` are at least those of the shapes given."""
    found: dict[Any, int] = {}
    for tensor, shape in zip(tensors, least, strict=True):
        sizes: tuple[Any, ...] = tuple(tensor.shape)
        for size, known in zip(sizes, shape, strict=True):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                symbol = size.node.expr
                found[symbol] = max(found.get(symbol, known_size(size)), known)
    return assumed(found)


def check_names() -> None:
    """Raise `UnknownTorch` if something that compiled plans rely on is not there."""
    try:
        from torch._dynamo.backends import common, debugging
        from torch._dynamo.eval_frame import remove_from_cache
        from torch._functorch import config, partitioners
        from torch._functorch.compile_utils import fx_graph_cse
        from torch._inductor import config as inductor_config
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.custom_graph_pass import CustomPartitionerFn

        found = (
            *(common.AotAutograd, debugging.aot_eager, debugging.boxed_nop, compile_fx),
            *(remove_from_cache, fx_graph_cse, CustomPartitionerFn, config.enable_autograd_cache),
            partitioners.min_cut_rematerialization_partition,
            partitioners.get_default_op_list,
            partitioners.CheckpointPolicy,  # type: ignore[attr-defined]
        )
        assert found
        inductor_config.custom_partitioner_fn  # noqa: B018 - an error if it is not there
    except (ImportError, AttributeError) as error:
        raise UnknownTorch(str(error)) from error
