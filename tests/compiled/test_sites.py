"""The compiled modules of a model."""

import pytest
import torch
from torch import nn

from recollect.compiled import sites
from tests.compiled._steps import observing


class Layer(nn.Linear):
    """The compiler leaves torch's own modules alone if they are compiled in place."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(width, width)

    def forward(self, x):
        return super().forward(x).sin()


def model() -> nn.Sequential:
    return nn.Sequential(Layer(), nn.Sequential(Layer(), Layer()))


def test_the_outermost_compiled_modules_are_found():
    found = model()
    found[1].compile(backend="aot_eager")
    found[1][0].compile(backend="aot_eager")
    found[0].compile(backend="aot_eager")
    assert [site.path for site in sites.find_sites(found)] == ["0", "1"]
    whole = torch.compile(found, backend="aot_eager")
    assert [site.path for site in sites.find_sites(whole)] == [""]
    assert sites.model_name(whole) == "Sequential"


def test_a_model_is_compiled_if_most_of_it_is():
    found = model()
    assert not sites.has_sites(found)
    found[0].compile(backend="aot_eager")
    assert sites.has_sites(found)
    assert not sites.is_compiled_throughout(found)
    found[1][0].compile(backend="aot_eager")
    assert sites.is_compiled_throughout(found)


def test_a_backend_without_a_place_for_a_plan_is_named():
    found = model()
    found[1].compile(backend="eager")
    with pytest.raises(ValueError, match="its 1 is compiled with backend='eager'"):
        sites.find_sites(found)


def test_equal_modules_share_code_and_get_their_own_back():
    found = nn.Sequential(Layer(), Layer())
    for layer in found:
        layer.compile(backend="aot_eager")
    before = [layer._compiled_call_impl for layer in found]
    places = sites.find_sites(found)
    backend = observing()
    called = sites.prepare(places, lambda *_: backend)
    x = torch.randn(2, 4, requires_grad=True)
    with sites.installed(called):
        found(x).sum().backward()
        assert [layer._compiled_call_impl for layer in found] == [*called.values()]
    assert [layer._compiled_call_impl for layer in found] == before
    # The second has an input of another kind: one graph if that makes no difference.
    assert len({graph.key for graph in backend.split.seen}) == len(backend.split.seen) == 1
