"""Every stream that a region draws from gives it the same numbers again, and then goes on."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests._support import ALL, Run, assert_transparent, leaf, rerun

np = pytest.importorskip("numpy")


#: A generator object with a seed, and how to draw from it.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda generator: torch.rand(3, generator=generator),
    ),
    "random": (lambda: random.Random(3), lambda generator: generator.gauss(0, 1)),
    "numpy": (lambda: np.random.default_rng(3), lambda generator: float(generator.normal())),
    "numpy legacy": (lambda: np.random.RandomState(3), lambda generator: float(generator.randn())),
    "system": (random.SystemRandom, lambda generator: 1.0),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@ALL
@EACH_KIND
def test_generators_in_a_closure(run: Run, kind: Any) -> None:
    make, draw = kind

    def train(run: Run) -> Any:
        generator, x = make(), leaf(3)

        def noisy(x: Tensor) -> Tensor:
            return (x.sin() * draw(generator)).exp() * draw(generator)

        out = run(noisy, run(noisy, x))
        out.sum().backward()
        return out, x.grad, draw(generator)

    assert_transparent(train, run)


@EACH_KIND
def test_generators_in_a_keyword(kind: Any) -> None:
    make, draw = kind

    def train(run: Run) -> Any:
        generator, x = make(), leaf(3)
        out = run(lambda x, generators: (x * draw(generators[0])).sin(), x, generators=[generator])
        out.sum().backward()
        return out, x.grad, draw(generator)

    assert_transparent(train, rerun)


@ALL
def test_a_generator_of_a_module(run: Run) -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(1)

        def forward(self, x: Tensor) -> Tensor:
            return (x * torch.rand(3, generator=self.generator)).sin()

    def train(run: Run) -> Any:
        noise, x = nn.Sequential(nn.Linear(3, 3), Noise()), leaf(3)
        run(noise, x).sum().backward()
        return x.grad, noise[1].generator.get_state()

    assert_transparent(train, run)


@ALL
@pytest.mark.parametrize("drawn_before", [0, 1])
def test_the_functions_of_random_and_numpy(run: Run, drawn_before: int) -> None:
    def train(run: Run) -> Any:
        random.seed(0)
        np.random.seed(0)
        for _ in range(drawn_before):
            random.gauss(0, 1), np.random.randn()

        def noisy(x: Tensor) -> Tensor:
            x = x.sin() * random.gauss(0, 1) * float(np.random.randn())
            return x.exp() * random.random() * float(np.random.rand())

        x = leaf(3)
        out = run(noisy, run(noisy, x))
        out.sum().backward()
        return out, x.grad, random.gauss(0, 1), float(np.random.randn())

    assert_transparent(train, run)


def test_streams_are_left_alone_on_request() -> None:
    drawn = []

    def noisy(x: Tensor) -> Tensor:
        drawn.append(random.random())
        return x.sin()

    rerun(noisy, leaf(3), preserve_rng_state=False).sum().backward()
    assert drawn[0] != drawn[1]
