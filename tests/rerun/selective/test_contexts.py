"""Selective checkpointing: what is kept, what is run again, and that gradients do not change."""

import functools
import gc
import re
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect import CheckpointPolicy, compat
from recollect.errors import KeptTensorError

aten = torch.ops.aten


class Ops(TorchDispatchMode):
    """Counts the ops that are really run."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func] += 1
        return func(*args, **(kwargs or {}))


def leaves(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def block(x, w):
    return torch.sigmoid(torch.tanh(x @ w) @ w)


def gradients(function, inputs, region=None):
    """Output, gradients and the ops run in forward and in backward, from a fixed seed."""
    torch.manual_seed(7)
    with Ops() as forward:
        out = function(*inputs) if region is None else region(function, *inputs)
    with Ops() as backward:
        grads = torch.autograd.grad(out.sum(), inputs)
    after = torch.rand(3)
    return [out.detach(), *grads, after], forward.count, backward.count


def assert_same(ours, plain):
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def selective(policy, **options):
    """A region that keeps by ``policy``, in the modern spelling."""
    return functools.partial(recollect.checkpoint, policy=policy, **options)


def compat_selective(policy, **options):
    make = functools.partial(compat.create_selective_checkpoint_contexts, policy, **options)
    return functools.partial(compat.checkpoint, use_reentrant=False, context_fn=make)


def every_op(*_, **__):
    return CheckpointPolicy.MUST_SAVE


def mm_policy(save, recompute):
    def policy(ctx, op, *args, **kwargs):
        return save if op is aten.mm.default else recompute

    return policy


KEEPING_MM = {
    "packet": [aten.mm],
    "overload": [aten.mm.default],
    "tuple": (aten.mm,),
    "set": {aten.mm.default},
    "recollect must": mm_policy(CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE),
    "recollect prefer": mm_policy(CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_RECOMPUTE),
    "torch": mm_policy(
        torch_checkpoint.CheckpointPolicy.PREFER_SAVE,
        torch_checkpoint.CheckpointPolicy.MUST_RECOMPUTE,
    ),
    "bool": mm_policy(True, False),
}


@pytest.mark.parametrize("policy", KEEPING_MM.values(), ids=KEEPING_MM)
@pytest.mark.parametrize("form", ["policy", "context_fn", "compat"])
def test_kept_ops_are_not_run_again_and_the_others_are(policy, form):
    inputs = leaves((4, 4), (4, 4))
    plain, _, plain_backward = gradients(block, inputs)
    if form == "policy":
        region = selective(policy)
    else:
        make = functools.partial(recollect.create_selective_checkpoint_contexts, policy)
        region = functools.partial(
            recollect.checkpoint if form == "context_fn" else compat.checkpoint,
            use_reentrant=False,
            context_fn=make,
        )
    ours, forward, backward = gradients(block, inputs, region)
    assert_same(ours, plain)
    assert forward[aten.mm.default] == 2
    assert backward[aten.mm.default] == plain_backward[aten.mm.default] == 4
    assert backward[aten.tanh.default] == backward[aten.sigmoid.default] == 1


def test_without_a_policy_all_is_run_again():
    inputs = leaves((4, 4), (4, 4))
    _, _, backward = gradients(block, inputs, recollect.checkpoint)
    assert backward[aten.mm.default] == 4 + 2
    assert backward[aten.tanh.default] == backward[aten.sigmoid.default] == 1


@pytest.mark.parametrize(
    ("decision", "products"),
    [
        (CheckpointPolicy.MUST_RECOMPUTE, 4 + 2),
        (CheckpointPolicy.PREFER_RECOMPUTE, 4 + 2),
        (CheckpointPolicy.MUST_CPU_OFFLOAD, 4),
        (CheckpointPolicy.PREFER_CPU_OFFLOAD, 4),
    ],
)
@pytest.mark.parametrize("region", ["policy", "compat"])
def test_every_other_decision(decision, products, region):
    make = selective if region == "policy" else compat_selective
    inputs = leaves((4, 4), (4, 4))
    ours, _, backward = gradients(block, inputs, make(lambda *_: decision))
    assert_same(ours, gradients(block, inputs)[0])
    assert backward[aten.mm.default] == products


def test_keeping_everything_runs_no_forward_op_again():
    inputs = leaves((4, 4), (4, 4))
    plain, _, plain_backward = gradients(block, inputs)
    ours, _, backward = gradients(block, inputs, selective(every_op))
    assert_same(ours, plain)
    for ops in (backward, plain_backward):
        del ops[aten.detach.default]
    assert backward == plain_backward


# --- kinds of ops ---------------------------------------------------------------------------------


def multi_output(x):
    values, _ = x.sort(dim=-1)
    first, second = values.split(2, dim=-1)
    return (first * second).sin() * torch.var_mean(x, dim=-1)[0].unsqueeze(-1)


def views(x):
    return x.t().reshape(-1).unsqueeze(0).expand(2, -1).sin() * x[0, 0]


def non_tensor_output(x):
    return x.sin() * x[0, 0].detach().item() * x.cos()


def dropout(x):
    # What F.dropout comes down to on a GPU; on a CPU it writes its mask in place.
    dropped, _ = torch.native_dropout(x.sin(), 0.5, True)
    return dropped.cos() * torch.rand_like(x).exp()


def in_place_inside(x):
    return x.sin().mul_(2).cos()


def views_only(ctx, op, *args, **kwargs):
    return op.is_view


def random_only(ctx, op, *args, **kwargs):
    return torch.Tag.nondeterministic_seeded in op.tags


@pytest.mark.parametrize("function", [multi_output, views, non_tensor_output, dropout])
@pytest.mark.parametrize("policy", [every_op, views_only, random_only, [aten.sin, aten.sort]])
@pytest.mark.parametrize("region", [selective, compat_selective])
def test_gradients_are_bitwise_those_of_plain_autograd(function, policy, region):
    if region is compat_selective and isinstance(policy, list):
        policy = [aten.sin.default, aten.sort.default]
    inputs = leaves((4, 4))
    assert_same(gradients(function, inputs, region(policy))[0], gradients(function, inputs)[0])


def test_all_outputs_of_a_multi_output_op_are_kept():
    inputs = leaves((4, 4))
    _, forward, backward = gradients(multi_output, inputs, selective([aten.sort]))
    assert forward[aten.sort.default] == 1
    assert backward[aten.sort.default] == 0
    assert backward[aten.sin.default] == 1


def test_an_output_that_is_no_tensor_is_kept():
    _, _, backward = gradients(non_tensor_output, leaves((4, 4)), selective(every_op))
    assert backward[aten._local_scalar_dense.default] == 0


@pytest.mark.parametrize(("policy", "draws"), [(random_only, 0), (lambda *_, **__: False, 2)])
def test_random_ops_draw_again_unless_kept(policy, draws):
    inputs = leaves((4, 4))
    ours, forward, backward = gradients(dropout, inputs, selective(policy))
    random = [aten.rand_like.default, aten.native_dropout.default]
    assert sum(forward[op] for op in random) == 2
    assert sum(backward[op] for op in random) == draws
    assert_same(ours, gradients(dropout, inputs)[0])


@pytest.mark.parametrize("policy", [[aten.mm], [aten.tanh], every_op])
def test_autocast_of_forward_is_that_of_the_recomputation(policy):
    inputs = leaves((4, 4), (4, 4))

    def run(region):
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(block, inputs, region)

    plain, _, _ = run(None)
    # Backward outside of autocast: the region must bring its own back.
    with torch.autocast("cpu", torch.bfloat16):
        out = recollect.checkpoint(block, *inputs, policy=policy)
    assert_same([out, *torch.autograd.grad(out.sum(), inputs)], plain[:3])
    assert_same(run(selective(policy))[0], plain)


def test_kept_results_of_the_same_op_are_told_apart():
    def function(x, w):
        for _ in range(5):
            x = (x @ w).tanh() + x
        return x

    inputs = leaves((4, 4), (4, 4))
    calls = []

    def every_second(ctx, op, *args, **kwargs):
        if op is not aten.mm.default:
            return False
        calls.append(op)
        return len(calls) % 2 == 1

    ours, _, backward = gradients(function, inputs, selective(every_second))
    assert_same(ours, gradients(function, inputs)[0])
    assert backward[aten.mm.default] == 10 + 2


# --- the policy function --------------------------------------------------------------------------


def test_policy_is_asked_once_for_each_op_of_forward_and_never_again():
    asked = []

    def policy(ctx, op, *args, **kwargs):
        assert ctx.is_recompute is False
        assert isinstance(ctx.op_output, torch.Tensor)
        assert not recollect.is_recomputing()
        asked.append((op, len(args), kwargs))
        return op is aten.mm.default

    def function(x, w):
        return torch.add(x @ w, x, alpha=2).sin()

    x, w = leaves((4, 4), (4, 4))
    expected = [(aten.mm.default, 2, {}), (aten.add.Tensor, 2, {"alpha": 2})]
    expected += [(aten.sin.default, 1, {})]
    recollect.checkpoint(function, x, w, policy=policy).sum().backward()
    assert asked == expected
    recollect.checkpoint(function, x, w, policy=policy).sum().backward()
    assert asked == 2 * expected


def test_ignored_ops_are_neither_put_to_the_policy_nor_kept():
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        return True

    (x,) = leaves((3,))
    out = recollect.checkpoint(lambda x: x.sin() * x.detach(), x, policy=policy)
    assert asked == [aten.sin.default, aten.mul.Tensor]
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, x.cos() * x.detach())


def test_ignored_ops_are_those_of_torch():
    assert recollect.SAC_IGNORED_OPS == torch_checkpoint.SAC_IGNORED_OPS


@pytest.mark.parametrize("answer", [None, "save", 1, object()])
@pytest.mark.parametrize("region", [selective, compat_selective])
def test_an_answer_that_is_no_decision_is_refused_by_name(answer, region):
    (x,) = leaves((3,))
    with pytest.raises(ValueError, match=re.escape(repr(answer))) as caught:
        region(lambda *_, **__: answer)(torch.sin, x)
    assert "aten.sin.default" in str(caught.value)
    assert torch.equal(torch.sin(x), torch.sin(x.detach()))  # nothing is left entered


def test_an_exception_of_the_policy_is_passed_on():
    def policy(*_, **__):
        raise LookupError("mine")

    (x,) = leaves((3,))
    with pytest.raises(LookupError, match="mine"):
        recollect.checkpoint(torch.sin, x, policy=policy)
    (grad,) = torch.autograd.grad(torch.sin(x).sum(), x)
    assert torch.equal(grad, torch.cos(x))


def test_without_grad_the_policy_is_not_asked():
    with torch.no_grad():
        out = recollect.checkpoint(torch.sin, torch.ones(2), policy=lambda *_: pytest.fail("asked"))
    assert torch.equal(out, torch.ones(2).sin())


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [recollect, compat])
@pytest.mark.parametrize("when", ["in the region", "after the region"])
def test_a_kept_tensor_that_was_changed_is_an_error(module, when):
    kept = []

    def function(x):
        y = x.sin()
        if not recollect.is_recomputing():
            kept.append(y)
            if when == "in the region":
                y.detach().mul_(2)
        return y.cos()

    def run(**options):
        (x,) = leaves((3,))
        make = module.create_selective_checkpoint_contexts
        context_fn = functools.partial(make, [aten.sin.default], **options)
        out = module.checkpoint(function, x, use_reentrant=False, context_fn=context_fn)
        if when == "after the region":
            kept[-1].detach().mul_(2)
        return x, torch.autograd.grad(out.sum(), x)[0]

    with pytest.raises(RuntimeError, match="has been mutated"):
        run()
    x, grad = run(allow_cache_entry_mutation=True)
    assert torch.equal(grad, -(2 * x.sin()).sin() * x.cos())


def test_in_place_on_a_kept_result_inside_the_region_is_right():
    inputs = leaves((3,))
    plain, _, plain_backward = gradients(in_place_inside, inputs)
    ours, _, backward = gradients(in_place_inside, inputs, selective([aten.sin.default]))
    assert_same(ours, plain)
    assert backward[aten.sin.default] == plain_backward[aten.sin.default]


def test_in_place_on_a_kept_result_inside_the_region_raises_in_compat():
    (x,) = leaves((3,))
    out = compat_selective([aten.sin.default])(in_place_inside, x)
    with pytest.raises(recollect.CheckpointError, match="has been mutated"):
        out.sum().backward()


@pytest.mark.parametrize("op", [aten.mul_.Tensor, aten.mul_])
def test_an_in_place_op_is_recomputed_whatever_the_policy_says(op):
    """What it returns is memory of another tensor, which the recomputation has elsewhere."""
    inputs = leaves((3,))
    ours = gradients(in_place_inside, inputs, selective([op]))[0]
    assert_same(ours, gradients(in_place_inside, inputs)[0])


@pytest.mark.parametrize("op", [aten.select, aten.slice])
def test_a_view_is_recomputed_whatever_the_policy_says(op):
    def write_through_a_view(x):
        y = torch.zeros(4, 4)
        y[0] = x.sin()[0]
        y[1:] += 1
        return (y.cos() * x).exp()

    inputs = leaves((4, 4))
    ours = gradients(write_through_a_view, inputs, selective([op]))[0]
    assert_same(ours, gradients(write_through_a_view, inputs)[0])


def test_a_recomputed_draw_after_a_kept_one_gets_its_own_numbers():
    def two_draws(x):
        return (x * torch.rand(64)).sin() * torch.dropout(x.exp(), 0.5, True)

    inputs = leaves((64,))
    ours = gradients(two_draws, inputs, selective([aten.rand]))[0]
    assert_same(ours, gradients(two_draws, inputs)[0])


def test_a_kept_draw_leaves_the_stream_alone_where_it_is_not_restored():
    (x,) = leaves((8,))
    out = recollect.checkpoint(
        lambda x: (x * torch.rand(8)).sin(), x, policy=[aten.rand], preserve_rng_state=False
    )
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    out.sum().backward()
    assert torch.equal(torch.rand(2), expected)


def test_backwards_inside_forward_do_not_disturb_what_is_kept():
    w = torch.linspace(-1, 1, 16).reshape(4, 4)

    def gradients_inside(x):
        h = (x @ w).sin()
        (first,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((h**2).sum(), x, create_graph=True)
        return h * first * second * (h @ w).cos()

    inputs = leaves((4, 4))
    ours = gradients(gradients_inside, inputs, selective([aten.mm]))[0]
    assert_same(ours, gradients(gradients_inside, inputs)[0])


def test_two_threads_recompute_one_region_at_once():
    """Each has its own place in what was kept. The barrier makes the two runs meet half-way."""
    w = torch.linspace(-1, 1, 16).reshape(4, 4)
    halfway = threading.Barrier(2, timeout=30)

    def two_outputs(x):
        h = (x @ w).sin()
        if recollect.is_recomputing():
            halfway.wait()
        return h.exp(), (h @ w).cos().exp()

    (x,) = leaves((4, 4))
    expected = [torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for out in two_outputs(x)]
    outs = recollect.checkpoint(two_outputs, x, policy=[aten.mm])
    with ThreadPoolExecutor(2) as pool:
        actual = pool.map(lambda out: torch.autograd.grad(out.sum(), x, retain_graph=True)[0], outs)
        assert_same(list(actual), expected)


@pytest.mark.parametrize("surface", [recollect, recollect.compat])
def test_a_pair_of_contexts_serves_one_region(surface):
    contexts = surface.create_selective_checkpoint_contexts([aten.mm.default])
    (x,) = leaves((4, 4))
    out = recollect.checkpoint(lambda x: (x @ x).sin(), x, context_fn=lambda: contexts)
    with pytest.raises(RuntimeError, match="serve one region each"):
        recollect.checkpoint(lambda x: (x @ x).sin(), out, context_fn=lambda: contexts)


def test_in_place_on_a_recomputed_result_is_fine():
    inputs = leaves((3,))
    ours = gradients(in_place_inside, inputs, selective([aten.cos]))[0]
    assert_same(ours, gradients(in_place_inside, inputs)[0])


@pytest.mark.parametrize("region", [selective, compat_selective])
def test_an_op_that_forward_did_not_run_is_an_error(region):
    def function(x):
        return (x.tanh() if recollect.is_recomputing() else x.sin()).cos()

    (x,) = leaves((3,))
    with pytest.raises(RuntimeError, match=r"aten.tanh.default .*not found in storage"):
        region([aten.cos.default])(function, x).sum().backward()


@pytest.mark.parametrize("region", [selective, compat_selective])
def test_an_op_run_more_often_than_in_forward_is_an_error(region):
    def function(x):
        if recollect.is_recomputing():
            x.detach().sin()
        return x.sin().cos()

    (x,) = leaves((3,))
    with pytest.raises(
        RuntimeError, match=r"aten.sin.default invocation index 1 .*not found in storage"
    ):
        region([aten.sin.default])(function, x).sum().backward()


def test_all_faults_are_checkpoint_errors():
    assert issubclass(KeptTensorError, recollect.CheckpointError)
    assert issubclass(recollect.CheckpointError, torch_checkpoint.CheckpointError)


# --- op lists -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.mm, "aten.mm", None, 3])
def test_a_list_holds_ops_only(bad):
    with pytest.raises(ValueError, match="to be an OpOverload"):
        recollect.create_selective_checkpoint_contexts([aten.mm, bad])
    with pytest.raises(ValueError, match="to be an OpOverload"):
        recollect.checkpoint(torch.sin, torch.ones(1), policy=[bad])


def test_compat_refuses_packets_in_the_words_of_torch():
    for module in (compat, torch_checkpoint):
        with pytest.raises(
            ValueError, match="Please update the OpOverloadPacket to a specific OpOverload"
        ):
            module.create_selective_checkpoint_contexts([aten.mm])


@pytest.mark.parametrize("bad", [3, "mm", None, aten.mm.default.name()])
def test_a_policy_is_a_list_or_a_function(bad):
    for module in (recollect, compat, torch_checkpoint):
        with pytest.raises(TypeError, match="must be either a function or a list of ops"):
            module.create_selective_checkpoint_contexts(bad)


def test_a_packet_stands_for_all_its_overloads():
    def function(x):
        return x.clamp(-1, 1).sin() * x.clamp(torch.zeros(3), torch.ones(3)).cos()

    _, forward, backward = gradients(function, leaves((3,)), selective([aten.clamp]))
    overloads = (aten.clamp.default, aten.clamp.Tensor)
    assert [forward[op] for op in overloads] == [1, 1]
    assert [backward[op] for op in overloads] == [0, 0]


# --- several backwards ----------------------------------------------------------------------------


def test_every_further_backward_runs_the_kept_ops_again():
    x, w = leaves((4, 4), (4, 4))
    plain = torch.autograd.grad(block(x, w).sum(), [x, w])
    out = recollect.checkpoint(block, x, w, policy=[aten.mm])
    for run, again in enumerate([0, 2, 2]):
        with Ops() as ops:
            grads = torch.autograd.grad(out.sum(), [x, w], retain_graph=run < 2)
        assert_same(grads, plain)
        assert ops.count[aten.mm.default] == 4 + again


@pytest.mark.parametrize("policy", [[aten.mm], [aten.tanh], every_op])
def test_double_backward(policy):
    x, w = leaves((4, 4), (4, 4))

    def second_order(region):
        out = block(x, w) if region is None else region(block, x, w)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.square().sum(), [x, w])]

    assert_same(second_order(selective(policy)), second_order(None))


def test_compat_gives_a_kept_result_out_once():
    for module in (compat, torch_checkpoint):
        x, w = leaves((4, 4), (4, 4))
        make = functools.partial(module.create_selective_checkpoint_contexts, [aten.mm.default])
        out = module.checkpoint(block, x, w, use_reentrant=False, context_fn=make)
        out.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
            out.sum().backward()


def test_parts_of_a_region_in_several_backwards():
    def function(x, w):
        return (x @ w).sin(), (w @ x).cos()

    inputs = leaves((4, 4), (4, 4))
    plain = [torch.autograd.grad(out.sum(), inputs) for out in function(*inputs)]
    outs = recollect.checkpoint(function, *inputs, policy=[aten.mm])
    for out, expected in zip(outs, plain, strict=True):
        assert_same(torch.autograd.grad(out.sum(), inputs), expected)


# --- nesting --------------------------------------------------------------------------------------

NESTINGS = {
    "selective in selective": (selective([aten.mm]), selective([aten.tanh])),
    "selective in plain": (recollect.checkpoint, selective([aten.mm])),
    "plain in selective": (selective([aten.mm]), recollect.checkpoint),
    "selective in reentrant": (
        functools.partial(recollect.checkpoint, engine="reentrant"),
        selective([aten.mm]),
    ),
    "compat in compat": (
        compat_selective([aten.mm.default]),
        compat_selective([aten.mm.default]),
    ),
}


@pytest.mark.parametrize(("outer", "inner"), NESTINGS.values(), ids=NESTINGS)
def test_nested_regions_give_the_gradients_of_plain_autograd(outer, inner):
    def nested(x, w):
        return inner(block, x, w).sin() @ inner(block, w, x)

    def flat(x, w):
        return block(x, w).sin() @ block(w, x)

    def run(function, region):
        x, w = leaves((4, 4), (4, 4))
        out = region(function, x, w)
        out.sum().backward()
        return [out.detach(), x.grad, w.grad]

    assert_same(run(nested, outer), run(flat, lambda f, *a: f(*a)))


def test_what_the_outer_region_keeps_serves_the_inner_ones():
    def nested(x, w):
        return recollect.checkpoint(block, x, w).sin()

    _, _, backward = gradients(nested, leaves((4, 4), (4, 4)), selective([aten.mm]))
    _, _, without = gradients(nested, leaves((4, 4), (4, 4)), recollect.checkpoint)
    # The outer rerun takes both products from the store; the inner rerun has none of its own.
    assert backward[aten.mm.default] == 4 + 2
    assert without[aten.mm.default] == 4 + 2 + 2


# --- what a step costs ----------------------------------------------------------------------------


def flops(region):
    x, w = leaves((8, 8), (8, 8))
    with FlopCounterMode(display=False) as counter:
        region(x, w).sum().backward()
    return counter.get_total_flops()


PRODUCT = 2 * 8**3


def test_flops_are_exact():
    def torch_region(policy):
        make = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)
        return functools.partial(
            torch_checkpoint.checkpoint, block, use_reentrant=False, context_fn=make
        )

    ours = functools.partial(recollect.checkpoint, block)
    assert flops(block) == 6 * PRODUCT
    assert flops(ours) == 8 * PRODUCT
    assert flops(functools.partial(ours, policy=[aten.mm])) == 6 * PRODUCT
    assert flops(functools.partial(ours, policy=[aten.tanh])) == 8 * PRODUCT
    for op in (aten.mm.default, aten.tanh.default):
        assert flops(functools.partial(ours, policy=[op])) == flops(torch_region([op]))


@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop_spares_the_ops_after_the_last_saved_tensor(early_stop):
    def function(x, w):
        return (x @ w).sin() @ w  # the last product saves its inputs, not its result

    def region(module, **options):
        return functools.partial(
            module.checkpoint, function, use_reentrant=False, early_stop=early_stop, **options
        )

    again = 1 if early_stop else 2
    assert flops(region(recollect)) == flops(region(torch_checkpoint)) == (6 + again) * PRODUCT
    assert flops(region(recollect, policy=[aten.mm])) == 6 * PRODUCT


# --- what is held ---------------------------------------------------------------------------------


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Tracker(TorchDispatchMode):
    """Weak references to the storages of all results of one op."""

    def __init__(self, op):
        super().__init__()
        self.op = op
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is self.op:
            self.storages.append(weakref.ref(out.untyped_storage()))
        return out

    def alive(self):
        return sum(ref() is not None for ref in self.storages)


@pytest.mark.parametrize("region", [selective, compat_selective])
@pytest.mark.usefixtures("no_gc")
def test_what_is_kept_dies_with_the_output(region):
    x, w = leaves((4, 4), (4, 4))
    with Tracker(aten.mm.default) as products, Tracker(aten.tanh.default) as others:
        out = region([aten.mm.default])(block, x, w)
    assert (products.alive(), others.alive()) == (2, 0)
    del out
    assert products.alive() == 0


@pytest.mark.parametrize("region", [selective, compat_selective])
@pytest.mark.usefixtures("no_gc")
def test_what_is_kept_is_released_by_backward(region):
    x, w = leaves((4, 4), (4, 4))
    with Tracker(aten.mm.default) as products:
        out = region([aten.mm.default])(block, x, w)
    assert products.alive() == 2
    out.sum().backward()
    assert products.alive() == 0


@pytest.mark.usefixtures("no_gc")
def test_a_policy_function_does_not_keep_results_alive():
    (x,) = leaves((4,))
    with Tracker(aten.cos.default) as results:
        out = recollect.checkpoint(lambda x: x.cos().sin(), x, policy=lambda *_, **__: False)
    assert results.alive() == 0
    del out
