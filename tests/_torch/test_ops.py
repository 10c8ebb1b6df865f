"""What the schema and the tags of an op say about it."""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recollect._torch.dynamo import inductor_region_key
from recollect._torch.ops import (
    _BINDINGS,
    arguments_of,
    bare_op,
    has_tag,
    metadata_ops,
    packet_of,
    returned_aliases,
)


def test_metadata_ops_are_those_that_torch_ignores():
    assert metadata_ops() < torch.utils.checkpoint.SAC_IGNORED_OPS
    assert torch.ops.aten.sym_size.default in metadata_ops()


def test_schemas_and_tags_of_ops():
    aten, cond = torch.ops.aten, torch.ops.higher_order.cond
    (first, out) = arguments_of(aten.sin.out)
    assert first == (0, "self", "Tensor", False, False)
    assert out == (1, "out", "Tensor", True, True)
    assert "Generator" in arguments_of(aten.normal_.default)[3].type
    assert arguments_of(cond) == []
    assert returned_aliases(aten.topk.default) == [False, False]
    assert returned_aliases(aten.add_.Tensor) == [True]
    assert returned_aliases(cond) is None
    assert has_tag(aten.sin.default, torch.Tag.pointwise)
    assert not has_tag(aten.mm.default, torch.Tag.pointwise)
    assert not has_tag(cond, torch.Tag.pointwise)


def test_an_op_is_known_by_itself():
    op = torch.ops.higher_order.cond
    assert inductor_region_key(op, (1,)) is op
    assert bare_op(functools.reduce) is functools.reduce


def test_the_op_that_a_function_is_named_after():
    aten = torch.ops.aten
    assert packet_of(torch.mm) is aten.mm
    assert packet_of(torch.Tensor.mm) is aten.mm
    assert packet_of(torch.nn.functional.gelu) is aten.gelu
    assert packet_of(print) is None
    assert packet_of(3) is None
    assert packet_of(lambda x: x) is None


class Log(TorchDispatchMode):
    """The ops that reach the kernels, with their arguments."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shown = [id(a) if isinstance(a, torch.Tensor) else (type(a), a) for a in args]
        self.ops.append((func, str(shown), kwargs or {}))
        return func(*args, **(kwargs or {}))


MATRIX, BATCH = torch.rand(4, 4) + 0.5, torch.rand(2, 4, 4) + 0.5
ROW = MATRIX[0]

#: More calls than with a matrix alone.
CALLS = {
    "_softmax": [((MATRIX, -1, False), {})],
    "addmm": [((ROW, MATRIX, MATRIX), {}), ((ROW, MATRIX, MATRIX), {"beta": 2, "alpha": 0.5})],
    "baddbmm": [((BATCH, BATCH, BATCH), {}), ((BATCH, BATCH, BATCH), {"beta": 0.5})],
    "bmm": [((BATCH, BATCH), {})],
    "cat": [(([MATRIX, MATRIX],), {}), (([MATRIX, MATRIX], -1), {})],
    "clone": [((MATRIX,), {}), ((MATRIX,), {"memory_format": torch.contiguous_format})],
    "embedding": [
        ((MATRIX, torch.tensor([1, 2])), {}),
        ((MATRIX, torch.tensor([1, 2]), 1, True, False), {}),
    ],
    "expand": [((MATRIX, [3, 4, 4]), {}), ((MATRIX, [2, -1, -1]), {"implicit": True})],
    "gelu": [((MATRIX,), {}), ((MATRIX,), {"approximate": "tanh"})],
    "mm": [((MATRIX, MATRIX), {})],
    "native_layer_norm": [
        ((MATRIX, [4], ROW, ROW, 1e-5), {}),
        ((MATRIX, [4], None, None, 1e-5), {}),
    ],
    "permute": [((BATCH, [2, 0, -2]), {})],
    "pow": [((MATRIX, 2), {}), ((MATRIX, 0.5), {}), ((MATRIX, True), {})],
    "select": [((BATCH, 1, -1), {})],
    "transpose": [((BATCH, -1, 0), {})],
    "unsqueeze": [((MATRIX, -1), {})],
    "view": [((BATCH, [8, 4]), {}), ((BATCH, [-1]), {}), ((MATRIX[0, 0], []), {})],
}
for name in ("add", "div", "mul", "sub"):
    others = (MATRIX, ROW, 2, 2.5, 1j)
    CALLS[name] = [((MATRIX, other), {}) for other in others] + [((2, MATRIX), {})]
for name in ("add", "sub"):
    CALLS[name] += [((MATRIX, MATRIX), {"alpha": 2}), ((MATRIX, 3), {"alpha": 0.5})]
for name in ("mean", "sum"):
    dims = [((MATRIX, dim), {}) for dim in ([0], [], None, [-1, 0])]
    CALLS[name] = [*dims, ((MATRIX, [-1], True), {}), ((MATRIX, [0]), {"dtype": torch.float64})]


@pytest.mark.parametrize("op", _BINDINGS, ids=str)
def test_a_function_in_the_place_of_an_op_runs_that_op(op):
    for args, kwargs in CALLS.get(op._schema.name.partition("::")[2], [((MATRIX,), {})]):
        found = []
        for function in (op._op, bare_op(op)):
            with Log() as log:
                out = function(*args, **kwargs)
            found.append((type(out), log.ops, out))
        (kind, ops, out), (other_kind, other_ops, other) = found
        assert [each[0] for each in ops] == [op]
        assert (other_kind, other_ops) == (kind, ops)
        results = zip(*((each if kind is tuple else (each,)) for each in (out, other)), strict=True)
        for a, b in results:
            assert torch.equal(a, b)
            assert a.dtype is b.dtype
            assert a.stride() == b.stride()
