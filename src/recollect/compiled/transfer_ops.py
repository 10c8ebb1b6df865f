"""Ops of ours in compiled code: a tensor leaves for the host, and is fetched from there (P7).

Each copy is two ops, as it runs beside the computation, on a stream of its own (`CudaLink`). One
starts it: ``send(source) -> host``, or ``fetch(host, device) -> tensor``. At the other,
``sent(source, host) -> host`` or ``fetched(host, tensor) -> tensor``, the computing stream waits
for it. That takes the source, too: a compiler must not use that memory for something else before.

The CPU never waits. Memory is freed in the order in which work is issued, so how much there is does
not depend on how long copies take. Pinned memory is that of torch's own cache, which knows the
copies that use it. Tensors of the CPU are copied at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recollect.checks.place import WarnOnce
from recollect.store.links import CudaLink, cuda_links
from recollect.store.spans import Span, bytes_of, layout_of, tensor_on

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


def _fake_send(source: Tensor) -> Tensor:
    return _like(source, torch.device("cpu"))


def _fake_arrived(_: Tensor, target: Tensor) -> Tensor:
    return target


SEND = _define("send(Tensor source) -> Tensor", _send, _fake_send)
SENT = _define("sent(Tensor source, Tensor(a) host) -> Tensor(a)", _arrived, _fake_arrived)
FETCH = _define("fetch(Tensor host, Device device) -> Tensor", _fetch, _like)
FETCHED = _define("fetched(Tensor host, Tensor(a) tensor) -> Tensor(a)", _arrived, _fake_arrived)
OPS = (SEND, SENT, FETCH, FETCHED)
