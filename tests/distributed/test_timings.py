"""Ranks that are slow at different times, in training and in planning: none waits forever.

The oracle is the same run without a plan.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import recollect
from recollect import PlanWarning
from recollect.modules import OPTIONS
from recollect.planning.ranks import together
from tests._support import assert_identical
from tests.distributed._parallel import PARALLEL
from tests.distributed._parallel import tokens as same_tokens
from tests.distributed._ranks import local, run_ranks
from tests.distributed._sharded import SHARDINGS, Decoder, loss_of, tokens
from tests.distributed.test_fsdp2_plans import begin, plan_of, same_on_all_ranks

STEPS = 5
Nap = Callable[[str], None]


def wide_awake(_: str) -> None:
    pass


def naps(slow: str, by: random.Random) -> Nap:
    """Pauses of random length where ``slow`` says: ``"backward 1"`` is in backward, on rank 1."""
    place, rank = slow.split()

    def nap(where: str) -> None:
        if where == place and dist.get_rank() == int(rank):
            time.sleep(0.05 * by.random())

    return nap


def trained(wrapped: Any, batch: Callable[[int], Tensor], nap: Nap = wide_awake) -> list[Any]:
    """The gradients of some steps. ``wrapped``: a model, perhaps in DDP."""
    model, parameters, found = getattr(wrapped, "module", wrapped), [*wrapped.parameters()], []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: nap("forward"))
    optimizer = torch.optim.SGD(parameters, 0.1)
    for step in range(STEPS):
        torch.manual_seed(step)
        out = wrapped(batch(step))
        out.register_hook(lambda _: nap("backward"))
        loss = loss_of(out)
        del out
        nap("loop")
        loss.backward()
        found.append([local(each.grad).clone() for each in parameters])
        optimizer.step()
        optimizer.zero_grad()
    return found


def replicated() -> Any:
    torch.manual_seed(0)
    return DistributedDataParallel(Decoder())


KINDS: dict[str, Callable[[], Any]] = {
    "sharded": SHARDINGS["reshard"].model,
    "replicated": replicated,
    "tensor": PARALLEL["tensor"].model,
}


def check_timings(runs: int) -> None:
    begin()
    by, own = random.Random(1), random.Random(dist.get_rank())
    expected = {}
    for run in range(runs):
        kind = [*KINDS][run % len(KINDS)]
        batch = same_tokens if kind == "tensor" else tokens
        place = by.choice(["forward", "backward", "loop", "planning"])
        nap = naps(f"{place} {by.randrange(2)}", own)
        if kind not in expected:
            expected[kind] = trained(KINDS[kind](), batch)
        wrapped = KINDS[kind]()
        model: Any = getattr(wrapped, "module", wrapped)
        patch = pytest.MonkeyPatch()
        for name in ("meet", "record_step", "samples_under"):
            patch.setattr(together, name, _after_a_nap(getattr(together, name), nap))
        with warnings.catch_warnings(record=True):  # the first steps of a lazy fit may take more
            warnings.simplefilter("always", PlanWarning)
            if kind == "tensor" or by.random() < 0.5:
                recollect.fit(model, batch(0), 0.85, loss=loss_of)
            else:
                recollect.fit(model, budget=0.85)
            assert_identical(trained(wrapped, batch, nap), expected[kind])
        patch.undo()
        plan = plan_of(model)
        assert same_on_all_ranks((plan.schedule, plan.budget, plan.predicted_peak))


def _after_a_nap(function: Callable[..., Any], nap: Nap) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        for _ in range(10):
            nap("planning")
        return function(*args)

    return run


@pytest.mark.slow
def test_ranks_are_slow_at_different_times(tmp_path: Path) -> None:
    run_ranks(check_timings, tmp_path, 9, deadline=400)


def check_missing() -> None:
    """One rank does not fit its model: the other one says so, and goes on by itself."""
    begin()
    patch = pytest.MonkeyPatch()
    patch.setattr(together, "_IN_A_LOOP", 0.5)
    expected = trained(replicated(), tokens)
    wrapped = replicated()
    if dist.get_rank() == 0:
        recollect.fit(wrapped.module, budget=0.85)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        assert_identical(trained(wrapped, tokens), expected)
    patch.undo()
    messages = [str(each.message) for each in caught if each.category is PlanWarning]
    if dist.get_rank() == 0:
        assert any("rank 1 has not called it within" in each for each in messages), messages
        assert any("makes a plan of its own" in each for each in messages)
        assert vars(wrapped.module)[OPTIONS].plan is not None
    else:
        assert messages == []


def test_a_rank_that_does_not_fit_its_model(tmp_path: Path) -> None:
    run_ranks(check_missing, tmp_path)
