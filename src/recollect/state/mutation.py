"""Tensors that a region changes beside computing its result: statistics, counters, histories.

They must end as after one forward, and a rerun must read them as forward did. So a region's buffers
are watched: what has changed when forward is over is put back to its value before for the time of a
rerun, in place, and gets its present value again afterwards. Version counters stay as they are:
for autograd nothing has happened.

Not every change shows in a version: the op of ``BatchNorm`` writes to the running statistics behind
its schema's back, and ``buffer.data.copy_()`` is a common way to update a moving average. So what
was copied is compared by content on the CPU. On a device that would be to wait: there, buffers of
modules that may do so are taken for changed. Large buffers are masks and tables, as a rule: those
are copied and compared, wherever they are, at their first call, and copied later only if they have
ever changed.
"""

from __future__ import annotations

from contextlib import ExitStack
from weakref import ref

import torch

from recollect._torch.autograd import set_version
from recollect._torch.modes import unobserved
from recollect._torch.tensors import copy_tensors
from recollect.errors import InputChanged
from recollect.state.reachable import Slot, Writes
from recollect.state.tensors import LARGE, are_statistics, is_plain, is_small, nbytes, same_values

__all__ = ["Watch"]


class _Watched:
    """One tensor, and what it was before the region."""

    __slots__ = ("before", "is_new", "name", "required_grad", "tensor", "version", "writes")

    def __init__(self, name: str, tensor: torch.Tensor, writes: Writes) -> None:
        self.name = name
        self.tensor = tensor
        self.version = tensor._version
        self.required_grad = tensor.requires_grad
        self.writes = writes
        #: Whether to compare values even on a device, which is to wait for it.
        self.is_new = False
        #: A copy of the values, if there was reason to make one.
        self.before: torch.Tensor | None = None

    def is_written(self) -> bool:
        if self.tensor._version != self.version:
            return True
        if self.before is None:
            return False
        if self.is_new or self.tensor.device.type == "cpu":
            return not same_values(self.tensor, self.before)
        return self.writes is not Writes.SEEN


class Watch:
    """The tensors that one region may change."""

    __slots__ = ("_changed", "_refusal", "_watched", "others")

    def __init__(self, buffers: list[Slot], tensors: list[torch.Tensor]) -> None:
        """Watch ``buffers``, and those of ``tensors`` that are small and need no gradient."""
        self._watched: list[_Watched] = []
        #: Those that are not watched: nobody may change them.
        self.others: list[torch.Tensor] = []
        for owner, name, writes in buffers:
            tensor = owner[name]
            if is_plain(tensor):
                self._watched.append(_Watched(f"buffer `{name}`", tensor, writes))
            elif isinstance(tensor, torch.Tensor):
                self.others.append(tensor)
        for tensor in tensors:
            if are_statistics(tensor):
                self._watched.append(_Watched("a tensor in a closure", tensor, Writes.MAYBE))
            elif is_small(tensor):
                self._watched.append(_Watched("a tensor in a closure", tensor, Writes.SEEN))
            else:
                self.others.append(tensor)
        self._changed: list[_Watched] = []
        #: Why there can be no rerun, if so.
        self._refusal: str | None = None
        to_copy = [w for w in self._watched if _is_copied(w)]
        if to_copy:
            with unobserved():
                for w, copy in zip(to_copy, _copies([w.tensor for w in to_copy]), strict=True):
                    w.before = copy

    def settle(self) -> list[torch.Tensor]:
        """Note what the region has changed. The others are returned: nobody may change them."""
        with unobserved():
            written = [w.is_written() for w in self._watched]
        for w in self._watched:
            if w.tensor.requires_grad and not w.required_grad:
                self._refusal = _GAINED_HISTORY.format(name=w.name, shape=list(w.tensor.shape))
                # The history runs through the region, which would hold itself.
                self._watched, self._changed = [], []
                return []
        unchanged = []
        for w, is_written in zip(self._watched, written, strict=True):
            if is_written:
                self._changed.append(w)
            else:
                unchanged.append(w.tensor)
            if nbytes(w.tensor) > LARGE:
                _remember(w, is_written)
        self._watched = []
        return unchanged

    @property
    def has_changes(self) -> bool:
        """Whether there is anything to recall."""
        return bool(self._changed) or self._refusal is not None

    def recall(self, stack: ExitStack) -> None:
        """Give what was changed its value before the region, until ``stack`` closes."""
        if self._refusal is not None:
            raise InputChanged(self._refusal)
        for w in self._changed:
            if w.before is None:
                raise InputChanged(_NOT_COPIED.format(name=w.name, shape=list(w.tensor.shape)))
            if w.before.shape != w.tensor.shape:
                sizes = {"before": list(w.before.shape), "now": list(w.tensor.shape)}
                raise InputChanged(_RESIZED.format(name=w.name, **sizes))
        tensors = [w.tensor for w in self._changed]
        with unobserved():
            stack.callback(_put_back, tensors, [t._version for t in tensors], _copies(tensors))
            copy_tensors([t.data for t in tensors], [w.before for w in self._changed])
        for w in self._changed:
            # Where the rerun saves it, it has the version it had when forward saved it.
            set_version(w.tensor, w.version)


def _put_back(tensors: list[torch.Tensor], versions: list[int], values: list[torch.Tensor]) -> None:
    with unobserved():
        copy_tensors([tensor.data for tensor in tensors], values)
    for tensor, version in zip(tensors, versions, strict=True):
        set_version(tensor, version)


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    copies = [torch.empty_like(tensor) for tensor in tensors]
    copy_tensors(copies, tensors)
    return copies


#: Large buffers that have been watched before, in training or not, and whether one of them has ever
#: changed.
_large: dict[tuple[int, Writes], tuple[ref[torch.Tensor], bool]] = {}


def _is_copied(watched: _Watched) -> bool:
    tensor = watched.tensor
    if nbytes(tensor) <= LARGE or watched.writes is Writes.HIDDEN:
        return True
    known = _large.get((id(tensor), watched.writes))
    if known is None or known[0]() is not tensor:
        watched.is_new = True
        return True
    return known[1]


def _remember(watched: _Watched, has_changed: bool) -> None:
    tensor, key = watched.tensor, (id(watched.tensor), watched.writes)
    known = _large.get(key)
    if known is None or known[0]() is not tensor:
        _large[key] = ref(tensor, lambda _: _large.pop(key, None)), has_changed
    elif has_changed and not known[1]:
        _large[key] = known[0], True


_GAINED_HISTORY = (
    "a checkpointed region wrote to {name}, {shape}, a value that requires grad. Backward runs "
    "through that tensor, and would have to run the region again before that: it cannot be put "
    "back. Write what is detached (buffer.copy_(x.detach())), or return the value from the region."
)


_NOT_COPIED = (
    "a checkpointed region changed {name}, {shape}, which it had left alone in earlier calls. "
    "Being large it was not copied, so the region cannot be recomputed as it was. From the next "
    "call on it will be copied. To have it right from the start, change it outside of the region."
)

_RESIZED = (
    "a checkpointed region changed the shape of {name} from {before} to {now}, which cannot be "
    "undone for its recomputation. Give it its shape before the region runs, or assign a new "
    "tensor instead of resizing this one."
)
