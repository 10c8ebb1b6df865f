"""Errors and warnings about rules of a policy that match nothing."""

from __future__ import annotations

from collections.abc import Container, Iterable

from recollect.checks.place import warn_user
from recollect.policy.patterns import first_unmatched, listed
from recollect.policy.rules import PatternRule
from recollect.policy.rulings import Rulebook

__all__ = ["check_names", "warn_unmatched"]


def check_names(rule: PatternRule, names: list[str]) -> None:
    """Raise if a pattern of ``rule`` matches none of the names that were given."""
    pattern = first_unmatched(rule.patterns, tuple(names))
    if pattern is not None:
        raise ValueError(
            f"{rule.title}: no tensor of the region was given a name like {pattern!r} by "
            f"recollect.tag(tensor, name). The names are: {listed(names, pattern)}"
        )


def warn_unmatched(rulebook: Rulebook, inside: Container[int], ran: Iterable[str]) -> None:
    """Warn, once, of rules that have matched nothing.

    ``inside``: the rules about modules that match a module of the region. ``ran``: the names of the
    ops that ran.
    """
    ranks = {n for n in rulebook.unmatched if n in inside or n not in rulebook.modules}
    if not ranks:
        return
    titles = [rulebook.rules[rank].title for rank in sorted(ranks)]
    rulebook.unmatched -= ranks  # once is enough
    warn_user(
        f"the policy's {' and '.join(titles)} matched nothing in the region. The ops that "
        f"ran are: {listed((name.replace('::', '.') for name in ran), '')}"
    )
