"""Has the halves of a split graph send saved tensors to the host, and fetch them (P7).

Forward returns the copy on the host for backward, in the place of the tensor. What that holds on
the device, and from when on, is decided by where ops of ours are in the graphs.

Each copy is two ops, as it runs beside the computation, on a stream of its own (`CudaLink`). One
starts it: ``send(source) -> host``, or ``fetch(host, device) -> tensor``. At the other,
``sent(source, host) -> host`` or ``fetched(host, tensor) -> tensor``, the computing stream waits
for it. That takes the source, too: a compiler must not use that memory for something else before.

The CPU never waits. Memory is freed in the order in which work is issued, so how much there is does
not depend on how long copies take. Pinned memory is that of torch's own cache, which knows the
copies that use it. Tensors of the CPU are copied at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from recollect._torch.pytree import tree_map_only
from recollect.checks.place import WarnOnce
from recollect.compiled.decisions import Away
from recollect.compiled.joint import kernel_test, returned_by
from recollect.store.links import CudaLink, cuda_links
from recollect.store.spans import Span, bytes_of, layout_of, tensor_on

_Test = Callable[[fx.Node], bool]


def offload(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    outputs: int,
    away: Sequence[Away],
    *,
    fused: bool,
) -> None:
    """Change the halves of a graph so that what is ``away`` is held on the host.

    ``outputs``: how much of what forward returns is for the caller, and not for backward;
    ``fused``: whether Inductor compiles the halves.
    """
    is_kernel = kernel_test() if fused else lambda _: True
    given = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    returned = returned_by(forward)
    saved = {each.name: each for each in returned[outputs:] if isinstance(each, fx.Node)}
    for each in returned[:outputs]:
        if isinstance(each, fx.Node):
            saved.pop(each.name, None)  # the caller holds it
    # In this order copies out begin, and copies back that begin at one node in the other one.
    leaving = [each for each in away if each.name in saved and each.name in given]
    hosts = {
        saved[each.name]: _put_send(forward, saved[each.name], each, is_kernel) for each in leaving
    }
    (output,) = forward.graph.find_nodes(op="output")
    output.args = tree_map_only(fx.Node, lambda node: hosts.get(node, node), output.args)
    for each in reversed(leaving):
        _put_fetch(backward, given[each.name], each, is_kernel)
    for half in (forward, backward):
        half.graph.lint()
        half.recompile()


def _put_send(forward: fx.GraphModule, source: fx.Node, away: Away, is_kernel: _Test) -> fx.Node:
    """Send a tensor when it is made. Returns its copy once that has arrived."""
    host = _insert_after(source, SEND, (source,))
    places = {node: number for number, node in enumerate(forward.graph.nodes)}
    (output,) = forward.graph.find_nodes(op="output")
    freed = _named(forward, away.freed, host) if away.freed else output.prev
    last = max(_end_of(freed, is_kernel), host, key=places.__getitem__)
    return _insert_after(last, SENT, (source, host))


def _put_fetch(backward: fx.GraphModule, given: fx.Node, away: Away, is_kernel: _Test) -> None:
    """Fetch a tensor that backward is ``given``."""
    device = given.meta["val"].device
    given.meta["val"] = SEND(given.meta["val"])
    given.meta.pop("tensor_meta", None)
    places = {node: number for number, node in enumerate(backward.graph.nodes)}
    readers = [*given.users]
    if not readers:
        return
    first = min(readers, key=places.__getitem__)
    last_given = max(backward.graph.find_nodes(op="placeholder"), key=places.__getitem__)
    after = _named(backward, away.fetched, first.prev) if away.fetched else last_given
    after = min(_end_of(after, is_kernel), first.prev, key=places.__getitem__)
    tensor = _insert_after(after, FETCH, (given, device))
    there = _insert_after(first.prev, FETCHED, (given, tensor))
    for reader in readers:
        reader.replace_input_with(given, there)


def _named(half: fx.GraphModule, name: str, other: fx.Node) -> fx.Node:
    """The node of a name; ``other`` if torch has put another one in its place."""
    return next((node for node in half.graph.nodes if node.name == name), other)


def _end_of(node: fx.Node, is_kernel: _Test) -> fx.Node:
    """The last node that belongs to what runs at ``node``, with copies that begin or end there.

    A copy back begins before the device waits for another one. Inductor runs loops just before the
    next kernel of a library, or has the one before compute them: a product adds to its result.
    """
    while (following := node.next).op != "output":
        is_copy = following.target in OPS
        if following.target is FETCHED or (is_kernel(following) and not is_copy):
            break
        node = following
    return node


def _insert_after(node: fx.Node, op: Any, args: tuple[Any, ...]) -> fx.Node:
    with node.graph.inserting_after(node):
        made = node.graph.call_function(op, args)
    made.meta["val"] = op(*tree_map_only(fx.Node, lambda each: each.meta["val"], args))
    return made


# --- the ops -------------------------------------------------------------------------------------

#: What finds the link between the device of a tensor and the host; None: there is none.
link_of: Callable[[Tensor], CudaLink | None] = cuda_links()


class _Running(NamedTuple):
    """A copy under way. It holds its tensors, should backward end before they are used."""

    link: CudaLink
    done: Any
    source: Tensor
    target: Tensor


_warnings = WarnOnce()
#: By address of the target.
_running: dict[int, _Running] = {}


def _send(source: Tensor) -> Tensor:
    """Start to copy a tensor to the host."""
    link = link_of(source)
    if link is None:
        return _like(source, source.device).copy_(source)
    host = tensor_on(_host_memory(link, source.nbytes), 0, layout_of(source)._replace(offset=0))
    done = link.copy_out([(_bytes(source), _bytes(host))], ())
    _note(_Running(link, done, source, host))
    return host


def _fetch(host: Tensor, device: torch.device) -> Tensor:
    """Start to copy a tensor from the host."""
    tensor = _like(host, device)
    link = link_of(tensor)
    if link is None:
        return tensor.copy_(host)
    done = link.copy_in([(_bytes(host), _bytes(tensor))], ())
    _note(_Running(link, done, host, tensor))
    return tensor


def _note(copy: _Running) -> None:
    for address, other in [*_running.items()]:
        if other.link.is_done(other.done):  # nobody needs to wait
            _running.pop(address, None)
    _running[copy.target.data_ptr()] = copy


def _arrived(_: Tensor, target: Tensor) -> Tensor:
    """The copy of a tensor, for which the computing stream waits."""
    copy = _running.pop(target.data_ptr(), None)
    if copy is not None:
        copy.link.wait(copy.link.stream(), copy.done)
    return target


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor that fills its memory."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    return bytes_of(tensor.untyped_storage(), Span(start, start + tensor.nbytes))


def _host_memory(link: CudaLink, size: int) -> Tensor:
    """Pinned host memory, or other memory, to which copies are slower."""
    try:
        return link.pin(size)
    except RuntimeError as error:
        _warnings.warn(
            "pinned",
            f"a plan holds {size:,} bytes in host memory that is not pinned: {error}. This is "
            "correct but slow, because the CPU waits for such copies. Plan with offload=False, or "
            "with a larger budget",
        )
        return torch.empty(size, dtype=torch.uint8, device="cpu")


# --- as the compiler sees them --------------------------------------------------------------------

_library = torch.library.Library("recollect", "FRAGMENT")
#: The strides of arguments are those that they had when they were traced.
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)


def _define(schema: str, run: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"recollect::{name}", fake, lib=_library)
    return getattr(torch.ops.recollect, name).default


def _fake_arrived(_: Tensor, target: Tensor) -> Tensor:
    return target


SEND = _define(
    "send(Tensor source) -> Tensor", _send, lambda source: _like(source, torch.device("cpu"))
)
SENT = _define("sent(Tensor source, Tensor(a) host) -> Tensor(a)", _arrived, _fake_arrived)
FETCH = _define("fetch(Tensor host, Device device) -> Tensor", _fetch, _like)
FETCHED = _define("fetched(Tensor host, Tensor(a) tensor) -> Tensor(a)", _arrived, _fake_arrived)
OPS = (SEND, SENT, FETCH, FETCHED)
