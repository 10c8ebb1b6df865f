"""Which tensors of a joint graph get memory from Inductor.

Kernels of libraries (matrix products, attention, convolutions) have results in memory. Everything
else becomes loops, and a loop is computed within the loops that read it, unless it pays to have its
result in memory. That is decided by rules which are not ours to know; this is what a step shows:

* a kernel of a library reads it, or it is returned,
* it is read after such a kernel that it does not need itself: two loops that lie so far apart are
  not one,
* it is at most half of what it is computed from: a reduction, or a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import fx

from recollect._torch.inductor import fuses
from recollect._torch.ops import op_name
from recollect.compiled.joint import Joint, is_maker, nbytes_of

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
