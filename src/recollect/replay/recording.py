"""A recording: what one call of a region did, for later calls to be checked against."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from recollect._torch.tensors import UnsupportedTensor
from recollect.replay.plan import Plan
from recollect.replay.steps import Outside, Step
from recollect.replay.tape import Tape

__all__ = ["Recording"]


class Recording:
    """What later calls are checked against, and what they hold."""

    def __init__(
        self,
        tape: Tape,
        steps: list[Step],
        outsides: dict[int, Outside],
        writes_outside: bool,
        stores_all: bool,
        reason: str | None,
    ) -> None:
        self.tape = tape
        self.steps = steps
        self.outsides = outsides
        self._stores_all = stores_all
        #: Whether it matters which tensors from outside are on the same memory.
        self.shares_memory = writes_outside or any(o.twin for o in outsides.values())
        #: The shapes that depend on data.
        self.shapes = [step.looks for step in steps if step.depends_on_data]
        #: Why it does not go on to the end, if it does not.
        self.reason = reason
        self.is_supported = not isinstance(reason, UnsupportedTensor)
        #: What a call that is checked is expected to do, once that is known.
        self.expected: Any = None

    def is_like(self, other: Recording) -> bool:
        """Whether the same functions were called."""
        pairs = zip(self.steps, other.steps, strict=False)
        return len(self.steps) == len(other.steps) and all(a.is_like(b) for a, b in pairs)

    @cached_property
    def plan(self) -> Plan:
        """What is kept, and where."""
        return Plan(self.tape, self.steps, stores_all=self._stores_all)
