"""A joint graph as ops, values and events: a part of the `Graph` of a step (P2, P3).

Forward and backward of a compiled graph are one event for each kernel. Forward's results are
values, which a schedule keeps or recomputes; what backward makes by itself, gradients above all,
are fixed bytes. To know what they cost, kernels of libraries are run, on tensors like theirs. Loops
move bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from recollect._torch.inductor import known_size
from recollect._torch.ops import OpOverload, op_name
from recollect._torch.pytree import tree_map_only
from recollect.compiled.joint import Joint, find_reads, in_memory, is_dense, nbytes_of
from recollect.graph.graph import Event, Op, Value
from recollect.planning.recording.prices import Prices

#: The end of a storage that the caller holds.
FOREVER = -1
#: The bytes of the state of a generator: it is held for an op that draws, if that is to run again.
_STATES = {"cpu": 5056}
_STATE = 16


@dataclass(frozen=True)
class Part:
    """What one call of a compiled graph adds to a step."""

    key: str  #: of the joint graph
    ops: Sequence[Op]  #: those of forward, in order
    names: Sequence[str]  #: the names of their nodes
    values: Sequence[Value]  #: the values that they make; value n has storage n
    #: By value: the last event of forward that reads it; `FOREVER` if forward returns it.
    dies: Sequence[int]
    #: The values that backward reads, each with the event of backward that does.
    saved: Sequence[tuple[int, int]]
    forward: Sequence[Event]  #: an event for each op
    backward: Sequence[Event]  #: an event for each kernel
    #: The positions of inputs that are read: by op, and by event of backward.
    inputs: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]
    outputs: dict[int, int]  #: by position of an output of forward: the value that it shows
    results: dict[str, int]  #: by name of a node that is a value: the number of its op
    #: The bytes of each, with the last event of backward that reads it.
    tangents: Sequence[tuple[int, int]] = ()
    backward_names: Sequence[str] = ()  #: the names of the nodes of ``backward``
    #: By op: the name of the first node from it on that runs where it is in the graph, as kernels
    #: of libraries do, and loops need not; empty: the end of forward.
    ends: Sequence[str] = ()

    @cached_property
    def needed(self) -> frozenset[str]:
        """The names of the nodes whose results this graph reads, or that must not run again."""
        read = {value for op in self.ops for value in op.reads} | {value for value, _ in self.saved}
        ops = {self.values[value].op for value in read}
        return frozenset(n for at, n in enumerate(self.names) if at in ops or self.ops[at].forced)

    @property
    def returned(self) -> int:
        """The bytes that forward returns."""
        return sum(self.values[value].nbytes for value in {*self.outputs.values()})


def make_part(key: str, joint: Joint, costs: NodeCosts, *, fused: bool) -> Part:
    """The part of a step that a joint graph is. ``fused``: whether Inductor compiles it."""
    return _Maker(key, joint, costs, fused=fused).make()


class _Maker:
    def __init__(self, key: str, joint: Joint, costs: NodeCosts, *, fused: bool) -> None:
        self.key, self.joint, self.costs = key, joint, costs
        if fused:
            self.heavy, self.kernels = in_memory(joint)
        else:
            self.heavy = self.kernels = set(joint.makers)
        self.reads: dict[fx.Node, list[fx.Node]] = {}
        for node in joint.makers:
            self.reads[node] = find_reads(joint, node, self.heavy, self.reads)
        self.ours = [node for node in joint.makers if node in self.heavy and node in joint.forward]
        self.theirs = [node for node in joint.backward if node in self.heavy]
        self.place = {node: number for number, node in enumerate(joint.placeholders)}
        self.number: dict[fx.Node, int] = {}
        self.values: list[Value] = []
        for at, node in enumerate(self.ours):
            for result in joint.results(node):
                self.number[result] = len(self.values)
                self.values.append(Value(nbytes_of(result), at, len(self.values)))

    def make(self) -> Part:
        joint = self.joint
        read_by = [[r for r in self.reads[node] if r in self.number] for node in self.ours]
        dies = [value.op for value in self.values]
        for at, reads in enumerate(read_by):
            for read in reads:
                dies[self.number[read]] = at
        outputs = {}
        for position, node in joint.forward_outputs:
            base = joint.base(node)
            if base in self.number:
                outputs[position] = self.number[base]
                dies[self.number[base]] = FOREVER
        ops = self._ops(read_by)
        return Part(
            key=self.key,
            ops=ops,
            names=[node.name for node in self.ours],
            values=self.values,
            dies=dies,
            saved=self._saved(),
            forward=[Event(op.seconds, 0, op.workspace, at) for at, op in enumerate(ops)],
            backward=self._backward(),
            inputs=(self._inputs(self.ours), self._inputs(self.theirs)),
            outputs=outputs,
            results={node.name: self.values[n].op for node, n in self.number.items()},
            tangents=self._tangents(),
            backward_names=[self._name(node) for node in self.theirs],
            ends=self._ends(),
        )

    def _inputs(self, nodes: Sequence[fx.Node]) -> list[list[int]]:
        return [[self.place[r] for r in self.reads[node] if r in self.place] for node in nodes]

    # --- forward ----------------------------------------------------------------------------------

    def _ops(self, read_by: Sequence[Sequence[fx.Node]]) -> list[Op]:
        counts: dict[str, int] = defaultdict(int)
        ops = []
        for node, reads in zip(self.ours, read_by, strict=True):
            path, name = self.joint.path(node), op_name(node.target)
            start = f"{path}|{name}"
            seconds, workspace = self._cost(node)
            makes = tuple(self.number[each] for each in self.joint.results(node))
            device = str(self.joint.device(node))
            ops.append(
                Op(
                    name=name,
                    path=path,
                    key=f"{start}|{counts[start]}",
                    seconds=seconds,
                    reads=tuple(self.number[each] for each in reads),
                    makes=makes,
                    places=tuple(range(len(makes))),
                    workspace=workspace,
                    state=_STATES.get(device, _STATE) if self.joint.draws(node) else 0,
                    forced=self.joint.must_not_run_again(node),
                    can_offload=self._can_send(node),
                )
            )
            counts[start] += 1
        return ops

    def _name(self, node: fx.Node) -> str:
        """The name of a maker in the halves, where one that draws is wrapped if it runs again."""
        results = self.joint.results(node)
        return next((each for each in results if each in self.joint.forward), results[0]).name

    def _ends(self) -> list[str]:
        ends = [""]
        for node in reversed(self.ours):
            ends.append(self._name(node) if node in self.kernels else ends[-1])
        return ends[:0:-1]

    def _can_send(self, node: fx.Node) -> bool:
        """Whether a copy of the results can take their place: nobody but backward holds them."""
        results = self.joint.results(node)
        return all(each not in self.joint.returned and is_dense(each) for each in results)

    def _cost(self, node: fx.Node) -> tuple[float, int]:
        moved = sum(map(nbytes_of, (*self.reads[node], *self.joint.results(node))))
        if node in self.kernels:
            return self.costs.of_kernel(node, moved)
        return self.costs.of_loop(moved), 0

    # --- backward ---------------------------------------------------------------------------------

    def _saved(self) -> list[tuple[int, int]]:
        """The values of forward that backward reads, and when: later reads of one value first."""
        found = [
            (self.number[read], at)
            for at, node in enumerate(self.theirs)
            for read in self.reads[node]
            if read in self.number
        ]
        for _, node in self.joint.backward_outputs:  # a value of forward that is a gradient
            base = self.joint.base(node)
            if base in self.number and self.theirs:
                found.append((self.number[base], len(self.theirs) - 1))
        return sorted(set(found), key=lambda pair: (pair[0], -pair[1]))

    def _tangents(self) -> list[tuple[int, int]]:
        last = {read: at for at, node in enumerate(self.theirs) for read in self.reads[node]}
        return [(nbytes_of(node), last.get(node, -1)) for node in self.joint.tangents]

    def _backward(self) -> list[Event]:
        """The kernels of backward, with the bytes that backward itself makes."""
        joint, theirs = self.joint, self.theirs
        ends: dict[fx.Node, int] = {}
        for at, node in enumerate(theirs):
            for read in self.reads[node]:
                ends[read] = at
        for _, node in joint.backward_outputs:
            ends[joint.base(node)] = len(theirs)
        freed: dict[int, int] = defaultdict(int)
        alive, events = 0, []
        for at, node in enumerate(theirs):
            seconds, workspace = self._cost(node)
            results = joint.results(node)
            made = sum(map(nbytes_of, results))
            written = 0 if node in self.kernels else min(made, self._last_reads(node, ends, at))
            events.append(Event(seconds, alive, alive + made - written + workspace))
            for result in results:
                freed[ends.get(result, at)] += nbytes_of(result)
            alive += made - freed[at]
        return events

    def _last_reads(self, node: fx.Node, ends: dict[fx.Node, int], at: int) -> int:
        """The bytes that a kernel of loops may write over: it is the last to read them."""
        return sum(
            nbytes_of(read)
            for read in self.reads[node]
            if ends.get(read) == at and read not in self.number and read.op != "placeholder"
        )


# --- costs ---------------------------------------------------------------------------------------

#: Seconds to launch a kernel of loops.
_LAUNCH = 3e-6


class NodeCosts:
    """The costs of nodes on one device."""

    def __init__(self, device: torch.device) -> None:
        self._prices = Prices(device, fakes=True)

    @property
    def spread(self) -> float:
        """By how much times may be off, as a fraction."""
        return self._prices.spread

    def of_kernel(self, node: fx.Node, moved: int) -> tuple[float, int]:
        """The seconds and the workspace of an op that runs as it is. ``moved``: its bytes."""
        if type(node.target) is not OpOverload:
            return self.of_loop(moved), 0
        args, kwargs = tree_map_only(fx.Node, _like, (node.args, node.kwargs))
        try:
            price = self._prices.price(node.target, args, kwargs)
        except NotImplementedError:  # what only a library knows
            return self.of_loop(moved), 0
        return price.seconds, max(0, price.workspace)

    def of_loop(self, moved: int) -> float:
        """The seconds of a kernel that reads and writes so many bytes."""
        return self._prices.moving(moved) + _LAUNCH

    def finish(self) -> None:
        """Remember all prices."""
        self._prices.finish()


def _like(node: fx.Node) -> Any:
    """A tensor like that of a node, without memory; another value as it is."""
    return tree_map_only((torch.Tensor, torch.SymInt, torch.SymFloat), _bare, node.meta.get("val"))


def _bare(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return known_size(value)
    sizes = [known_size(size) for size in value.shape]
    strides = [known_size(stride) for stride in value.stride()]
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
