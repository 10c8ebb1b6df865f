"""Several processes that make one plan together (P5).

One of them leads: it decides what is run next, and tells the others by a store of keys and values
which all can reach. A follower does what it is told, and answers. No collective is used for this,
so the steps that are run may have their own; a process that fails writes that to the store, where
all that wait for something find it; and who waits for too long says for whom.

    leader                         followers
    order("peaks", way)    ---->   next_order()
    runs the step          <--->   run the step, perhaps with collectives
    answers()              <----   answer(...)
    order("plan", plan)    ---->   done
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from torch import distributed

from recollect._torch.groups import default_store, group_timeout
from recollect.errors import CheckpointError

#: Seconds between two looks at the store: from the first to the later ones.
_SOONEST, _LATEST = 0.001, 0.1
#: Seconds that a process is waited for at most; while another one searches for a plan.
_PATIENCE, _SEARCH = 300.0, 3600.0

#: Errors that collectives raise if a process is gone.
_OF_GROUPS = (RuntimeError, distributed.DistError, distributed.DistBackendError)

#: How many sessions the processes with these ranks have had.
_sessions: Counter[tuple[int, ...]] = Counter()


class MissingRank(CheckpointError):
    """Another process did not come within the time limit."""


class OtherRankFailed(CheckpointError):
    """Another process has failed; what it raised is in the message."""


class Team:
    """The processes with these ``ranks``, including this one. The first one leads.

    Args:
        ranks: In order.
        patience: Seconds to wait for another one; by default as the group does, up to minutes.
        store: What they tell each other by; by default that of the default group.
        name: Of this session; by default its number, which is the same in all processes.
        rank: Of this process, if it is not that in the default group.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        patience: float | None = None,
        store: Any = None,
        name: str | None = None,
        rank: int | None = None,
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = distributed.get_rank() if rank is None else rank
        self._store = default_store() if store is None else store
        self._patience = min(_PATIENCE, group_timeout()) if patience is None else patience
        if name is None:
            _sessions[self.ranks] += 1
            name = f"recollect/{','.join(map(str, self.ranks))}/{_sessions[self.ranks]}"
        self._name = name
        self._orders = self._agreements = 0

    @property
    def leads(self) -> bool:
        """Whether this process decides."""
        return self.rank == self.ranks[0]

    # --- keys and values --------------------------------------------------------------------------

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._name, *parts)))

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))

    def _get(self, key: str, missing: Callable[[], None], patience: float) -> Any:
        """The value of a key, once it is there. Raises if a process has failed meanwhile.

        ``missing`` is called when the time is up; if it returns, the key is about to come.
        """
        end, pause = time.monotonic() + patience, _SOONEST
        while not self._store.check([key]):
            self._raise_told()
            if time.monotonic() > end:
                missing()
            time.sleep(pause)
            pause = min(2 * pause, _LATEST)
        self._raise_told()
        return pickle.loads(self._store.get(key))

    def _raise_told(self, cause: BaseException | None = None) -> None:
        """Raise the error that another process has reported, if any."""
        key = self._key("error")
        if not self._store.check([key]):
            return
        rank, error, text = pickle.loads(self._store.get(key))
        if isinstance(error, CheckpointError):  # such as a budget that is too low: the same for all
            raise error from cause
        raise OtherRankFailed(f"rank {rank} has failed: {text}") from cause

    # --- meeting ----------------------------------------------------------------------------------

    def meet(self, about: Any, call: str) -> dict[int, Any]:
        """Wait for all. Returns what each says it is ``about``, by rank.

        ``call``: what is called, for the error if one does not come.
        """
        self._set(self._key("here", self.rank), about)
        keys = {rank: self._key("here", rank) for rank in self.ranks}
        give_up = partial(self._give_up, call)
        found = {rank: self._get(key, give_up, self._patience) for rank, key in keys.items()}
        if self._decide("met") != "met":
            self._get(self._key("error"), partial(self._lost, self.ranks[0]), self._patience)
        return found

    def _decide(self, wish: str) -> str:
        """Decide once for all whether everyone met or someone gave up: the first to say so wins.

        Otherwise a process could continue with another that has just given up waiting for it.
        """
        decided: bytes = self._store.compare_set(self._key("decided"), "", wish)
        return decided.decode()

    def among(self, ranks: Sequence[int]) -> Team:
        """The team of some of them, once all have met."""
        return Team(ranks, self._patience, self._store, self._key("among", *ranks), self.rank)

    def _give_up(self, call: str) -> None:
        if self._decide("given up") == "met":
            return
        here = [rank for rank in self.ranks if self._store.check([self._key("here", rank)])]
        away = ", ".join(str(rank) for rank in self.ranks if rank not in here)
        error = MissingRank(
            f"{call} is a collective call: all ranks make one plan together, and rank {away} has "
            f"not called it within {self._patience:.0f} s. Call it on every rank, the same number "
            "of times and in the same order; or make the plan in one process without a process "
            "group, plan.save(path), and recollect.Plan.load(path).apply(model) on every rank"
        )
        self._tell(error)
        raise error

    def agree(self, value: bool) -> bool:
        """Whether ``value`` holds in all of them, which all have to ask."""
        self._agreements += 1
        keys = {rank: self._key("agree", self._agreements, rank) for rank in self.ranks}
        self._set(keys[self.rank], bool(value))
        return all(self._get(keys[rank], partial(self._lost, rank), _SEARCH) for rank in keys)

    # --- orders and answers -----------------------------------------------------------------------

    def order(self, name: str, *args: Any) -> None:
        """Tell the followers what to do."""
        self._orders += 1
        self._set(self._key("order", self._orders), (name, args))

    def next_order(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next order of the leader."""
        self._orders += 1
        leader = self.ranks[0]
        found: tuple[str, tuple[Any, ...]] = self._get(
            self._key("order", self._orders), partial(self._lost, leader), _SEARCH
        )
        return found

    def answer(self, value: Any) -> None:
        """Answer the order."""
        self._set(self._key("answer", self._orders, self.rank), value)

    def answers(self) -> list[Any]:
        """The answers of all followers to the last order."""
        found = []
        for rank in self.ranks[1:]:
            key = self._key("answer", self._orders, rank)
            found.append(self._get(key, partial(self._lost, rank), _SEARCH))
            self._store.delete_key(key)
        return found

    def _lost(self, rank: int) -> NoReturn:
        error = MissingRank(f"rank {rank} has not been heard of for {_SEARCH:.0f} s")
        self._tell(error)
        raise error

    # --- failing ----------------------------------------------------------------------------------

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """A context that reports its errors to all processes."""
        try:
            yield
        except (OtherRankFailed, MissingRank):
            raise  # it was told
        except BaseException as error:
            if type(error) in _OF_GROUPS:
                # If another has failed, that is the cause: it does not answer any more.
                self._raise_told(error)
            self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        self._set(self._key("error"), (self.rank, _portable(error), _text(error)))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _portable(error: BaseException) -> BaseException | None:
    """The error, if another process can read it."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - errors may hold anything
        return None
    return copy if type(copy) is type(error) else None
