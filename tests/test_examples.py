"""Every example runs as a user would run it."""

import importlib.util
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


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NEEDS, *SAYS, "demo"}


@pytest.mark.parametrize("name", [*NEEDS, *SAYS])
def test_it_runs_and_says_what_came_of_planning(name):
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert SAYS.get(name, "to plan") in result.stdout + result.stderr
