"""The demo runs to its end, within its budgets, and finds all gradients bitwise equal."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


def run_demo(folder, *arguments):
    command = [sys.executable, str(DEMO), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_demo_succeeds(tmp_path):
    result = run_demo(tmp_path, "--steps", "4")
    assert result.returncode == 0, result.stderr
    plans = re.findall(r"^plan for \d+% +(.+)$", result.stdout, re.MULTILINE)
    assert len(plans) == 3
    for plan in plans:
        budget, predicted, measured = re.findall(r"([\d.]+) MiB", plan)[:3]
        assert float(measured) <= float(budget)
        assert measured == predicted
        assert plan.endswith("bitwise equal")
    lines = [line.strip() for line in result.stdout.rstrip().splitlines()]
    assert lines[-3:] == [
        "import recollect",
        'plan = recollect.plan(model, batch, "12GiB", optimizer=optimizer)',
        "plan.apply(model)",
    ]
    page = tmp_path / "demo.html"
    assert str(page) in result.stdout
    assert "LanguageModel" in page.read_text(encoding="utf-8")


def test_too_few_steps_are_refused(tmp_path):
    result = run_demo(tmp_path, "--steps", "3")
    assert result.returncode == 2
    assert "--steps must be more than 3" in result.stderr
    assert list(tmp_path.iterdir()) == []
