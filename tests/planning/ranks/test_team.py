"""Ranks that plan together: who waits for whom, and for how long."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch import distributed

from recollect.errors import InfeasibleBudget
from recollect.planning.ranks import team
from recollect.planning.ranks.team import MissingRank, OtherRankFailed, Team

Work = Callable[[Team], Any]


def run(*work: Work | None, patience: float = 20.0) -> list[Any]:
    """Run each as one rank, in a thread. Returns results and errors; None stays away."""
    store = distributed.HashStore()
    ranks = range(len(work))

    def one(rank: int) -> Any:
        mine, each = Team(ranks, patience, store, "here", rank), work[rank]
        assert each is not None
        with mine.failing_together():
            return each(mine)

    with ThreadPoolExecutor() as pool:
        begun: list[Future[Any] | None] = [
            None if each is None else pool.submit(one, rank) for rank, each in enumerate(work)
        ]
    return [None if each is None else each.exception() or each.result() for each in begun]


def lead(mine: Team) -> Any:
    found = mine.meet(mine.rank, "a call")
    mine.order("square", 7)
    answers = mine.answers()
    mine.order("stop")
    return found, answers


def follow(mine: Team) -> Any:
    mine.meet(mine.rank, "a call")
    while True:
        name, args = mine.next_order()
        if name == "stop":
            return "stopped"
        mine.answer(args[0] ** 2 + mine.rank)


def test_the_first_leads_and_the_others_answer() -> None:
    (found, answers), *others = run(lead, follow, follow)
    assert found == {0: 0, 1: 1, 2: 2}
    assert answers == [50, 51]
    assert others == ["stopped", "stopped"]


def test_ranks_that_take_turns_in_being_late() -> None:
    draw = random.Random(0)

    def late(work: Work, delays: list[float]) -> Work:
        def run_late(mine: Team) -> Any:
            time.sleep(delays.pop())
            return work(mine)

        return run_late

    for _ in range(200):
        delays = [draw.choice([0.0, 0.0, 0.001, 0.01]) for _ in range(2)]
        (_, answers), other = run(late(lead, delays), late(follow, delays))
        assert (answers, other) == ([50], "stopped")


def test_all_agree_or_none() -> None:
    for values, expected in (((True, True), True), ((True, False), False), ((False, True), False)):
        agree = [lambda mine, value=value: mine.agree(value) for value in values]
        assert run(*agree) == [expected, expected]


def test_one_that_does_not_come_is_named() -> None:
    begun = time.monotonic()
    first, _, third = run(lead, None, follow, patience=0.2)
    for error in (first, third):
        assert isinstance(error, MissingRank)
        assert "a call is a collective call" in str(error)
        assert "rank 1 has not called it" in str(error)
    assert time.monotonic() - begun < 10


def test_one_that_comes_too_late_learns_so_at_once() -> None:
    given_up = threading.Event()

    def impatient(mine: Team) -> Any:
        try:
            return lead(mine)
        finally:
            given_up.set()

    def late(mine: Team) -> Any:
        assert given_up.wait(20)
        begun = time.monotonic()
        try:
            return mine.meet(1, "a call") and mine.next_order()
        finally:
            assert time.monotonic() - begun < 10

    first, second = run(impatient, late, patience=0.2)
    assert isinstance(first, MissingRank)
    assert isinstance(second, MissingRank)


def test_they_meet_or_all_give_up() -> None:
    # The second comes at about the time when the first gives up.
    draw = random.Random(0)
    for _ in range(60):
        delay = draw.uniform(0.0, 0.06)

        def late(mine: Team, delay: float = delay) -> Any:
            time.sleep(delay)
            return follow(mine)

        results = run(lead, late, patience=0.03)
        outcome = tuple(isinstance(each, MissingRank) for each in results)
        assert outcome in ((True, True), (False, False)), results


def _fail(error: Exception) -> Work:
    def work(mine: Team) -> Any:
        mine.meet(None, "a call")
        raise error

    return work


class Strange(ValueError):
    """Cannot be read by another process."""

    def __reduce__(self) -> Any:
        raise TypeError


@pytest.mark.parametrize("error", [ValueError("it is odd"), Strange("it is odd")])
def test_what_one_raises_the_others_tell(error: Exception) -> None:
    for work, failed in (((_fail(error), follow), 0), ((lead, _fail(error)), 1)):
        found = run(*work)
        assert found[failed] is error
        assert isinstance(found[1 - failed], OtherRankFailed)
        assert f"rank {failed} has failed: {type(error).__name__}: it is odd" in str(
            found[1 - failed]
        )


def test_a_budget_that_is_too_low_is_the_same_error_for_all() -> None:
    error = InfeasibleBudget("too low", budget=1, least=2)
    _, other = run(_fail(error), follow)
    assert isinstance(other, InfeasibleBudget)
    assert (str(other), other.budget, other.least) == ("too low", 1, 2)


def test_nobody_waits_for_one_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_SEARCH", 0.2)

    def leave(mine: Team) -> None:
        mine.meet(mine.rank, "a call")

    found, _ = run(lead, leave)
    assert isinstance(found, MissingRank)
    assert "rank 1 has not been heard of" in str(found)
    _, found = run(leave, follow)
    assert isinstance(found, MissingRank)
    assert "rank 0 has not been heard of" in str(found)


def test_some_of_them_go_on_as_a_team_of_their_own() -> None:
    def work(mine: Team) -> Any:
        found = mine.meet(mine.rank % 2, "a call")
        part = mine.among([rank for rank in found if found[rank] == mine.rank % 2])
        return part.ranks, part.leads, part.agree(True)

    found = run(work, work, work, work)
    assert found[0] == ((0, 2), True, True)
    assert found[3] == ((1, 3), False, True)
