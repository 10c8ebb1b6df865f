"""Tensors: plain or not, their storages, their hooks."""

import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from recollect._torch.modes import below_python
from recollect._torch.tensors import (
    copy_tensors,
    inner_tensors,
    is_plain_tensor,
    local_tensors,
    memory_key,
    storage_key,
    tensor_hooks,
    unsupported_tensor,
    version_of,
    write_tensor_hooks,
)


def test_versions_are_read():
    x = torch.ones(2)
    assert version_of(x) == 0
    assert version_of(x.add_(1)) == 1
    with torch.inference_mode():
        assert version_of(torch.ones(2)) is None


def test_tensors_are_copied():
    targets, sources = [torch.zeros(2), torch.zeros(3, dtype=torch.long)], [1.5, 2]
    copy_tensors(targets, [torch.full_like(t, s) for t, s in zip(targets, sources, strict=True)])
    assert [t.tolist() for t in targets] == [[1.5, 1.5], [2, 2, 2]]
    copy_tensors([], [])


def test_a_tensor_of_zeros_without_memory_is_not_plain():
    zeros = torch._efficientzerotensor(2)
    assert not is_plain_tensor(zeros)
    assert unsupported_tensor(zeros) == "a tensor of zeros without memory"


def test_a_tensor_of_a_transform_is_not_plain_though_one_with_its_keys_is():
    assert is_plain_tensor(torch._to_functional_tensor(torch.ones(2)))
    found = []

    def function(x):
        found.append(is_plain_tensor(x))
        return x

    torch.func.functionalize(function)(torch.ones(2))
    assert found == [False]


def test_inner_tensors():
    x = torch.ones(2, 2)
    sparse = x.to_sparse()
    with below_python():
        assert inner_tensors(x)[0] is x
        assert inner_tensors(torch.nn.Parameter(x))[0].shape == (2, 2)
        assert [t.shape for t in inner_tensors(sparse)] == [(2, 4), (4,)]
        assert inner_tensors(x.to("meta")) is None


def test_a_wrapper_has_the_tensors_that_it_wraps():
    x = torch.ones(3)
    (local,) = local_tensors(x)
    assert local is x
    (local,) = local_tensors(AsyncCollectiveTensor(x))
    assert local is x


def test_the_memory_of_tensors_is_told_apart():
    x, y = torch.ones(2), torch.ones(2)
    assert storage_key(x) == storage_key(x[1:]) != storage_key(y)
    assert storage_key(torch.eye(2).to_sparse()) is None


def test_the_hooks_of_a_tensor_are_taken_away():
    parameter, calls = torch.nn.Parameter(torch.ones(2)), []
    before = tensor_hooks(parameter)
    assert before == (None, None)
    for _ in range(2):
        parameter.register_hook(lambda _: calls.append("gradient"))
        parameter.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
        parameter.sum().backward()
        assert calls == ["gradient", "after"]
        write_tensor_hooks(parameter, before)
        parameter.sum().backward()
        assert calls == ["gradient", "after"]
        assert tensor_hooks(parameter) == before
        calls.clear()


def test_the_address_of_fake_memory_is_not_read():
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of it
        x, y = torch.ones(3), torch.nn.Parameter(torch.ones(3))
        assert memory_key(x) == memory_key(x[1:]) != memory_key(y) == storage_key(y)
