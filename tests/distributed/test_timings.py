"""Ranks that are slow at different times, in training and in planning: none waits forever.

The oracle is the same run without a plan.
"""

from __future__ import annotations

import faulthandler
import os
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
from recollect.planning.planner import Planner
from recollect.planning.ranks import together
from recollect.planning.ranks.team import Team
from recollect.planning.recording.step import TrainingStep
from tests._support import assert_identical
from tests.distributed._parallel import PARALLEL
from tests.distributed._parallel import tokens as same_tokens
from tests.distributed._ranks import local, run_ranks
from tests.distributed._sharded import SHARDINGS, Decoder, loss_of, tokens
from tests.distributed.test_fsdp2_plans import begin, plan_of, same_on_all_ranks

STEPS = 5
#: ``RECOLLECT_TIMINGS=200 pytest -m slow -k slow_at_different_times`` runs as many.
RUNS = int(os.environ.get("RECOLLECT_TIMINGS", "9"))
#: Seconds for one of them. A process that takes longer says where it is, and ends.
_ONE_RUN = 90
PLACES = ("forward", "backward", "loop", "store", "solve", "trial")
Nap = Callable[[str], None]


def wide_awake(_: str) -> None:
    pass


def naps(by: random.Random) -> Nap:
    """Pauses of random length, in some of `PLACES`."""
    chosen = by.sample(PLACES, by.randint(0, 3))
    longest = by.choice([0.001, 0.02, 0.1])

    def nap(where: str) -> None:
        if where in chosen:
            time.sleep(longest * by.random() ** 2)

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
    "sequence, sharded": PARALLEL["sequence, sharded"].model,
}


def check_timings(runs: int) -> None:
    """Fresh models and plans in each run; pauses in other places on each rank."""
    begin()
    by, own = random.Random(1), random.Random(2 + dist.get_rank())
    expected: dict[str, list[Any]] = {}
    for run in range(runs):
        faulthandler.dump_traceback_later(_ONE_RUN, exit=True)
        kind = [*KINDS][run % len(KINDS)]
        batch = tokens if kind in ("sharded", "replicated") else same_tokens
        if kind not in expected:
            expected[kind] = trained(KINDS[kind](), batch)
        check_run(kind, batch, expected[kind], by, naps(own))
    faulthandler.cancel_dump_traceback_later()


def check_run(
    kind: str, batch: Callable[[int], Tensor], expected: list[Any], by: random.Random, nap: Nap
) -> None:
    wrapped = KINDS[kind]()
    model: Any = getattr(wrapped, "module", wrapped)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        _nap_before(patch, "store", nap, Team, "_set", "_get")
        _nap_before(patch, "solve", nap, Planner, "_schedules_for")
        _nap_before(patch, "trial", nap, TrainingStep, "run")
        patch.setattr(together, "_IN_A_LOOP", by.choice([30.0, 30.0, 0.02]))
        warnings.simplefilter("always", PlanWarning)  # the first steps of a lazy fit may take more
        if by.random() < 0.5:
            recollect.fit(model, batch(0), 0.85, loss=loss_of)
        else:
            recollect.fit(model, budget=0.85)
        assert_identical(trained(wrapped, batch, nap), expected)
    plan = plan_of(model)
    is_alone = any("makes a plan of its own" in str(each.message) for each in caught)
    assert same_on_all_ranks(is_alone)
    assert is_alone or same_on_all_ranks((plan.schedule, plan.budget, plan.predicted_peak))


def _nap_before(patch: pytest.MonkeyPatch, where: str, nap: Nap, owner: type, *names: str) -> None:
    def slow(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nap(where)
            return method(*args)

        return run

    for name in names:
        patch.setattr(owner, name, slow(getattr(owner, name)))


@pytest.mark.slow
def test_ranks_are_slow_at_different_times(tmp_path: Path) -> None:
    run_ranks(check_timings, tmp_path, RUNS, deadline=400 + 30 * RUNS)


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
