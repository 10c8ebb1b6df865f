"""Every example runs as a user would run it."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {
    "transformers_trainer": ["transformers", "accelerate"],
    "lightning_fit": ["lightning"],
    "lora": ["transformers", "peft"],
    "gan": [],
}
#: What each of the others says.
SAYS = {"largest_batch": "One step with"}
ON_TWO_RANKS = ("fsdp2", "ddp")


def test_every_example_is_tested():
    found = {path.stem for path in EXAMPLES.glob("*.py")}
    assert found == {*NEEDS, *SAYS, *ON_TWO_RANKS, "demo"}


@pytest.mark.parametrize("name", [*NEEDS, *SAYS])
def test_it_runs_and_says_what_came_of_planning(name):
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert SAYS.get(name, "to plan") in result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_it_runs_on_two_ranks_and_says_what_came_of_planning(name):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, str(EXAMPLES / f"{name}.py")]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=alone
    )
    assert result.returncode == 0, result.stderr
    assert "to plan" in result.stdout + result.stderr
    assert "PlanWarning" not in result.stderr
    assert "step 4: loss" in result.stdout
    found = dict(re.findall(r"rank (\d): loss (\S+) in the end", result.stdout))
    assert sorted(found) == ["0", "1"]
    assert found["0"] == found["1"]  # all ranks have the same weights
    assert math.isfinite(float(found["0"]))
