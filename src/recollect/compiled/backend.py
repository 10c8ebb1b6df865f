"""A backend of torch.compile: the user's, with a partitioner of ours (P7)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from recollect._torch.inductor import (
    aot_arguments,
    assumed_sizes,
    backend_name,
    compile_by_inductor,
    graph_inputs,
    inductor_options,
    known_size,
    partitioner,
    run_as_it_is,
)
from recollect._torch.tensors import storage_key
from recollect.compiled.split import Observer, Player, SeenGraph

#: Options of Inductor in planned code: it holds no freed memory for later.
_PLANNED = {"allow_buffer_reuse": False}


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
    def is_fused(self) -> bool:
        """Whether Inductor compiles the graphs."""
        return self.options is not None

    def compile(
        self, graph: fx.GraphModule, inputs: Any, split: Observer | Player
    ) -> Callable[..., Any]:
        """Compile a graph of dynamo."""
        if self.options is None:
            assert self.arguments is not None
            return run_as_it_is(graph, inputs, self.arguments, split)
        planned = _PLANNED if split.decides else {}
        ours = partitioner(split, split.uuid)
        return compile_by_inductor(graph, inputs, {**planned, **self.options}, ours)


@dataclass(frozen=True)
class Call:
    """A call of a compiled graph in a step that is observed.

    Args:
        graph: The graph; None if it has no backward.
        source: The key of the graph of dynamo.
        inputs: The storages of its arguments; None for what is no tensor.
        outputs: Those of its results.
        site: The number of the compiled module that called it.
    """

    graph: SeenGraph | None
    source: str
    inputs: list[Any]
    outputs: list[Any]
    site: int


@dataclass
class Notes:
    """What is noted while a step is observed."""

    site: int = 0  #: the compiled module that was called last
    calls: list[Call] = field(default_factory=list)
    forwards: int = 0  #: how often the first compiled module was called

    def begin(self, site: int) -> None:
        """A compiled module is called."""
        self.site = site
        self.forwards += site == 0

    def clear(self) -> None:
        """Another step begins."""
        self.calls.clear()
        self.forwards = 0


@dataclass
class Runs:
    """How often compiled graphs ran, and how many were compiled."""

    count: int = 0
    compiled: int = 0
    #: Called when a graph is about to be compiled.
    on_compile: Callable[[], None] | None = None


@dataclass(eq=False)
class Backend:
    """Called by dynamo with a graph and its inputs. Compared by identity: dynamo shares code.

    Args:
        compiler: The user's backend.
        split: Splits joint graphs.
        on_larger: Called when code with dynamic shapes runs on larger ones than it was split for.
        runs: Counts the graphs that run.
        notes: Where calls of the compiled graphs are noted, if they are to be.
        on_copy: Called when a model with this code is copied: the copy has the same.
    """

    compiler: Compiler
    split: Observer | Player
    on_larger: Callable[[], None] | None = None
    runs: Runs = field(default_factory=Runs)
    notes: Notes | None = None
    on_copy: Callable[[], None] | None = None
    #: By the ranks of the tensors that graphs take: their largest sizes.
    _largest: dict[tuple[int, ...], list[tuple[int, ...]]] = field(default_factory=dict, repr=False)

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """Compile a graph."""
        source = _source_key(graph, inputs)
        self.runs.compiled += 1
        if self.runs.on_compile is not None:
            self.runs.on_compile()
        if isinstance(self.split, Player):
            self.split.source = source
            with self._for_largest(graph):
                return self._watched(self.compiler.compile(graph, inputs, self.split), inputs)
        before = len(self.split.seen)
        compiled = self.compiler.compile(graph, inputs, self.split)
        new = self.split.seen[before:]
        seen = new[-1] if new else None
        return compiled if self.notes is None else _noted(compiled, seen, source, self.notes)

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
        return assumed_sizes(tensors, largest)

    def _watched(self, compiled: Callable[..., Any], inputs: Any) -> Callable[..., Any]:
        """The same, counted; if shapes are dynamic, sizes above those that were met are told."""
        places = [n for n, each in enumerate(inputs) if isinstance(each, torch.SymInt)]
        most, runs = [known_size(inputs[n]) for n in places], self.runs

        def watched(*args: Any) -> Any:
            runs.count += 1
            for n, place in enumerate(places):
                if args[place] > most[n] and self.on_larger is not None:
                    self.on_larger()
                    most[n] = args[place]
            return compiled(*args)

        return watched

    def __deepcopy__(self, memo: Any) -> Backend:
        if self.on_copy is not None:
            self.on_copy()
        return self

    @property
    def __name__(self) -> str:
        return f"recollect({self.compiler.name})"


def _noted(
    compiled: Callable[..., Any], graph: SeenGraph | None, source: str, notes: Notes
) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        site, inputs = notes.site, _storages(args)
        result = compiled(*args)
        notes.calls.append(Call(graph, source, inputs, _storages(result), site))
        return result

    return noted


def _storages(values: Any) -> list[Any]:
    if isinstance(values, torch.Tensor):
        values = [values]
    return [storage_key(v) if isinstance(v, torch.Tensor) else None for v in values]


def _source_key(graph: fx.GraphModule, inputs: Any) -> str:
    """What a graph of dynamo is known by."""
    digest = hashlib.sha256(str(graph.graph).encode())
    for each in inputs:
        if isinstance(each, torch.Tensor):
            form = tuple(each.shape), each.stride(), each.dtype, each.device, each.requires_grad
            digest.update(str(form).encode())
    return digest.hexdigest()
