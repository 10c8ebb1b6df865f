"""Models that ``FullyShardedDataParallel`` has wrapped: regions inside of its units and around."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import recollect
from tests._support import Run, assert_identical, torch_reentrant, torch_rerun
from tests.distributed._ranks import outcomes, run_ranks, steps_of
from tests.distributed.test_fsdp2 import Block, batches, made

pytestmark = pytest.mark.slow


def wrapped(model: nn.Module) -> Any:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def check_engines() -> None:
    warnings.filterwarnings("ignore", category=UserWarning)
    batch = batches(8)
    expected, _ = outcomes(steps_of(wrapped(made()), batch))
    for theirs, options in (
        (torch_rerun, {}),
        (torch_rerun, {"engine": "replay"}),
        (torch_reentrant, {"engine": "reentrant"}),
    ):
        counts = []
        for change in (partial(changed, theirs), partial(recollect.checkpointed, **options)):
            inside = made()
            for block in inside.get_submodule("blocks").children():
                change(block)
            around = wrapped(made())
            for unit in around.module.blocks:
                change(unit)
            found = [outcomes(steps_of(model, batch)) for model in (wrapped(inside), around)]
            assert_identical([values for values, _ in found], [expected] * 2)
            counts.append([count for _, count in found])
        assert counts[0] == counts[1], options  # as many collectives as with torch's


def changed(run: Run, module: nn.Module) -> None:
    """Have ``run`` call the forward of ``module``."""
    module.forward = partial(run, module.forward)  # type: ignore[method-assign]


def check_warning() -> None:
    around = wrapped(made())
    for unit in around.module.blocks:
        recollect.checkpointed(unit, engine="replay")
    with pytest.warns(UserWarning, match="FullyShardedDataParallel gathers"):
        around(batches(8)(0)).sum().backward()


def test_engines(tmp_path: Path) -> None:
    run_ranks(check_engines, tmp_path)


def test_replay_around_a_unit_tells_that_it_is_a_rerun(tmp_path: Path) -> None:
    run_ranks(check_warning, tmp_path)
