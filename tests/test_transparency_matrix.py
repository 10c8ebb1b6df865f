"""Every engine with every option on every kind of module: all bits as without checkpointing.

Loss, gradients, parameters after a step, buffers, and the random streams of torch, ``random`` and
numpy, over two steps of training.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recollect import CheckpointPolicy
from tests._support import (
    Run,
    assert_transparent,
    compat_rerun,
    leaf,
    reentrant,
    rerun,
    sampled,
)

aten = torch.ops.aten

pytestmark = pytest.mark.filterwarnings(
    # Forward of an outer reentrant region runs without grad, and the inner one notices.
    "ignore:None of the inputs have requires_grad=True:UserWarning"
)


# --- modules: from (3, 4, 8) to (3, 4, 8) ---------------------------------------------------------


class Noise(nn.Module):
    """Dropout, with a scale drawn from the streams of ``random`` and numpy."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.p:
            return x
        return F.dropout(x, self.p) * (1 + random.random()) * float(1 + np.random.randn() ** 2)


def mlp(p: float) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), Noise(p), nn.Linear(12, 8), nn.Tanh())


class Attention(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.project_in = nn.Linear(8, 24)
        self.project_out = nn.Linear(8, 8)
        self.noise = Noise(p)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(-1, (2, 4)).transpose(1, 2)
            for part in self.project_in(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, dropout_p=self.noise.p)
        return x + self.noise(self.project_out(mixed.transpose(1, 2).flatten(2)))


def convolutions(p: float) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(-1, (4, 2)),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        Noise(p),
        nn.Conv2d(6, 4, 1),
        nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(2),
    )


class Recurrent(nn.Module):
    """An LSTM gate by gate: the fused ones write in place to what a policy may keep."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.from_input = nn.Linear(8, 32)
        self.from_hidden = nn.Linear(8, 32, bias=False)
        self.noise = Noise(p)

    def forward(self, x: Tensor) -> Tensor:
        hidden = memory = torch.zeros_like(x[:, 0])
        outputs = []
        for step in x.unbind(1):
            gates = self.from_input(self.noise(step)) + self.from_hidden(hidden)
            keep, take, give, new = gates.chunk(4, dim=-1)
            memory = keep.sigmoid() * memory + take.sigmoid() * new.tanh()
            hidden = give.sigmoid() * memory.tanh()
            outputs.append(hidden)
        return torch.stack(outputs, dim=1)


class Lookup(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.noise = Noise(p)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2]) % 5
        return self.noise(self.embedding(ids)) * x


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.square())
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _, square = ctx.saved_tensors
        return 3 * square * grad


class Custom(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.noise = Noise(p)

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.noise(Cube.apply(x.sin()) + self.linear(x))).tanh()


class InPlace(nn.Module):
    """Also writes to a buffer, whose value it has read before."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.noise = Noise(p)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.linear(x) * 2).relu_() - self.mean
        self.mean.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)
        y[..., 0] = 0
        y.add_(1).mul_(0.5)
        return self.noise(y.sin()).mul(2).add_(x).sigmoid_()


class Several(nn.Module):
    """Two outputs, of which the second counts for less, and a common trunk."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.noise = Noise(p)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        trunk = self.noise(self.trunk(x)).exp()
        return trunk.cos() * x, trunk.tanh().sum(-1)


FAMILIES = [mlp, Attention, convolutions, Recurrent, Lookup, Custom, InPlace, Several]


# --- ways to run it -------------------------------------------------------------------------------

KEPT = [aten.mm, aten.addmm, aten.convolution, aten.tanh, aten.embedding, aten.native_layer_norm]
KEPT_OVERLOADS = {getattr(op, name) for op in KEPT for name in op.overloads()}


def keep_some(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in KEPT_OVERLOADS and ctx.op_output is not None:
        return CheckpointPolicy.PREFER_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


RUNS: dict[str, Run] = {
    "rerun": rerun,
    "rerun, op list": partial(rerun, policy=KEPT),
    "rerun, policy function": partial(rerun, policy=keep_some),
    "compat": compat_rerun,
    "reentrant": reentrant,
}


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def train(
    family: Callable[[float], nn.Module], nested: bool, autocast: bool, dropout: float, run: Run
) -> Any:
    random.seed(0)
    np.random.seed(0)
    model = nn.ModuleList([nn.Linear(8, 8), family(dropout), family(dropout), nn.Linear(8, 8)])
    before, block, second, after = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def region(x: Tensor) -> Any:
        if not nested:
            return second(first(block(x)))
        return second(first(run(block, x)))

    history = []
    for _ in range(2):
        optimizer.zero_grad()
        x = leaf(3, 4, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = run(region, before(x))
            loss = after(first(out)).float().square().mean()
            if isinstance(out, tuple):
                loss = loss + 0.1 * out[1].float().sum()
        noise = torch.rand(1), random.random(), np.random.randn()  # before the recomputation
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        buffers = [b.clone() for b in model.buffers()]
        history.append([loss, x.grad, gradients, buffers, noise])
        optimizer.step()
    name, keys, *rest = np.random.get_state()
    streams = repr(random.getstate()), name, keys.tobytes(), rest
    return history, [*model.parameters()], streams


#: Of nested, autocast and dropout: any two of them go together in one that is always run.
SETTINGS = list(product([False, True], [False, True], [0.0, 0.5]))
USUAL = [(False, False, 0.0), (False, True, 0.5), (True, False, 0.5), (True, True, 0.0)]


def name_of(setting: tuple[bool, bool, float]) -> str:
    nested, autocast, dropout = setting
    names = "nested" if nested else "flat", "bfloat16" if autocast else "float32"
    return "-".join([*names, "dropout" if dropout else "no_dropout"])


@pytest.mark.parametrize("setting", sampled(SETTINGS, usual=USUAL), ids=name_of)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_training_is_the_same(
    run: Run,
    family: Callable[[float], nn.Module],
    setting: tuple[bool, bool, float],
) -> None:
    assert_transparent(partial(train, family, *setting), run)
