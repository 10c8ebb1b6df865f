"""Which kind of accelerator a call is about."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from recollect._torch.pytree import tree_leaves

__all__ = ["DefaultDeviceType", "device_module", "infer_device_type"]


class DefaultDeviceType:
    """The device type assumed when no argument lives on an accelerator.

    Starts as the accelerator of this machine, or ``"cpu"`` where there is none.
    """

    _default_device_type: str | None = None

    @staticmethod
    def set_device_type(device: str = "cuda") -> None:
        """Make ``device`` the default device type."""
        DefaultDeviceType._default_device_type = device

    @staticmethod
    def get_device_type() -> str:
        """The default device type."""
        if not DefaultDeviceType._default_device_type:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            DefaultDeviceType._default_device_type = accelerator.type if accelerator else "cpu"
        return DefaultDeviceType._default_device_type


def device_module(device_type: str) -> Any:
    """``torch.cuda`` for ``"cuda"``, and so on; the meta device has no module."""
    if device_type == "meta":
        return torch.device("meta")
    return getattr(torch, device_type)


def infer_device_type(*args: Any) -> str:
    """The type of accelerator on which the tensors in ``args`` live.

    CPU tensors do not count. CUDA wins over other types; without any, the default type is given.
    """
    types = [
        leaf.device.type
        for leaf in tree_leaves(args)
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"
    ]
    if not types:
        return DefaultDeviceType.get_device_type()
    distinct = sorted(set(types))
    if len(distinct) > 1:
        warnings.warn(
            "Tensor arguments, excluding CPU tensors, are detected on at least two types of "
            "devices, and this function can name only one of them (cuda first, then the first "
            f"met).\nDevice types: {distinct} first device type: {types[0]}",
            stacklevel=2,
        )
    return "cuda" if "cuda" in distinct else types[0]
