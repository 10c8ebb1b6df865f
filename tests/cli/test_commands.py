"""The commands that plan and explain: what is printed where, and what is written."""

import json
import re
from pathlib import Path

import pytest

import recollect
from recollect.cli import main
from tests.cli._commands import refused


def test_a_plan_is_printed(capsys):
    assert main(["plan", "job.py:pair", "--budget", "0.7"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Plan for Sequential on cpu")
    assert "budget" in captured.out
    assert captured.err == ""


def test_a_plan_is_saved_and_explained(capsys, folder):
    code = main(["plan", "job:as_dict", "--budget", "0.7", "--save", "p.json", "--html", "p.html"])
    assert code == 0
    printed = capsys.readouterr().out
    assert "p.json" in printed
    assert "p.html" in printed
    assert "<html" in (folder / "p.html").read_text(encoding="utf-8")
    plan = recollect.Plan.load("p.json")
    assert printed.startswith(str(plan))

    assert main(["explain", "p.json"]) == 0
    explained = capsys.readouterr().out
    assert explained.startswith(str(plan))
    rows = explained.removeprefix(str(plan)).strip().splitlines()
    assert re.split(r"\s{2,}", rows[0]) == ["module", "op", "memory", "time", "fate", "reason"]
    assert len(rows) == 2 + len(plan.explain())
    assert {row.fate for row in plan.explain()} <= set(" ".join(rows).split())


def test_the_optimizer_counts(capsys):
    peaks = []
    for name in ("pair", "as_dict"):
        assert main(["plan", f"job:{name}", "--budget", "1GiB", "--save", "p.json"]) == 0
        peaks.append(json.loads(Path("p.json").read_text())["plain_peak"])
    assert peaks[1] > peaks[0]


def test_a_budget_that_nothing_fits_is_said_in_a_sentence(capsys):
    error = refused(capsys, "plan", "job.py:pair", "--budget", "1KiB", code=1)
    assert error.startswith("recollect plan: error: budget: no plan")
    (least,) = re.findall(r"--budget (\d+)$", error, re.MULTILINE)
    assert main(["plan", "job.py:pair", "--budget", least]) == 0


def test_offload_can_be_ruled_out(capsys, monkeypatch):
    seen = []
    planner_of = recollect.cli.commands.planner_of

    def spy(*args, **options):
        seen.append(options["offload"])
        return planner_of(*args, **options)

    monkeypatch.setattr(recollect.cli.commands, "planner_of", spy)
    assert main(["plan", "job.py:pair", "--budget", "1.0"]) == 0
    assert main(["plan", "job.py:pair", "--budget", "1.0", "--no-offload"]) == 0
    assert seen == ["auto", False]


def test_a_loop_that_frees_the_output_is_planned_for(capsys):
    assert (
        main(["plan", "job.py:pair", "--budget", "1.0", "--frees-output", "--save", "p.json"]) == 0
    )
    assert "taken to be gone when backward runs" in capsys.readouterr().out
    assert recollect.Plan.load("p.json").holds_output is False


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("12XiB", "there is no unit 'XiB'"),
        ("12G", "'G' may mean GB or GiB"),
        ("1.5", "Give a unit"),
        ("0", "more than 0"),
        ("half", "12GiB"),
    ],
)
def test_budgets_that_mean_nothing(capsys, budget, said):
    error = refused(capsys, "plan", "job.py:pair", "--budget", budget)
    assert "argument --budget: " in error
    assert said in error


def test_files_that_cannot_be_written_are_noticed_before_the_work(capsys):
    error = refused(capsys, "plan", "job.py:pair", "--budget", "0.7", "--html", "no/page.html")
    assert "argument --html: there is no folder no" in error
    assert "mkdir -p no" in error
    error = refused(capsys, "plan", "job.py:pair", "--budget", "0.7", "--save", "package")
    assert "argument --save: package is a folder" in error


# --- frontier and explain -------------------------------------------------------------------------


def test_the_frontier_is_printed_and_written(capsys, folder):
    assert main(["frontier", "job.py:pair", "--html", "frontier.html"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Frontier of Sequential on cpu")
    assert captured.err == ""
    assert "Frontier" in (folder / "frontier.html").read_text(encoding="utf-8")


def test_a_forward_with_keywords_is_explained(capsys):
    assert main(["explain", "job:as_dict"]) == 0
    assert "held after forward" in capsys.readouterr().out


def test_files_that_are_no_plan(capsys, folder):
    error = refused(capsys, "explain", "plan.json")
    assert "there is no file plan.json" in error
    assert "--save plan.json" in error
    (folder / "other.json").write_text("{}")
    error = refused(capsys, "explain", "other.json", code=1)
    assert "other.json is no plan" in error
