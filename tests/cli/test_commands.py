"""The commands: help, exit codes, what is printed where, and what is written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recollect
from recollect.cli import main
from recollect.planning.planner import Planner
from tests.cli._commands import exit_code, refused, run


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 2
    printed = capsys.readouterr().out
    for command in ("plan", "frontier", "largest", "explain", "demo", "doctor"):
        assert f"    {command} " in printed


@pytest.mark.parametrize("command", ["plan", "frontier", "largest", "explain", "demo", "doctor"])
def test_every_command_has_help(capsys, command):
    assert exit_code(command, "--help") == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    if command in {"plan", "frontier", "largest", "explain"}:
        assert f"  recollect {command} train.py:build" in printed


def test_the_version(capsys):
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"recollect {recollect.__version__}\n"


def test_an_unknown_command(capsys):
    assert "invalid choice: 'plans'" in refused(capsys, "plans")


def test_the_module_is_the_command():
    result = run("explain", "job:pair")
    assert result.returncode == 0
    assert "held after forward" in result.stdout
    assert result.stderr == ""


def test_exit_codes_of_the_process():
    assert run("explain", "job:pairs").returncode == 2
    result = run("plan", "job.py:broken", "--budget", "0.5")
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback")
    assert "in broken" in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="pipes break otherwise there")
def test_a_reader_that_has_enough_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "recollect", "explain", "job:pair"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert result.stderr == ""
    assert result.returncode == 1


# --- plan -----------------------------------------------------------------------------------------


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
    make = Planner.of

    def spy(*args, **options):
        seen.append(options["offload"])
        return make(*args, **options)

    monkeypatch.setattr(Planner, "of", spy)
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


# --- largest --------------------------------------------------------------------------------------


def test_the_largest_batch_is_printed_and_written(capsys, folder):
    options = ["--budget", "40KiB", "--html", "l.html", "--save", "p.json", "--multiple-of", "4"]
    assert main(["largest", "job.py:sized_dict", *options]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Largest batch of Sequential on cpu")
    assert captured.err == ""
    assert "Largest batch" in (folder / "l.html").read_text(encoding="utf-8")
    (line,) = [line for line in captured.out.splitlines() if line.endswith("chosen")]
    size = int(line.split()[0])
    assert size % 4 == 0
    ((_, (shape, _)),) = [recollect.Plan.load("p.json").signature]
    assert shape == (size, 16)


def test_the_largest_batch_is_bounded_and_may_be_limited_in_time(capsys):
    options = ["--budget", "1GiB", "--most", "3", "--time", "1.5", "--no-offload"]
    assert main(["largest", "job:sized", *options]) == 0
    assert "no larger size was to be considered" in capsys.readouterr().out


def test_a_budget_that_no_size_fits_is_said_in_a_sentence(capsys):
    error = refused(capsys, "largest", "job.py:sized", "--budget", "1KiB", code=1)
    assert error.startswith("recollect largest: error: budget: not even a batch of size 1 fits")
    assert re.findall(r"--budget (\d+)$", error, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "0.5"], "argument --budget: budget=0.5 is a fraction"),
        (["--budget", "12G"], "may mean GB or GiB"),
        (["--budget", "1MiB", "--time", "0.5"], "argument --time: time=0.5 should be 1 or more"),
        (["--budget", "1MiB", "--time", "fast"], "argument --time: invalid float value: 'fast'"),
        (["--budget", "1MiB", "--most", "0"], "argument --most: it should be 1 or more"),
        ([], "required: --budget"),
    ],
)
def test_options_of_largest_that_mean_nothing(capsys, options, said):
    assert said in refused(capsys, "largest", "job.py:sized", *options)


def test_batches_that_do_not_grow_are_said_in_a_sentence(capsys):
    error = refused(capsys, "largest", "job.py:constant", "--budget", "1GiB", code=1)
    assert "make_batch: the tensors of make_batch(2)" in error


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
