"""What a region of the replay engine holds and runs again, read from its tape after the call.

The engine tells little while it runs, and need not: each op that was seen is one of the tape, in
the same order, and the tape says why its results are held. So the two are laid side by side once
the call is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any

import torch

from recollect._torch.ops import CAST, op_name
from recollect.explaining.memory import Memories, Memory
from recollect.explaining.region import NO_POLICY, Region, Seen
from recollect.explaining.watcher import Watcher
from recollect.graph.release import find_needs
from recollect.policy.rules import Policy
from recollect.replay.held_tensor import Held
from recollect.replay.kinds import kind_of
from recollect.replay.recording_cache import Slot, slot_of
from recollect.replay.rematerialize import Recall
from recollect.replay.tape import Buffer, Op, Tape
from recollect.state.memories import WriteLog

__all__ = ["Replayed", "Slots"]

_MUST = "must keep: "
_OPAQUE = "opaque"
_COPY = "(copy)"


class Slots:
    """Copies of what the engine remembers, so that to be asked leaves no trace in it."""

    def __init__(self) -> None:
        #: By id of what is copied, which is held for the id to stay its own.
        self._copies: dict[int, tuple[Slot, Slot]] = {}

    def slot(self, function: Callable[..., Any], signature: Any) -> Slot:
        """The copy for a call of ``function``."""
        slot = slot_of(function, tuple(map(_unwatched, signature)))
        return self._copies.setdefault(id(slot), (slot, copy(slot)))[1]


#: The dispatch modes that `recollect.explain` runs a function under.
_LOOKING_ON: tuple[Any, ...] = (Watcher, WriteLog)


def _unwatched(part: Any) -> Any:
    """A part of a signature as it is when nobody looks on."""
    if not isinstance(part, tuple) or not any(each in _LOOKING_ON for each in part):
        return part
    return tuple(each for each in part if each not in _LOOKING_ON)


class Replayed:
    """One call. Holds tensors until it has ended."""

    def __init__(
        self,
        memories: Memories,
        region: Region,
        policy: Policy | None,
        recall: Recall,
        slot: Slot,
        note_saved: Callable[[torch.Tensor, Region], None],
    ) -> None:
        self._memories = memories
        self._region = region
        self._policy = policy
        self._slot = slot
        self._note_saved = note_saved
        self._is_recorded = slot.recording is None
        #: One, or two if the call was recorded from its middle on.
        self._parts = [_Part(recall, 0)]

    def packing(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """``pack``, the hook that is called when autograd saves a tensor, watched."""

        def note_and_pack(tensor: torch.Tensor) -> Any:
            self._note_saved(tensor, self._region)
            ticket = pack(tensor)
            self._parts[-1].tickets.append(ticket)
            return ticket

        return note_and_pack

    def goes_on(self, recall: Recall) -> None:
        """The call is not as recorded: from here on ``recall`` holds what is held."""
        self._parts.append(_Part(recall, len(self._region.seen or [])))

    @property
    def is_rehearsal(self) -> bool:
        """Whether the call was recorded, and the next one will be run otherwise."""
        slot = self._slot
        return self._is_recorded and (slot.recording is not None or slot.fallback is not None)

    def end(self, stopped: str | None) -> None:
        """The call is over. ``stopped``: why everything is held from some point on."""
        region, slot = self._region, self._slot
        if slot.unsettled is not None:
            region.notes.append(f"recorded at every call: {slot.unsettled}")
        if stopped is not None:
            what = "everything is held" if len(self._parts) == 1 else "it is recorded anew"
            region.notes.append(f"{what} from some point on: {stopped}")
        titles = [] if self._policy is None else [rule.title for rule in self._policy.rules]
        last: int | None = None
        for part in reversed(self._parts):
            seen = (region.seen or [])[part.first : last]
            is_rest = part is not self._parts[0]
            findings = _Findings(
                self._memories, region, part.recall, seen, titles, stopped, is_rest=is_rest
            )
            findings.note_held()
            findings.note_saved(ticket[0] for ticket in part.tickets if ticket[0] is not None)
            findings.note_gone(self._policy is not None)
            last = part.first
        states = [state for part in self._parts for state in part.recall.states.values()]
        region.rng_bytes = sum(state.nbytes for state in states)
        self._parts.clear()


class _Part:
    """Of a call: what holds its values, the first of its ops, and what stands for saved tensors."""

    def __init__(self, recall: Recall, first: int) -> None:
        self.recall = recall
        self.first = first
        self.tickets: list[Any] = []


class _Findings:
    """The tape of a call beside the memory that its ops were seen to make."""

    def __init__(
        self,
        memories: Memories,
        region: Region,
        recall: Recall,
        seen: list[Seen],
        titles: list[str],
        stopped: str | None,
        *,
        is_rest: bool,
    ) -> None:
        self._memories = memories
        self._region = region
        self._recall = recall
        #: Whether the call was recorded from its middle on, and this is about that.
        self._is_rest = is_rest
        self._reasons = _Reasons(recall.tape, recall.kept.keys(), titles, stopped)
        self._tape = recall.tape
        self._matched = list(_matched(recall.tape.ops, seen))
        #: By the tape's number of a memory, and the other way round.
        self._made: dict[int, Memory] = {}
        self._numbers: dict[Memory, int] = {}
        for op, _, made in self._matched:
            for value, memory in zip(op.makes, made, strict=False):
                buffer = self._tape.values[value]
                self._made[buffer.memory] = memory
                self._numbers[memory] = buffer.memory
        #: By the tape's number of a memory, what it held last.
        self._last = {buffer.memory: buffer for buffer in self._tape.values}
        #: The ops that are not run again thanks to what others have made of their results.
        self._spared: set[int] = set()

    # --- what is there ----------------------------------------------------------------------------

    def note_held(self) -> None:
        """What the region itself holds, here or in a store."""
        for number, held in self._recall.kept.items():
            buffer = self._tape.values[number]
            if held.away is not None:
                self._note_away(buffer)
            elif buffer.outside is not None and not self._is_copy(held):
                self._note_input(held.tensor)
            elif buffer.outside is not None and self._is_rest:
                self._note_made_before(held.tensor)
            else:
                self._note_kept(buffer, held.tensor)

    def _note_away(self, buffer: Buffer) -> None:
        memory = self._made.get(buffer.memory)
        if memory is not None:
            memory.ruling = self._why(buffer)

    def _is_copy(self, held: Held) -> bool:
        """Whether an input is held as a copy, since it is changed later."""
        found = self._memories.find(held.tensor)
        return any(memory.is_made_in(self._region) for memory in found)

    def _note_input(self, tensor: torch.Tensor) -> None:
        for memory in self._memories.find(tensor):
            if memory.input_of is None:
                memory.input_of = self._region

    def _note_made_before(self, tensor: torch.Tensor) -> None:
        """What the rest of the call takes from the part before it."""
        for memory in self._memories.find(tensor):
            memory.kept = memory.kept or (self._reasons.other, self._region)

    def _note_kept(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        origin = self._made.get(buffer.memory)
        for memory in self._memories.find(tensor):
            memory.kept = self._why(buffer), self._region
            if buffer.outside is not None:
                memory.describe(tensor, _COPY, self._region.name)
            elif origin is not None and memory is not origin:
                # A copy as well: the user may change what the region returns.
                memory.describe(tensor, origin.op, origin.path)

    def note_saved(self, tensors: Iterable[torch.Tensor]) -> None:
        """What autograd saved and holds as it is."""
        for tensor in tensors:
            for memory in self._memories.find(tensor):
                if not memory.is_made_in(self._region):
                    self._note_input(tensor)
                elif memory.kept is None:
                    memory.kept = self._why_saved(memory), self._region

    def _why_saved(self, memory: Memory) -> str:
        number = self._numbers.get(memory)
        return self._reasons.other if number is None else self._why(self._last[number])

    def _why(self, buffer: Buffer) -> str:
        sources = self._reasons.sources(buffer)
        own = buffer.op
        self._spared |= {op.number for op, _ in sources if op.number != own}
        return self._reasons.of(buffer, sources)

    # --- what is not ------------------------------------------------------------------------------

    def note_gone(self, has_policy: bool) -> None:
        """What is run again, and what would be held if it were needed."""
        kept = self._recall.kept
        saved = [ticket[2].buffer.number for ticket in self._recall.tickets]
        uses = find_needs(self._tape, saved, kept).uses
        again = {b.memory for b in self._tape.values if uses[b.number] and b.number not in kept}
        for op, number, made in self._matched:
            for memory in made:
                if self._numbers.get(memory) in again:
                    self._region.again.add(number)
                    is_decided = has_policy or op.key is not None
                    memory.ruling = memory.ruling or (_ruling(op) if is_decided else NO_POLICY)
                elif self._reasons.is_rule(op):
                    memory.let_go = f"{op.keep}, but {self._why_not(op)}"

    def _why_not(self, op: Op) -> str:
        return "what is made of it is held" if op.number in self._spared else "nothing needs it"


def _ruling(op: Op) -> str | None:
    """Why an op is run again."""
    if op.ruling is None:
        return None
    reason: str = op.ruling.reason
    return f"{reason}, but it has to run again" if op.ruling.keeps else reason


#: An op that is not to be run again, and why.
_Source = tuple[Op, str]


class _Reasons:
    """Why buffers are held."""

    def __init__(
        self, tape: Tape, kept: Iterable[int], titles: list[str], stopped: str | None
    ) -> None:
        self._tape = tape
        self._kept = frozenset(kept)
        self._titles = frozenset(titles)
        #: Of what is held for no reason of its own.
        self.other = _MUST + (stopped or _OPAQUE)

    def of(self, buffer: Buffer, sources: list[_Source]) -> str:
        """Why ``buffer`` is held, where ``sources`` are what it was made from."""
        if buffer.unsure is not None:
            return _MUST + buffer.unsure
        if buffer.op < 0:
            return f"{_MUST}made of constants"
        if any(op.number == buffer.op for op, _ in sources):
            return sources[0][1]
        reasons = dict.fromkeys(f"{reason}, for {_name(op)}" for op, reason in sources)
        return "; ".join(reasons) or self.other

    def sources(self, buffer: Buffer) -> list[_Source]:
        """The ops that are not run again thanks to ``buffer``: its own, or what that goes by."""
        found: list[_Source] = []
        seen = {buffer.number}
        wanted = [buffer]
        while wanted:
            op = self._tape.maker_of(wanted.pop())
            if op is None:
                continue
            reason = self._why_not_again(op)
            if reason is not None:
                found.append((op, reason))
                continue
            reads = [each for each in op.reads if each not in seen | self._kept]
            seen.update(reads)
            wanted += [self._tape.values[each] for each in reads]
        return found

    def is_rule(self, op: Op) -> bool:
        """Whether a rule of the policy has the results of ``op`` kept."""
        return op.keep in self._titles

    def _why_not_again(self, op: Op) -> str | None:
        if op.held:
            return str(op.ruling.reason)
        if op.keep is not None:
            return op.keep if self.is_rule(op) else _MUST + op.keep
        unsure = (self._tape.values[number].unsure for number in op.reads)
        reason = op.later or next(filter(None, unsure), None)
        return None if reason is None else _MUST + reason


def _name(op: Op) -> str:
    return op_name(op.op).replace("::", ".")


def _matched(ops: list[Op], seen: list[Seen]) -> Iterator[tuple[Op, int, list[Memory]]]:
    """The ops of a tape, each with its number among those that were seen, and what it made."""
    place = 0
    for func, number, made in seen:
        if kind_of(func).is_view:
            continue
        found = place
        # The casts of weights that autocast remembers are on the tape, and were done before.
        while found < len(ops) and ops[found].op is CAST and func is not CAST:
            found += 1
        # Others are on no tape: those by which the engine looks at random states.
        if found < len(ops) and ops[found].op is func:
            yield ops[found], number, made
            place = found + 1
