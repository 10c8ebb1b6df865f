"""Why a call holds values, and why other ops run again: read from its recorded graph."""

from __future__ import annotations

from typing import Any

from recollect._torch.ops import op_name
from recollect.graph.release import find_needs
from recollect.policy.rules import Policy
from recollect.replay.rematerialize import Recall
from recollect.replay.tape import Buffer, Op

__all__ = ["Reasons"]

_MUST = "must keep: "

#: An op that is not to be run again, and why.
_Source = tuple[Op, str]


class Reasons:
    """Of one call. ``stopped``: why the recording ends before the call does, if so."""

    def __init__(self, recall: Recall, policy: Policy | None, stopped: str | None) -> None:
        self._tape = recall.tape
        self._kept = frozenset(recall.kept)
        self._has_policy = policy is not None
        self._titles = {rule.title for rule in (() if policy is None else policy.rules)}
        #: Of what is held for no reason of its own.
        self.other = _MUST + (stopped or "opaque")
        #: The ops that do not run again because a result computed from theirs is held.
        self._replaced: set[int] = set()
        saved = [ticket[2].buffer.number for ticket in recall.tickets]
        uses = find_needs(self._tape, saved, self._kept).uses
        self._again = {
            b.memory for b in self._tape.values if uses[b.number] and b.number not in self._kept
        }

    def holding(self, buffer: Buffer) -> str:
        """Why ``buffer`` is held."""
        sources = self._sources(buffer)
        self._replaced |= {op.number for op, _ in sources if op.number != buffer.op}
        if buffer.unsure is not None:
            return _MUST + buffer.unsure
        if buffer.op < 0:
            return f"{_MUST}made of constants"
        if any(op.number == buffer.op for op, _ in sources):
            return sources[0][1]
        reasons = dict.fromkeys(f"{reason}, for {_name(op)}" for op, reason in sources)
        return "; ".join(reasons) or self.other

    def recomputing(self, op: Op, memory: int) -> str | None:
        """Why ``op`` runs again to make the storage ``memory``; None if it does not."""
        if memory not in self._again:
            return None
        if op.ruling is None or not (self._has_policy or op.key is not None):
            return "no policy"
        reason: str = op.ruling.reason
        return f"{reason}, but it has to run again" if op.ruling.keeps else reason

    def leaving_out(self, op: Op) -> str | None:
        """Why the results of ``op`` are not held, though a rule says so; after all of `holding`."""
        if op.keep not in self._titles:
            return None
        is_replaced = op.number in self._replaced
        why = "what is made of it is held" if is_replaced else "nothing needs it"
        return f"{op.keep}, but {why}"

    def _sources(self, buffer: Buffer) -> list[_Source]:
        """The ops that are not run again thanks to ``buffer``: its own, or those it stems from."""
        ops = self._tape.sources(buffer.number, self._kept, self._why_not_again)
        return [(op, str(self._why_not_again(op))) for op in ops]

    def _why_not_again(self, op: Op) -> str | None:
        if op.held:
            return str(op.ruling.reason)
        if op.keep is not None:
            return op.keep if op.keep in self._titles else _MUST + op.keep
        reason = op.later or self._tape.unsure_read(op)
        return None if reason is None else _MUST + reason


def _name(op: Any) -> str:
    return op_name(op.op).replace("::", ".")
