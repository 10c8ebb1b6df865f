"""Cases that are easily forgotten: odd tensors, odd modules, odd places to keep state."""

from __future__ import annotations

import gc
import io
import logging
import weakref
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recollect
from tests._support import ALL, RERUNS, Run, assert_transparent, leaf, rerun

# --- odd tensors ----------------------------------------------------------------------------------


def _sparse() -> Tensor:
    return torch.eye(3).to_sparse()


def _csr() -> Tensor:
    return torch.eye(3).to_sparse_csr()


def _expanded() -> Tensor:
    return torch.ones(1, 3).expand(3, 3)


def _meta() -> Tensor:
    return torch.ones(3, 3, device="meta")


def _conjugate() -> Tensor:
    return torch.ones(3, 3, dtype=torch.complex64).conj()


@ALL
@pytest.mark.parametrize("place", ["closure", "buffer"])
@pytest.mark.parametrize("make", [_sparse, _csr, _expanded, _meta, _conjugate])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_tensors_that_cannot_be_copied_like_others(make: Any, place: str, run: Run) -> None:
    def train(run: Run) -> Any:
        odd, module, x = make(), nn.Linear(3, 3), leaf(3, 3)
        if place == "buffer":
            module.register_buffer("odd", odd)
        region = (lambda x: module(x) if odd is not None else x) if place == "closure" else module
        run(region, x).sin().sum().backward()
        return x.grad, module.weight.grad

    assert_transparent(train, run)


@RERUNS
def test_vmap_around_a_region_with_a_buffer(run: Run) -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    norm.register_buffer("table", torch.ones(2, 3).t())
    x = leaf(2, 4, 3)
    out = torch.vmap(lambda x: run(norm, x))(x)
    assert out.shape == (2, 4, 3)


@ALL
def test_a_buffer_that_the_region_resizes_is_loud(run: Run) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.register_buffer("seen", torch.zeros(0))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.seen.resize_(len(self.seen) + 1).fill_(1)
            return x.sin()

    module, x = Growing(), leaf(3)
    out = run(module, x)
    with pytest.raises(recollect.CheckpointError, match="changed the shape of buffer `seen`"):
        out.sum().backward()
    assert module.count == 1  # nothing is left changed


# --- odd modules ----------------------------------------------------------------------------------


@ALL
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("direct", [True, False])
def test_scripted_modules(run: Run, direct: bool) -> None:
    def train(run: Run) -> Any:
        module = torch.jit.script(nn.BatchNorm1d(3))
        module = module if direct else nn.Sequential(module, nn.Linear(3, 3))
        x = leaf(4, 3)
        with recollect.set_checkpoint_early_stop(False):
            run(module, x).sum().backward()
        return x.grad, [*module.buffers()]

    assert_transparent(train, run)


@ALL
def test_quantisation_aware_training(run: Run) -> None:
    def train(run: Run) -> Any:
        observer = torch.ao.quantization.MovingAverageMinMaxObserver()
        layer, x = nn.Linear(3, 3), leaf(4, 3)
        run(lambda x: layer(observer(x)).sin(), x).sum().backward()
        return x.grad, observer.min_val, observer.max_val

    assert_transparent(train, run)


@ALL
def test_an_embedding_that_scales_its_weight_twice(run: Run) -> None:
    def train(run: Run) -> Any:
        embedding, scale = nn.Embedding(5, 3, max_norm=1.0), leaf(3)
        ids = torch.tensor([1, 2])
        region = lambda scale: (embedding(ids) * scale).sin()  # noqa: E731
        (run(region, scale) + run(region, scale)).sum().backward()
        return scale.grad, embedding.weight

    assert_transparent(train, run)


@ALL
def test_lazy_modules_are_to_be_made_before(run: Run) -> None:
    module, x = nn.Sequential(nn.LazyLinear(3), nn.Dropout(0.5)), leaf(2, 3)
    with pytest.raises(ValueError, match="Run the model once before"):
        run(module, x)
    with torch.no_grad():
        module(x)
    run(module, x).sum().backward()
    assert module[0].weight.grad is not None


@ALL
def test_eval_mode_entered_before_backward(run: Run) -> None:
    def train(run: Run) -> Any:
        model, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), leaf(8, 3)
        out = run(model, x)
        model.eval()
        out.sum().backward()
        assert not model.training
        return x.grad

    assert_transparent(train, run)


@ALL
def test_a_child_that_is_replaced_before_backward(run: Run) -> None:
    def train(run: Run) -> Any:
        model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), leaf(2, 3)
        out, first = run(model, x), model[0]
        model[0] = second = nn.Linear(3, 3)
        out.sum().backward()
        assert model[0] is second
        return x.grad, first.weight.grad

    assert_transparent(train, run)


def test_modules_that_refer_to_themselves_are_freed() -> None:
    module = nn.Sequential(nn.Linear(3, 3))
    module.method, module[0].parent = module.forward, [module]
    rerun(module, leaf(2, 3)).sum().backward()
    dead = weakref.ref(module)
    del module
    gc.collect()
    assert dead() is None


# --- odd places -----------------------------------------------------------------------------------


@dataclass
class Kit:
    norm: nn.Module
    generator: torch.Generator


class Slotted:
    __slots__ = ("kit",)

    def __init__(self, kit: Kit) -> None:
        self.kit = kit

    def __call__(self, x: Tensor) -> Tensor:
        return use(x, self.kit)


class Deep:
    def __init__(self, kit: Kit) -> None:
        self.a = {"b": [kit]}

    def run(self, x: Tensor) -> Tensor:
        return use(x, self.a["b"][0])


class MyPartial(partial):
    """Not exactly a partial."""


def use(x: Tensor, kit: Kit) -> Tensor:
    return kit.norm(x).sin() * torch.rand(3, generator=kit.generator)


def use_last_of(run: Run, kits: list[Any], x: Tensor) -> Tensor:
    return run(lambda x: use(x, kits[-1]), x)


PLACES: dict[str, Any] = {
    "object as argument": lambda run, kit, x: run(use, x, kit),
    "function as argument": lambda run, kit, x: run(lambda x, f: f(x), x, lambda x: use(x, kit)),
    "slots": lambda run, kit, x: run(Slotted(kit), x),
    "partial of its own": lambda run, kit, x: run(MyPartial(use, kit=kit), x),
    "deep": lambda run, kit, x: run(Deep(kit).run, x),
    "many": lambda run, kit, x: use_last_of(run, [None] * 99 + [kit], x),
}


@ALL
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_state_is_found(place: Any, run: Run) -> None:
    def train(run: Run) -> Any:
        kit, x = Kit(nn.BatchNorm1d(3), torch.Generator().manual_seed(1)), leaf(4, 3)
        place(run, kit, x).sum().backward()
        return x.grad, [*kit.norm.buffers()], kit.generator.get_state()

    assert_transparent(train, run)


NOISE = torch.Generator()


class NoisyInside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.noisy(x).sin()

    def noisy(self, x: Tensor) -> Tensor:
        return x * torch.rand(3, generator=NOISE)


@ALL
def test_a_global_that_a_method_names(run: Run) -> None:
    def train(run: Run) -> Any:
        NOISE.manual_seed(1)
        x = leaf(3)
        run(nn.Sequential(NoisyInside()), x).sum().backward()
        return x.grad, NOISE.get_state()

    assert_transparent(train, run)


@ALL
def test_loop_variables_at_the_top_level_of_a_script(run: Run) -> None:
    script = """
for layer in layers:
    x = run(lambda x: layer(x).sin(), x)
x.sum().backward()
"""

    def train(run: Run) -> Any:
        layers, x = [nn.Linear(3, 3) for _ in range(3)], leaf(2, 3)
        exec(script, {"layers": layers, "x": x, "run": run, "__name__": "script"})
        return x.grad, [layer.weight.grad for layer in layers]

    assert_transparent(train, run)


@ALL
def test_equal_functions_of_two_modules(run: Run) -> None:
    def train(run: Run) -> Any:
        x = leaf(4, 3)
        spaces = [{"norm": nn.BatchNorm1d(3), "__name__": name} for name in ("one", "two")]
        code = (lambda x: norm(x).sin()).__code__  # type: ignore[name-defined]  # noqa: F821
        for space in spaces:
            run(FunctionType(code, space), x).sum().backward()
        return x.grad, [[*space["norm"].buffers()] for space in spaces]

    assert_transparent(train, run)


@ALL
def test_a_dead_weak_reference_in_a_closure(run: Run) -> None:
    gone = weakref.proxy(nn.Linear(1, 1))
    x = leaf(3)
    run(lambda x: x.sin() if gone is not None else x, x).sum().backward()
    assert x.grad is not None


@ALL
@pytest.mark.parametrize("log", [io.StringIO(), logging.getLogger("test")], ids=["file", "logger"])
def test_logs_among_the_arguments(run: Run, log: Any) -> None:
    x = leaf(3)
    run(lambda x, log: x.sin(), x, log).sum().backward()
    assert x.grad is not None


@ALL
def test_a_tensor_that_is_a_plain_attribute(run: Run) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.ones(3)  # a forgotten register_buffer

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.mask).sin()

    module, x = Masked(), leaf(3)
    out = run(module, x)
    module.mask.zero_()
    with pytest.raises(recollect.CheckpointError, match="modified by an inplace operation"):
        out.sum().backward()


@RERUNS
def test_an_argument_changed_under_hooks(run: Run) -> None:
    mask, x = torch.ones(4, 4), leaf(4, 4)
    with torch.autograd.graph.save_on_cpu():
        out = run(lambda x, mask: (x * mask).sin(), x, mask)
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# --- policies -------------------------------------------------------------------------------------


def test_a_kept_op_that_draws_from_a_generator_of_its_own() -> None:
    def train(run: Run) -> Any:
        generator, x = torch.Generator().manual_seed(1), leaf(3)

        def noisy(x: Tensor) -> Tensor:
            x = x * torch.rand(3, generator=generator)
            return x.sin() * torch.empty(3).normal_(generator=generator)

        run(noisy, x).sum().backward()
        return x.grad

    for ops in ([torch.ops.aten.rand], [torch.ops.aten.normal_], [torch.ops.aten.mul]):
        assert_transparent(train, partial(rerun, policy=ops))


def test_a_kept_op_that_writes_statistics() -> None:
    def train(run: Run) -> Any:
        mean, var, x = torch.zeros(3), torch.ones(3), leaf(4, 3)

        def normalise(x: Tensor) -> Tensor:
            x = F.batch_norm(x, mean, var, training=True)
            return (x * mean.clone()).sin() * var.clone()

        run(normalise, x).sum().backward()
        return x.grad, mean, var

    ops = [torch.ops.aten.native_batch_norm, torch.ops.aten._native_batch_norm_legit]
    assert_transparent(train, partial(rerun, policy=ops))
