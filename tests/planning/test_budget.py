"""Budgets as users write them."""

import pytest
import torch

from recollect.planning.budget import check_budget, is_fraction, resolve_budget

CPU = torch.device("cpu")
PLAIN = 1000_000


@pytest.mark.parametrize(
    ("budget", "count"),
    [
        (0.5, 500_000),
        ("0.5", 500_000),
        (" 50 %", 500_000),
        ("12.5%", 125_000),
        ("100%", PLAIN),
        (1.0, PLAIN),
        ("1.0", PLAIN),
        (2048, 2048),
        ("2048", 2048),
        (1e9, 10**9),
        ("1e9", 10**9),
        ("2KiB", 2048),
        ("3GB", 3 * 10**9),
        ("24B", 24),
    ],
)
def test_what_a_budget_stands_for(budget, count):
    check_budget(budget)
    assert resolve_budget(budget, PLAIN, CPU) == count
    assert is_fraction(budget) == (budget in (0.5, "0.5", " 50 %", "12.5%", "100%", 1.0, "1.0"))


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (24, r'budget=24 would be 24 bytes. Did you mean "24GiB"\?'),
        ("24", r"""budget='24' would be 24 bytes. Did you mean "24GiB"\?"""),
        (24.0, r'budget=24.0 would be 24 bytes. Did you mean "24GiB"\?'),
        (1, r'Did you mean "1GiB"\?'),
        (1, "would be 1 byte[.]"),
        (70, r'"70GiB"[?] Or "70%" of the plain step[?]'),
        (float("inf"), 'at most 1. Give bytes, as "12GiB", a fraction of the plain step, as "50%"'),
        (0, 'more than 0, but is 0. Give bytes, as "12GiB"'),
        ("150%", "peak. Give bytes"),
        (1.5, r'at most 1. Did you mean "1.5GiB"\?'),
        ("1.5", r'at most 1. Did you mean "1.5GiB"\?'),
        ("24G", "may mean GB or GiB"),
        ("150%", "at most 100% of the plain"),
        ("-5%", "more than 0%"),
        ("0%", "more than 0%"),
        (0, "more than 0"),
        ("0", "more than 0"),
        ("-1", "more than 0"),
        (float("nan"), "more than 0"),
        ("nan", "more than 0"),
        ("0GiB", "more than 0"),
        ("plenty", "not a number and a unit"),
        ("50 % of it", "not a number and a unit"),
    ],
)
def test_what_is_no_budget_says_what_it_could_be(budget, message):
    with pytest.raises(ValueError, match=message):
        check_budget(budget)


@pytest.mark.parametrize("budget", [True, None, [1], 1j])
def test_other_types_are_refused(budget):
    with pytest.raises(TypeError, match="budget should be a number of bytes"):
        check_budget(budget)


def test_auto_is_what_the_device_has():
    check_budget("auto")
    assert not is_fraction("auto")
    assert resolve_budget("auto", PLAIN, CPU) > 2**28
