"""Progress on a terminal, and what is left of it."""

import io
import sys

import recollect
from recollect.cli import main
from tests.cli._commands import refused


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

    monkeypatch.setattr(recollect.planning.planner.Planner, "of", interrupt)
    assert refused(capsys, "frontier", "job.py:pair", code=130).endswith("stopped\n")
