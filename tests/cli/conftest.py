import sys

import pytest

from recollect.planning.solving import solve
from tests.cli._commands import JOB


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
