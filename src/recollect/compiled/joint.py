"""Reads a joint graph: forward and backward of a compiled step, as nodes of torch.fx.

A *maker* is a node that runs a kernel, its *results* are the tensors that it makes: itself, or what
is taken out of the tuple that it returns. Views are seen through: a node *stands for* the result
whose memory it shows.

Where Inductor compiles the graph, kernels of libraries (matrix products, attention, convolutions)
have results in memory. Everything else becomes loops, and a loop is computed within the loops that
read it, unless it pays to have its result in memory. That is decided by rules which are not ours to
know; this is what a step shows (`in_memory`):

* a kernel of a library reads it, or it is returned,
* it is read after such a kernel that it does not need itself: two loops that lie so far apart are
  not one,
* it is at most half of what it is computed from: a reduction, or a mask.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from recollect._torch.inductor import fuses, known_size
from recollect._torch.ops import OpOverload, has_tag, op_name
from recollect._torch.pytree import tree_leaves
from recollect.policy.op_info import op_info

#: Blocks of CUDA's allocator are multiples of this.
_BLOCK = 512
#: Copies that Inductor does not make.
_LIKE_VIEWS = frozenset({"aten::_unsafe_view", "aten::reshape"})


def nbytes_of(node: fx.Node) -> int:
    """The bytes of a new storage for the result of ``node``."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = [known_size(size) for size in value.shape]
    if 0 in sizes:
        return 0
    strides = [known_size(stride) for stride in value.stride()]
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    nbytes = (1 + last) * value.dtype.itemsize
    return -(-nbytes // _BLOCK) * _BLOCK if value.device.type == "cuda" else nbytes


def is_dense(node: fx.Node) -> bool:
    """Whether the numbers of the result of ``node`` fill its memory, each in a place of its own."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    sizes = [known_size(size) for size in value.shape]
    strides = [known_size(stride) for stride in value.stride()]
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def key_of(graph: fx.GraphModule) -> str:
    """What a joint graph is known by: its ops, wiring and constants, and the forms of its inputs.

    The same in another process, with the same release of torch.
    """
    digest = hashlib.sha256(str(graph.graph).encode())
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            form = tuple(value.shape), value.stride(), value.dtype, value.device
            digest.update(str(form).encode())
    return digest.hexdigest()


def returned_by(graph: fx.GraphModule) -> list[Any]:
    """What a graph returns: nodes, and other values."""
    (output,) = graph.graph.find_nodes(op="output")
    return tree_leaves(output.args)


class Joint:
    """A joint graph, simplified, with the properties of tensors as ``meta["val"]`` of nodes.

    ``outputs``: how many of its outputs are those of forward.
    """

    def __init__(self, graph: fx.GraphModule, outputs: int) -> None:
        self.nodes: list[fx.Node] = [node for node in graph.graph.nodes if node.op != "output"]
        returned = returned_by(graph)
        self.placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.tangents = [node for node in self.placeholders if "tangents" in str(node.target)]
        #: What forward returns, and backward: tensors, each by its position.
        self.forward_outputs = _nodes_in(returned[:outputs])
        self.backward_outputs = _nodes_in(returned[outputs:])
        self.forward = _ancestors(self.forward_outputs)
        self._stands_for: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            self._stands_for[node] = self._find_base(node)

    # --- nodes ------------------------------------------------------------------------------------

    def _find_base(self, node: fx.Node) -> fx.Node:
        if node.op != "call_function" or not node.all_input_nodes:
            return node
        if node.target is operator.getitem:
            source = node.all_input_nodes[0]
            return self._stands_for[source] if is_view(source) else node
        return self._stands_for[node.all_input_nodes[0]] if is_view(node) else node

    def base(self, node: fx.Node) -> fx.Node:
        """The result, or the input, whose memory ``node`` shows."""
        return self._stands_for[node]

    def is_view(self, node: fx.Node) -> bool:
        """Whether ``node`` shows the memory of another one."""
        return self._stands_for[node] is not node

    def is_result(self, node: fx.Node) -> bool:
        """Whether ``node`` is one of several results of a maker."""
        return node.target is operator.getitem and not self.is_view(node)

    def maker(self, result: fx.Node) -> fx.Node:
        """The node that makes a result."""
        return result.all_input_nodes[0] if self.is_result(result) else result

    @cached_property
    def makers(self) -> list[fx.Node]:
        """The nodes that run kernels, in the order of the graph."""
        return [node for node in self.nodes if is_maker(node)]

    def results(self, maker: fx.Node) -> list[fx.Node]:
        """The results of a maker that are used."""
        return [user for user in maker.users if self.is_result(user)] or [maker]

    def readers(self, maker: fx.Node) -> list[fx.Node]:
        """The makers that read results of a maker, through views."""
        found: dict[fx.Node, None] = {}
        pending = [maker]
        while pending:
            for user in pending.pop().users:
                if user.op == "output":
                    continue
                if user.target is operator.getitem or self.is_view(user):
                    pending.append(user)
                else:
                    found[user] = None
        return list(found)

    @cached_property
    def returned(self) -> set[fx.Node]:
        """The results that forward or backward returns."""
        return {self.base(node) for _, node in (*self.forward_outputs, *self.backward_outputs)}

    @cached_property
    def backward(self) -> list[fx.Node]:
        """The nodes of backward, in the order in which it runs them.

        Those that no gradient leads to run when they are first needed.
        """
        order = {node: number for number, node in enumerate(self.nodes)}
        first = min((order[user] for each in self.tangents for user in each.users), default=0)
        done: dict[fx.Node, None] = {}
        for node in self.nodes[first:]:
            if node in self.forward or node.op != "call_function":
                continue
            wanted: set[fx.Node] = set()
            pending = [node]
            while pending:
                each = pending.pop()
                if each not in done and each not in wanted and each not in self.forward:
                    wanted.add(each)
                    pending += each.all_input_nodes
            done |= dict.fromkeys(sorted(wanted, key=order.__getitem__))
        return list(done)

    @cached_property
    def unclaimed(self) -> set[fx.Node]:
        """The nodes of backward that depend on no gradient."""
        led_to = set(self.tangents)
        for node in self.nodes:
            if any(each in led_to for each in node.all_input_nodes):
                led_to.add(node)
        return {node for node in self.backward if node not in led_to}

    # --- what nodes are ---------------------------------------------------------------------------

    @staticmethod
    def path(node: fx.Node) -> str:
        """The path of the module that called the op of a node."""
        stack = node.meta.get("nn_module_stack") or {}
        paths = [str(path) for path, _ in stack.values()]
        return _bare_path(paths[-1]) if paths else ""

    @staticmethod
    def device(maker: fx.Node) -> torch.device | None:
        """The device of the first result of a maker."""
        return next((each.device for each in tensors_of(maker)), None)

    @staticmethod
    def must_not_run_again(node: fx.Node) -> bool:
        """Whether another run would compute something else, or is an effect."""
        target = node.target
        if type(target) is not OpOverload:
            return True  # a higher-order op, which may be anything
        info = op_info(target)
        seeds = str(target).startswith(("prims.inductor_seeds", "prims.inductor_seed."))
        return seeds or info.communicates or info.writes

    @staticmethod
    def draws(node: fx.Node) -> bool:
        """Whether torch holds the state of the generator for the op, if it is to run again.

        So it does for attention without dropout, too.
        """
        return has_tag(node.target, torch.Tag.nondeterministic_seeded)


def is_view(node: fx.Node) -> bool:
    """Whether a node shows the memory of what it is given."""
    target = node.target
    if type(target) is not OpOverload:
        return False
    info = op_info(target)
    return (info.is_alias and not info.writes) or info.name in _LIKE_VIEWS


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node returns, as fakes."""
    leaves = tree_leaves(node.meta.get("val"))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def is_maker(node: fx.Node) -> bool:
    """Whether a node runs a kernel that makes tensors."""
    is_op = node.op == "call_function" and node.target is not operator.getitem
    return is_op and not is_view(node) and bool(tensors_of(node))


def _nodes_in(values: Iterable[Any]) -> list[tuple[int, fx.Node]]:
    return [(n, each) for n, each in enumerate(values) if isinstance(each, fx.Node)]


def _ancestors(nodes: Iterable[tuple[int, fx.Node]]) -> set[fx.Node]:
    """The nodes, and all that they are computed from."""
    found: set[fx.Node] = set()
    pending = [node for _, node in nodes]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _bare_path(path: str) -> str:
    """A path as dynamo writes it, such as ``L['self'].layers[0].up``, as modules are named."""
    _, _, rest = path.partition("]")
    text = (rest if path.startswith("L[") else path).replace("_modules['", "").replace("']", "")
    text = text.replace("[", ".").replace("]", "").removeprefix(".")
    return text.removeprefix("_orig_mod").removeprefix(".")


# --- fusion --------------------------------------------------------------------------------------

#: Beside those that the partitioner knows of: ops that Inductor computes by loops.
_LOOPS = frozenset(
    {
        *("aten::_unsafe_index", "aten::amin", "aten::cat", "aten::constant_pad_nd"),
        *("aten::embedding", "aten::flip", "aten::gather", "aten::index", "aten::masked_fill"),
        *("aten::prod", "aten::repeat", "aten::select_scatter", "aten::slice_scatter"),
        *("aten::tril", "aten::triu", "prims::fma", "prims::iota", "prims::xor_sum"),
        *("prims::inductor_lookup_seed", "prims::inductor_randint", "prims::inductor_random"),
        "prims::inductor_seeds",
    }
)
#: What is drawn once in forward, and never again.
_SEEDS = "prims::inductor_seeds"


def kernel_test() -> Callable[[fx.Node], bool]:
    """A function: whether a node of a graph that Inductor compiles runs a kernel of a library.

    That runs where it is in the graph. Loops run anywhere between what they read and their reader.
    """
    is_fused = fuses()

    def is_kernel(node: fx.Node) -> bool:
        return is_maker(node) and op_name(node.target) not in _LOOPS and not is_fused(node)

    return is_kernel


def in_memory(joint: Joint) -> tuple[set[fx.Node], set[fx.Node]]:
    """The makers whose results have memory; and those of them that are kernels of libraries."""
    kernels = set(filter(kernel_test(), joint.makers))
    depth = _depths(joint, kernels)
    found: set[fx.Node] = set()
    reads: dict[fx.Node, list[fx.Node]] = {}
    for node in joint.makers:
        reads[node] = find_reads(joint, node, found, reads)
        readers = joint.readers(node)
        side = node in joint.forward
        results = joint.results(node)
        size = sum(map(nbytes_of, results))
        given = sum(nbytes_of(each) for each in reads[node] if each.op != "placeholder")
        if (
            node in kernels
            or any(each in joint.returned for each in results)
            or any(each in kernels for each in readers)
            or any(depth[r] > depth[node] for r in readers if (r in joint.forward) is side)
            or 0 < 2 * size <= given
            or op_name(node.target) == _SEEDS
        ):
            found.add(node)
    return found, kernels


def _depths(joint: Joint, kernels: set[fx.Node]) -> dict[fx.Node, int]:
    """By node: how many kernels of libraries come before it, one after the other."""
    depth: dict[fx.Node, int] = {}
    for node in joint.nodes:
        depth[node] = max(
            (depth[each] + (joint.maker(each) in kernels) for each in node.all_input_nodes),
            default=0,
        )
    return depth


def find_reads(
    joint: Joint,
    node: fx.Node,
    in_memory: Collection[fx.Node],
    reads: Mapping[fx.Node, Sequence[fx.Node]],
) -> list[fx.Node]:
    """The results and inputs that a maker reads, through makers whose results have no memory.

    ``reads``: those of the makers before it.
    """
    found: dict[fx.Node, None] = {}
    for given in node.all_input_nodes:
        base = joint.base(given)
        maker = joint.maker(base)
        if base.op == "placeholder" or maker in in_memory:
            found[base] = None
        else:
            found |= dict.fromkeys(reads.get(maker, ()))
    return list(found)
