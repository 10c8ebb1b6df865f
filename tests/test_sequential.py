"""checkpoint_sequential of the modern surface: balanced segments, exact reruns, loud errors."""

import pytest
import torch
from torch import nn

import recollect


class Step(nn.Module):
    """One layer, which counts its runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return torch.nn.functional.dropout(self.linear(x).tanh(), 0.25)


def chain(length, kind=nn.Sequential):
    torch.manual_seed(0)
    steps = [Step() for _ in range(length)]
    return nn.Sequential(*steps) if kind is nn.Sequential else kind(steps)


def gradients(run, model):
    torch.manual_seed(1)
    x = torch.randn(3, 4, requires_grad=True)
    out = run(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for step in model for p in step.parameters())]


@pytest.mark.parametrize(
    ("length", "segments", "lengths"),
    [
        (9, 5, [2, 2, 2, 2, 1]),
        (9, 4, [3, 2, 2, 2]),
        (9, 3, [3, 3, 3]),
        (9, 1, [9]),
        (4, 4, [1, 1, 1, 1]),
        (5, 2, [3, 2]),
        (1, 1, [1]),
    ],
)
def test_segments_are_balanced_and_all_but_the_last_run_again(length, segments, lengths):
    again = []

    def step(position):
        def run(x):
            if recollect.is_recomputing():
                again.append(position)
            return x.sin().exp()

        return run

    x = torch.ones(2, requires_grad=True)
    steps = [step(position) for position in range(length)]
    out = recollect.checkpoint_sequential(steps, segments, x)
    assert again == []
    out.sum().backward()
    positions = iter(range(length))
    parts = [[next(positions) for _ in range(part)] for part in lengths]
    # Backward meets the last segment first, which has run plainly.
    assert again == [position for part in reversed(parts[:-1]) for position in part]


@pytest.mark.parametrize("kind", [nn.Sequential, list, tuple, nn.ModuleList, iter])
@pytest.mark.parametrize("segments", [1, 2, 3, 7])
def test_gradients_are_bitwise_those_of_the_plain_chain(kind, segments):
    model = chain(7)
    expected = gradients(model, model)
    model = chain(7)
    functions = model if kind is nn.Sequential else kind(list(model))
    ours = gradients(lambda x: recollect.checkpoint_sequential(functions, segments, x), model)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    last = 7 // segments
    assert [step.runs for step in model] == [2] * (7 - last) + [1] * last


@pytest.mark.parametrize(
    "options",
    [{"engine": "reentrant"}, {"policy": [torch.ops.aten.addmm]}, {"early_stop": False}],
    ids=str,
)
def test_options_are_those_of_checkpoint(options):
    model = chain(4)
    expected = gradients(model, model)
    model = chain(4)
    ours = gradients(lambda x: recollect.checkpoint_sequential(model, 2, x, **options), model)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_input_may_be_anything_the_first_function_takes():
    def first(pair):
        return pair["a"].sin() * pair["b"]

    x = torch.ones(2, requires_grad=True)
    pair = {"a": x, "b": 3}
    recollect.checkpoint_sequential([first, torch.cos], 2, pair).sum().backward()
    expected = torch.ones(2, requires_grad=True)
    (expected.sin() * 3).cos().sum().backward()
    assert torch.equal(x.grad, expected.grad)


@pytest.mark.parametrize("segments", [0, -1, 4, 100])
def test_segments_out_of_range(segments):
    with pytest.raises(ValueError, match=rf"segments should be between 1 and .*3, .*{segments}"):
        recollect.checkpoint_sequential(chain(3), segments, torch.ones(2, 4))


def test_an_empty_chain_has_no_segments():
    with pytest.raises(ValueError, match="segments should be between 1 and"):
        recollect.checkpoint_sequential([], 1, torch.ones(2))


@pytest.mark.parametrize("segments", [True, 2.0, "2", None])
def test_segments_of_another_type(segments):
    with pytest.raises(TypeError, match="segments should be an int"):
        recollect.checkpoint_sequential(chain(3), segments, torch.ones(2, 4))


def test_the_input_in_the_place_of_the_segments():
    message = r"but got Tensor\. The order is: checkpoint_sequential\(functions, segments, input\)$"
    with pytest.raises(TypeError, match=message):
        recollect.checkpoint_sequential(chain(3), torch.ones(2, 4), 2)


@pytest.mark.parametrize("functions", [torch.sin, 3, None, nn.Linear(2, 2)])
def test_functions_that_are_no_chain(functions):
    with pytest.raises(TypeError, match=r"functions should be an nn\.Sequential or a list"):
        recollect.checkpoint_sequential(functions, 1, torch.ones(2))


def test_a_function_that_cannot_be_called_is_named():
    with pytest.raises(TypeError, match=r"functions\[1\] should be callable, but got 3"):
        recollect.checkpoint_sequential([torch.sin, 3], 1, torch.ones(2))


def test_unknown_options_are_listed():
    with pytest.raises(TypeError, match=r"'segment'.*preserve_rng_state"):
        recollect.checkpoint_sequential([torch.sin], 1, torch.ones(2), segment=2)


def test_nothing_runs_before_everything_is_checked():
    ran = []
    with pytest.raises(TypeError, match=r"functions\[1\]"):
        recollect.checkpoint_sequential([ran.append, None], 2, torch.ones(2))
    assert ran == []
