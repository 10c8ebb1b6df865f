"""Where an op was called, read off the Python stack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.checks.place import Place, source_line
from tests._support import compat_rerun, reentrant, rerun


class Probe(nn.Module):
    """Notes where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []
        self.in_library: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        place = Place(sys._getframe())
        self.paths.append(place.path(WeakKeyDictionary()))
        self.in_library.append(place.in_library)
        return x.sin()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), Probe())

    @property
    def probe(self) -> Probe:
        return self.inner[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Decoder(nn.Module):
    def __init__(self, call: Callable[..., Tensor] = lambda f, x: f(x)) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x


def paths(model: Any, probe: Probe) -> list[str]:
    model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    return probe.paths


def test_a_module_is_named_from_the_outermost() -> None:
    model = Decoder()
    assert paths(model, model.layers[1].probe) == ["Decoder: layers.1.inner.1"]


def test_in_no_module_there_is_no_path() -> None:
    assert Place(sys._getframe()).path(WeakKeyDictionary()) == ""


@pytest.mark.parametrize("run", [rerun, compat_rerun, reentrant], ids=["rerun", "compat", "re"])
def test_a_recomputation_sees_the_region_and_what_is_inside(run: Any) -> None:
    model = Decoder(run)
    expected = ["Decoder: layers.1.inner.1", "Block: inner.1"]
    assert paths(model, model.layers[1].probe) == expected


def test_a_module_checkpointed_in_place_is_named_once() -> None:
    model = Decoder()
    recollect.checkpointed(model.layers[0])
    expected = ["Decoder: layers.0.inner.1", "Block: inner.1"]
    assert paths(model, model.layers[0].probe) == expected


def test_forward_called_directly_is_noticed() -> None:
    model = Decoder(lambda layer, x: layer.forward(x))
    assert paths(model, model.layers[0].probe) == ["Decoder: layers.0.inner.1"]
    model = Decoder()
    assert paths(model.forward, model.layers[0].probe) == ["Decoder: layers.0.inner.1"]


def test_hooks_do_not_hide_a_module() -> None:
    model = Decoder()
    model.layers[0].register_forward_hook(lambda module, args, out: out + 1)
    model.layers[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert paths(model, model.layers[0].probe) == ["Decoder: layers.0.inner.1"]


def test_a_module_that_no_other_holds_starts_anew() -> None:
    loose = Block()
    model = Decoder(lambda layer, x: loose(layer(x)))
    assert paths(model, loose.probe)[0] == "Decoder > Block: inner.1"


def test_names_that_wrappers_add_are_left_out() -> None:
    class Wrapper(nn.Module):
        def __init__(self, wrapped: nn.Module) -> None:
            super().__init__()
            self._checkpoint_wrapped_module = wrapped

        def forward(self, x: Tensor) -> Tensor:
            return self._checkpoint_wrapped_module(x)

    model = Decoder()
    probe = model.layers[0].probe
    model.layers[0] = Wrapper(model.layers[0])
    assert paths(model, probe) == ["Decoder: layers.0.inner.1"]
    assert paths(Wrapper(probe), probe)[-1] == "Wrapper"


def test_a_name_is_searched_for_once_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from recollect.checks import place

    searched: list[nn.Module] = []
    search = place.name_in

    def counted(parent: nn.Module, module: nn.Module) -> str | None:
        searched.append(module)
        return search(parent, module)

    monkeypatch.setattr(place, "name_in", counted)
    names: Any = WeakKeyDictionary()
    block = Block()
    monkeypatch.setattr(Probe, "forward", lambda self, x: Place(sys._getframe()).path(names) and x)
    block(torch.ones(1, 3))
    found = len(searched)
    block(torch.ones(1, 3))
    assert found == len(searched) == 2


def from_file(file: str, source: str, **names: Any) -> dict[str, Any]:
    """Run ``source`` as if it stood in ``file``."""
    exec(compile(source, file, "exec"), names)
    return names


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (str(Path(torch.__file__).parent / "distributed/fsdp/_fully_shard/_fsdp_param.py"), True),
        ("/usr/lib/deepspeed/runtime/zero/parameter_offload.py", True),
        ("/home/me/model.py", False),
    ],
)
def test_the_work_of_a_library_in_a_hook_is_known_as_such(file: str, expected: bool) -> None:
    seen = []
    hook = from_file(
        file,
        "def hook(module, args): note()",
        note=lambda: seen.append(Place(sys._getframe()).in_library),
    )["hook"]
    block = Block()
    block.register_forward_pre_hook(hook)
    block(torch.ones(1, 3))
    assert seen == [expected]
    # The ops of the module itself are the user's, whoever calls it.
    call = from_file(file, "def call(block, x): return block(x)")["call"]
    call(block, torch.ones(1, 3))
    assert block.probe.in_library == [False, False]


def test_the_users_frames_are_those_outside_of_torch_and_recollect() -> None:
    seen: list[Any] = []

    def region(x: Tensor) -> Tensor:
        seen.append(Place(sys._getframe()).stack)
        return x.sin()

    rerun(region, torch.ones(1, requires_grad=True)).sum().backward()
    for stack in seen:
        assert [name for _, _, name in stack[:2]] == [
            "region",
            "test_the_users_frames_are_those_outside_of_torch_and_recollect",
        ]
        files = " ".join(file for file, _, _ in stack)
        assert str(Path(torch.__file__).parent) not in files
        assert str(Path(recollect.__file__).parent) not in files


def test_the_source_line_is_the_users_and_not_beyond_the_caller(tmp_path):
    seen = []

    class Probed(nn.Module):
        def forward(self, x):
            return self.inner(x)

    class Inner(nn.Module):
        def forward(self, x):
            seen.append(source_line(sys._getframe(), "no such file"))
            return x

    model = Probed()
    model.inner = Inner()
    model(torch.ones(1))
    line = Inner.forward.__code__.co_firstlineno + 1
    assert seen == [f"{__file__}:{line}"]
    assert source_line(sys._getframe(), __file__) == ""
