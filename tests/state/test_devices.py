"""Which device type a call is about."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import recollect
from recollect.compat import _infer_device_type


@pytest.fixture(autouse=True)
def restored_default() -> Iterator[None]:
    before = recollect.DefaultDeviceType.get_device_type()
    yield
    recollect.DefaultDeviceType.set_device_type(before)


def test_default_is_the_accelerator_of_the_machine() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    expected = accelerator.type if accelerator else "cpu"
    assert recollect.DefaultDeviceType.get_device_type() == expected


def test_default_can_be_set_and_is_shared_with_compat() -> None:
    recollect.DefaultDeviceType.set_device_type("foo")
    assert recollect.compat.DefaultDeviceType.get_device_type() == "foo"
    assert _infer_device_type(torch.ones(2), 3) == "foo"


def test_tensors_are_found_in_nested_structures() -> None:
    assert _infer_device_type(1, [{"a": torch.ones(2, device="meta")}]) == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_wins_with_a_warning() -> None:
    tensors = torch.ones(2, device="meta"), torch.ones(2, device="cuda")
    with pytest.warns(UserWarning, match="at least two types of devices"):
        assert _infer_device_type(*tensors) == "cuda"
