"""Ranges of bytes of storages."""

from __future__ import annotations

import pytest
import torch

from recollect.store.spans import Span, bytes_of, layout_of, span_of, span_to_store, tensor_on

BASE = torch.arange(4096.0).reshape(64, 64)

VIEWS = {
    "whole": BASE,
    "transpose": BASE.t(),
    "row": BASE[20],
    "column": BASE[:, 3],
    "expanded": BASE[5:6].expand(7, 64),
    "every third": BASE[10:50:3, 1::5],
    "diagonal": BASE.diagonal(),
    "scalar": BASE[63, 63],
    "other dtype": BASE.view(torch.int16)[:, 7],
    "overlapping": BASE.as_strided((5, 8), (2, 1), 1000),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_tensor_comes_back_from_its_bytes(view):
    layout = layout_of(view)
    span = span_of(layout)
    again = tensor_on(bytes_of(view.untyped_storage(), span).clone(), span.start, layout)
    assert torch.equal(again, view)
    assert (again.stride(), again.dtype) == (view.stride(), view.dtype)
    assert again.untyped_storage().nbytes() == span.size


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_span_ends_with_the_last_value(view):
    span = span_of(layout_of(view))
    indices = torch.arange(4096 * 4, dtype=torch.int32)
    item = view.element_size()
    at = indices.as_strided(view.size(), [s * item for s in view.stride()], 0)
    assert span.end == view.storage_offset() * item + int(at.max()) + item


def test_a_span_starts_where_memory_is_aligned_for_any_dtype():
    span = span_of(layout_of(BASE.view(torch.uint8).flatten()[1001:1005]))
    assert span.start % 512 == 0
    assert span.start <= 1001 < span.start + 512


@pytest.mark.parametrize(
    ("span", "stored"),
    [
        (Span(0, 499), Span(0, 499)),
        (Span(512, 1000), Span(512, 1000)),
        (Span(0, 500), Span(0, 1000)),
        (Span(400, 1000), Span(0, 1000)),
    ],
)
def test_less_than_half_of_a_storage_is_stored_alone(span, stored):
    assert span_to_store(span, 1000) == stored


def test_a_span_covers_what_lies_within():
    assert Span(0, 10).covers(Span(0, 10))
    assert not Span(0, 10).covers(Span(5, 11))
    assert not Span(1, 10).covers(Span(0, 5))
