"""Patterns of names: pure."""

import pytest

from recollect.policy.patterns import first_unmatched, fits, fits_any, listed


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("attn.wo", "attn.wo"),
        ("layers.3.attn.wo", "attn.wo"),
        ("layers.3.attn.wo", "wo"),
        ("layers.3.attn.wo", "*.attn.wo"),
        ("attn.wo", "*.attn.wo"),
        ("wo", "*.wo"),
        ("layers.3.attn.wo", "layers.*.attn.wo"),
        ("model.layers.3.attn.wo", "layers.*.attn.wo"),
        ("layers.3.attn.wo", "layers.[0-3].attn.wo"),
        ("layers.3.attn.wo", "layers.?.*"),
        ("layers.3.attn.wo", "*"),
        ("", "*"),
        ("mlp.up", "mlp.*"),
        ("mlp.a.b.c", "mlp.*"),
    ],
)
def test_a_name_or_its_end_fits(name, pattern):
    assert fits(name, pattern)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("attn.wo", "wo.attn"),
        ("attn.wo", "o"),
        ("attn.wo", "attn"),
        ("attn.wo", "attn.w"),
        ("attn.wo", "attn.wo.*"),
        ("attn.wo", "Attn.wo"),
        ("xattn.wo", "attn.wo"),
        ("layers.10.attn", "layers.?.attn"),
        ("layers.4.attn.wo", "layers.[0-3].attn.wo"),
        ("", "attn"),
        ("wo", "*.attn.wo"),
        ("", "*.wo"),
    ],
)
def test_other_names_do_not(name, pattern):
    assert not fits(name, pattern)


def test_one_of_several_patterns_may_fit():
    assert fits_any("attn.wo", ("up", "wo"))
    assert not fits_any("attn.wo", ("up", "down"))
    assert not fits_any("attn.wo", ())


def test_the_first_pattern_that_fits_no_name():
    assert first_unmatched(("wo", "up", "down"), ("attn.wo", "attn.wq")) == "up"
    assert first_unmatched(("wo", "w?"), ("attn.wo", "attn.wq")) is None
    assert first_unmatched(("wo",), ()) == "wo"


def test_names_are_listed_with_the_most_similar_first():
    names = ["norm", "attn.wq", "attn.wo", "mlp.up"]
    assert listed(names, "mlp.upp").startswith("mlp.up, ")
    assert set(listed(names, "mlp.upp").split(", ")) == set(names)
    assert listed(names, "*.attn.wo").startswith("attn.wo")


def test_names_are_listed_once_and_in_order():
    assert listed(["b", "a", "b", ""], "zzz") == "a, b"


def test_there_may_be_none():
    assert listed([], "x") == listed([""], "x") == "none"


def test_a_long_list_is_cut():
    text = listed([f"layer{n:03}" for n in range(100)], "other")
    assert text.endswith("layer039 and 60 more")
    assert "layer040" not in text
