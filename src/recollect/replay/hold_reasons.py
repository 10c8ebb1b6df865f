"""Why a call holds a value, and why an op runs again, for `recollect.explain`."""

from __future__ import annotations

from typing import Any

from recollect._torch.ops import op_name
from recollect.graph.release import find_needs
from recollect.policy.rules import Policy
from recollect.replay.recorded_graph import RecordedOp, RecordedValue
from recollect.replay.rematerialize import Rematerializer

_MUST = "must keep: "

#: An op that must not run again, and why.
_Source = tuple[RecordedOp, str]


class HoldReasons:
    """The reasons of one call. ``stopped``: why its recording ends early, if so."""

    def __init__(self, remat: Rematerializer, policy: Policy | None, stopped: str | None) -> None:
        self._graph = remat.graph
        self._kept = frozenset(remat.kept)
        self._has_policy = policy is not None
        self._titles = {rule.title for rule in (() if policy is None else policy.rules)}
        #: For values without a reason of their own.
        self.other = _MUST + (stopped or "opaque")
        #: The ops that do not run again because a result computed from theirs is held.
        self._replaced: set[int] = set()
        saved = [ticket[2].value.number for ticket in remat.tickets]
        uses = find_needs(self._graph, saved, self._kept).uses
        self._again = {
            v.storage for v in self._graph.values if uses[v.number] and v.number not in self._kept
        }

    def holding(self, value: RecordedValue) -> str:
        """Why ``value`` is held."""
        sources = self._sources(value)
        self._replaced |= {op.number for op, _ in sources if op.number != value.op}
        if value.unsure is not None:
            return _MUST + value.unsure
        if value.op < 0:
            return f"{_MUST}made of constants"
        if any(op.number == value.op for op, _ in sources):
            return sources[0][1]
        reasons = dict.fromkeys(f"{reason}, for {_name(op)}" for op, reason in sources)
        return "; ".join(reasons) or self.other

    def recomputing(self, op: RecordedOp, storage: int) -> str | None:
        """Why ``op`` runs again to make the storage ``storage``; None if it does not."""
        if storage not in self._again:
            return None
        if op.ruling is None or not (self._has_policy or op.key is not None):
            return "no policy"
        reason: str = op.ruling.reason
        return f"{reason}, but it has to run again" if op.ruling.keeps else reason

    def leaving_out(self, op: RecordedOp) -> str | None:
        """Why results of ``op`` are not held although a rule says so. Call `holding` before."""
        if op.keep not in self._titles:
            return None
        is_replaced = op.number in self._replaced
        why = "what is made of it is held" if is_replaced else "nothing needs it"
        return f"{op.keep}, but {why}"

    def _sources(self, value: RecordedValue) -> list[_Source]:
        """The ops that need not run again because ``value`` is held."""
        ops = self._graph.sources(value.number, self._kept, self._why_not_again)
        return [(op, str(self._why_not_again(op))) for op in ops]

    def _why_not_again(self, op: RecordedOp) -> str | None:
        if op.held:
            return str(op.ruling.reason)
        if op.keep is not None:
            return op.keep if op.keep in self._titles else _MUST + op.keep
        reason = op.later or self._graph.unsure_read(op)
        return None if reason is None else _MUST + reason


def _name(op: Any) -> str:
    return op_name(op.op).replace("::", ".")
