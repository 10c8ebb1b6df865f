"""A job for the commands, and how the tests run them."""

import subprocess
import sys

from recollect.cli import main

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


def sized():
    return make_model(), lambda n: torch.randn(n, 16)


def sized_dict():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = lambda output: output.square().mean()
    make_batch = lambda n: {"input": torch.randn(n, 16)}
    return dict(model=model, make_batch=make_batch, loss=loss, optimizer=optimizer)


def constant():
    return make_model(), lambda n: torch.randn(4, 16)


model = make_model()
number = 3
"""


def run(*arguments):
    command = [sys.executable, "-m", "recollect", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def printed(capsys, *arguments):
    """The exit code of a command, and what it prints to stdout and stderr."""
    code = exit_code(*arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


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
