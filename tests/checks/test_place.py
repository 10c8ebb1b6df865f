"""Where an op was called, read off the Python stack."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import policy
from recollect.checks.place import Place, hide_own_frames, source_line
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


def test_libraries_whose_name_begins_like_torchs_are_a_users() -> None:
    stack = place_in(str(Path(torch.__file__).parent) + "vision/models/resnet.py").stack
    assert stack[0][2] == "place"
    assert place_in(str(Path(torch.__file__).parent) + "/nn/functional.py").stack[0][2] != "place"


def place_in(file: str) -> Place:
    return from_file(file, "import sys\ndef place(make): return make(sys._getframe())")["place"](
        Place
    )


# --- the frames of errors -------------------------------------------------------------------------


class Failing(nn.Module):
    """Fails on request, in its own code or in an op."""

    how = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "own":
            raise LookupError("mine") from KeyError("cause")
        return x.view(3, -1) if self.how == "op" else x.relu()


def failing_model() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(4)]
    return nn.Sequential(*blocks, Failing())


def run_first(model: nn.Module, x: Tensor) -> Any:
    return recollect.fit(model, budget="1TiB")(x)


def run_planned(model: nn.Module, x: Tensor) -> Any:
    failing = model[-1]
    how, failing.how = failing.how, ""
    recollect.fit(model, x, budget="70%")
    for _ in range(2):
        model(x).sum().backward()
    failing.how = how
    return model(x)


def run_checked(model: nn.Module, x: Tensor) -> Any:
    failing = model[-1]
    how, failing.how = failing.how, ""
    for _ in range(3):
        recollect.checkpoint(model, x, engine="replay").sum().backward()
    failing.how = how
    return recollect.checkpoint(model, x, engine="replay")


#: Ways to run a model, and how many frames of the library come before the user's code.
WAYS: dict[str, tuple[Callable[[nn.Module, Tensor], Any], int]] = {
    "checkpoint": (recollect.checkpoint, 2),
    "checkpointed": (lambda model, x: recollect.checkpointed(model)(x), 3),
    "selective": (lambda model, x: recollect.checkpoint(model, x, policy=policy.matmuls()), 2),
    "recorded": (lambda model, x: recollect.checkpoint(model, x, engine="replay"), 2),
    "checked": (run_checked, 2),
    "first step": (run_first, 3),
    "planned": (run_planned, 3),
    "plan": (lambda model, x: recollect.plan(model, x, "70%"), 2),
    "frontier": (recollect.frontier, 1),
    "largest_batch": (lambda model, x: recollect.largest_batch(model, lambda _: x, "1TiB"), 1),
    "explain": (recollect.explain, 1),
}


def frames_of(error: BaseException) -> list[str]:
    """The functions in the traceback, without those of modules and of this file's lambdas."""
    own = str(Path(recollect.__file__).parent)
    found = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(own):
            found.append("ours")
        elif file == __file__ and name == "forward":
            found.append("the user's")
    return found


@pytest.mark.parametrize("how", ["own", "op"])
@pytest.mark.parametrize("way", WAYS)
def test_a_traceback_ends_in_the_users_line_with_few_frames_of_ours(way: str, how: str) -> None:
    run, count = WAYS[way]
    model, x = failing_model(), torch.randn(512, 8)
    model[-1].how = how
    with pytest.raises(LookupError if how == "own" else RuntimeError) as caught:
        run(model, x)
    assert frames_of(caught.value) == ["ours"] * count + ["the user's"]
    assert isinstance(caught.value.__cause__, KeyError if how == "own" else type(None))


def test_an_error_that_the_library_raises_keeps_its_frames() -> None:
    def forward(x: Tensor) -> Tensor:
        return recollect.tag(x, 3)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="tag") as caught:
        recollect.checkpoint(forward, torch.ones(1, requires_grad=True), engine="replay")
    assert frames_of(caught.value)[-1] == "ours"
    assert len(frames_of(caught.value)) > 3


def test_a_mistake_of_ours_that_torch_notices_keeps_its_frames() -> None:
    """Else nobody could tell where in the library it was."""
    spaces: dict[str, Any] = {"dropout": nn.functional.dropout}
    file = Path(recollect.__file__).with_name("mistaken.py")
    exec(compile("def mistake():\n    dropout(None, p=2.0)\n", file, "exec"), spaces)
    with pytest.raises(ValueError, match="probability") as caught:
        spaces["mistake"]()
    hide_own_frames(caught.value)
    assert "ours" in frames_of(caught.value)


@pytest.mark.parametrize("way", ["checked", "first step", "planned"])
def test_an_error_holds_no_activations_once_it_is_handled(way: str) -> None:
    model, x = failing_model(), torch.randn(512, 8)
    model[-1].how = "own"
    seen: list[ref[Tensor]] = []
    model[-2].register_forward_hook(lambda module, args, out: seen.append(ref(out)))
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(LookupError):
            WAYS[way][0](model, x)
        assert seen
        assert seen[-1]() is None
    finally:
        gc.enable()
