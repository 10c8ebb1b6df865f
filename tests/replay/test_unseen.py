"""What is not seen, or was otherwise when it was: memory, generators, libraries, threads, switches.

Each case is a region that is called several times: the first call records, the others are checked
against the recording. Outputs, gradients and random streams must be those of plain autograd, bit
for bit, without a policy, with one, and as under a plan by which all that can be is made again.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.attention import SDPBackend, sdpa_kernel

import recollect
from recollect import policy
from recollect._torch.ops import OpOverload
from recollect.errors import InputChanged
from recollect.policy.op_info import op_info
from recollect.replay.engine import LeftToRerun, replay_region
from recollect.replay.named_schedule import NamedSchedule
from recollect.replay.recording_cache import _entries
from recollect.state.flags import read_flags
from recollect.store.offload_batch import OffloadBatch
from tests._support import assert_identical, assert_transparent, leaf, plain, play
from tests.distributed._ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:the policy's .* matched nothing:UserWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
    # torch's own, in setting a switch and in taking derivatives forward.
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

_NOTHING_KEPT = NamedSchedule()


def planned(function: Any, *args: Any) -> Any:
    """Call a region as under a plan."""
    out = replay_region(function, args, {}, _NOTHING_KEPT, OffloadBatch(), False)
    return out if type(out) is not LeftToRerun else recollect.checkpoint(function, *args)


replay = partial(recollect.checkpoint, engine="replay")
RUNS = {
    "replay": replay,
    "matmuls": partial(replay, policy=policy.matmuls()),
    "everything": partial(replay, policy=policy.everything()),
    "planned": planned,
}
ALL = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)

Make = Callable[[int], tuple[Tensor, ...]]


def square(number: int) -> tuple[Tensor, ...]:
    return (torch.rand(4, 4, requires_grad=True),)


def check(run: Any, region: Callable[..., Tensor], make: Make = square, count: int = 5) -> None:
    """``count`` calls of ``region`` have the outcome of plain autograd."""
    assert_transparent(partial(calls, region, make, count), run)


def calls(region: Callable[..., Tensor], make: Make, count: int, run: Any) -> list[Any]:
    found = []
    for number in range(count):
        CALL.number = number
        inputs = make(number)
        out = run(region, *inputs)
        leaves = [each for each in inputs if each.requires_grad]
        weights = torch.linspace(0.5, 1.5, out.numel(), device=out.device).view(out.shape)
        grads = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
        found.append([out.detach().clone(), *grads])
    return found


class CALL:
    """Which call of a region this is, for regions that are others in some calls."""

    number = 0


def is_late() -> bool:
    return CALL.number in (2, 3)


#: When something happens that nobody sees: in every call, or in some that are checked.
WHEN = {"always": lambda: True, "late": is_late, "at first": lambda: not is_late()}
ALWAYS_OR_NOT = pytest.mark.parametrize("when", WHEN.values(), ids=WHEN)


# --- where a tensor begins in its memory ----------------------------------------------------------


def pieces(number: int) -> tuple[Tensor, ...]:
    """A piece of a larger memory, in other places from the third call on, and a leaf."""
    start = (0, 0, 8, 16, 16)[number]
    return torch.randn(64)[start : start + 16].view(4, 4), leaf(4, 4)


def by_method(x: Tensor) -> Tensor:
    return x.as_strided((4, 4), (4, 1), 2)


def by_function(x: Tensor) -> Tensor:
    return torch.as_strided(x, (4, 4), (4, 1), storage_offset=2)


def by_op(x: Tensor) -> Tensor:
    return torch.ops.aten.as_strided.default(x, (4, 4), (4, 1), 2)


def in_place(x: Tensor) -> Tensor:
    return x.detach().as_strided_((4, 4), (4, 1), 2)


def of_a_view(x: Tensor) -> Tensor:
    return x[1:].t().as_strided((4, 4), (4, 1), 2)


def of_the_base(x: Tensor) -> Tensor:
    assert x._base is not None
    return x._base[2:18].view(4, 4)


def copied(x: Tensor) -> Tensor:
    return torch.as_strided_copy(x, (4, 4), (4, 1), 2)


def by_number(x: Tensor) -> Tensor:
    return x * x.storage_offset()


def by_storage(x: Tensor) -> Tensor:
    return torch.empty(0).set_(x.untyped_storage(), 2, (4, 4), (4, 1))


def written(x: Tensor) -> Tensor:
    x.as_strided((4, 4), (4, 1), 2).mul_(2)
    return x * 1.0


ABSOLUTE = [by_method, by_function, by_op, in_place, of_a_view, of_the_base, copied, by_number]
ABSOLUTE += [by_storage, written]


@ALL
@pytest.mark.parametrize("look", ABSOLUTE, ids=lambda f: f.__name__)
def test_a_view_that_counts_from_the_beginning_of_a_memory(look: Any, run: Any) -> None:
    def region(x: Tensor, w: Tensor) -> Tensor:
        return (look(x) * w).sin() * w

    check(run, region, pieces)


@ALL
def test_such_a_view_of_a_tensor_in_a_closure(run: Any) -> None:
    big = torch.randn(64)

    def region(w: Tensor) -> Tensor:
        x = big[CALL.number // 2 * 3 :][:16].view(4, 4)
        return (x.as_strided((4, 4), (4, 1), 2) * w).sin() * w

    check(run, region, lambda _: (leaf(4, 4),))


@ALL
def test_such_a_view_of_what_others_have_made(run: Any) -> None:
    def region(w: Tensor) -> Tensor:
        x = torch.from_numpy(torch.arange(40.0).numpy())[CALL.number :][:16]
        return (x.as_strided((4, 4), (4, 1), 2) * w).sin() * w

    check(run, region, lambda _: (leaf(4, 4),))


@ALL
def test_such_a_view_of_what_a_library_gives_a_piece_of(run: Any, library: Any) -> None:
    def region(w: Tensor) -> Tensor:
        x = torch.ops.recollect_unseen.piece(w.detach(), CALL.number)
        return (x.as_strided((2, 2), (2, 1), 5) * w[:2, :2]).sin() * w[2:, 2:]

    check(run, region, lambda _: (leaf(4, 4),))


def test_such_a_view_of_what_the_region_made_is_recorded_once() -> None:
    def region(x: Tensor) -> Tensor:
        h = (x * 2).view(-1)[3:]
        return h.as_strided((4,), (2,), 1).sin() * h.as_strided((4,), (1,), 5).exp()

    assert set(kept(region, replay).values()) == {None}
    (entry,) = _entries[region.__code__].values()
    assert entry.difference is entry.unsettled is None


# --- generators -----------------------------------------------------------------------------------

OWN = torch.Generator()
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "poisson": lambda x: torch.poisson(x * 5, OWN),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 5.0), x, OWN),
    "gamma": lambda x: torch._standard_gamma(x + 1, OWN),
    "dirichlet": lambda x: torch._sample_dirichlet(x + 1, OWN),
    "rrelu": lambda x: torch.rrelu(x - 0.5, 0.1, 0.4, True, OWN),
    "rrelu_": lambda x: torch.rrelu_((x - 0.5).clone(), 0.1, 0.4, True, OWN),
    "by keyword": lambda x: torch.poisson(x * 5, generator=OWN),
    "into": lambda x: torch.ops.aten.poisson.out(x * 5, OWN, out=torch.empty(4, 4)),
    "of the process": lambda x: torch.poisson(x * 5, None),
    "normal": lambda x: torch.normal(x, 1.0, generator=OWN),
    "uniform_": lambda x: torch.empty(4, 4).uniform_(generator=OWN),
    "multinomial": lambda x: x * torch.multinomial(x, 4, generator=OWN),
}


@ALL
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_generator_is_found_wherever_the_schema_has_it(draw: Any, run: Any) -> None:
    def region(x: Tensor) -> Tensor:
        return (draw(x.detach()) * x).sin() * x

    def scenario(run: Any) -> Any:
        OWN.manual_seed(7)
        return calls(region, square, 4, run), OWN.get_state()

    assert_transparent(scenario, run)


def all_ops() -> Iterator[OpOverload]:
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        try:
            yield getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        except AttributeError:  # known to the dispatcher, and to nobody else
            continue


def test_every_op_of_torch_that_takes_a_generator_is_known_by_it() -> None:
    found = 0
    for op in all_ops():
        arguments = op._schema.arguments
        if "Generator" not in str(op._schema) or op.namespace != "aten":
            continue
        found += 1
        given = [OWN if "Generator" in str(each.type) else None for each in arguments]
        named = {each.name: value for each, value in zip(arguments, given, strict=True)}
        info = op_info(op)
        assert info.is_random, op
        assert info.generator((), named) is OWN, op
        # By position as far as the schema takes them so.
        count = sum(not each.kwarg_only for each in arguments)
        rest = dict([*named.items()][count:])
        assert info.generator(tuple(given[:count]), rest) is OWN, op
        assert info.generator((), {}) is None
    assert found > 80


# --- ops of other libraries -----------------------------------------------------------------------

STATE = torch.zeros(4, 4)
COUNTS = [0]


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    library = torch.library.Library("recollect_unseen", "DEF")
    anywhere = "CompositeExplicitAutograd"
    library.define("noise(Tensor x) -> Tensor")
    library.impl("noise", lambda x: x + torch.rand_like(x), anywhere)
    library.define("counted(Tensor x) -> Tensor")
    library.impl("counted", counted, anywhere)
    library.define("moving(Tensor x) -> Tensor")
    library.impl("moving", lambda x: STATE.mul_(0.5).add_(x).clone(), anywhere)
    library.define("fill(Tensor x, Tensor(a!) y) -> ()")
    library.impl("fill", fill, anywhere)
    library.define("piece(Tensor x, int start) -> Tensor")
    library.impl("piece", lambda x, start: torch.cat([x.view(-1)] * 2)[start : start + 8], anywhere)
    library.define("scaled(Tensor x) -> Tensor", tags=torch.Tag.pointwise)
    library.impl("scaled", lambda x: x * 3, anywhere)
    library.define("plainly(Tensor x) -> Tensor")
    library.impl("plainly", lambda x: x * 3, anywhere)
    library.define("_flash_attn(Tensor q, float dropout_p) -> Tensor")
    yield library
    library._destroy()


def counted(x: Tensor) -> Tensor:
    COUNTS[0] += 1
    return x * COUNTS[0]


def fill(x: Tensor, y: Tensor) -> None:
    y.copy_(x * torch.rand_like(x))


def filled(x: Tensor) -> Tensor:
    y = torch.zeros(4, 4)
    torch.ops.recollect_unseen.fill(x, y)
    return y


def call_op(name: str, x: Tensor) -> Tensor:
    return getattr(torch.ops.recollect_unseen, name)(x)


CUSTOM: dict[str, Callable[[Tensor], Tensor]] = {
    "draws": partial(call_op, "noise"),
    "draws, by overload": lambda x: torch.ops.recollect_unseen.noise.default(x + 1),
    "counts": partial(call_op, "counted"),
    "has a state": partial(call_op, "moving"),
    "fills": filled,
}


@ALL
@pytest.mark.parametrize("op", CUSTOM.values(), ids=CUSTOM)
def test_ops_of_other_libraries_are_not_run_again(op: Any, run: Any, library: Any) -> None:
    def region(x: Tensor) -> Tensor:
        return (op(x.detach() * 2) * x).sin() * F.dropout(x)

    def scenario(run: Any) -> Any:
        STATE.zero_()
        COUNTS[0] = 0
        return calls(region, square, 4, run), STATE.clone(), COUNTS[0]

    assert_transparent(scenario, run)


@pytest.fixture(scope="module")
def custom() -> Any:
    @torch.library.custom_op("recollect_unseen_custom::drop", mutates_args=())
    def drop(x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > 0.5)

    def save(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        return torch.where(x == out, grad, 0)

    drop.register_autograd(backward, setup_context=save)
    return drop


@ALL
def test_a_custom_op_with_a_gradient_is_not_run_again(custom: Any, run: Any) -> None:
    def region(x: Tensor) -> Tensor:
        return custom(x * 2).sin() * F.dropout(x)

    check(run, region)


def kept(region: Callable[..., Any], run: Any) -> dict[str, str | None]:
    """Why the ops of a region are not run again, by name of the op."""
    check(run, region)
    (entry,) = _entries[region.__code__].values()
    assert entry.recording is not None
    return {str(op.op): op.keep for op in entry.recording.graph.ops}


def test_which_ops_of_others_are_run_again(library: Any) -> None:
    def region(x: Tensor) -> Tensor:
        h = torch.ops.recollect_unseen.scaled(x.detach() * 2)
        return torch.ops.recollect_unseen.plainly(h) * x

    names = [f"recollect_unseen.{name}.default" for name in ("scaled", "plainly")]
    found = kept(region, replay)
    # Its author says that it is a function of each element.
    assert found[names[0]] is None
    assert found[names[1]] == "of another library"

    def insisting(x: Tensor) -> Tensor:
        return torch.ops.recollect_unseen.plainly(x.detach() * 2) * x

    rule = policy.recompute_ops(torch.ops.recollect_unseen.plainly)
    assert kept(insisting, partial(replay, policy=rule))[names[1]] is None


def test_attention_of_others_is_run_again_if_it_drops_nothing(monkeypatch: Any) -> None:
    library = torch.library.Library("flash_attn", "FRAGMENT")
    library.define("_flash_attn_forward(Tensor q, float dropout_p) -> Tensor")
    try:
        info = op_info(torch.ops.flash_attn._flash_attn_forward.default)
        q = torch.ones(2)
        assert info.is_pure((q, 0.0), {})
        assert not info.is_pure((q, 0.1), {})
        assert not info.is_pure((q,), {"dropout_p": 0.1})
    finally:
        library._destroy()


def test_ops_that_write_without_a_word() -> None:
    """Collectives write to what they are given, and their schemas do not say so."""
    assert op_info(torch.ops.c10d.allreduce_.default).writes_uncounted
    assert not op_info(torch.ops.aten.mm.default).writes_unseen
    assert not op_info(torch.ops.higher_order.flex_attention).writes_unseen
    assert op_info(torch.ops.higher_order.cond).writes_unseen


# --- writes that no op was seen to make -----------------------------------------------------------


def elsewhere(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def write_elsewhere(h: Tensor) -> None:
    def work() -> None:
        with torch.no_grad():
            h.mul_(3).add_(1)

    elsewhere(work)


def triple(h: Tensor) -> None:
    h.mul_(3)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    write_by_script = torch.jit.script(triple)


def write_uncounted(h: Tensor) -> None:
    torch.autograd.graph.increment_version(h)
    h.detach().numpy()[0] = 7.0


WRITES = {
    "thread": write_elsewhere,
    "script": lambda h: write_by_script(h.detach()),
    "counted by hand": write_uncounted,
    "address": lambda h: ctypes.memset(h.data_ptr(), 0, 16),
}


class Saves(Function):
    """Saves a tensor outside of all functions of torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


def used(x: Tensor, h: Tensor) -> Tensor:
    return (h * x).sin() * h.exp() * x


def seen_before(x: Tensor, h: Tensor) -> Tensor:
    return (h[1:] * x[1:]).sin()


def saved_by_function(x: Tensor, h: Tensor) -> Tensor:
    return Saves.apply(x, h).sin()


def tagged(x: Tensor, h: Tensor) -> Tensor:
    return used(x, recollect.tag(h, "h"))


def written_again(x: Tensor, h: Tensor) -> Tensor:
    h.add_(1)
    return used(x, h)


def joined(x: Tensor, h: Tensor) -> Tensor:
    return torch.cat([h, x]).sin()


USES = [used, seen_before, saved_by_function, tagged, written_again, joined]


@ALL
@ALWAYS_OR_NOT
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("use", USES, ids=lambda f: f.__name__)
def test_a_write_that_nobody_sees(use: Any, write: Any, when: Any, run: Any) -> None:
    def region(x: Tensor) -> Tensor:
        h = x.detach() * 2
        if when():
            write(h)
        return use(x, h)

    check(run, region)


@ALL
@ALWAYS_OR_NOT
def test_a_write_by_another_thread_to_a_tensor_with_a_history(when: Any, run: Any) -> None:
    def region(x: Tensor) -> Tensor:
        h = x * 2
        view = h.t()
        if when():
            write_elsewhere(h)
        return (view * x).sin() * x

    check(run, region)


@ALL
@ALWAYS_OR_NOT
def test_a_write_by_another_thread_to_what_the_region_did_not_make(when: Any, run: Any) -> None:
    def region(x: Tensor, w: Tensor) -> Tensor:
        if when():
            write_elsewhere(w)
        return (w * x).sin() * x

    check(run, region, lambda _: (leaf(4, 4), torch.rand(4, 4)))


def test_what_was_kept_and_changed_by_another_thread_is_told() -> None:
    """It is wanted as it was, and must not be made again."""

    def region(x: Tensor) -> Tensor:
        h = x.detach().argsort(-1)
        y = h + x
        elsewhere(h.zero_)
        return (y.sin() + h) * x

    x = leaf(4, 4)
    out = replay(region, x)
    with pytest.raises(InputChanged, match="was changed after"):
        out.sum().backward()
    # By a plan it is made again.
    expected = torch.autograd.grad(region(x).sum(), x)
    for _ in range(3):
        assert_identical(torch.autograd.grad(planned(region, x).sum(), x), expected)


class InPlace(Function):
    """Counts its write when it is over."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.mark_dirty(h)
        return h.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_a_write_that_is_counted_late_is_none_that_nobody_saw() -> None:
    def region(x: Tensor) -> Tensor:
        h = InPlace.apply(x * 3)
        return h.sin() * x

    found = kept(region, replay)
    assert found["aten.mul_.Tensor"] is None
    assert found["aten.sin.default"] is None


@ALL
def test_threads_that_compute(run: Any) -> None:
    """As data-parallel layers do."""

    def region(x: Tensor) -> Tensor:
        h, found = x.detach() * 2, [Tensor()] * 2

        def work(number: int) -> None:
            found[number] = (h * x).sin() * (number + 1)

        for number in range(2):
            elsewhere(partial(work, number))
        return torch.stack(found).exp() * x

    check(run, region)


# --- code that a compiler made --------------------------------------------------------------------


def scale(h: Tensor, x: Tensor) -> None:
    h.mul_(x.detach())


def scale_past_autograd(h: Tensor, x: Tensor) -> None:
    h.data.mul_(3)


def scale_and_return(h: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        h.copy_(h * 3 + x)
    return h * 2


@pytest.mark.slow
@pytest.mark.parametrize("is_warm", [False, True], ids=["", "compiled before"])
@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "eager"])
@pytest.mark.parametrize("write", [scale, scale_past_autograd, scale_and_return])
def test_compiled_code_that_writes_to_a_tensor_of_the_region(
    write: Any, backend: str, is_warm: bool
) -> None:
    for run in (replay, planned):
        torch._dynamo.reset()
        compiled = torch.compile(write, backend=backend)
        if is_warm:
            compiled(torch.rand(4, 4), leaf(4, 4))

        def region(x: Tensor, compiled: Any = compiled) -> Tensor:
            h = x.detach() * 2
            compiled(h, x)
            return used(x, h)

        check(run, region)


# --- switches that the region sets itself ---------------------------------------------------------


def images(number: int) -> tuple[Tensor, ...]:
    return leaf(2, 16, 8, 8), leaf(8, 16, 3, 3)


def convolved(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(F.gelu(x), w).sin().exp()


@contextmanager
def no_mkldnn() -> Iterator[None]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def test_the_switch_of_the_test_changes_bits() -> None:
    torch.manual_seed(0)
    x, w = images(0)
    with no_mkldnn():
        other = convolved(x, w)
    assert not torch.equal(convolved(x, w), other)


@ALL
@ALWAYS_OR_NOT
def test_a_switch_set_for_a_part_of_the_region(when: Any, run: Any) -> None:
    def region(x: Tensor, w: Tensor) -> Tensor:
        y = convolved(x, w)
        if when():
            with no_mkldnn():
                y = y * convolved(x.exp(), w)
        else:
            y = y * convolved(x.exp(), w)
        return y.sin() * convolved(x.cos(), w)

    check(run, region, images)


@ALL
@ALWAYS_OR_NOT
def test_a_switch_that_the_region_leaves_set(when: Any, run: Any) -> None:
    def region(x: Tensor, w: Tensor) -> Tensor:
        y = convolved(x, w)
        if when():
            torch.backends.mkldnn.set_flags(_enabled=False)
        return y * convolved(x.exp(), w)

    def scenario(run: Any) -> Any:
        found = []
        for number in range(5):
            with torch.backends.mkldnn.flags(enabled=True):
                found += calls(region, lambda _, n=number: set_call(n) or images(n), 1, run)
        return found

    assert_transparent(scenario, run)


def set_call(number: int) -> None:
    CALL.number = number


@ALL
def test_a_switch_that_is_another_after_the_region(run: Any) -> None:
    def scenario(run: Any) -> Any:
        found = []
        for _ in range(4):
            x, w = images(0)
            with no_mkldnn():
                out = run(convolved, x, w)
            found.append(torch.autograd.grad(out.sum(), [x, w]))
        return found

    assert_transparent(scenario, run)


@ALL
def test_sums_are_taken_by_as_many_threads_as_before(run: Any) -> None:
    def region(x: Tensor) -> Tensor:
        torch.set_num_threads(2)
        try:
            total = x.sum()
        finally:
            torch.set_num_threads(1)
        return (total * x).sin() * x

    torch.manual_seed(0)
    before = torch.get_num_threads()
    try:
        check(run, region, lambda _: (leaf(100_003),))
    finally:
        torch.set_num_threads(before)


@ALL
def test_denormal_numbers_are_flushed_as_before(run: Any) -> None:
    def region(x: Tensor) -> Tensor:
        torch.set_flush_denormal(True)
        try:
            h = x * 1e-38
        finally:
            torch.set_flush_denormal(False)
        return (h * 1e38 * x).sin() * x

    check(run, region)


@ALL
def test_the_default_dtype_is_another_inside(run: Any) -> None:
    def region(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            h = torch.arange(4) / 3 + torch.full((4,), 0.1)
        finally:
            torch.set_default_dtype(torch.float32)
        return ((x * h).sin() * x).float()

    check(run, region)


@ALL
@ALWAYS_OR_NOT
def test_kernels_of_attention_are_chosen_inside(when: Any, run: Any) -> None:
    def region(x: Tensor) -> Tensor:
        q = x.sin().view(1, 1, 16, 4)
        with sdpa_kernel(SDPBackend.MATH if when() else SDPBackend.FLASH_ATTENTION):
            a = F.scaled_dot_product_attention(q, q, q)
        return (a * F.scaled_dot_product_attention(q, q, q)).exp()

    check(run, region, lambda _: (leaf(16, 4),))


@ALL
@ALWAYS_OR_NOT
def test_a_switch_around_a_product(when: Any, run: Any) -> None:
    def region(x: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=not when()):
            y = F.linear(F.layer_norm(x, (4,)), x).softmax(-1)
        with torch.autocast("cpu", torch.bfloat16, enabled=when()):
            return F.linear(y, y).float().exp() @ x

    check(run, region, lambda _: (leaf(4, 4),))


def test_backward_leaves_the_switches_as_they_are() -> None:
    def region(x: Tensor, w: Tensor) -> Tensor:
        with no_mkldnn():
            return convolved(x, w)

    for _ in range(3):
        x, w = images(0)
        flags = read_flags()
        replay(region, x, w).sum().backward()
        assert read_flags() == flags


def test_a_step_without_switches_of_its_own_costs_no_look_at_them() -> None:
    def region(x: Tensor) -> Tensor:
        return (x.sin() * x).exp().view(-1)

    check(replay, region)
    (entry,) = _entries[region.__code__].values()
    assert entry.recording is not None
    expected = entry.recording.expected
    while expected is not None:
        assert expected.flags is None
        expected = expected.following


# --- random streams that the region handles itself ------------------------------------------------


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        h = F.dropout(x, 0.5)
    return F.dropout(h * x, 0.5).sin().exp()


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    h = F.dropout(x, 0.5).sin()
    torch.manual_seed(CALL.number)
    return F.dropout(h * x, 0.5).exp()


def set_back(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    h = F.dropout(x, 0.5).sin()
    torch.set_rng_state(state)
    return F.dropout(h * x, 0.5).exp()


def initialized(x: Tensor) -> Tensor:
    h = torch.empty(4, 4)
    nn.init.trunc_normal_(h)
    y = h.clone() * x
    nn.init.kaiming_uniform_(h)
    return (y * h * nn.init.orthogonal_(torch.empty(4, 4))).sin().exp()


@ALL
@pytest.mark.parametrize("region", [forked, seeded, set_back, initialized])
def test_random_streams_that_the_region_handles_itself(region: Any, run: Any) -> None:
    check(run, region)


# --- forward-mode AD ------------------------------------------------------------------------------


def of_input(x: Tensor, dual: Tensor) -> Any:
    return (lambda x, y: (x.sin() * y).exp()), (x, dual)


def of_closure(x: Tensor, dual: Tensor) -> Any:
    return (lambda x: (x.sin() * dual).exp()), (x,)


def of_parameter(x: Tensor, dual: Tensor) -> Any:
    layer = nn.Linear(4, 4, bias=False)
    del layer.weight
    layer.weight = dual
    return layer, (x,)


@ALL
@pytest.mark.parametrize("where", [of_input, of_closure, of_parameter])
def test_tangents(where: Any, run: Any) -> None:
    def scenario(run: Any) -> Any:
        found = []
        for _ in range(3):
            x = leaf(4, 4)
            with fwad.dual_level():
                dual = fwad.make_dual(torch.randn(4, 4), torch.randn(4, 4))
                function, args = where(x, dual)
                primal, tangent = fwad.unpack_dual(run(function, *args))
                assert tangent is not None
                grads = torch.autograd.grad(primal.sum() + tangent.sin().sum(), x)
                found.append((primal.detach(), tangent.detach(), grads))
        return found

    assert_transparent(scenario, run)


@ALL
def test_tangents_in_a_region(run: Any) -> None:
    def region(x: Tensor) -> Tensor:
        with fwad.dual_level():
            dual = fwad.make_dual(torch.ones(4, 4), torch.ones(4, 4) * 2)
            out = (x.sin() * dual).exp() * torch.cat([x, dual])[:4]
            primal, tangent = fwad.unpack_dual(out)
            return primal * tangent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recollect.replay.engine._warn_of_fallback", lambda _: None)
        check(run, region)


@ALL
@pytest.mark.parametrize("how", ["jvp", "jacfwd", "linearize"])
def test_transforms_of_forward_mode(how: str, run: Any) -> None:
    def scenario(run: Any) -> Any:
        def function(x: Tensor) -> Any:
            return run(lambda x: (x.sin() * x).exp(), x)

        x = torch.rand(3)
        if how == "jvp":
            return torch.func.jvp(function, (x,), (torch.ones(3),))
        if how == "jacfwd":
            return torch.func.jacfwd(function)(x)
        out, push = torch.func.linearize(function, x)
        return out, push(torch.ones(3))

    assert_identical(play(scenario, run), play(scenario, plain))


# --- collectives that write in place --------------------------------------------------------------


def summed(x: Tensor) -> Tensor:
    h = x.detach() * 2
    dist.all_reduce(h)
    return used(x, h)


def gathered(x: Tensor) -> Tensor:
    h = x.detach() * 2
    dist.all_reduce(h, async_op=True).wait()
    parts = [torch.zeros(4, 4) for _ in range(2)]
    dist.all_gather(parts, h * (dist.get_rank() + 1))
    return used(x, parts[1]) * h.cos()


def sent(x: Tensor) -> Tensor:
    rank = dist.get_rank()
    h, other = x.detach() * (rank + 2), torch.zeros(4, 4)
    dist.broadcast(h, 0)
    (dist.send if rank == 0 else dist.recv)(h if rank == 0 else other, 1 - rank)
    return used(x, h) * other.cos()


def _compare() -> None:
    for region in (summed, gathered, sent):
        for run in RUNS.values():
            check(run, region, count=3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_collectives_that_write_in_place(tmp_path: Path) -> None:
    run_ranks(_compare, tmp_path)


# --- on a device ----------------------------------------------------------------------------------


def matrices(number: int) -> tuple[Tensor, ...]:
    return (torch.rand(256, 256, device="cuda").requires_grad_(),)


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.gpu
@ALL
@ALWAYS_OR_NOT
def test_a_precision_set_for_a_part_of_the_region(when: Any, run: Any) -> None:
    def region(x: Tensor) -> Tensor:
        with tf32(when()):
            h = (x @ x).sin()
        return (h @ x).sin() * h

    check(run, region, matrices)


@pytest.mark.gpu
@ALL
def test_generators_of_a_device(run: Any) -> None:
    own = torch.Generator("cuda")

    def region(x: Tensor) -> Tensor:
        h = torch.poisson(x.detach() * 5, own) * x
        # On the device, whatever the tensor is on that it is like.
        noise = torch.rand_like(torch.empty(256, 256), device="cuda")
        return (h.sin() * noise).exp() * F.dropout(x)

    def scenario(run: Any) -> Any:
        own.manual_seed(7)
        torch.cuda.manual_seed(8)
        return calls(region, matrices, 4, run), own.get_state(), torch.cuda.get_rng_state()

    assert_transparent(scenario, run)


@pytest.mark.gpu
@ALL
@ALWAYS_OR_NOT
def test_a_write_by_another_thread_on_a_device(when: Any, run: Any) -> None:
    def region(x: Tensor) -> Tensor:
        h = x.detach() * 2
        if when():
            write_elsewhere(h)
        return used(x, h)

    check(run, region, matrices)
