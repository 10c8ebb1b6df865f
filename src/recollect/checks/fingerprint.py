"""A 64-bit fingerprint of the values of a tensor.

It compares two runs of a region without keeping copies. It depends on every bit and its position,
so it tells 0.0 from -0.0 and one NaN from another, and notices swapped elements. It does not depend
on strides. Shape, dtype and device are compared elsewhere.

Eight bytes of values are one *word*. A word is added to a multiple of its place, and the bits of
the sum are mixed by the finalizer of MurmurHash3 (A. Appleby, 2011); the results are summed
modulo 2^64. Integer sums do not depend on their order, so the number does not depend on how a
device divides the work. Torch's right shift copies the sign bit, so the mixing maps an x and its ~x
to the same bits; otherwise it is one to one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import torch

from recollect._torch.modes import below_python
from recollect._torch.tensors import inner_tensors

#: Bytes folded at a time: they fit a CPU's cache, or are worth a kernel launch. The scratch space
#: is three times as large.
_PIECE_ON_CPU = 1 << 21
_PIECE_ELSEWHERE = 1 << 23

#: An odd number without a pattern (the golden ratio), and the factors of the finalizer; signed.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))
_SHIFT = 33


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-dim int64 tensor, on the same device, that depends on the bits of every value.

    For nested and sparse tensors and wrappers it comes from their inner tensors. All tensors
    without data (on ``meta``, fake, traced) have the same fingerprint, on the CPU. Modes and
    autograd do not see the ops, and nothing waits for them.
    """
    with below_python():
        return _of(tensor)


def compare(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> int | None:
    """The index of the first fingerprint that differs, with one transfer per device.

    Nothing can be fetched while a CUDA graph is captured: tensors on that device count as equal.
    """
    with below_python():
        differing: list[int] = []
        by_device: dict[torch.device, list[int]] = {}
        for number, (one, other) in enumerate(zip_longest(before, after)):
            if one is None or other is None or one.device != other.device:
                differing.append(number)
                break
            by_device.setdefault(one.device, []).append(number)
        for device, numbers in by_device.items():
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                continue
            if device.type != "cpu":
                # Some may have been made on another stream.
                torch.accelerator.synchronize(device)
            ones, others = (torch.stack([side[n] for n in numbers]) for side in (before, after))
            flags = ones.ne(others).tolist()
            differing += [n for n, differs in zip(numbers, flags, strict=True) if differs]
        return min(differing, default=None)


def _of(tensor: torch.Tensor) -> torch.Tensor:
    inner = inner_tensors(tensor)
    if inner is None:
        return torch.zeros((), dtype=torch.int64, device="cpu")
    if len(inner) == 1 and inner[0] is tensor:
        return _joined(_folded(_words(piece)) for piece in _pieces(tensor))
    return _joined(_of(each) for each in inner)


def _joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    first, *rest = list(parts) or [torch.zeros((), dtype=torch.int64, device="cpu")]
    if not rest:
        return first
    return _folded(torch.stack([first, *(part.to(first.device) for part in rest)]))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in their order, cut by shape and dtype: strides make no difference."""
    most = _PIECE_ON_CPU if tensor.device.type == "cpu" else _PIECE_ELSEWHERE
    if tensor.nbytes <= most:
        yield tensor.reshape(-1)
        return
    rows = most * tensor.shape[0] // tensor.nbytes
    if rows:
        for part in tensor.split(rows):
            yield part.reshape(-1)
    else:
        for row in tensor.unbind():
            yield from _pieces(row)


def _words(piece: torch.Tensor) -> torch.Tensor:
    """The bytes of a piece as integers, zeros appended to the last one; may be a view of it."""
    piece = piece.resolve_conj().resolve_neg()
    if piece.stride(0) != 1:
        piece = piece.clone(memory_format=torch.contiguous_format)
    raw = piece.view(torch.uint8)
    size = raw.numel()
    if size % 8 == 0 and raw.storage_offset() % 8 == 0 and raw.data_ptr() % 8 == 0:
        return raw.view(torch.int64)
    words = torch.zeros(-(-size // 8), dtype=torch.int64, device=raw.device)
    words.view(torch.uint8)[:size].copy_(raw)
    return words


def _folded(words: torch.Tensor) -> torch.Tensor:
    places = torch.arange(1, len(words) + 1, dtype=torch.int64, device=words.device)
    mixed = places.mul_(_STEP).add_(words)
    for factor in _FACTORS:
        mixed.bitwise_xor_(mixed >> _SHIFT).mul_(factor)
    return mixed.bitwise_xor_(mixed >> _SHIFT).sum()
