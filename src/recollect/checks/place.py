"""Where an op was called: the module that ran it, by name, and the user's lines of code.

Both come from the Python stack. In backward the modules around a region are not on it, so the
same op is in ``Decoder: layers.3.mlp`` in forward and in ``Block: mlp`` when recomputed.
"""

from __future__ import annotations

import contextlib
import dis
import os
import sys
import warnings
from pathlib import Path
from types import FrameType, TracebackType
from weakref import WeakKeyDictionary

import torch
import torch.nn.modules.module
from torch import nn

from recollect._torch.modules import MODULE_CALL
from recollect.checks.names import name_in
from recollect.errors import PlanWarning, RecollectWarning

#: File, line and function, the innermost first.
Stack = tuple[tuple[str, int, str], ...]

#: The name of each child in a parent. Kept for one run.
Names = WeakKeyDictionary[nn.Module, "WeakKeyDictionary[nn.Module, str | None]"]

#: Folders, with the separator: the frames of torchvision are a user's.
_OWN = str(Path(__file__).parents[1]) + os.sep
_HIDDEN = (_OWN, str(Path(torch.__file__).parent) + os.sep)
_MODULE_FILE = torch.nn.modules.module.__file__
#: Libraries that move parameters in hooks of modules.
_LIBRARIES = (str(Path(torch.__file__).parent / "distributed" / "fsdp"), "/deepspeed/runtime/")
#: How many user frames to record at most.
_FRAMES = 12


class Place:
    """The part of the Python stack that shows where an op was called."""

    def __init__(self, frame: FrameType | None) -> None:
        stack: list[tuple[str, int, str]] = []
        #: Modules being called, the innermost first.
        self._modules: list[nn.Module] = []
        #: Whether a library called the op, in a hook of the innermost module.
        self.in_library = False
        while frame is not None:
            file = frame.f_code.co_filename
            if not self._modules and any(library in file for library in _LIBRARIES):
                self.in_library = True
            module = _module_called(frame)
            if module is not None and not (self._modules and module is self._modules[-1]):
                self._modules.append(module)
            if len(stack) < _FRAMES and not file.startswith(_HIDDEN):
                stack.append((file, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        self.stack: Stack = tuple(stack)

    @property
    def line(self) -> tuple[str, int]:
        lines = [entry[:2] for entry in self.stack if entry[0] != contextlib.__file__]
        return lines[0] if lines else ("<unknown>", 0)

    def path(self, names: Names) -> str:
        """The path of the innermost module in the outermost; ``>`` between unrelated modules."""
        parts: list[list[str]] = []
        parent: nn.Module | None = None
        for module in reversed(self._modules):
            name = None if parent is None else _name(names, parent, module)
            if name is None:
                parts.append([type(module).__name__])
            else:
                parts[-1].append(name)
            parent = module
        return " > ".join(_titled(part) for part in parts)


def source_line(frame: FrameType | None, caller: str) -> str:
    """The innermost line of the user's model that is running, as ``file:line``.

    Empty if only modules of torch are running. ``caller``: the file that calls the model.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file == caller:
            return ""
        if not file.startswith(_HIDDEN):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def hide_own_frames(error: BaseException) -> None:
    """Take the frames of this library out of the traceback of an error, below the caller's.

    Call it where an error of the user's code, or of an op, leaves the library. The traceback of an
    error that the library itself raised stays whole.
    """
    entry = next_one = error.__traceback__
    innermost = None  # of those that are not torch's, in which our own mistakes may end
    while next_one is not None:
        if _is_own(next_one) or not next_one.tb_frame.f_code.co_filename.startswith(_HIDDEN):
            innermost = next_one
        next_one = next_one.tb_next
    if innermost is None or (_is_own(innermost) and not _calls_op(innermost)):
        return
    while entry is not None:
        while entry.tb_next is not None and _is_own(entry.tb_next):
            entry.tb_next = entry.tb_next.tb_next
        entry = entry.tb_next


def _is_own(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_OWN)


def _calls_op(entry: TracebackType) -> bool:
    """Whether the frame was calling a function with ``*args``, as modes call ops."""
    return entry.tb_frame.f_code.co_code[entry.tb_lasti] == dis.opmap["CALL_FUNCTION_EX"]


def warn_user(message: str, category: type[Warning] = RecollectWarning) -> None:
    """Warn at the user's line that is running."""
    file, line = Place(sys._getframe(1)).line
    warnings.warn_explicit(message, category, file, line)


def _module_called(frame: FrameType) -> nn.Module | None:
    """The module that this frame calls, or whose ``forward`` it runs without ``__call__``."""
    code = frame.f_code
    if code is MODULE_CALL:
        return frame.f_locals.get("self")
    # Reading a frame's locals keeps them alive for a while: only if there is no other way.
    if code.co_name != "forward" or code.co_varnames[:1] != ("self",):
        return None
    if frame.f_back is not None and frame.f_back.f_code.co_filename == _MODULE_FILE:
        return None
    module = frame.f_locals.get("self")
    return module if isinstance(module, nn.Module) else None


def _name(names: Names, parent: nn.Module, module: nn.Module) -> str | None:
    known = names.setdefault(parent, WeakKeyDictionary())
    if module not in known:
        known[module] = name_in(parent, module)
    return known[module]


def _titled(part: list[str]) -> str:
    kind, *names = part
    path = ".".join(name for name in names if name)
    return f"{kind}: {path}" if path else kind


class WarnOnce:
    """Warns once for each cause."""

    def __init__(self) -> None:
        self._causes: set[str] = set()

    def warn(self, cause: str, message: str) -> None:
        """Warn at the user's line, unless there was a warning for the same cause."""
        if cause not in self._causes:
            self._causes.add(cause)
            warn_user(message, PlanWarning)
