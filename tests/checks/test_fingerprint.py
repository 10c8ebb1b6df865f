"""Fingerprints: what they depend on, what they do not, and that nobody notices them being taken."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from recollect.checks import fingerprint as module
from recollect.checks.fingerprint import compare, fingerprint
from tests._support import measure


def number(tensor: Tensor) -> int:
    found = fingerprint(tensor)
    assert found.shape == ()
    assert found.dtype is torch.int64
    assert not found.requires_grad
    return found.item()


# --- what it depends on ---------------------------------------------------------------------------

MODULO = 1 << 64


def mixed(value: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value = (value ^ shifted(value)) * factor % MODULO
    return value ^ shifted(value)


def shifted(value: int) -> int:
    signed = value - MODULO if value >= MODULO // 2 else value
    return (signed >> 33) % MODULO


def test_is_the_sum_that_it_says_it_is() -> None:
    words = [5, -7, 1 << 62, -(1 << 63)]
    places = ((n * 0x9E3779B97F4A7C15 + word) % MODULO for n, word in enumerate(words, 1))
    expected = sum(mixed(place) for place in places) % MODULO
    assert number(torch.tensor(words)) % MODULO == expected


def flip_bits(bits: int, *positions: int) -> Callable[[Tensor], None]:
    def change(x: Tensor) -> None:
        for position in positions:
            x.view(torch.int32)[position] ^= bits

    return change


def swap(x: Tensor) -> None:
    x[[3, 8]] = x[[8, 3]]


def trade(x: Tensor) -> None:
    x[3] += 1
    x[8] -= 1


def reverse(x: Tensor) -> None:
    x.copy_(x.flip(0))


@pytest.mark.parametrize(
    "change",
    [
        swap,
        trade,
        reverse,
        flip_bits(1, 0),
        flip_bits(1, 9),
        flip_bits(1, 2, 7),
        flip_bits(-(1 << 31), 4),
        flip_bits(-(1 << 31), 1, 3),
        flip_bits(-(1 << 31), *range(10)),
        flip_bits(-1, 1, 3),
    ],
)
def test_notices(change: Callable[[Tensor], None]) -> None:
    x = torch.arange(1, 11, dtype=torch.float32)
    y = x.clone()
    change(y)
    assert number(x) != number(y)


@pytest.mark.parametrize("bits", [1, 1 << 52, -(1 << 63), -1])
def test_equal_changes_of_two_words_do_not_cancel_out(bits: int) -> None:
    x = torch.arange(500)
    seen = {number(x)}
    for other in range(1, 500):
        y = x.clone()
        y[0] ^= bits
        y[other] ^= bits
        seen.add(number(y))
    assert len(seen) == 500


def test_tells_what_compares_equal_from_each_other() -> None:
    assert number(torch.tensor([0.0])) != number(torch.tensor([-0.0]))
    payloads = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    one, other = payloads.split(1)
    assert one.isnan().all()
    assert other.isnan().all()
    assert number(one) != number(other)
    assert number(one) == number(one.clone())


DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    # torch can neither fill nor copy these, so no op could have made one.
    - {getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in range(1, 8)}
    - {getattr(torch, name) for name in ("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16")}
    - {getattr(torch, f"q{name}") for name in ("int8", "uint8", "int32", "uint4x2", "uint2x4")},
    key=str,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, 8])
def test_every_dtype(dtype: torch.dtype, count: int) -> None:
    raw = torch.arange(count * dtype.itemsize, dtype=torch.uint8) % 2
    x = raw.view(dtype)
    assert number(x) == number(raw.clone().view(dtype))
    for position in (0, len(raw) - 1):
        other = raw.clone()
        other[position] ^= 1
        assert number(other.view(dtype)) != number(x)


def test_the_dtypes_are_the_common_ones_and_more() -> None:
    assert len(DTYPES) >= 20
    assert {torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex128} < set(DTYPES)


def test_zeros_of_different_number_differ() -> None:
    """Of a multiple of eight bytes, that is: the shape, which always differs, is not part of it."""
    assert len({number(torch.zeros(count)) for count in (0, 2, 4, 6, 100)}) == 5


# --- what it does not depend on -------------------------------------------------------------------


def wide() -> Tensor:
    return torch.randn(6, 5, 4).to(torch.bfloat16)


@pytest.mark.parametrize(
    "view",
    [
        lambda: wide().permute(2, 0, 1),
        lambda: wide()[1:, :, 1::2],
        lambda: wide()[::5, 1:2, :1],
        lambda: wide().flatten()[1:],
        lambda: wide().flatten()[3::7],
        lambda: wide().as_strided((1,), (9,), 5),
        lambda: wide()[:, :1].expand(6, 7, 4),
        lambda: wide()[2, 3, 1],
        lambda: wide().contiguous(memory_format=torch.contiguous_format).unfold(1, 3, 1),
        lambda: torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        lambda: torch.randn(5, dtype=torch.complex64).conj(),
        lambda: torch.randn(5, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(6, dtype=torch.complex128).conj()[1::2],
    ],
)
def test_a_view_is_as_good_as_a_copy(view: Callable[[], Tensor]) -> None:
    x = view()
    copy = torch.tensor(x.tolist(), dtype=x.dtype)
    assert copy.is_contiguous()
    assert not copy.is_conj()
    assert number(x) == number(copy)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_ON_CPU", 64)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("shape", [(100,), (3, 40), (40, 3), (2, 3, 7, 5), (1, 1, 100), (17, 16)])
def test_in_pieces(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    pieces = list(module._pieces(x))
    assert 1 < len(pieces) < 3 * x.nbytes / 64 + 2
    assert torch.equal(torch.cat(pieces), x.flatten())
    assert max(piece.nbytes for piece in pieces) <= 64

    order = tuple(reversed(range(x.dim())))
    transposed = x.permute(order).contiguous().permute(order)
    assert number(transposed) == number(x)
    seen = {number(x)}
    for position in range(x.numel()):
        y = x.clone()
        y.view(-1)[position] += 1
        seen.add(number(y))
    assert len(seen) == x.numel() + 1


@pytest.mark.usefixtures("small_pieces")
def test_pieces_that_change_places_are_noticed() -> None:
    x = torch.randn(4, 16)
    assert number(x) != number(x[[1, 0, 2, 3]])


def test_scratch_space_is_bounded() -> None:
    def take(x: Tensor) -> int:
        return measure(lambda: fingerprint(x), lambda result: None).peak

    x = torch.randn(2048, 4096)
    assert x.nbytes == 2**25
    assert take(x) < 2**23
    assert take(x.T) < 2**23


# --- tensors of other kinds -----------------------------------------------------------------------


def test_empty_and_scalar() -> None:
    assert number(torch.empty(0)) == number(torch.empty(3, 0, 2)) == 0
    assert number(torch.tensor(1.5)) == number(torch.tensor([1.5]))
    assert number(torch.tensor(1.5)) != number(torch.tensor(2.5))


def coo(scale: float) -> Tensor:
    return torch.tensor([[0.0, 1.0], [scale, 0.0]]).to_sparse()


def strided_nested(scale: float) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors is in prototype stage")
        return torch.nested.nested_tensor([torch.ones(2), torch.full((3,), scale)])


def jagged(scale: float) -> Tensor:
    rows = [torch.ones(2), torch.full((3,), scale)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def compressed(to: str) -> Callable[[float], Tensor]:
    def make(scale: float) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Sparse .* support is in beta state")
            dense = torch.eye(4) * scale
            return getattr(dense, to)(*([(2, 2)] if to.startswith("to_sparse_bs") else []))

    return make


def quantized(scale: float) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.full((3,), 7.0), scale, 0, torch.qint8)


class Pair(Tensor):
    """A wrapper of two tensors."""

    @staticmethod
    def __new__(cls, one: Tensor, other: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype)

    def __init__(self, one: Tensor, other: Tensor) -> None:
        self.one, self.other = one, other

    def __tensor_flatten__(self) -> Any:
        return ["one", "other"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called on the wrapper")


class Labelled(Tensor):
    """A subclass that holds its own data and refuses torch functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called on the subclass")


KINDS = {
    "coo": coo,
    "csr": compressed("to_sparse_csr"),
    "csc": compressed("to_sparse_csc"),
    "bsr": compressed("to_sparse_bsr"),
    "bsc": compressed("to_sparse_bsc"),
    "nested": strided_nested,
    "jagged": jagged,
    "quantized": quantized,
    "mkldnn": lambda scale: torch.full((2, 2), scale).to_mkldnn(),
    "wrapper": lambda scale: Pair(torch.ones(2), torch.full((2,), scale)),
    "subclass": lambda scale: torch.full((2,), scale).as_subclass(Labelled),
    "parameter": lambda scale: torch.nn.Parameter(torch.full((2,), scale)),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_other_kinds_are_taken_by_what_they_hold(make: Callable[[float], Tensor]) -> None:
    assert number(make(2.0)) == number(make(2.0))
    assert number(make(2.0)) != number(make(3.0))


def test_the_parts_of_a_wrapper_have_their_places() -> None:
    one, other = torch.ones(2), torch.zeros(2)
    assert number(Pair(one, other)) != number(Pair(other, one))


def test_what_a_jagged_tensor_has_cached_makes_no_difference() -> None:
    x = jagged(2.0)
    lazy = torch.nested.nested_tensor_from_jagged(x.values(), x.offsets())
    assert lazy.__tensor_flatten__()[0] != x.__tensor_flatten__()[0]
    assert number(lazy) == number(x)


def test_the_result_of_a_collective_is_waited_for() -> None:
    class Pending(Pair):
        def trigger_wait(self) -> Tensor:
            return self.one + 1

    assert number(Pending(torch.ones(2), torch.ones(2))) == number(torch.full((2,), 2.0))


class Opaque(Pair):
    """Tells nobody what it is made of."""

    __tensor_flatten__ = property()


def test_without_data_all_are_equal() -> None:
    on_meta = fingerprint(torch.empty(3, device="meta"))
    with FakeTensorMode() as mode:
        fake = fingerprint(torch.ones(3))
        other = mode.from_tensor(torch.tensor(2.0))
    assert number(other) == 0
    opaque = fingerprint(Opaque(torch.ones(1), torch.ones(1)))
    assert on_meta.device == fake.device == opaque.device == torch.device("cpu")
    assert compare([on_meta, fake], [fake, opaque]) is None


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_inside_a_transform(transform: Callable[..., Any]) -> None:
    """What is being transformed counts as without data; other tensors do not."""
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.extend((number(x), number(constant)))
        assert compare([fingerprint(constant)], [fingerprint(constant + 1)]) == 0
        return x.sum()

    constant = torch.ones(2)
    transform(function)(torch.ones(3))
    assert seen == [0, number(constant)]


# --- nobody notices -------------------------------------------------------------------------------


class NoOps(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


class NoFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


def refuse(value: Any) -> Any:
    raise AssertionError(value)


AROUND = {
    "dispatch mode": NoOps,
    "function mode": NoFunctions,
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(refuse, refuse),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "a fake mode": FakeTensorMode,
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_modes_neither_see_nor_change_it(around: Callable[[], Any]) -> None:
    x = torch.randn(3, 4, requires_grad=True).T
    expected = number(x)
    state = torch.get_rng_state()
    with around():
        first, second = fingerprint(x), fingerprint(x)
        assert compare([first], [second]) is None
    assert first.item() == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert x._version == 0


def test_the_tensor_is_left_as_it_was() -> None:
    x = torch.arange(8)
    fingerprint(x)
    assert x.tolist() == list(range(8))


def test_works_where_algorithms_must_be_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert number(torch.ones(9)[1:]) == number(torch.ones(8))
    finally:
        torch.use_deterministic_algorithms(False)


# --- compare --------------------------------------------------------------------------------------


def prints(*values: int) -> list[Tensor]:
    return [torch.tensor(value) for value in values]


@pytest.mark.parametrize(
    ("before", "after", "first"),
    [
        ([], [], None),
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 0, 0], 1),
        ([1, 2], [0, 2], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2], [1], 1),
        ([1, 2], [0], 0),
    ],
)
def test_first_that_differs(before: list[int], after: list[int], first: int | None) -> None:
    assert compare(prints(*before), prints(*after)) == first


def test_many_are_fetched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: fetched.append(len(self)) or tolist(self))
    assert compare(prints(*range(1000)), prints(*range(1000))) is None
    assert fetched == [1000]


def test_another_device_is_a_difference() -> None:
    elsewhere = torch.zeros((), dtype=torch.int64, device="meta")
    assert compare(prints(0, 0), [*prints(0), elsewhere]) == 1


# --- on a device ----------------------------------------------------------------------------------


def test_zeros_without_memory() -> None:
    """As forward-mode AD makes them of weights: to read their memory is a crash."""
    zeros = torch._efficientzerotensor((3,))
    assert number(zeros) == number(torch.empty(3, device="meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_gives_the_same_number(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2, (100_003 * dtype.itemsize,), dtype=torch.uint8)
    x = raw.view(dtype)
    found = {number(x.cuda()) for _ in range(3)}
    assert fingerprint(x.cuda()).device.type == "cuda"
    assert found == {number(x)}
    assert number(x.cuda()[1:]) == number(x[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_in_pieces_under_autocast_and_across_devices() -> None:
    x = torch.randn(3000, 1001)
    with torch.autocast("cuda"):
        assert number(x.cuda().T) == number(x.T.contiguous().cuda())
        assert number(x.cuda()) != number(x.cuda().neg())
    before = [fingerprint(t) for t in (x, x.cuda(), x, x.cuda())]
    after = [fingerprint(t) for t in (x, x.cuda(), x, -x.cuda())]
    assert compare(before, before) is None
    assert compare(before, after) == 3
    assert compare(before, [after[0], after[2], *after[2:]]) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_cuda_waits_for_nothing() -> None:
    x = torch.randn(1000, device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        found = fingerprint(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.item() == number(x.cpu())
