"""The demo runs to its end and finds all gradients bitwise equal."""

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


@pytest.mark.slow
def test_the_demo_succeeds():
    command = [sys.executable, str(DEMO), "--steps", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for variant in ("plain", "rerun", "reentrant", "selective", "replay"):
        assert variant in result.stdout
    lines = [line.strip() for line in result.stdout.rstrip().splitlines()]
    assert lines[-3:] == [
        "import recollect",
        "for block in model.blocks:",
        "recollect.checkpointed(block)",
    ]
