"""What a store must offer: the three methods through which kept tensors go.

A protocol and no base class, so that a user's store (to disk, compressed) needs nothing of ours.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

__all__ = ["Store", "check_store"]


class Store(Protocol):
    """Where a kept tensor lives from forward to backward.

    ``put`` takes a tensor and returns a handle of any kind. ``get`` gives back a tensor of the same
    values, shape, strides, dtype and device; it may be called several times, or not at all, and
    from another thread than ``put``. ``drop`` says that the handle is not needed any more; it is
    called once for each ``put``, and may come at any time, from any thread.

    More methods are called where a store has them:

    - ``prefetch(handles)``: these are asked for next, in this order;
    - ``release(handle)``: what the store still holds on the device of the tensor that was put is
      to be let go, and the current stream may wait for that;
    - ``before_write(handle)``: the tensor that was put is about to be written to in place, by the
      current stream. A store that still reads it must make that safe;
    - ``count_version(handle)``: the tensor that was put has another version now, but was not
      written to. For stores that compare versions.
    """

    def put(self, tensor: Tensor) -> Any: ...

    def get(self, handle: Any) -> Tensor: ...

    def drop(self, handle: Any) -> None: ...


_EXAMPLE = """
    class MyStore:
        def put(self, tensor): ...   # take a tensor, return a handle
        def get(self, handle): ...   # the tensor again: same values, shape, strides, dtype, device
        def drop(self, handle): ...  # the handle is not needed any more
"""


def check_store(value: Any, name: str) -> None:
    """Refuse ``value`` (to the user: the argument ``name``) if it is not a store."""
    if isinstance(value, type):
        raise TypeError(
            f"{name} is the class {value.__name__}: pass an object, {value.__name__}(), that has "
            f"the methods of a store:\n{_EXAMPLE}"
        )
    missing = [each for each in ("put", "get", "drop") if not callable(getattr(value, each, None))]
    if missing:
        raise TypeError(
            f"{name} must be a store, but {value!r} of type {type(value).__name__} has no "
            f"{', no '.join(missing)}. A store is an object with three methods:\n{_EXAMPLE}"
        )
