"""Splitting a joint graph, and what is read from the halves."""

import torch
from torch import Tensor
from torch.nn import functional as F

from recollect.compiled.split import ObservingSplit
from tests.compiled._steps import observing


def attended(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).view(1, 1, 4, 8)
    return F.layer_norm(F.scaled_dot_product_attention(y, y, y), (8,)).cos()


def test_the_state_of_a_generator_is_no_result_that_is_saved():
    backend = observing()
    split = backend.split = ObservingSplit(lambda *_: [])
    inputs = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    torch.compile(attended, backend=backend, fullgraph=True)(*inputs).sum().backward()
    (graph,) = split.seen
    assert list(graph.saved) == []  # though forward saves the state, under the name of a result
    assert graph.torch_saves
