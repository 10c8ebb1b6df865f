"""The command itself: help, version, exit codes."""

import os
import subprocess
import sys

import pytest

import recollect
from recollect.cli import main
from tests.cli._commands import exit_code, refused, run


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
