"""A machine with a GPU may have torch and pytest alone: the tests are found all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ABSENT = ("execnet", "expecttest", "hypothesis", "scipy", "transformers", "xdist")


@pytest.mark.slow
def test_the_tests_that_need_a_gpu_are_found_with_torch_and_pytest_alone(tmp_path: Path) -> None:
    for name in ABSENT:
        error = f"raise ModuleNotFoundError('there is no {name} here', name={name!r})\n"
        (tmp_path / f"{name}.py").write_text(error)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    command = [sys.executable, "-m", "pytest", "--quiet", "--collect-only", "-m", "gpu"]
    found = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "tests/planning/test_cuda.py::" in found.stdout
