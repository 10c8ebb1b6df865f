"""The demo runs to its end, within its budgets, and finds all gradients bitwise equal."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recollect.cli import demo as demo_module
from recollect.cli import main

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture
def small_demo(monkeypatch):
    monkeypatch.setattr(demo_module, "_DEPTH", 1)
    monkeypatch.setattr(demo_module, "_STEPS", 4)
    monkeypatch.setattr(demo_module, "_BUDGETS", (0.9, 0.8, 0.7))


def test_the_demo_compares_three_plans_with_plain(capsys, folder, small_demo):
    threads = torch.get_num_threads()
    assert main(["demo", "--html", "demo.html"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("bitwise equal") == 3
    assert "recollect.fit(model" in captured.out
    assert captured.err == ""
    assert "Transformer" in (folder / "demo.html").read_text(encoding="utf-8")
    assert torch.get_num_threads() == threads


def test_a_demo_that_finds_a_difference_fails(capsys, monkeypatch, small_demo):
    monkeypatch.setattr(demo_module, "_BUDGETS", (0.9,))
    monkeypatch.setattr(demo_module, "bitwise_equal", lambda ours, theirs: ours is theirs)
    assert main(["demo"]) == 1
    printed = capsys.readouterr().out
    assert "DIFFERENT" in printed
    assert "recollect.fit(model" not in printed


def test_a_demo_that_exceeds_a_budget_fails(capsys, monkeypatch, small_demo):
    monkeypatch.setattr(demo_module, "_BUDGETS", (0.9,))
    make_plans = demo_module._plans
    monkeypatch.setattr(
        demo_module,
        "_plans",
        lambda status: [replace(each, budget=1) for each in make_plans(status)],
    )
    assert main(["demo"]) == 1
    assert "exceeds its budget" in capsys.readouterr().out


# --- as a script ----------------------------------------------------------------------------------


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
    assert lines[-2:] == [
        "import recollect",
        'model = recollect.fit(model, budget="12GiB")',
    ]
    page = tmp_path / "demo.html"
    assert str(page) in result.stdout
    assert "LanguageModel" in page.read_text(encoding="utf-8")


def test_too_few_steps_are_refused(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    result = run_demo(empty, "--steps", "3")
    assert result.returncode == 2
    assert "--steps must be more than 3" in result.stderr
    assert list(empty.iterdir()) == []
