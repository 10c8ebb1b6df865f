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
from recollect.cli.screen import say
from recollect.planning.planner import Planner
from tests.cli._commands import exit_code, printed, refused, run


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().out
    for command in ("plan", "frontier", "largest", "explain", "compare", "demo", "doctor"):
        assert f"    {command} " in shown


@pytest.mark.parametrize("command", ["plan", "frontier", "largest", "explain", "demo", "doctor"])
def test_every_command_has_help(capsys, command):
    assert exit_code(command, "--help") == 0
    shown = capsys.readouterr().out
    if command in {"plan", "frontier", "largest", "explain"}:
        assert f"  recollect {command} train.py:build" in shown


def test_the_version(capsys):
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"recollect {recollect.__version__}\n"


def test_an_unknown_command(capsys):
    assert "there is no command 'plans'. Did you mean plan?" in refused(capsys, "plans")


def test_an_option_of_another_command_is_not_taken_for_one_that_merely_looks_alike(capsys):
    error = refused(capsys, "frontier", "job:pair", "--budget", "0.5")
    assert error.endswith("error: there is no option --budget.\n")
    assert "no option --versoin. Did you mean --version?" in refused(capsys, "--versoin")


def test_a_batch_that_cannot_be_used_is_a_sentence(capsys, folder):
    (folder / "package" / "loads.py").write_text(
        "from job import pair\nfrom torch.utils.data import DataLoader\n"
        "def build(): return pair()[0], DataLoader([1])\n"
        "def strings(): return pair()[0], 'text'\n"
    )
    error = refused(capsys, "frontier", "package.loads:build", code=1)
    assert error.startswith("recollect frontier: error: batch is a DataLoader: pass what it gives")
    error = refused(capsys, "frontier", "package.loads:strings", code=1)
    assert "error: batch: there is no tensor in this str" in error


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
    shown = capsys.readouterr().out
    assert "p.json" in shown
    assert "p.html" in shown
    assert "<html" in (folder / "p.html").read_text(encoding="utf-8")
    plan = recollect.Plan.load("p.json")
    assert shown.startswith(str(plan))

    assert main(["explain", "p.json"]) == 0
    explained = capsys.readouterr().out
    assert explained.startswith(str(plan))
    *rows, _, origin = explained.removeprefix(str(plan)).strip().splitlines()
    assert origin == f"Made with {plan.origin}"
    assert re.split(r"\s{2,}", rows[0]) == ["module", "op", "memory", "time", "fate", "reason"]
    assert len(rows) == 2 + len(plan.explain())
    assert {row.fate for row in plan.explain()} <= set(" ".join(rows).split())


def test_the_optimizer_counts(capsys):
    peaks = []
    for name in ("pair", "as_dict"):
        assert main(["plan", f"job:{name}", "--budget", "1GiB", "--save", "p.json"]) == 0
        peaks.append(json.loads(Path("p.json").read_text())["plain_peak"])
    assert peaks[1] > peaks[0]


def test_an_optimizer_is_made_for_a_function_that_returns_none(capsys):
    def parts(*more):
        code, out, _ = printed(capsys, "plan", "job.py:pair", "--budget=0.95", "--json", *more)
        assert code == 0
        return json.loads(out)["peak_parts"]["parameters, optimizer state"]

    assert parts("--optimizer=AdamW") > 2.9 * parts()
    said = refused(capsys, "plan", "job.py:as_dict", "--budget=0.9", "--optimizer=AdamW")
    assert "--optimizer: job.py:as_dict returns an optimizer already, a SGD" in said
    said = refused(capsys, "plan", "job.py:pair", "--budget=0.9", "--optimizer=Adamm")
    assert "--optimizer: torch.optim has no Adamm. Did you mean Adam" in said


@pytest.mark.parametrize("option", ["--dtype=bfloat16", "--batch=2x8", "--set=hidden_size=8"])
def test_options_of_a_config_are_refused_for_a_function(capsys, option):
    said = refused(capsys, "plan", "job.py:pair", "--budget=0.9", option)
    assert f"{option.partition('=')[0]} is for a config of transformers" in said


def test_a_budget_that_nothing_fits_is_said_in_a_sentence(capsys):
    error = refused(capsys, "plan", "job.py:pair", "--budget", "1KiB", code=1)
    assert error.startswith("recollect plan: error: budget: no plan")
    (least,) = re.findall(r"--budget (\d+)$", error, re.MULTILINE)
    assert main(["plan", "job.py:pair", "--budget", least]) == 0


def test_offload_can_be_ruled_out(capsys, monkeypatch):
    seen = []
    make = Planner.of

    def spy(*args, **options):
        seen.append(args[0].offload)
        return make(*args, **options)

    monkeypatch.setattr(Planner, "of", spy)
    assert main(["plan", "job.py:pair", "--budget", "1.0"]) == 0
    assert main(["plan", "job.py:pair", "--budget", "1.0", "--no-offload"]) == 0
    assert seen == ["auto", False]


def test_a_loop_that_frees_the_output_is_planned_for(capsys):
    assert (
        main(["plan", "job.py:pair", "--budget", "1.0", "--frees-output", "--save", "p.json"]) == 0
    )
    assert "the loop frees the model's output before backward" in capsys.readouterr().out
    assert recollect.Plan.load("p.json").holds_output is False


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("12XiB", "there is no unit 'XiB'"),
        ("12G", "'G' may mean GB or GiB"),
        ("1.5", "1.5GiB"),
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
        (["--budget", "0.5"], "argument --budget: budget='0.5' is a fraction"),
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
    error = refused(capsys, "explain", "other.json")
    assert "error: PLAN.json: other.json is not a saved plan" in error
    assert "A: job.py is not a saved plan" in refused(capsys, "compare", "job.py", "job.py")
    said = refused(capsys, "plan", "some/Llama-3-8B", "--budget=0.5")
    assert "name its config: transformers:LlamaConfig" in said


# --- for programs, and for people in a hurry ------------------------------------------------------


def test_help_and_misspelt_words_need_no_torch():
    script = """
import sys
from recollect.cli import main
for argv in (["--help"], ["plan", "--help"], ["--version"], ["paln"], ["plan", "--budegt", "1"]):
    try:
        main(argv)
    except SystemExit as stop:
        assert stop.code == (0 if argv[-1].startswith("--") else 2), argv
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert "there is no command 'paln'. Did you mean plan?" in done.stderr
    assert "there is no option --budegt. Did you mean --budget?" in done.stderr


@pytest.mark.parametrize("command", ["", "plan", "frontier", "largest", "explain", "compare"])
def test_help_fits_into_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = printed(capsys, *filter(None, [command]), "--help")
    assert code == 0
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_a_misspelt_function_is_asked_about(capsys):
    code, _, err = printed(capsys, "plan", "job.py:piar", "--budget", "0.9")
    assert code == 2
    assert "there is no piar in job.py. Did you mean pair?" in err


def test_json_is_all_that_is_printed(capsys, folder):
    code, out, err = printed(
        capsys, "plan", "job.py:pair", "--budget", "90%", "--json", "--save", "plan.json"
    )
    assert (code, err) == (0, "")
    figures = json.loads(out)
    plan = recollect.Plan.load(folder / "plan.json")
    assert figures["predicted_peak"] == plan.predicted_peak
    assert figures["budget"] == int(0.9 * figures["plain_peak"])
    kept = sum(row.bytes for row in plan.explain() if row.fate == "kept")
    assert figures["kept_bytes"] == kept
    _, out, _ = printed(capsys, "explain", "plan.json", "--json")
    assert len(json.loads(out)["rows"]) == len(plan.explain())
    _, out, _ = printed(capsys, "explain", "job.py:pair", "--json", "--html", "held.html")
    assert json.loads(out)["held_bytes"] > 0
    assert "What one forward holds" in (folder / "held.html").read_text(encoding="utf-8")


def test_quiet_prints_nothing_but_errors(capsys, folder):
    given = ("frontier", "job.py:pair", "--quiet", "--save", "points.json", "--html", "page.html")
    assert printed(capsys, *given) == (0, "", "")
    points = json.loads((folder / "points.json").read_text())["points"]
    assert {point["kind"] for point in points} >= {"plan", "plain"}
    assert (folder / "page.html").exists()
    code, out, err = printed(capsys, "plan", "job.py:pair", "--budget", "2KiB", "--quiet")
    assert (code, out) == (1, "")
    assert "The least that works" in err
    refused(capsys, "plan", "job.py:pair", "--budget", "0.9", "--quiet", "--json")


def test_two_plans_are_compared(capsys, folder):
    for name, budget in (("a", "0.95"), ("b", "0.85")):
        printed(
            capsys, "plan", "job.py:pair", "--budget", budget, "--quiet", "--save", f"{name}.json"
        )
    code, out, err = printed(capsys, "compare", "a.json", "b.json", "--html", "both.html")
    assert (code, err) == (0, "")
    assert re.search(r"^ +a +b$", out, re.MULTILINE)
    assert "budget" in out
    assert "Two plans side by side" in (folder / "both.html").read_text(encoding="utf-8")
    _, out, _ = printed(capsys, "compare", "a.json", "b.json", "--json")
    assert {"first", "second", "changes"} == set(json.loads(out))
    code, _, err = printed(capsys, "compare", "a.json", "c.json")
    assert code == 2
    assert "B: there is no file c.json" in err


def test_colours_are_for_terminals(capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = "Title\n\nmodule  kept\n------  ----\nkeptless kept"
    say(text)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    say(text)
    painted = capsys.readouterr().out
    assert painted.startswith("\x1b[1mTitle\x1b[0m")
    assert painted.count("\x1b[34mkept\x1b[0m") == 2
    assert re.sub(r"\x1b\[\d+m", "", painted) == f"{text}\n"
    monkeypatch.setenv("NO_COLOR", "1")
    say(text)
    assert capsys.readouterr().out == f"{text}\n"
