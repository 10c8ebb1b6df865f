"""A checkpointed module trains exactly as the plain one: outputs, gradients, random streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recollect import policy
from tests._support import Run, assert_transparent, compat_rerun, leaf, reentrant, rerun


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.project_in = nn.Linear(16, 48)
        self.project_out = nn.Linear(16, 16)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(-1, (2, 8)).transpose(1, 2)
            for part in self.project_in(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, dropout_p=self.dropout
        )
        return x + self.project_out(mixed.transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(16, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.cell(self.dropout(step), state)
            outputs.append(state[0])
        return torch.stack(outputs, dim=1)


class Lookup(nn.Module):
    """An embedding, beside a float input: the reentrant engine needs one that requires grad."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2]) % 10
        return self.dropout(self.embedding(ids)) * x


def mlp(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16))


def convolutions(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(-1, (4, 4)),
        nn.Conv2d(5, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(inplace=True),
        nn.Dropout2d(dropout),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 2, 1),
    )


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["no_dropout", "dropout"])
@pytest.mark.parametrize("family", [mlp, convolutions, Attention, Recurrent, Lookup])
@pytest.mark.parametrize(
    "run", [rerun, compat_rerun, reentrant], ids=["rerun", "compat_rerun", "reentrant"]
)
def test_training_is_the_same(
    run: Run, family: Callable[[float], nn.Module], dropout: float, autocast: bool
) -> None:
    def train(run: Run) -> Any:
        before, block = nn.Linear(16, 16), family(dropout)
        x = leaf(3, 5, 16)
        history = []
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                out = run(block, before(x))
            noise = torch.rand(3)  # drawn after the region, before its recomputation
            (out.float().flatten(1).sum(1) * noise).sum().backward()
            leaves = [x, *before.parameters(), *block.parameters()]
            history.append([out, *(tensor.grad.clone() for tensor in leaves)])
        return history

    assert_transparent(train, run)


@pytest.mark.parametrize("run", [rerun, reentrant], ids=["rerun", "reentrant"])
def test_a_stack_of_blocks_trains_the_same(run: Run) -> None:
    def train(run: Run) -> Any:
        blocks = nn.ModuleList(Attention(0.1) for _ in range(4))
        optimizer = torch.optim.AdamW(blocks.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(2, 5, 16, requires_grad=True)
            for block in blocks:
                x = run(block, x)
            x.square().mean().backward()
            optimizer.step()
        return list(blocks.parameters())

    assert_transparent(train, run)


def test_fused_lstm_trains_the_same() -> None:
    """Not with the reentrant engine: without grad, torch runs another kernel for the whole LSTM."""

    def train(run: Run) -> Any:
        lstm, x = nn.LSTM(16, 16, num_layers=2, batch_first=True, dropout=0.5), leaf(3, 5, 16)
        outputs, (hidden, _) = run(lstm, x)
        (outputs.sum() + hidden.exp().sum()).backward()
        return outputs, hidden, x.grad, [p.grad for p in lstm.parameters()]

    assert_transparent(train, rerun)


MODES = {
    "everything": partial(rerun, policy=policy.everything()),
    "nothing": partial(rerun, policy=policy.nothing()),
    "debug": partial(rerun, debug=True),
    "values": partial(rerun, determinism_check="values"),
    "replay": partial(rerun, engine="replay"),
    "replay, everything": partial(rerun, engine="replay", policy=policy.everything()),
}


def residuals(x: Tensor, y: Tensor) -> Tensor:
    solved = torch.linalg.lstsq(x[:, :2].detach(), y.detach(), driver="gels")
    return solved.residuals * y.abs() * x.abs()


@pytest.mark.parametrize("function", [residuals, lambda x, y: (torch.linalg.pinv(x) @ y).abs()])
@pytest.mark.parametrize("run", MODES.values(), ids=MODES)
def test_kernels_conjugate_under_a_mode_as_without(
    run: Run, function: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """torch forgets it there: its residuals are negative."""

    def train(run: Run) -> Any:
        x, y = leaf(5, 5, dtype=torch.complex64), leaf(5, 5, dtype=torch.complex64)
        outputs = []
        for _ in range(3):
            out = run(lambda x, y: function(x * 2, y * 2).sin().exp(), x, y)
            out.sum().backward()
            outputs += [out, x.grad.clone(), y.grad.clone()]
        return outputs

    assert_transparent(train, run)


def lists_of_views(x: Tensor) -> Tensor:
    """Autograd has to notice that the other views have changed."""
    whole = x * 2
    square, start = whole.view(2, 2), whole[:2]
    torch._foreach_mul_([square], 3.0)
    torch._foreach_add_([start, x * 1], [start.detach().sin(), x])
    return whole.sin() * square.view(-1) * start.sum()


@pytest.mark.parametrize("run", MODES.values(), ids=MODES)
def test_writes_to_lists_of_views(run: Run) -> None:
    """torch forgets to count them under a mode."""

    def train(run: Run) -> Any:
        x, outputs = leaf(4), []
        for _ in range(3):
            out = run(lists_of_views, x)
            out.sum().backward()
            outputs += [out, x.grad.clone()]
        return outputs

    assert_transparent(train, run)


@pytest.mark.parametrize(
    "run",
    [rerun, partial(rerun, early_stop=False), reentrant],
    ids=["rerun", "to the end", "reentrant"],
)
def test_writes_to_lists_of_views_while_another_tensor_has_changed(run: Run) -> None:
    """A rerun is watched then, for whether it uses that tensor."""

    def train(run: Run) -> Any:
        x, other = leaf(4), torch.zeros(5000)
        out = run(lambda x: lists_of_views(x) if x.numel() else other, x)
        other.add_(1)
        out.sum().backward()
        return out, x.grad

    assert_transparent(train, run)


@pytest.mark.parametrize("run", [rerun, reentrant], ids=["rerun", "reentrant"])
def test_nothing_is_recorded_without_grad_mode(run: Run) -> None:
    block = mlp(0.5)
    x = torch.randn(2, 16)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = block(x)
        torch.manual_seed(0)
        if run is reentrant:
            with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
                out = run(block, x)
        else:
            out = run(block, x)
    assert torch.equal(out, expected)
    assert not out.requires_grad


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "run",
    [
        partial(rerun, determinism_check="values"),
        partial(rerun, debug=True),
        partial(rerun, policy=policy.everything()),
    ],
    ids=["values", "debug", "policy"],
)
def test_forward_mode_inside(run: Run) -> None:
    """The tangent of a weight is a zero that has no memory."""

    def scenario(run: Run) -> Any:
        weight, x = leaf(4, 4), leaf(3, 4)

        def tangent(x: Tensor) -> Any:
            ones = torch.ones_like(x)
            return torch.func.jvp(lambda x: (x @ weight).sin(), (x,), (ones,))[1]

        for _ in range(3):
            run(tangent, x).exp().sum().backward()
        return x.grad, weight.grad

    assert_transparent(scenario, run)
