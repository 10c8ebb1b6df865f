"""The graphs of a compiled step, and what is around them, as one `Graph` (P2).

The events of a step are those of its calls, in the order in which they ran, with one more event
before each call, and one after the last: for whatever runs there. A result of one graph that
another one reads in backward is kept in any case: no graph recomputes what another one computed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from recollect.compiled.backend import Call
from recollect.compiled.decisions import Away
from recollect.compiled.part import FOREVER, Part
from recollect.compiled.timeline import Stretch
from recollect.graph.graph import Event, Graph, Op, SavedTensor, Schedule, Storage, Value
from recollect.graph.simulate import levels_under, transfers_under

#: Smaller results of an op that is offloaded stay on the device.
SMALLEST = 4096
#: The ops of a call that are kept, and those that are offloaded, by their numbers in the call.
Decided = tuple[frozenset[int], frozenset[int]]
#: Of a step with one graph: the gaps before forward, before backward and after that, all empty.
NOTHING_AROUND = ((0, 0), (0, 0), (0, 0))


@dataclass(frozen=True)
class Merged:
    """The graph of a step, and where its calls are in it."""

    graph: Graph  #: the step
    parts: Sequence[Part]  #: by call of a compiled graph: what it adds to the step
    first: Sequence[int]  #: by call: the number of its first op
    values: Sequence[int]  #: by call: the number of its first value
    backward: Sequence[int]  #: by call: the first event of its backward
    gaps: Sequence[int]  #: the events around the calls
    #: By gap: the bytes that are held at its end, and the most in it, beside those of the graphs.
    around: Sequence[tuple[int, int]] = field(default=())

    def kept_in(self, call: int, schedule: Schedule) -> frozenset[str]:
        """The names of the nodes of a call that a schedule keeps, or offloads."""
        part, first = self.parts[call], self.first[call]
        kept = schedule.kept | schedule.offloaded | self.graph.forced
        return frozenset(name for n, name in enumerate(part.names) if first + n in kept)

    def away(self, schedule: Schedule) -> list[tuple[Away, ...]]:
        """By call: the results that a schedule offloads.

        A graph begins and ends its copies itself, and none runs beside another graph.
        """
        found: list[list[Away]] = [[] for _ in self.parts]
        transfers = transfers_under(self.graph, schedule) if schedule.offloaded else []
        for value, freed, event in transfers:
            call = max(self.graph.call_of(freed), 0)
            part, number = self.parts[call], value - self.values[call]
            if part.values[number].nbytes >= SMALLEST:
                before = event - self.backward[call] - 1
                fetched = part.backward_names[before] if before >= 0 else ""
                freed_at = part.ends[freed - self.first[call]]
                found[call].append(Away([*part.results][number], freed_at, fetched))
        return [*map(tuple, found)]

    def decided(self, call: int, schedule: Schedule) -> Decided:
        """The ops of a call that a schedule keeps and offloads, by their numbers in the call."""
        first, count = self.first[call], len(self.parts[call].ops)
        kept, away = (
            frozenset(n - first for n in ops if first <= n < first + count)
            for ops in (schedule.kept, schedule.offloaded)
        )
        return kept, away

    def together(self, decided: Sequence[Decided], like: Schedule | None = None) -> Schedule:
        """The schedule that decides so by call. ``like``: how it offloads."""
        pairs = [*zip(self.first, decided, strict=True)]
        kept = frozenset(first + n for first, (ops, _) in pairs for n in ops)
        away = frozenset(first + n for first, (_, ops) in pairs for n in ops)
        return replace(like, kept=kept, offloaded=away) if like and away else Schedule(kept, away)


def merge(
    parts: Sequence[Part],
    calls: Sequence[Call],
    stretches: Sequence[Stretch] | None,
    saves: Sequence[Mapping[str, int]],
    base: int,
) -> Merged:
    """The graph of a step, of what its calls add. ``base``: the bytes that are there throughout.

    Of a step that ran, ``stretches`` tell what was held around the calls, and ``saves`` what each
    saved, in bytes by name of a node.
    """
    order = _order_of(len(parts), stretches)
    bare = _Merger(parts, calls, order, base, [(0, 0)] * (len(order) + 1)).merged()
    if stretches is None:
        return bare
    around = _around(bare, order, stretches, saves)
    return replace(_Merger(parts, calls, order, base, around).merged(), around=around)


def merge_alone(
    part: Part,
    base: int = 0,
    around: Sequence[tuple[int, int]] = NOTHING_AROUND,
    made: Sequence[int] = (),
) -> Merged:
    """The graph of a step with one call. ``around``: as of `Merged`; ``made``: as of `Call`."""
    call = Call(None, "", [], [], 0, made=[n for n in made if n < len(part.tangents)])
    return _Merger([part], [call], _order_of(1, None), base, around).merged()


#: A call: whether it is backward, and its number.
_Turn = tuple[bool, int]


def _order_of(count: int, stretches: Sequence[Stretch] | None) -> list[_Turn]:
    """The calls in the order in which they ran."""
    usual = [(False, n) for n in range(count)] + [(True, n) for n in reversed(range(count))]
    seen = [each.call for each in stretches or () if each.call is not None]
    forwards = [n for is_backward, n in seen if not is_backward]
    backwards = sorted(n for is_backward, n in seen if is_backward)
    turns = [is_backward for is_backward, _ in seen]
    is_whole = forwards == [*range(count)] and backwards == [*range(count)]
    # If the backward of a graph begins before the last forward, it is not a step as planned.
    return seen if is_whole and turns == sorted(turns) else usual


def saved_schedule(merged: Merged, saves: Sequence[Mapping[str, int]]) -> Schedule:
    """What a split keeps, of results that have memory in our model. ``saves``: as of `merge`."""
    pairs = zip(merged.parts, saves, strict=True)
    kept = [frozenset(part.results[n] for n in each if n in part.results) for part, each in pairs]
    return merged.together([(each, frozenset()) for each in kept])


def unmodelled_bytes(merged: Merged, saves: Sequence[Mapping[str, int]]) -> list[int]:
    """By call: what is saved of results that have no memory in our model."""
    return [
        sum(nbytes for name, nbytes in each.items() if name not in part.results)
        for part, each in zip(merged.parts, saves, strict=True)
    ]


def _around(
    bare: Merged,
    order: Sequence[_Turn],
    stretches: Sequence[Stretch],
    saves: Sequence[Mapping[str, int]],
) -> list[tuple[int, int]]:
    """By gap: the bytes that were held at its end and the most in it, beside the graphs' own."""
    if len(stretches) != len(order) + 1:
        return [(0, 0)] * (len(order) + 1)
    levels = levels_under(bare.graph, saved_schedule(bare, saves))
    others = unmodelled_bytes(bare, saves)
    held = 0
    found = []
    for number, stretch in enumerate(stretches):
        own = levels[bare.gaps[number]] - bare.graph.base + held
        found.append((stretch.end - own, stretch.most - own))
        if number < len(order):
            is_backward, call = order[number]
            held += -others[call] if is_backward else others[call]
    return found


class _Merger:
    def __init__(
        self,
        parts: Sequence[Part],
        calls: Sequence[Call],
        order: Sequence[_Turn],
        base: int,
        around: Sequence[tuple[int, int]],
    ) -> None:
        self.parts, self.calls, self.order, self.base = parts, calls, order, base
        self.around = around
        self.first_op = [*accumulate((len(part.ops) for part in parts), initial=0)][:-1]
        self.first_value = [*accumulate((len(part.values) for part in parts), initial=0)][:-1]
        #: By call: the event of its first op, in forward and in backward.
        self.begin: list[dict[bool, int]] = [{} for _ in parts]
        self.gaps: list[int] = []
        at = 0
        for is_backward, call in order:
            self.gaps.append(at)
            self.begin[call][is_backward] = at + 1
            part = parts[call]
            at += 1 + len(part.backward if is_backward else part.forward)
        self.gaps.append(at)
        self.end = at
        self.turn = self.gaps[len(parts)]
        #: By position of an input of a call: the value of another call that it is.
        self.given = self._find_given()

    def _find_given(self) -> list[dict[int, int]]:
        makers: dict[object, int] = {}
        given: list[dict[int, int]] = []
        for number, (part, call) in enumerate(zip(self.parts, self.calls, strict=True)):
            places = {n: makers[key] for n, key in enumerate(call.inputs) if key in makers}
            given.append(places)
            # Forward may return more than its caller gets: first the buffers that it updated.
            more = max(part.outputs, default=-1) + 1 - len(call.outputs)
            for position, value in part.outputs.items():
                at = position - max(0, more)
                if 0 <= at < len(call.outputs) and call.outputs[at] is not None:
                    makers[call.outputs[at]] = self.first_value[number] + value
        return given

    def merged(self) -> Merged:
        storages = self._storages()
        saved = self._saved(storages)
        # What another graph reads it cannot recompute.
        forced = {value for given in self.given for value in given.values()}
        graph = Graph(
            ops=self._ops(forced),
            values=self._values(),
            storages=storages,
            saved=[SavedTensor(value, storages[value].born) for value, _ in saved],
            events=self._events(saved),
            turn=self.turn,
            base=self.base,
            calls=tuple(self.first_op) if len(self.parts) > 1 else (),
        )
        backward = [begin[True] for begin in self.begin]
        return Merged(graph, self.parts, self.first_op, self.first_value, backward, self.gaps)

    def _ops(self, forced: set[int]) -> list[Op]:
        counts: Counter[str] = Counter()
        ops: list[Op] = []
        for call, part in enumerate(self.parts):
            shift = self.first_value[call]
            for number, op in enumerate(part.ops):
                others = [self.given[call].get(n) for n in part.inputs[0][number]]
                reads = [shift + read for read in op.reads]
                reads += [value for value in others if value is not None and value not in reads]
                makes = tuple(shift + made for made in op.makes)
                start = op.key.rpartition("|")[0]  # calls of one graph have the same
                key, keeps = (
                    f"{start}|{counts[start]}",
                    op.forced or bool(forced.intersection(makes)),
                )
                counts[start] += 1
                ops.append(replace(op, key=key, reads=tuple(reads), makes=makes, forced=keeps))
        return ops

    def _values(self) -> list[Value]:
        values: list[Value] = []
        for call, part in enumerate(self.parts):
            ops, storages = self.first_op[call], len(values)
            values += [
                Value(each.nbytes, ops + each.op, storages + each.storage) for each in part.values
            ]
        return values

    def _storages(self) -> list[Storage]:
        """They die when nobody besides the plan holds them."""
        read: dict[int, int] = {}
        for call, part in enumerate(self.parts):
            for number, places in enumerate(part.inputs[0]):
                for place in self.given[call].keys() & places:
                    read[self.given[call][place]] = self.begin[call][False] + number
        found: list[Storage] = []
        for call, part in enumerate(self.parts):
            start = self.begin[call][False]
            for value, last in zip(part.values, part.dies, strict=True):
                # Whoever gets it holds it until the next graph has read it, or to the end.
                dies = read.get(len(found), self.end) if last == FOREVER else start + last
                found.append(Storage(value.nbytes, start + value.op, dies))
        return found

    def _saved(self, storages: Sequence[Storage]) -> list[tuple[int, int]]:
        """What backward reads: the value, and the event."""
        found = []
        for call, part in enumerate(self.parts):
            shift, start = self.first_value[call], self.begin[call][True]
            found += [(shift + value, start + event) for value, event in part.saved]
            for event, places in enumerate(part.inputs[1]):
                given = self.given[call].keys() & places
                found += [(self.given[call][place], start + event) for place in given]
        # In the order of forward; of one value the one that is read last first.
        return sorted(set(found), key=lambda each: (storages[each[0]].born, each[0], -each[1]))

    def _events(self, saved: Sequence[tuple[int, int]]) -> list[Event]:
        unpacked: dict[int, list[int]] = defaultdict(list)
        for number, (_, event) in enumerate(saved):
            unpacked[event].append(number)
        events: list[Event] = []
        for (is_backward, call), (held, most) in zip(self.order, self.around, strict=False):
            events.append(Event(0.0, held, most))
            part = self.parts[call]
            for at, each in enumerate(part.backward if is_backward else part.forward):
                numbers = tuple(unpacked[len(events)])
                op = -1 if is_backward else self.first_op[call] + each.op
                more = held + (self._tangents(call, at) if is_backward else 0)
                before, during = more + each.before, more + each.during
                events.append(Event(each.seconds, before, during, op, numbers, numbers))
        held, most = self.around[-1]
        return [*events, Event(0.0, held, most)]

    def _tangents(self, call: int, at: int) -> int:
        """The bytes of tangents at an event of backward that it has made itself."""
        tangents = self.parts[call].tangents
        made = (tangents[number] for number in self.calls[call].made)
        return sum(nbytes for nbytes, last in made if at <= last)
