"""The ways of running a block that are compared: plain, the floor, torch's checkpoints and ours.

Torch's are called where they live and ours where they live. `recollect.install()` must not be used
here: it would put ours in the place of torch's, and they would be compared with themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from _decoder import LINEARS, tagged
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy

import recollect
import recollect.compat
from recollect import policy

aten = torch.ops.aten

# What selective checkpointing keeps: what the products and attention return, whichever kernel
# serves the latter.
KEPT_OPS = [
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]
_KEPT = frozenset(KEPT_OPS)


def keep_products(_ctx: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    """Keep the ops of `KEPT_OPS`, as a policy function."""
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class Floor(torch.autograd.Function):
    """The least that rerunning a block costs: no check, no RNG, no autocast."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        """Run the block without a graph."""
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        """Run the block again, with a graph, and go backward through it."""
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class _Enough(BaseException):
    """Ends a rerun once all tensors are there."""


def bare_hooks(block: nn.Module, x: Tensor) -> Tensor:
    """The least that saved-tensor hooks cost: forget, run again at the first ask, stop early.

    No check, no RNG, no ambient state, one backward only.
    """
    saved = 0
    tensors: list[Tensor | None] = []

    def forget(_tensor: Tensor) -> int:
        nonlocal saved
        saved += 1
        return saved - 1

    def note(tensor: Tensor) -> int:
        tensors.append(tensor.detach())
        if len(tensors) == saved:
            raise _Enough
        return len(tensors) - 1

    def recall(number: int) -> Tensor:
        if not tensors:
            with (
                saved_tensors_hooks(note, tensors.__getitem__),
                torch.enable_grad(),
                suppress(_Enough),
            ):
                block(x)
        tensor = tensors[number]
        assert tensor is not None
        tensors[number] = None
        return tensor

    with saved_tensors_hooks(forget, recall):
        return block(x)


RunBlock = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Mode:
    """One way of running a block. `rival` names torch's row that a row of ours is compared with."""

    run: RunBlock
    rival: str | None = None


def _with(checkpoint: Callable[..., Any], **options: object) -> RunBlock:
    return lambda block, x: checkpoint(block, x, **options)


def _torch_selective(keep: object) -> RunBlock:
    contexts = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, keep)
    return _with(torch_checkpoint.checkpoint, use_reentrant=False, context_fn=contexts)


def _our_selective(keep: Any) -> RunBlock:
    contexts = functools.partial(recollect.create_selective_checkpoint_contexts, keep)
    return _with(recollect.checkpoint, context_fn=contexts)


class _Stranger:
    """A block that has never been seen."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block

    def __call__(self, x: Tensor) -> Any:
        return self._block(x)


def _recording(**options: object) -> RunBlock:
    """The replay engine, where every call is the first."""
    run = _with(recollect.checkpoint, engine="replay", **options)
    return lambda block, x: run(_Stranger(block), x)


def _with_tags() -> RunBlock:
    """Keep the same results as the policies of ops and modules do, by name."""
    run = _with(recollect.checkpoint, policy=policy.save_named(*LINEARS) | policy.attention())
    twin = functools.cache(tagged)  # made once for each block
    return lambda block, x: run(twin(block), x)


PLAIN, FLOOR = "plain", "floor"

MODES: Mapping[str, Mode] = {
    PLAIN: Mode(lambda block, x: block(x)),
    FLOOR: Mode(Floor.apply),
    "bare saved-tensor hooks": Mode(bare_hooks),
    "torch reentrant": Mode(_with(torch_checkpoint.checkpoint, use_reentrant=True)),
    "torch non-reentrant": Mode(_with(torch_checkpoint.checkpoint, use_reentrant=False)),
    "torch selective, function": Mode(_torch_selective(keep_products)),
    "torch selective, op list": Mode(_torch_selective(KEPT_OPS)),
    "recollect.checkpoint": Mode(_with(recollect.checkpoint), "torch non-reentrant"),
    "compat non-reentrant": Mode(
        _with(recollect.compat.checkpoint, use_reentrant=False), "torch non-reentrant"
    ),
    "compat reentrant": Mode(
        _with(recollect.compat.checkpoint, use_reentrant=True), "torch reentrant"
    ),
    "selective, function": Mode(_our_selective(keep_products), "torch selective, function"),
    "selective, op list": Mode(_our_selective(KEPT_OPS), "torch selective, op list"),
    "policy, ops": Mode(
        _with(recollect.checkpoint, policy=policy.matmuls() | policy.attention()),
        "torch selective, function",
    ),
    "policy, modules": Mode(
        _with(recollect.checkpoint, policy=policy.save_modules(*LINEARS) | policy.attention()),
        "torch selective, function",
    ),
    "policy, names": Mode(_with_tags(), "torch selective, function"),
    "replay, nothing kept": Mode(
        _with(recollect.checkpoint, engine="replay"), "torch non-reentrant"
    ),
    "replay, ops": Mode(
        _with(recollect.checkpoint, engine="replay", policy=policy.matmuls() | policy.attention()),
        "torch selective, function",
    ),
    "replay, attention": Mode(
        _with(recollect.checkpoint, engine="replay", policy=policy.attention()),
        "torch non-reentrant",
    ),
    "replay, recording": Mode(
        _recording(policy=policy.matmuls() | policy.attention()), "torch selective, function"
    ),
}


def run_blocks(mode: Mode, blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Run the blocks one after the other, each as `mode` does it."""
    for block in blocks:
        x = mode.run(block, x)
    return x
