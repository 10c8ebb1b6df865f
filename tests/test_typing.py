"""Type checkers catch a typo in an option."""

import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import recollect
from recollect.checks.determinism import Describe
from recollect.options import Engine, Keywords, Options

GOOD = """\
import recollect
from torch import nn

recollect.checkpoint(nn.ReLU(), engine="replay", determinism_check="values")
recollect.checkpoint(nn.ReLU(), determinism_check=lambda tensor: tensor.shape)
recollect.checkpointed(nn.ReLU(), engine="rerun", determinism_check="none")
recollect.compat.checkpoint(nn.ReLU(), use_reentrant=False, determinism_check="none")
recollect.plan(nn.ReLU(), 0, "1GiB", offload="auto", holds_output=False)
recollect.fit(nn.ReLU(), 0, offload=True)
"""

BAD = """\
import recollect
from torch import nn

recollect.checkpoint(nn.ReLU(), engine="replya")
recollect.checkpoint(nn.ReLU(), determinism_check="value")
recollect.checkpointed(nn.ReLU(), engine="replya")
recollect.checkpointed(nn.ReLU(), polcy=None)
recollect.checkpoint_sequential([], 1, None, determinism_check="value")
recollect.plan(nn.ReLU(), 0, "1GiB", offload="atuo")
recollect.fit(nn.ReLU(), 0, offlaod=True)
recollect.frontier(nn.ReLU(), 0, offload="yes")
"""


@pytest.mark.parametrize("function", [recollect.checkpoint, Options.__init__])
def test_options_are_literals(function):
    hints = get_type_hints(function)
    assert hints["engine"] == Engine | None
    assert get_args(Engine) == ("rerun", "reentrant", "replay")
    named, _ = get_args(hints["determinism_check"])
    assert set(get_args(named)) == {"default", "values", "none"}
    assert Describe in get_args(hints["determinism_check"])


def test_keywords_are_the_options():
    options = get_type_hints(Options.__init__)
    del options["return"]
    assert get_type_hints(Keywords) == options


@pytest.mark.slow
def test_mypy_catches_a_typo(tmp_path):
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    pytest.importorskip("mypy")
    source = Path(recollect.__file__).parents[1]
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), "good.py", "bad.py"]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env={"MYPYPATH": str(source), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in result.stdout.splitlines() if ": error:" in line]
    found = {tuple(line.split(":")[:2]) for line in errors}
    assert found == {("bad.py", str(number)) for number in range(4, 12)}, result.stdout
