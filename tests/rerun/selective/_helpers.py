"""What the tests of selective checkpointing share: counting ops, comparing runs, small models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect._torch.modes import DispatchMode
from tests._support import Memory, assert_identical, measure

aten = torch.ops.aten


def limit(text: str) -> Any:
    """A test that shows a fault which is known and not mended yet."""
    return pytest.mark.xfail(strict=True, reason=text)


class Ops(DispatchMode):
    """Counts the ops that are really run, in any number of threads."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[Any] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func] += 1
        return func(*args, **(kwargs or {}))

    def __getitem__(self, op: Any) -> int:
        return self.count[op.default if hasattr(op, "default") else op]


def leaves(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """The same numbers every time, with gradient."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def square(count: int = 2, seed: int = 0) -> list[Tensor]:
    """Some 4 x 4 matrices."""
    return leaves(*[(4, 4)] * count, seed=seed)


def total(out: Any) -> Tensor:
    """A scalar in which every element of every output counts differently."""
    outs = out if isinstance(out, (tuple, list)) else [out]
    parts = [o * torch.linspace(0.5, 1.5, o.numel()).reshape(o.shape) for o in outs]
    return torch.stack([part.sum() for part in parts]).sum()


def selective(policy: Any, **options: Any) -> Callable[..., Any]:
    """A way of calling a region that keeps by ``policy``."""
    return partial(recollect.checkpoint, policy=policy, **options)


def step(function: Any, inputs: Any, region: Any = None) -> list[Any]:
    """Outputs, gradients of inputs and of weights, and where the stream stands, from one seed."""
    torch.manual_seed(7)
    weights = list(function.parameters()) if isinstance(function, nn.Module) else []
    out = function(*inputs) if region is None else region(function, *inputs)
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    wanted = [t for t in (*inputs, *weights) if t.requires_grad]
    grads = torch.autograd.grad(total(outs), wanted, allow_unused=True)
    return [*[o.detach().clone() for o in outs], *grads, torch.get_rng_state()]


def assert_right(function: Any, inputs: Any, policy: Any, **options: Any) -> None:
    """Bit for bit what plain autograd gives, twice in a row."""
    expected = step(function, inputs)
    for _ in range(2):
        assert_identical(step(function, inputs, selective(policy, **options)), expected)


def backward_ops(function: Any, inputs: Any, policy: Any = None, **options: Any) -> Ops:
    """The ops of backward, those of the recomputation among them; the gradients are checked."""
    assert_right(function, inputs, policy, **options)
    torch.manual_seed(7)
    loss = total(selective(policy, **options)(function, *inputs))
    with Ops() as ops:
        loss.backward()
    _forget_gradients(function, inputs)
    return ops


def plain_ops(function: Any, inputs: Any) -> Ops:
    """The ops of plain backward."""
    torch.manual_seed(7)
    loss = total(function(*inputs))
    with Ops() as ops:
        loss.backward()
    _forget_gradients(function, inputs)
    return ops


def again(function: Any, inputs: Any, policy: Any, **options: Any) -> Counter[Any]:
    """How often each op is run again in backward."""
    ours = backward_ops(function, inputs, policy, **options).count
    ours.subtract(plain_ops(function, inputs).count)
    del ours[aten.detach.default]
    return Counter({op: count for op, count in ours.items() if count})


def _forget_gradients(function: Any, inputs: Any) -> None:
    weights = list(function.parameters()) if isinstance(function, nn.Module) else []
    for tensor in (*inputs, *weights):
        tensor.grad = None


def flops(function: Any, inputs: Any, region: Any = None) -> int:
    """Of forward and backward."""
    with FlopCounterMode(display=False) as counter:
        total(function(*inputs) if region is None else region(function, *inputs)).backward()
    _forget_gradients(function, inputs)
    return counter.get_total_flops()


def held(function: Any, inputs: Any, policy: Any = None) -> int:
    """Bytes that forward leaves behind: plainly, or with what a policy keeps.

    Without the random state, which a region holds beside activations.
    """
    region = None if policy is None else selective(policy, preserve_rng_state=False)
    return memory(function, inputs, region).held


def memory(function: Any, inputs: Any, region: Any = None) -> Memory:
    """Bytes of one step."""
    ones: list[Tensor] = []

    def forward() -> Any:
        return function(*inputs) if region is None else region(function, *inputs)

    def backward(out: Tensor) -> None:
        if not ones:
            ones.append(torch.ones_like(out))
        torch.autograd.grad(out, [t for t in inputs if t.requires_grad], ones[0])

    return measure(forward, backward)


# --- models ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Written out: two products around a softmax."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.wq = nn.Linear(width, width)
        self.wk = nn.Linear(width, width)
        self.wv = nn.Linear(width, width)
        self.wo = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.wq(x) @ self.wk(x).transpose(-2, -1)
        return self.wo(scores.softmax(-1) @ self.wv(x))


class Mlp(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x).sin()


class Model(nn.Module):
    """Blocks, each called through ``region``."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))
        self.region: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.region is None else self.region(layer, x)
        return x


def seeded(make: Callable[[], Any]) -> Any:
    """What ``make`` makes of the same random numbers every time."""
    torch.manual_seed(3)
    return make()


def hooks_of(module: nn.Module) -> int:
    """How many hooks there are on ``module`` and all below."""
    return sum(
        len(hooks)
        for each in module.modules()
        for name, hooks in vars(each).items()
        if name.endswith(("_hooks", "_hooks_always_called", "_hooks_with_kwargs"))
    )
