"""Splits joint graphs into forward and backward: as torch does, or as a plan decides (P7)."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from recollect._torch.dynamo import tag_recompute_nodes
from recollect._torch.inductor import copied, min_cut, simplify
from recollect._torch.pytree import tree_leaves
from recollect.compiled.joint import Joint, key_of, nbytes_of

_Halves = tuple[fx.GraphModule, fx.GraphModule]
#: Decides which nodes of a graph that was not planned are kept.
Solve = Callable[[str, Joint], Collection[str]]


@dataclass(frozen=True)
class SeenGraph:
    """A joint graph that was split.

    Args:
        key: Of the joint graph.
        joint: The graph.
        saved: The names of the results that forward saves for backward, each with its bytes.
        torch_saves: The same as torch would split it.
    """

    key: str
    joint: Joint
    saved: Mapping[str, int]
    torch_saves: Mapping[str, int]


class Observer:
    """Splits as torch does, or as ``solve`` says, and keeps what it has seen."""

    def __init__(self, solve: Solve | None = None) -> None:
        self.seen: list[SeenGraph] = []
        self._solve = solve
        self._count = 0
        #: Whether anything is decided, and not left to torch.
        self.decides = solve is not None

    def uuid(self) -> str:
        """Of its own at each call: out of a cache, nothing would be seen."""
        self._count += 1
        return f"recollect-observer-{id(self)}-{time.time_ns()}-{self._count}"

    def __call__(self, graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> _Halves:
        """Split a graph."""
        simplify(graph)
        key, outputs = key_of(graph), kwargs["num_fwd_outputs"]
        joint = Joint(graph, outputs)
        torch_saves = None
        if self._solve is not None:
            torchs = min_cut(copied(graph), inputs, **kwargs)[0]
            torch_saves = _saved_bytes(joint, torchs, outputs)
            tag(joint, self._solve(key, joint))
        halves = min_cut(graph, inputs, **kwargs)
        saved = _saved_bytes(joint, halves[0], outputs)
        self.seen.append(SeenGraph(key, joint, saved, torch_saves or saved))
        return halves


class Player:
    """Splits as decided.

    Args:
        decisions: By key of a graph: the names of the nodes to keep; None: as torch chooses.
        sources: Keys of the graphs of dynamo that they were made from.
        uuid: What the compiler's caches know the decisions by.
        solve: For graphs without a decision.
    """

    def __init__(
        self,
        decisions: Mapping[str, Collection[str] | None],
        sources: Collection[str],
        uuid: str,
        solve: Solve,
    ) -> None:
        self._decisions = decisions
        self._sources = frozenset(sources)
        self._uuid = uuid
        self._solve = solve
        self._count = 0
        #: Whether anything is decided, and not left to torch.
        self.decides = any(each is not None for each in decisions.values())
        #: The key of the graph of dynamo that is being compiled.
        self.source = ""

    def uuid(self) -> str:
        """The same for the same decisions.

        For a graph that was not planned it is another one each time: out of a cache, nobody would
        know whether it fits.
        """
        if self.source in self._sources:
            return self._uuid
        self._count += 1
        return f"{self._uuid}-{id(self)}-{time.time_ns()}-{self._count}"

    def __call__(self, graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> _Halves:
        """Split a graph."""
        simplify(graph)
        key = key_of(graph)
        joint = Joint(graph, kwargs["num_fwd_outputs"])
        kept = self._decisions[key] if key in self._decisions else self._solve(key, joint)
        if kept is not None:
            tag(joint, kept)
        return min_cut(graph, inputs, **kwargs)


def tag(joint: Joint, kept: Collection[str]) -> None:
    """Say of every node that backward needs whether it is saved or recomputed.

    The partitioner is left with nothing to choose.
    """
    keep = {node for node in joint.makers if node.name in set(kept)}
    saved: dict[fx.Node, None] = {}
    recomputed: dict[fx.Node, None] = {}
    own = set(joint.backward) - joint.unclaimed
    pending = [each for node in own for each in node.all_input_nodes if each not in own]
    pending += [node for _, node in joint.backward_outputs if node not in own]
    while pending:
        node = pending.pop()
        if node.op != "call_function" or node in saved or node in recomputed:
            continue
        if node in keep:
            saved[node] = None
        elif node.target is operator.getitem and node.all_input_nodes[0] in keep:
            # The tuple cannot be saved, but its maker must not run again: so this is saved.
            saved[node.all_input_nodes[0]] = None
        else:
            recomputed[node] = None
            pending += node.all_input_nodes
    tag_recompute_nodes(list(saved), "MUST_SAVE", None)
    tag_recompute_nodes([n for n in recomputed if _is_tensor(n)], "MUST_RECOMPUTE", None)


def _is_tensor(node: fx.Node) -> bool:
    leaves = tree_leaves(node.meta.get("val"))
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _saved_bytes(joint: Joint, forward: fx.GraphModule, outputs: int) -> dict[str, int]:
    """The results that forward returns for backward, by name of the node that makes them."""
    nodes = {node.name: node for node in joint.nodes}
    (output,) = forward.graph.find_nodes(op="output")
    saved: dict[str, int] = {}
    for each in tree_leaves(output.args)[outputs:]:
        node = nodes.get(each.name) if isinstance(each, fx.Node) else None
        if node is None:
            continue
        base = joint.base(node)
        if base.op == "call_function":
            saved[base.name] = nbytes_of(base)
    return saved
