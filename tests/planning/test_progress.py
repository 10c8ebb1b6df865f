"""``progress=``: a bar of tqdm, lines, a function, or nothing."""

from __future__ import annotations

import gc
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import recollect
from recollect.planning.progress import reporter, silent


class Bar:
    """As tqdm is called."""

    made: list[Bar]

    def __init__(self, *, desc: str, total: float, leave: bool, bar_format: str) -> None:
        self.desc, self.total, self.leave = desc, total, leave
        self.n, self.is_closed = 0.0, False
        self.made.append(self)

    def update(self, more: float) -> None:
        self.n += more

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    Bar.made = []
    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Bar))  # type: ignore[arg-type]
    return Bar.made


def test_a_bar_for_each_stage(bars: list[Bar]) -> None:
    report = reporter(True)
    report("solving", 0.0)
    report("solving", 0.5)
    assert [(bar.desc, bar.n, bar.is_closed) for bar in bars] == [
        ("recollect: solving", 0.5, False)
    ]
    report("trying the plan", 0.25)
    assert [(bar.n, bar.is_closed) for bar in bars] == [(0.5, True), (0.25, False)]
    assert not any(bar.leave for bar in bars)
    del report
    gc.collect()
    assert bars[-1].is_closed


def test_lines_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)  # as if it were not installed
    report = reporter(True)
    for done in (0.0, 0.5):
        report("solving", done)
    report("trying the plan", 0.0)
    assert capsys.readouterr().err == "recollect: solving\nrecollect: trying the plan\n"


def test_a_function_is_called_and_false_is_silent(bars: list[Bar]) -> None:
    told: list[tuple[str, float]] = []

    def tell(what: str, done: float) -> None:
        told.append((what, done))

    assert reporter(tell) is tell
    assert reporter(False) is reporter(None) is silent
    assert not bars


def test_a_real_bar_can_be_drawn(capsys: Any) -> None:
    pytest.importorskip("tqdm")
    report = reporter(True)
    report("solving", 0.0)
    report("solving", 1.0)
    del report
    assert "recollect: solving" in capsys.readouterr().err


def test_the_plan_is_told_in_a_line(bars: list[Bar], capsys: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    recollect.fit(model, torch.randn(64, 8), "90%", progress=True)
    assert bars
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        r"recollect: [\d.]+ KiB -> [\d.]+ KiB, step [+-]\d+%, [\d.]+ s to plan", line
    )


def test_a_step_that_needs_no_plan_is_told(bars: list[Bar], capsys: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    recollect.fit(model, torch.randn(64, 8), "20GiB", progress=True)
    assert bars
    line = capsys.readouterr().err.splitlines()[-1]
    said = r"the plain step takes [\d.]+ KiB, within the budget of 20.00 GiB: it runs plain"
    assert re.fullmatch(f"recollect: {said}", line)


def test_without_progress_nothing_is_printed(capsys: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    recollect.fit(model, torch.randn(64, 8), "100%")
    assert capsys.readouterr().err == ""
