"""``recollect doctor``: the versions and devices of this machine, and whether recollect works."""

from __future__ import annotations

import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import recollect
from recollect.cli.demo import bitwise_equal
from recollect.cli.screen import say
from recollect.planning.recording.sampling import measured_link
from recollect.report.units import bytes_text
from recollect.store.pool import memory_of_machine

#: The versions of torch that the tests are run on.
_TESTED = ("2.11", "2.13", "2.15")

_OK, _NOTE, _WRONG = "ok", "note", "WRONG"
_REPORT = "This should not happen: please report it, with all that is printed here"

#: The model of the self-test. On a GPU it must outweigh the workspaces of libraries.
_DEPTH, _WIDTH, _FRACTION = 12, 64, 0.6
_ROWS_ON_CPU, _ROWS = 1 << 10, 1 << 16
#: A plan records in the first step, and checks later ones against the recording.
_STEPS = 3


class _Finding(NamedTuple):
    text: str
    state: str = _OK
    advice: str = ""


_Check = Callable[[], _Finding]


def doctor() -> int:
    """Print the results of all checks. Returns the exit code: 1 if something is wrong."""
    is_well = True
    for name, check in _checks():
        finding = _guarded(check)
        is_well &= finding.state != _WRONG
        say(f"{finding.state:<5}  {name:<13}  {finding.text}")
        for line in finding.advice.splitlines():
            say(f"{'':22}{line}")
    say("\nAll is well" if is_well else "\nSomething is wrong: see above what to do about it")
    return 0 if is_well else 1


def _checks() -> Iterator[tuple[str, _Check]]:
    yield "Python", lambda: _Finding(f"{platform.python_version()} at {sys.executable}")
    yield "torch", _torch
    folder = Path(recollect.__file__).parent
    yield "recollect", lambda: _Finding(f"{recollect.__version__} at {folder}")
    memory, threads = bytes_text(memory_of_machine()), torch.get_num_threads()
    yield "CPU", lambda: _Finding(f"{memory} of memory, threads of torch: {threads}")
    yield "self-test", partial(_self_test, torch.device("cpu"))
    if not torch.cuda.is_available():
        yield "CUDA", _no_cuda
        return
    yield "pinned memory", _pinned
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        yield str(device), partial(_cuda, device)
        yield "link to host", partial(_link, device)
        yield "self-test", partial(_self_test, device)


def _guarded(check: _Check) -> _Finding:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 -- a check that fails is a finding
        advice = f"{_REPORT}\n{traceback.format_exc()}"
        return _Finding(f"{type(error).__name__}: {error}", _WRONG, advice)


# --- versions and devices -------------------------------------------------------------------------


def _torch() -> _Finding:
    version = torch.__version__
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    tested = [tuple(map(int, each.split("."))) for each in _TESTED]
    if release in tested:
        return _Finding(f"{version}, a version that recollect is tested on")
    if release < min(tested):
        advice = f"Install a newer one:  pip install 'torch>={_TESTED[0]}'"
        return _Finding(f"{version}, which is older than what recollect needs", _WRONG, advice)
    advice = "The self-test below says whether the main parts work"
    text = f"{version}, which recollect is not tested on; {' and '.join(_TESTED)} are"
    return _Finding(text, _NOTE, advice)


def _no_cuda() -> _Finding:
    if torch.version.cuda is None:
        return _Finding("this torch is built without it: models are trained on the CPU")
    advice = "If there is a GPU, `nvidia-smi` tells whether its driver works"
    return _Finding("no device is seen: models are trained on the CPU", _NOTE, advice)


def _cuda(device: torch.device) -> _Finding:
    free, total = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_name(device)
    return _Finding(f"{name}, {bytes_text(total)}, {bytes_text(free)} of them free")


def _pinned() -> _Finding:
    if torch.empty(1, pin_memory=True).is_pinned():
        return _Finding("works")
    return _Finding("host memory is not pinned, though pin_memory=True", _WRONG, _REPORT)


def _link(device: torch.device) -> _Finding:
    link = measured_link(device)
    if link is None:
        return _Finding("there is none", _WRONG, _REPORT)
    there, back = (f"{rate / 1e9:.1f} GB/s" for rate in (link.out_rate, link.in_rate))
    return _Finding(f"{there} to the host, {back} back")


# --- does it work ---------------------------------------------------------------------------------


def _self_test(device: torch.device) -> _Finding:
    """Plan a small model for part of its memory, and compare gradients with and without."""
    # The process may hold other tensors, which no plan can free: the budget leaves room for them.
    others = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    layers = [each for _ in range(_DEPTH) for each in (nn.Linear(_WIDTH, _WIDTH), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    rows = _ROWS_ON_CPU if device.type == "cpu" else _ROWS
    batch = torch.randn(rows, _WIDTH, device=device)
    expected = _gradients(model, batch)
    frontier = recollect.frontier(model, batch)
    plan = frontier.plan_for(others + int(_FRACTION * (frontier.plain_peak - others)))
    with plan.applied(model):
        found = [_gradients(model, batch) for _ in range(_STEPS)]
    if not all(bitwise_equal(each, expected) for each in found):
        return _Finding("gradients under a plan are not those of the plain model", _WRONG, _REPORT)
    memory = f"{bytes_text(plan.predicted_peak)} instead of {bytes_text(plan.plain_peak)}"
    return _Finding(f"a small model under a plan: {memory}, gradients bitwise equal")


def _gradients(model: nn.Module, batch: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(batch).sum().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]
