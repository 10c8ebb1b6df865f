"""Bytes and seconds, read and written."""

import pytest

from recollect.report.units import (
    argument_text,
    bytes_text,
    parse_bytes,
    percent_text,
    seconds_text,
)

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
given = hypothesis.given


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("12GiB", 12 * 2**30),
        ("8GB", 8 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("1.5TiB", 3 * 2**39),
        ("100kB", 100_000),
        ("100KB", 100_000),
        ("4096B", 4096),
        ("4096 b", 4096),
        ("12gib", 12 * 2**30),
        ("8gb", 8 * 10**9),
        ("  3 KiB ", 3072),
        (".5KiB", 512),
        ("2.MB", 2_000_000),
        # Not 9,007,199,254,740,992, which a float makes of it.
        ("9007199254740993B", 2**53 + 1),
        ("0.1GB", 10**8),
    ],
)
def test_sizes_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "not a number"),
        ("GiB", "not a number"),
        ("-1GiB", "not a number"),
        ("1,5GiB", "not a number"),
        ("nanGB", "not a number"),
        ("1 2GB", "not a number"),
        ("1\u0662GB", "not a number"),
        ("12", "no unit"),
        ("12G", "'G' may mean GB or GiB"),
        ("12k", "'k' may mean KB or KiB"),
        ("12Gb", "means bits"),
        ("12Mib", "means bits"),
        ("12GiBs", "no unit 'GiBs'"),
        ("12 parsecs", "no unit 'parsecs'"),
    ],
)
def test_what_is_no_size_is_refused_with_the_reason_and_examples(text, fault):
    with pytest.raises(ValueError, match=fault) as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)
    assert '"12GiB", "8GB"' in str(caught.value)


@given(st.integers(0, 2**60))
def test_a_whole_number_of_bytes_is_read_exactly(count):
    assert parse_bytes(f"{count} B") == count


@given(st.integers(0, 2**60))
def test_what_is_written_can_be_read_back_to_its_digits(count):
    text = bytes_text(count)
    assert parse_bytes(text) == pytest.approx(count, rel=0.006, abs=1)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (12_799_000_000, "11.92 GiB"),
        (-3 * 2**29, "-1.50 GiB"),
        (5 * 2**60, "5120.00 PiB"),
    ],
)
def test_bytes_are_written(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.412, "412 ms"),
        (0.99949, "999 ms"),
        (0.9999, "1.00 s"),
        (1.084, "1.08 s"),
        (12.34, "12.3 s"),
        (99.96, "100 s"),
        (0.0412, "41.2 ms"),
        (0.0012, "1.20 ms"),
        (45e-6, "45.0 µs"),
        (2e-9, "2.00 ns"),
        (1e-12, "0.00 ns"),
    ],
)
def test_seconds_are_written_with_three_digits(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0, "0%"), (0.0001, "<0.1%"), (0.007, "0.7%"), (1, "100.0%"), (-0.02, "-2.0%")],
)
def test_fractions_are_written_in_percent(fraction, text):
    assert percent_text(fraction) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("rerun", "'rerun'"),
        (3, "3"),
        (None, "None"),
        (True, "True"),
        (dict, "the class dict"),
        (range(10**6), "range"),
        ([0] * 1000, "list"),
    ],
    ids=["str", "int", "None", "bool", "class", "range", "list"],
)
def test_a_wrong_argument_is_shown_in_few_words(value, text):
    assert argument_text(value) == text
