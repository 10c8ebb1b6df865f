"""The compiler from the outside: its modules, backends and partitioner."""

import copy
import pickle

import pytest
import torch
from torch import nn

from recollect._torch import inductor


class Layer(nn.Linear):
    """The compiler leaves torch's own modules alone if they are compiled in place."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x):
        return super().forward(x)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    torch.compiler.reset()


def test_all_names_are_there():
    inductor.check_names()


def wrapped(module):
    return torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=False)


def in_place(module):
    module.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    return module


@pytest.mark.parametrize("how", [wrapped, in_place])
def test_the_settings_of_a_compiled_module_are_found(how):
    assert not inductor.is_compiled_here(Layer())
    module = how(Layer())
    assert inductor.is_compiled_here(module)
    context = inductor.compiler_context(module)
    assert (context.fullgraph, context._dynamic) == (True, False)
    backend = inductor.backend_in(context)
    assert inductor.backend_name(backend) == "aot_eager"
    assert inductor.inductor_options(backend) is None
    arguments = inductor.aot_arguments(backend)
    assert arguments is not None
    assert {"fw_compiler", "bw_compiler"} <= set(arguments)


def test_the_options_of_inductor_are_found():
    module = torch.compile(Layer(), options={"max_autotune": True})
    backend = inductor.backend_in(inductor.compiler_context(module))
    assert inductor.inductor_options(backend) == {"max_autotune": True}


def test_a_backend_without_a_partitioner_has_neither():
    module = torch.compile(Layer(), backend="eager")
    backend = inductor.backend_in(inductor.compiler_context(module))
    assert inductor.inductor_options(backend) is None
    assert inductor.aot_arguments(backend) is None


@pytest.mark.parametrize("how", [wrapped, in_place])
def test_a_module_is_compiled_with_another_backend_and_back(how):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    module = how(Layer())
    x = torch.ones(1, 2)
    expected = module(x)
    before = inductor.called_by_compiler(module)
    made = inductor.compiled_with(module, backend)
    inductor.set_called_by_compiler(module, made)
    assert torch.equal(module(x), expected)
    assert len(graphs) == 1
    inductor.set_called_by_compiler(module, before)
    module(x)
    assert len(graphs) == 1


def test_modules_that_are_compiled_alike_share_their_code():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    first, second = in_place(Layer()), in_place(Layer())
    assert inductor.shares_code(first, second)
    inductor.set_called_by_compiler(first, inductor.compiled_with(first, backend))
    like = inductor.compiler_context(first)
    inductor.set_called_by_compiler(second, inductor.compiled_with(second, backend, like))
    first(torch.ones(1, 2))
    second(torch.ones(1, 2))
    assert len(graphs) == 1


def test_a_partitioner_can_be_a_value_of_inductors_config():
    made = inductor.partitioner(lambda graph, inputs, **_: (graph, inputs), lambda: "name")
    assert made.uuid() == "name"
    assert copy.deepcopy(made) is made
    assert pickle.loads(pickle.dumps(made)) == "name"
    assert repr(made) == "None"
    assert made(1, 2, compiler="inductor") == (1, 2)


def test_sizes():
    assert inductor.known_size(3) == 3


def test_dynamic_sizes_can_be_assumed_to_be_larger():
    found = []

    def backend(graph, inputs):
        (x,) = inductor.graph_inputs(graph)
        found.append([inductor.known_size(size) for size in (*x.shape, x.shape[0] * 2)])
        with inductor.assumed_shapes([x], [(5, 1)]):
            found.append([inductor.known_size(size) for size in (*x.shape, x.shape[0] * 2)])
        return graph.forward

    x = torch.ones(3, 2)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(lambda x: x * 2, backend=backend)(x)
    assert found == [[3, 2, 6], [5, 2, 10]]
