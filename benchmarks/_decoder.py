"""The model that is measured: the decoder block of today's language models."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recollect import tag

# The linear layers of a block, as policies know them.
LINEARS = ("qkv", "out", "gate", "up", "down")


class DecoderBlock(nn.Module):
    """RMSNorm, fused QKV, causal attention, SwiGLU and two residuals."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        hidden = 8 * width // 3 // 64 * 64
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map batch x tokens x width to the same shape."""
        x = x + self._dropped(self._attention(self.attention_norm(x)))
        return x + self._dropped(self._mlp(self.mlp_norm(x)))

    def _attention(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        by_head = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = by_head.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))

    def _mlp(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class TaggedBlock(DecoderBlock):
    """A `DecoderBlock` that tags what its linear layers return. Made by `tagged`."""

    def _attention(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = tag(self.qkv(x), "qkv")
        by_head = qkv.view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = by_head.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return tag(self.out(mixed.transpose(1, 2).reshape(batch, tokens, width)), "out")

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = tag(self.gate(x), "gate"), tag(self.up(x), "up")
        return tag(self.down(F.silu(gate) * up), "down")


def tagged(block: DecoderBlock) -> TaggedBlock:
    """Return a twin of `block` with the same weights, whose results have names."""
    twin = copy.copy(block)
    twin.__class__ = TaggedBlock
    return twin


def decoder(
    depth: int,
    width: int,
    heads: int,
    dropout: float = 0.0,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> nn.ModuleList:
    """Make `depth` blocks, with the same weights at every call."""
    torch.manual_seed(0)
    with torch.device(device):
        return nn.ModuleList(DecoderBlock(width, heads, dropout) for _ in range(depth)).to(dtype)
