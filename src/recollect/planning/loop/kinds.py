"""The kinds of forwards and steps that a loop runs under a plan (P8).

The kind of a forward is the signature of its batch and the state of the model. The kind of a step
is the kinds of its forwards, in order: a loop may call the model several times before backward.
When a forward runs, the later ones are not known yet. So it runs by the schedule for the longest
step that began in the same way.

`find` decides, in this order: the variant known for this step; a prediction from traced steps
(`shapes`); the planned step; the schedule of the smallest known step that is no smaller; else the
schedule of the least peak, and the step is traced.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import nn

from recollect._torch.modes import is_transforming
from recollect.checks.place import WarnOnce
from recollect.graph.graph import Graph
from recollect.planning.budget import IF_SHAPES_VARY
from recollect.planning.loop import notices
from recollect.planning.loop.choice import Choice, choose
from recollect.planning.loop.companions import Companion, Companions, RunsBy
from recollect.planning.loop.contest import Contest
from recollect.planning.loop.planned_step import ForwardKind, PlannedStep, StepKind
from recollect.planning.loop.shapes import Shapes
from recollect.planning.loop.updates import OwnState, StateWatch, local_bytes
from recollect.planning.loop.variant import Variant
from recollect.planning.recording.model_state import (
    Differences,
    compare_state,
    extra_gradient_bytes,
    facts_of,
    with_state,
)
from recollect.planning.recording.record import peak_of_run
from recollect.replay.engine import CallReport
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.recording import Recording

#: The assumed peak of a step that ran out of memory, as a multiple of its budget.
_OUT_OF_MEMORY = 1.05
#: How many kinds of forwards, and schedules solved for some of them, are remembered.
_REMEMBERED = 64
_SOLVED = 8


class Kinds:
    """All kinds of forwards and steps seen under a plan, and the schedules chosen for them."""

    def __init__(
        self,
        plan: PlannedStep,
        warnings: WarnOnce,
        recordings: Sequence[Recording] = (),
        companions: Sequence[Companion] = (),
    ) -> None:
        self.plan = plan
        self._warnings = warnings
        #: The recordings of the planned step, if it was traced in the loop.
        self._recordings = recordings
        self._known: dict[StepKind, Variant] = {}  #: by step: its last forward
        self._choices: dict[StepKind, Choice] = {}  #: by step: the choice of its schedules
        self._planned = tuple(
            ForwardKind(each.signature, extra_bytes=each.extra_bytes) for each in plan.forwards
        )
        self._shapes = Shapes()  #: the traced steps
        self._solved: list[NamedSchedule] = []  #: schedules solved for predicted steps
        #: The kinds of forwards that no schedule brings into the budget.
        self._too_large: deque[ForwardKind] = deque(maxlen=_REMEMBERED)
        self._companions = Companions()
        self._companions.note(self._planned, companions)
        if plan.graph is not None and not plan.others:
            state, made = self._planned[0][1:], dict(plan.made)
            self._shapes.add(plan.signature, state, plan.graph, made, is_planned=True)
        if min(plan.predicted_peak, plan.plain_peak) > plan.budget:
            self._too_large.append(self._planned[0])
        self._optimizers, self._own = StateWatch(), OwnState()
        self._is_on_cuda = False
        self._planned_state: float | None = None
        #: The facts of the model at the last call, and how they differ from the planned ones.
        self._seen: tuple[Any, Differences | None] = (None, None)

    # --- which kind -------------------------------------------------------------------------------

    def kind_of(self, model: Any, signature: tuple[Any, ...]) -> ForwardKind:
        """The kind of a forward of ``model`` that begins now."""
        if not isinstance(model, nn.Module):
            return ForwardKind(signature)
        facts, found = self._seen  # once: another thread may change it
        now, parameters = facts_of(model)
        if facts is None:
            self._is_on_cuda = any(each.is_cuda for each in parameters)
        now.append(self._state_growth(model, parameters))
        if now != facts:
            found = compare_state(self.plan.state, model)
            found = with_state(found, now[-1], self.plan.budget // 256)
            self._seen = now, found
            notices.of_opaque_code(self._warnings, self.plan, model)
        more = extra_gradient_bytes(model, parameters, self.plan.gradients)
        return ForwardKind(signature, found, more + (0 if found is None else found.nbytes))

    def _state_growth(self, model: nn.Module, parameters: list[Any]) -> int:
        """The bytes of optimizer state that were not there when the plan was made.

        An optimizer has state for a parameter from its first update on, as for a head that is not
        used in every step.
        """
        if is_transforming():
            return 0  # torch.func has put its own tensors into the model
        nbytes = self._optimizers.nbytes(parameters)
        if not self._is_on_cuda:  # where the peak is watched
            nbytes += self._own.nbytes(parameters)
        if self._planned_state is None:
            self._planned_state = self._find_planned_state(model, parameters)
        return math.ceil(max(0.0, nbytes - self._planned_state))

    def _find_planned_state(self, model: nn.Module, parameters: list[Any]) -> float:
        """The bytes of optimizer state that the plan counts; infinite if unknown."""
        plan = self.plan
        if plan.from_loop:
            return plan.state_bytes
        if self._is_on_cuda:
            return math.inf  # where the peak is watched
        state = plan.base - plan.gradients - local_bytes([*parameters, *model.buffers()])
        return state if state > 0 else math.inf  # it was made without an optimizer

    def is_planned(self, step: StepKind) -> bool:
        """Whether a step is the planned one."""
        return step == self._planned

    def begin(self, step: StepKind) -> Variant:
        """The last forward of ``step`` begins. Returns its variant."""
        variant = self.find(step)
        variant.count()
        if len(step) == 1 and self._companions.have_changed(step[0]):
            variant.forget()
        if not variant.is_known and variant.schedule is not None and len(step) == 1:
            is_wanted = self._shapes.note_unpredicted(step[0].signature, step[0][1:])
            variant.wants_trace |= is_wanted
        return variant

    def find(self, step: StepKind) -> Variant:
        """The variant for the last forward of ``step``; the others have begun before."""
        variant = self._known.get(step)
        version = self._shapes.version  # a prediction is tried when steps were traced since
        if variant is None or (not variant.is_known and variant.version != version):
            if variant is None and len(self._known) >= _REMEMBERED:
                self._forget_oldest(step)
            first = self._known.get(step[:1])
            found = self._predicted_variant(step) if step != self._planned else None
            variant = found or variant or self._new_variant(step, first)
            variant.version, self._known[step] = version, variant
        return variant

    def _forget_oldest(self, step: StepKind) -> None:
        """Forget the oldest kind of step, with all that begin like it, but no part of ``step``."""
        known = [*self._known]
        oldest = next((each for each in known if each != step[: len(each)]), None)
        for each in known:
            if oldest is not None and each[: len(oldest)] == oldest:
                self._known.pop(each, None)
                self._choices.pop(each, None)

    def _predicted_variant(self, step: StepKind) -> Variant | None:
        """Predict a forward that was never traced from others that were; None if impossible."""
        kind, plan = step[-1], self.plan
        # What follows a forward cannot be predicted.
        if len(step) > 1 or plan.others or any(len(each) > 1 for each in self._choices):
            return None
        found = self._shapes.predict(kind.signature, kind[1:])
        if found is None:
            return None
        choice = Choice(
            plan,
            found.graph,
            may_be_plain=found.is_covered and not self._differ,
            is_predicted=True,
            other_schedules=self._solved,
            can_solve=not any(other.is_within(kind) for other in self._too_large),
        )
        self._solved = [*self._solved, *choice.solved][-_SOLVED:]
        variant = Variant(plan, self._warnings, plan.least, found.made, kind)
        variant.is_predicted = True
        self._choices[step], self._known[step] = choice, variant
        self._choose(variant)
        if variant.peak > plan.budget:
            self._too_large.append(kind)
            variant.warn(variant.peak, found.made, variant.peak)
        return variant

    def runs_by(self, step: StepKind) -> RunsBy | None:
        """By what the last forward of ``step`` runs from now on; None if that is yet to be seen."""
        variant = self._known.get(step)
        if variant is None or not variant.is_known or variant.contest is not None:
            return None
        return None if variant.first.wants_trace else RunsBy(variant.schedule)

    def compare(self, step: StepKind, report: CallReport) -> None:
        """The last forward of a step was recorded: compare it with its expected bytes."""
        variant = self._known.get(step)
        if variant is None:
            return  # it was forgotten since
        is_right = variant.is_as_expected(report)
        if is_right and report.recording is not None and report.recording.shapes:
            choice = self._choice_of(step)
            if choice is not None and choice.saw(variant.ratio):
                self._choose(variant.first)
        if variant.is_predicted:
            variant.is_predicted = False
            self._shapes.ran(step[0].signature, step[0][1:], is_right=is_right)
            choice = self._choices[step]
            choice.recorded()
            if is_right:
                choice.may_be_plain |= not self._differ
                self._choose(variant)

    @property
    def _differ(self) -> bool:
        """Whether forwards of one kind have ever done more than those before."""
        return any(each.differs for each in [*self._known.values()])

    def _new_variant(self, step: StepKind, first: Variant | None) -> Variant:
        larger = self._larger(step)
        plan, warnings, count = self.plan, self._warnings, len(step)
        if step == self._planned[:count]:
            found = self._planned_variant(count, first)
            if plan.rivals and found.schedule is not None:
                schedules = (found.schedule, *plan.rivals)
                found.contest = Contest(schedules, on_device=self._is_on_cuda)
            return found
        if larger is not None:
            return Variant.within(larger, first)
        kind = step[-1]
        only_gradients = kind._replace(extra_bytes=0).is_within(self._planned[0])
        least = plan.least_with(kind.extra_bytes) if only_gradients else plan.least
        return Variant(plan, warnings, least, kind=kind, of_first=first)

    def _larger(self, step: StepKind) -> Variant | None:
        """The smallest known forward that takes no less memory than the last one of ``step``."""
        known = [
            (other, variant)
            for other, variant in [*self._known.items()]
            if variant.is_known and _are_within(step, other)
        ]
        if known:
            return min(known, key=lambda each: sum(map(_numbers_in, each[0])))[1]
        planned = self._planned[: len(step)]
        if not _are_within(step, planned):
            return None
        return self._planned_variant(len(step), None)

    def _planned_variant(self, count: int, first: Variant | None) -> Variant:
        """The forward of the planned step with the number ``count``."""
        plan, forward = self.plan, self.plan.forwards[count - 1]
        schedule = None if plan.needed_schedule is None else forward.schedule
        variant = Variant(plan, self._warnings, schedule, dict(forward.made), of_first=first)
        if self._recordings:
            variant.recording = self._recordings[count - 1]
            variant.nodes = variant.recording.nodes
        return variant

    def has_room_for_plain(self, step: StepKind = ()) -> bool:
        """Whether the budget has ample room for a traced step without the engine.

        Ample, as saved-tensor hooks may hold what no trace has, such as the states of generators.
        """
        choice = self._choice_of(step or self._planned)
        return choice is not None and choice.plain_peak <= IF_SHAPES_VARY * self.plan.budget

    # --- what is learned --------------------------------------------------------------------------

    def surprised(self, step: StepKind) -> bool:
        """Whether the last forward follows others that it never followed, without room for all.

        Then the next step like it is traced.
        """
        is_known = len(step) == 1 or step in self._known or self._larger(step) is not None
        if is_known or self._has_room(step):
            return False
        for count in range(1, len(step)):
            variant = self._known.get(step[:count])
            if variant is not None:
                variant.surprised()
        return True

    def _has_room(self, step: StepKind) -> bool:
        """Whether the budget has room for the forwards of a step, each as if it were alone."""
        base, needed = self.plan.base, 0
        for kind in step:
            variant = self._known.get((kind,))
            if variant is not None and variant.is_known:
                needed += variant.peak - base
            elif kind.is_within(self._planned[0]):
                needed += self.plan.predicted_peak - base
            else:
                return False
        return base + needed <= self.plan.budget

    def forget(self, step: StepKind) -> None:
        """A step does more than is known: the next one is traced."""
        for each in self._forwards(step):
            each.forget()

    def add_trace(
        self,
        step: StepKind,
        graph: Graph,
        recordings: Sequence[Recording],
        companions: Sequence[Companion] = (),
    ) -> None:
        """A step was traced: choose the schedules of later ones."""
        self._companions.note(step, companions)
        forwards = self._forwards(step)
        if not forwards:
            return  # they were forgotten since
        first = forwards[0]
        is_whole = not graph.units
        made = [each.add_trace(r, is_whole) for each, r in zip(forwards, recordings, strict=True)]
        before = self._choice_of(step)
        # What differs from step to step is always recorded or checked, and the largest step counts.
        choice = traced = Choice(self.plan, graph, may_be_plain=not self._differ)
        if self._differ and before is not None and before.plain_peak > choice.plain_peak:
            choice, before.may_be_plain = before, False
        self._choices[step] = choice
        if first.expects > 1 and len(step) == 1:
            first.expects -= 1  # the step that came as a surprise has yet to come again
        else:
            self._choose(first)
        chosen = tuple(each.schedule for each in forwards)
        later = choice.expected(chosen) or 0
        ran = self._peak_of_run(step, graph, traced, recordings) or later
        if max(later, ran) > self.plan.budget:
            first.warn(ran, made[0], later, len(step), beside=bool(companions))
        for forward, size in zip(forwards, made, strict=True):
            forward.learn(size)
        if len(step) == 1:
            self._shapes.add(step[0].signature, step[0][1:], graph, made[0])

    def _peak_of_run(
        self, step: StepKind, graph: Graph, choice: Choice, recordings: Sequence[Recording]
    ) -> int | None:
        """The peak of the step that was traced, or of one that led to it; None if unknown.

        Simulations of traced steps are exact on the CPU; on CUDA `PeakWatch` reads the peak.
        """
        forwards = self._forwards(step)
        if any(each.outgrown is not None for each in forwards):
            return choice.simulate(graph, tuple(each.ran_by for each in forwards))
        differences = step[0].differences
        early = 0 if differences is None or self._is_on_cuda else differences.yet_to_come
        return peak_of_run(graph, recordings) - early

    def trace_failed(self, step: StepKind) -> None:
        """The trace of a step failed: there was no backward."""
        variant = self._known.get(step[:1])
        if variant is not None:
            variant.trace_failed()

    def exceeded(self, step: StepKind, measured: int) -> bool:
        """A step exceeded its budget: it took ``measured`` bytes. Whether later ones keep less."""
        plan, forwards = self.plan, self._forwards(step)
        before = tuple(each.schedule for each in forwards)
        choice = self._choice_of(step)
        if choice is None:
            for each in forwards:
                each.choose(plan.least, each.peak)
        elif forwards:
            choice.measured(before, measured)
            self._choose(forwards[0])
        return before != tuple(each.schedule for each in forwards)

    def tighten(self, step: StepKind) -> int:
        """A step ran out of memory: have later ones keep less. Returns by how many bytes."""
        before = tuple(each.schedule for each in self._forwards(step))
        if not self.exceeded(step, math.ceil(_OUT_OF_MEMORY * self.plan.budget)):
            return 0
        after, choice = self._forwards(step), self._choices.get(step)
        if choice is None or choice.expected(before) is None:
            return max(1, (after[0].peak - self.plan.base) // 2)  # not known: as if it were halved
        return choice.peak(before) - choice.peak(tuple(each.schedule for each in after))

    def _choice_of(self, step: StepKind) -> Choice | None:
        """The choice of schedules for a step; None if its graph is not known."""
        if step == self._planned and step not in self._choices and self.plan.graph is not None:
            self._choices[step] = Choice(self.plan, self.plan.graph)
        return self._choices.get(step)

    def _forwards(self, step: StepKind) -> list[Variant]:
        """The forwards of a step; none if one of them is not known."""
        found = [self._known.get(step[: n + 1]) for n in range(len(step))]
        return [] if None in found else [each for each in found if each is not None]

    def _choose(self, first: Variant) -> None:
        """Choose schedules for all steps that begin with ``first``: the longest ones decide."""
        steps = [step for step in self._choices if self._known.get(step[:1]) is first]
        steps = [s for s in steps if not any(s == e[: len(s)] for e in steps if e != s)]
        choices = [self._choices[step] for step in steps]
        for step, choice, schedules in zip(steps, choices, choose(choices), strict=True):
            peak = choice.expected(schedules) or 0
            for count, schedule in enumerate(schedules, 1):
                variant = self._known.get(step[:count])
                if variant is not None:
                    variant.choose(schedule, peak)


def _are_within(step: StepKind, other: StepKind) -> bool:
    pairs = zip(step, other, strict=False)
    return len(step) == len(other) and all(a.is_within(b) for a, b in pairs)


def _numbers_in(kind: ForwardKind) -> int:
    """The number of tensor elements in a batch."""
    return sum(math.prod(each[0]) for each in kind.signature if isinstance(each, tuple))
