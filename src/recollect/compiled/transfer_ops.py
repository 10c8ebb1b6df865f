"""Ops of ours in compiled code: a tensor leaves for the host, and is fetched from there (P7).

Each copy is two ops, as it runs beside the computation, on a stream of its own (`CudaLink`): one
starts it, and the computing stream waits for it at the other. That takes what is copied from, too:
so neither Inductor nor torch's allocator can use that memory for something else before.

``send(source) -> host``, ``sent(source, host) -> host``, ``fetch(host, device) -> tensor`` and
``fetched(host, tensor) -> tensor``. On the CPU they copy at once.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from recollect.errors import RecollectWarning
from recollect.store.links import CudaLink, cuda_links

_library = torch.library.Library("recollect", "DEF")
#: Strides have to be those of the joint graph.
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
_link_of = cuda_links()
#: By address of the memory that a copy writes to: its link and the event of its end.
_running: dict[int, tuple[CudaLink, Any]] = {}


def _send(source: Tensor) -> Tensor:
    """Start to copy a tensor to the host."""
    link = _link_of(source)
    if link is None:
        return _like(source, source.device).copy_(source)
    host = _pinned_like(source)
    _running[host.data_ptr()] = link, link.copy_out([(source, host)], ())
    return host


def _fetch(host: Tensor, device: torch.device) -> Tensor:
    """Start to copy a tensor from the host."""
    tensor = _like(host, device)
    link = _link_of(tensor)
    if link is None:
        return tensor.copy_(host)
    # After all that the computing stream has been given: that may yet use the memory.
    _running[tensor.data_ptr()] = link, link.copy_in([(host, tensor)], ())
    return tensor


def _arrived(_: Tensor, copy: Tensor) -> Tensor:
    """The copy of a tensor, for which the computing stream waits."""
    running = _running.pop(copy.data_ptr(), None)
    if running is not None:
        link, done = running
        link.wait(link.stream(), done)
    return copy


def _like(tensor: Tensor, device: torch.device, *, pinned: bool = False) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, pin_memory=pinned
    )


def _pinned_like(tensor: Tensor) -> Tensor:
    """Pinned host memory for a tensor, or other memory, to which copies are slower."""
    host = torch.device("cpu")
    try:
        return _like(tensor, host, pinned=True)
    except RuntimeError as error:
        warnings.warn(
            f"recollect keeps {tensor.nbytes:,} bytes in host memory that is not pinned: {error}. "
            "This is correct but slow, because the CPU waits for such copies. Plan with a larger "
            "budget, or with offload=False",
            RecollectWarning,
            stacklevel=2,
        )
        return _like(tensor, host)


def _define(schema: str, run: Any, fake: Any) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"recollect::{name}", fake, lib=_library)
    return getattr(torch.ops.recollect, name).default


def _fake_send(source: Tensor) -> Tensor:
    return _like(source, torch.device("cpu"))


def _fake_arrived(_: Tensor, copy: Tensor) -> Tensor:
    return copy


SEND = _define("send(Tensor source) -> Tensor", _send, _fake_send)
SENT = _define("sent(Tensor source, Tensor(a) host) -> Tensor(a)", _arrived, _fake_arrived)
FETCH = _define("fetch(Tensor host, Device device) -> Tensor", _fetch, _like)
FETCHED = _define("fetched(Tensor host, Tensor(a) tensor) -> Tensor(a)", _arrived, _fake_arrived)
OPS = (SEND, SENT, FETCH, FETCHED)
