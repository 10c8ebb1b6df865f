"""The backend ``torch.compile(model, backend="recollect")``, an entry point of the package (P7).

It runs a graph of ATen ops as straight-line Python, which calls each op by the quickest way. What
torch generates for a graph looks up each op by four names, and calls it through its object. A value
is freed after the op that reads it last, as there.
"""

from __future__ import annotations

import linecache
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from math import isfinite
from typing import Any
from weakref import finalize

import torch
from torch import fx

from recollect._torch.bindings import quickest_call
from recollect._torch.inductor import (
    backend_of,
    default_partition,
    known_size,
    simplify,
    takes_list,
)
from recollect._torch.pytree import tree_map_only
from recollect.compiled.rewrites import fold_views, separate_gradients

_numbers = count()
#: What is written into the code as it is.
_LITERALS = (bool, int, str, type(None))


def straight_line(graph: fx.GraphModule, _inputs: Any = None) -> Callable[..., Any]:
    """A function that runs a graph. It takes a list of arguments, and empties it."""
    return _Writer(graph).function()


class _Writer:
    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.nodes = list(graph.graph.nodes)
        self.locals = {node.name for node in self.nodes}
        #: What the code refers to, by name; and the other way round, by identity.
        self.globals: dict[str, Any] = {}
        self.names: dict[int, str] = {}

    def function(self) -> Callable[..., Any]:
        lines = self._lines()
        file = f"<recollect graph {next(_numbers)}>"
        text = "\n".join(lines)
        exec(compile(text, file, "exec"), self.globals)
        run: Callable[..., Any] = self.globals.pop("run")
        # For the lines of a traceback.
        linecache.cache[file] = len(text), None, [f"{line}\n" for line in lines], file
        finalize(run, linecache.cache.pop, file, None)
        return takes_list(run)

    def _lines(self) -> list[str]:
        dead = self._last_uses()
        given = [node.name for node in self.nodes if node.op == "placeholder"]
        lines = ["def run(args):"]
        lines += [f"    {', '.join(given)}, = args"] if given else []
        lines += ["    args.clear()"]
        for node in self.nodes:
            if node.op == "output":
                lines.append(f"    return {self._text(node.args[0])}")
            elif node.op != "placeholder":
                lines.append(f"    {node.name} = {self._expression(node)}")
            if node.op != "output" and dead[node]:
                lines.append(f"    del {', '.join(each.name for each in dead[node])}")
        return lines

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """By node: what is not needed after it."""
        last = {used: node for node in self.nodes for used in (node, *node.all_input_nodes)}
        dead = defaultdict(list)
        for used, node in last.items():
            dead[node].append(used)
        return dead

    def _expression(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            value: Any = self.graph
            for name in str(node.target).split("."):
                value = getattr(value, name)
            return self._global(value, node.name)
        if node.op == "call_method":
            first, *others = node.args
            return f"{self._text(first)}.{node.target}({self._given(others, node.kwargs)})"
        args, kwargs = tree_map_only(fx.Node, _example, (node.args, node.kwargs))
        function = quickest_call(node.target, args, kwargs)
        name = self._global(function, getattr(node.target, "__name__", "function"))
        return f"{name}({self._given(node.args, node.kwargs)})"

    def _given(self, args: Any, kwargs: Any) -> str:
        texts = [self._text(each) for each in args]
        return ", ".join([*texts, *(f"{name}={self._text(v)}" for name, v in kwargs.items())])

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return str(value.name)
        if isinstance(value, (list, tuple)):  # also the lists of torch.fx
            items = "".join(f"{self._text(each)}, " for each in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if isinstance(value, dict):
            pairs = (f"{key!r}: {self._text(each)}" for key, each in value.items())
            return f"{{{', '.join(pairs)}}}"
        if type(value) in _LITERALS or (type(value) is float and isfinite(value)):
            return repr(value)
        return self._global(value, type(value).__name__)

    def _global(self, value: Any, hint: str) -> str:
        """The name by which the code refers to a value."""
        if id(value) not in self.names:
            name = base = "".join(c if c.isalnum() else "_" for c in hint)
            numbers = count(1)
            while name in self.locals or name in self.globals or not name.isidentifier():
                name = f"{base}_{next(numbers)}_"
            self.globals[name], self.names[id(value)] = value, name
        return self.names[id(value)]


def _example(node: fx.Node) -> Any:
    """A value of the type that a node has when the graph runs."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymFloat):
        return 1.0
    return known_size(value) if isinstance(value, torch.SymInt) else value


def split(graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Split a joint graph where there is no plan."""
    fold_views(graph, kwargs["num_fwd_outputs"])
    separate_gradients(graph, **kwargs)
    simplify(graph)
    return default_partition(graph, inputs, **kwargs)


#: Runs the ops of a graph as they are, and does nothing else at each step.
backend = backend_of("recollect", straight_line, split)
