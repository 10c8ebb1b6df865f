"""A backend of torch.compile: the user's, with a partitioner of ours (P7)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from recollect._torch.autograd import current_graph_task
from recollect._torch.inductor import (
    aot_arguments,
    assumed_shapes,
    backend_name,
    compile_by_inductor,
    default_partition,
    graph_inputs,
    inductor_options,
    known_size,
    partitioner,
    run_as_it_is,
    symbol_of,
)
from recollect._torch.tensors import storage_key
from recollect.compiled.rewrites import fold_views, separate_gradients
from recollect.compiled.split import ObservingSplit, PlannedSplit, SeenGraph
from recollect.compiled.timeline import note_tangents

#: Options of Inductor in planned code: it holds no freed memory for later.
_PLANNED = {"allow_buffer_reuse": False}
#: And where tensors are offloaded: the order of the graph, by which copies begin ahead of use.
_OFFLOADING = {"reorder_for_peak_memory": False}
#: The backends that are not Inductor and run whatever op there is.
_RUNS_ANY_OP = ("aot_eager", "recollect")


@dataclass(frozen=True)
class Compiler:
    """The user's backend: Inductor with its options, or AOTAutograd with its arguments."""

    name: str
    options: dict[str, Any] | None
    arguments: dict[str, Any] | None

    @classmethod
    def of(cls, backend: Any) -> Compiler | None:
        """A backend of the user's; None if it leaves no place for a partitioner."""
        options = inductor_options(backend)
        arguments = aot_arguments(backend) if options is None else None
        if options is None and arguments is None:
            return None
        return cls(backend_name(backend), options, arguments)

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether kernels are recorded as CUDA graphs, as by ``mode="reduce-overhead"``."""
        return bool(self.options and self.options.get("triton.cudagraphs"))

    @property
    def knows_any_op(self) -> bool:
        """Whether graphs may have ops of ours in them: not all backends of users know others."""
        return self.is_fused or self.name in _RUNS_ANY_OP

    @property
    def is_fused(self) -> bool:
        """Whether Inductor compiles the graphs."""
        return self.options is not None

    def compile(
        self, graph: fx.GraphModule, inputs: Any, split: ObservingSplit | PlannedSplit
    ) -> Callable[..., Any]:
        """Compile a graph of dynamo."""
        if self.options is None:
            assert self.arguments is not None
            plain = self.arguments.get("partition_fn", default_partition)

            def folded(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
                fold_views(joint, kwargs["num_fwd_outputs"])
                separate_gradients(joint, **kwargs)
                return split(joint, joint_inputs, plain, **kwargs)

            return run_as_it_is(graph, inputs, self.arguments, folded)
        planned = _PLANNED if split.decides else {}
        if split.offloads:
            planned = {**planned, **_OFFLOADING}
        options = {**planned, **self.options}
        if self.uses_cuda_graphs and all(each.device.type == "cpu" for each in graph_inputs(graph)):
            options["triton.cudagraphs"] = False  # there are none, but what they take would be held
        return compile_by_inductor(graph, inputs, options, partitioner(split, split.uuid))


@dataclass(frozen=True)
class Call:
    """A call of a compiled graph that was noted."""

    graph: SeenGraph | None  #: the graph; None if it was not observed, or has no backward
    source: str  #: the key of the graph of dynamo
    inputs: list[Any]  #: the storages of its arguments; None for what is no tensor
    outputs: list[Any]  #: those of its results
    site: int  #: the number of the compiled module that called it
    shapes: tuple[tuple[int, ...], ...] = ()  #: the shapes of its arguments
    sizes: Mapping[Any, int] = field(default_factory=dict)  #: its dynamic sizes, by `symbol_of`
    #: Whether it was in backward, by a region that runs again: that may end halfway.
    again: bool = False
    #: The numbers of the tangents that its backward makes, once that has run.
    made: list[int] = field(default_factory=list)


@dataclass
class Notes:
    """What is noted of the compiled code of a model."""

    runs: int = 0  #: how often graphs ran
    compiled: int = 0  #: how many were compiled
    site: int = 0  #: the compiled module that was called last
    forwards: int = 0  #: how often the first compiled module was called in this step
    #: The calls of graphs for training in this step; None: they are not noted.
    calls: list[Call] | None = None
    #: Called when a graph is about to be compiled.
    on_compile: Callable[[], None] | None = None
    #: The events of a CUDA device at which calls began and ended; None: they are not timed.
    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None

    def begin(self, site: int) -> None:
        """A compiled module is called."""
        self.site = site
        self.forwards += site == 0

    def begun(self, site: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """What a compiled module calls, whose calls are noted."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.begin(site)
            return function(*args, **kwargs)

        return noted

    def clear(self) -> None:
        """A step begins whose calls are to be noted."""
        self.calls, self.forwards = [], 0

    def run(self, compiled: Callable[..., Any], args: Any) -> Any:
        """Call a compiled graph for training."""
        if self.spans is None:
            return compiled(*args)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = compiled(*args)
        end.record()
        self.spans.append((start, end))
        return result

    def observed(self) -> list[Call]:
        """The calls of graphs that have a backward."""
        return [call for call in self.calls or () if call.graph is not None]


@dataclass(eq=False)
class Backend:
    """Called by dynamo with a graph and its inputs. Compared by identity: dynamo shares code."""

    compiler: Compiler  #: the user's backend
    split: ObservingSplit | PlannedSplit  #: splits joint graphs
    notes: Notes  #: where it is noted what the compiled code does
    #: Called when code with dynamic shapes runs on larger ones than it was split for.
    on_larger: Callable[[], None] | None = None
    #: Called when a model with this code is copied: the copy has the same.
    on_copy: Callable[[], None] | None = None
    #: By the ranks of the tensors that graphs take: their largest sizes.
    _largest: dict[tuple[int, ...], list[tuple[int, ...]]] = field(default_factory=dict, repr=False)

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """Compile a graph."""
        source, split = _source_key(graph), self.split
        self.notes.compiled += 1
        if self.notes.on_compile is not None:
            self.notes.on_compile()
        if isinstance(split, PlannedSplit):
            split.source = source
            with self._for_largest(graph):
                compiled = self.compiler.compile(graph, inputs, split)
                return self._noted(compiled, inputs, source, None, split.sizes.get(source, ()))
        before = len(split.seen)
        compiled = self.compiler.compile(graph, inputs, split)
        new = split.seen[before:]
        return self._noted(compiled, inputs, source, new[-1] if new else None, ())

    def _for_largest(self, graph: fx.GraphModule) -> AbstractContextManager[None]:
        """A context in which dynamic sizes are at least those of code that was made before.

        The last batch of an epoch is smaller, and code for dynamic shapes is made of it, which then
        runs on the others, too.
        """
        tensors = graph_inputs(graph)
        shapes = [tuple(known_size(size) for size in each.shape) for each in tensors]
        ranks = tuple(map(len, shapes))
        before = self._largest.get(ranks, shapes)
        largest = [tuple(map(max, *pair)) for pair in zip(before, shapes, strict=True)]
        self._largest[ranks] = largest
        return assumed_shapes(tensors, largest)

    def _noted(
        self,
        compiled: Callable[..., Any],
        inputs: Any,
        source: str,
        graph: SeenGraph | None,
        planned: Sequence[int],
    ) -> Callable[..., Any]:
        """The same, noted. Dynamic sizes above those that were met or ``planned`` are told."""
        notes = self.notes
        dynamic = {n: each for n, each in enumerate(inputs) if isinstance(each, torch.SymInt)}
        symbols = {n: symbol_of(each) for n, each in dynamic.items()}
        most = {n: known_size(each) for n, each in dynamic.items()}
        if len(planned) == len(most):
            most = {n: max(most[n], size) for n, size in zip(most, planned, strict=True)}

        def noted(*args: Any) -> Any:
            notes.runs += 1
            for n in most:
                if args[n] > most[n] and self.on_larger is not None:
                    self.on_larger()
                    most[n] = args[n]
            if notes.calls is None or not torch.is_grad_enabled():
                return compiled(*args)
            site, storages = notes.site, _storages(args)
            shapes = tuple(tuple(each.shape) for each in args if isinstance(each, torch.Tensor))
            sizes = {symbol: int(args[n]) for n, symbol in symbols.items()}
            again = current_graph_task() != -1
            result = notes.run(compiled, args)
            outputs = _storages(result)
            call = Call(graph, source, storages, outputs, site, shapes, sizes, again)
            notes.calls.append(call)
            if graph is not None:
                note_tangents(_listed(result), graph.joint, sizes, call.made)
            return result

        return noted

    def __deepcopy__(self, memo: Any) -> Backend:
        if self.on_copy is not None:
            self.on_copy()
        return self

    @property
    def __name__(self) -> str:
        return f"recollect({self.compiler.name})"


def _listed(values: Any) -> Any:
    return [values] if isinstance(values, torch.Tensor) else values


def _storages(values: Any) -> list[Any]:
    return [storage_key(v) if isinstance(v, torch.Tensor) else None for v in _listed(values)]


def _source_key(graph: fx.GraphModule) -> str:
    """What a graph of dynamo is known by: the same for all sizes that are dynamic."""
    digest = hashlib.sha256(str(graph.graph).encode())
    for each in graph_inputs(graph):
        form = tuple(each.shape), each.stride(), each.dtype, each.device, each.requires_grad
        digest.update(str(form).encode())
    return digest.hexdigest()
