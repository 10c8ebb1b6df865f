"""The doctor: what it finds, and what it says of it."""

import re

import pytest
import torch

import recollect
from recollect.cli import doctor as doctor_module
from recollect.cli import main

CUDA = "cuda:0" if torch.cuda.is_available() else "CUDA"


def test_the_doctor_finds_all_well(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for name in ("Python", "torch", "recollect", "CPU", "self-test", CUDA):
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
        ("2.15.0", 0, "ok     torch          2.15.0, a version that recollect is tested on"),
        ("2.12.0", 0, "note   torch          2.12.0, which recollect is not tested on"),
        ("3.0.0a0+git1", 0, "note   torch "),
        ("2.9.1", 1, "pip install 'torch>=2.11'"),
    ],
)
def test_the_doctor_knows_versions_of_torch(capsys, monkeypatch, no_self_test, version, code, said):
    monkeypatch.setattr(torch, "__version__", version)
    assert main(["doctor"]) == code
    assert said in capsys.readouterr().out


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
