"""The command line: what is printed where, what is written, and how mistakes are answered."""

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import recollect
from recollect.cli import demo as demo_module
from recollect.cli import doctor as doctor_module
from recollect.cli import main
from recollect.planning.solving import solve

JOB = """
import torch
from torch import nn


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(3) for each in (nn.Linear(16, 16), nn.GELU())))


def pair():
    return make_model(), torch.randn(256, 16)


def as_dict():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = lambda output: output.square().mean()
    return dict(model=model, batch={"input": torch.randn(256, 16)}, loss=loss, optimizer=optimizer)


def triple():
    return make_model(), torch.randn(256, 16), None


def swapped():
    return torch.randn(256, 16), make_model()


def without_batch():
    return dict(model=make_model())


def misspelt():
    return dict(model=make_model(), batch=torch.randn(256, 16), optimiser=None)


def wrong_loss():
    return dict(model=make_model(), batch=torch.randn(256, 16), loss=0.5)


def wrong_optimizer():
    return dict(model=make_model(), batch=torch.randn(256, 16), optimizer="adam")


def frozen():
    return make_model().requires_grad_(False), torch.randn(256, 16)


def needs(width, depth=3):
    return make_model()


def broken():
    raise ValueError("model: not ours")


class Broken(nn.Linear):
    def forward(self, x):
        raise ValueError("loss: not ours either")


def broken_forward():
    return Broken(16, 16), torch.randn(4, 16)


number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with a job in it, to be in; what commands import is forgotten afterwards."""
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(f"from job import *\n\n{JOB}")
    (tmp_path / "imports.py").write_text("import not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(solve, "_WORK", 10_000)  # how good plans are does not matter here
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.split(".")[0].split(" ")[0] in {"job", "package", "imports"}:
            del sys.modules[name]


def run(*arguments):
    command = [sys.executable, "-m", "recollect", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def refused(capsys, *arguments, code=2):
    """What is said of arguments that cannot be used."""
    assert exit_code(*arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def exit_code(*arguments):
    try:
        return main(arguments)
    except SystemExit as stop:  # argparse's
        return stop.code


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
    assert re.split(r"\s{2,}", rows[0]) == ["module", "op", "choice", "memory", "time", "reason"]
    assert len(rows) == 2 + len(plan.explain())
    assert {row.choice for row in plan.explain()} <= set(" ".join(rows).split())


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


# --- MODULE:FUNCTION ------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["job:pair", "job.py:pair", "package.train:pair"])
def test_modules_by_name_and_by_path(capsys, target):
    assert main(["explain", target]) == 0
    assert "held after forward" in capsys.readouterr().out


def test_a_file_finds_its_neighbours_and_takes_the_place_of_no_module(capsys, folder, monkeypatch):
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "neighbour.py").write_text(JOB)
    (elsewhere / "json.py").write_text("from neighbour import pair")
    assert main(["explain", str(elsewhere / "json.py") + ":pair"]) == 0
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("job.py", "should name a module and a function in it, such as train.py:build"),
        ("job:", "should name a module and a function"),
        (":pair", "should name a module and a function"),
        ("jobs:pair", "MODULE: there is no module 'jobs'"),
        ("package.trains:pair", "MODULE: there is no module 'package.trains'"),
        ("jobs.py:pair", "MODULE: there is no file jobs.py"),
        ("job:pairs", "FUNCTION: there is no pairs in job. It has make_model, pair, as_dict"),
        ("job:number", "FUNCTION: number in job is no function but a int"),
        ("job:needs", "needs width. Give them defaults"),
        ("job:triple", "triple in job returns, which is of type tuple of length 3"),
        ("job:make_model", "which is of type Sequential"),
        ("job:swapped", "model should be an nn.Module, but is of type Tensor"),
        ("job:without_batch", "batch is missing"),
        ("job:misspelt", "'optimiser' is not known"),
        ("job:wrong_loss", "loss should be a function of the model's output"),
        ("job:wrong_optimizer", "optimizer should be a torch.optim.Optimizer"),
    ],
)
def test_targets_that_cannot_be_used(capsys, target, said):
    error = refused(capsys, "frontier", target)
    assert error.startswith("recollect frontier: error: ")
    assert said in error


def test_a_model_that_cannot_be_planned_is_said_in_a_sentence(capsys):
    error = refused(capsys, "frontier", "job:frozen", code=1)
    assert "no parameter of this Sequential requires a gradient" in error


@pytest.mark.parametrize("target", ["job:broken", "job:broken_forward"])
def test_errors_of_the_code_of_the_user_stay_what_they_are(target):
    with pytest.raises(ValueError, match="not ours"):
        main(["plan", target, "--budget", "0.5"])


def test_a_module_that_imports_what_is_not_there_shows_where():
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        main(["explain", "imports:build"])


def test_a_file_that_cannot_be_run_is_forgotten():
    with pytest.raises(ModuleNotFoundError):
        main(["explain", "imports.py:build"])
    assert "imports" not in sys.modules


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


# --- progress -------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_is_told_how_far_the_work_is_and_nothing_is_left(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["plan", "job.py:pair", "--budget", "0.7"]) == 0
    written = terminal.getvalue()
    assert "recording a step ..." in written
    assert "solving 100%" in written
    assert "\n" not in written
    lines = written.split("\r\x1b[K")
    assert lines[-1] == ""
    assert "\x1b" not in capsys.readouterr().out


def test_after_an_error_nothing_of_the_progress_is_left(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["plan", "job.py:pair", "--budget", "1KiB"]) == 1
    assert terminal.getvalue().split("\r\x1b[K")[-1].startswith("recollect plan: error")


def test_a_narrow_terminal_is_given_short_lines(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "10")
    assert main(["frontier", "job.py:pair"]) == 0
    assert max(map(len, terminal.getvalue().split("\r\x1b[K"))) == 9


def test_who_interrupts_gets_no_traceback(monkeypatch, capsys):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(recollect.cli.commands, "planner_of", interrupt)
    assert refused(capsys, "frontier", "job.py:pair", code=130).endswith("stopped\n")


# --- demo -----------------------------------------------------------------------------------------


@pytest.fixture
def small_demo(monkeypatch):
    monkeypatch.setattr(demo_module, "_DEPTH", 1)
    monkeypatch.setattr(demo_module, "_TIMED", 1)
    monkeypatch.setattr(demo_module, "_BUDGETS", (0.9, 0.8, 0.7))


def test_the_demo_compares_three_plans_with_plain(capsys, folder, small_demo):
    threads = torch.get_num_threads()
    assert main(["demo", "--html", "demo.html"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("bitwise equal") == 3
    assert "plan.apply(model)" in captured.out
    assert captured.err == ""
    assert "Transformer" in (folder / "demo.html").read_text(encoding="utf-8")
    assert torch.get_num_threads() == threads


def test_a_demo_that_finds_a_difference_fails(capsys, monkeypatch, small_demo):
    monkeypatch.setattr(demo_module, "_BUDGETS", (0.9,))
    monkeypatch.setattr(demo_module, "bitwise_equal", lambda ours, theirs: ours is theirs)
    assert main(["demo"]) == 1
    printed = capsys.readouterr().out
    assert "DIFFERENT" in printed
    assert "plan.apply(model)" not in printed


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


# --- doctor ---------------------------------------------------------------------------------------

CUDA = "cuda:0" if torch.cuda.is_available() else "CUDA"


def test_the_doctor_finds_all_well(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for name in ("Python", "torch", "recollect", "exact solver", "CPU", "self-test", CUDA):
        assert re.search(rf"^(ok|note) +{name} ", printed, re.MULTILINE), name
    assert "gradients bitwise equal" in printed
    assert printed.endswith("All is well\n")


@pytest.fixture
def no_self_test(monkeypatch):
    found = doctor_module._Finding("left out")
    monkeypatch.setattr(doctor_module, "_self_test", lambda device: found)


@pytest.mark.parametrize(
    ("version", "code", "said"),
    [
        (
            "2.13.1+cu130",
            0,
            "ok     torch          2.13.1+cu130, a version that recollect is tested on",
        ),
        ("2.12.0", 0, "note   torch          2.12.0, which recollect is not tested on"),
        ("3.0.0a0+git1", 0, "note   torch "),
        ("2.9.1", 1, "pip install 'torch>=2.11'"),
    ],
)
def test_the_doctor_knows_versions_of_torch(capsys, monkeypatch, no_self_test, version, code, said):
    monkeypatch.setattr(torch, "__version__", version)
    assert main(["doctor"]) == code
    assert said in capsys.readouterr().out


def test_the_doctor_says_how_to_get_the_exact_solver(capsys, monkeypatch, no_self_test):
    monkeypatch.setattr(doctor_module.importlib.util, "find_spec", lambda name: None)
    assert main(["doctor"]) == 0
    assert "pip install 'recollect[exact]'" in capsys.readouterr().out


def test_the_doctor_notices_other_gradients(capsys, monkeypatch):
    monkeypatch.setattr(doctor_module, "bitwise_equal", lambda ours, theirs: False)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^WRONG +self-test +gradients", printed, re.MULTILINE)
    assert "please report it" in printed


def test_the_doctor_reports_whatever_goes_wrong(capsys, monkeypatch):
    def fail(*args):
        raise RuntimeError("no plan today")

    monkeypatch.setattr(recollect, "frontier", fail)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^WRONG +self-test +RuntimeError: no plan today", printed, re.MULTILINE)
    assert "Traceback" in printed
    assert re.search(rf"^(ok|note) +{CUDA}", printed, re.MULTILINE), "it goes on with the rest"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_doctor_looks_at_the_gpu(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for name in ("pinned memory", "cuda:0", "link to host", "self-test"):
        assert re.search(rf"^ok +{name} ", printed, re.MULTILINE), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_doctor_passes_where_the_process_holds_other_memory(capsys):
    held = torch.ones(1 << 30, device="cuda")  # 4 GiB, many times the model of the self-test
    assert main(["doctor"]) == 0
    assert "All is well" in capsys.readouterr().out
    assert held.sum() == held.numel()


# --- the command itself ---------------------------------------------------------------------------


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 2
    printed = capsys.readouterr().out
    for command in ("plan", "frontier", "explain", "demo", "doctor"):
        assert f"    {command} " in printed


@pytest.mark.parametrize("command", ["plan", "frontier", "explain", "demo", "doctor"])
def test_every_command_has_help(capsys, command):
    assert exit_code(command, "--help") == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    if command in {"plan", "frontier", "explain"}:
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
