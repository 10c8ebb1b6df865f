"""Rules about modules: what runs inside them is kept, exactly that, and the model is left alone."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import recollect
from recollect import policy
from tests._support import assert_identical
from tests.rerun.selective._helpers import (
    Block,
    Model,
    Ops,
    again,
    assert_right,
    backward_ops,
    hooks_of,
    leaves,
    seeded,
    selective,
    step,
    total,
)

aten = torch.ops.aten
save = policy.save_modules

#: In a block: four projections and two of the mlp, `addmm` each; two `bmm`.
PROJECTIONS = 6


def inputs():
    return leaves((2, 3, 8))


@pytest.fixture
def block():
    return seeded(Block)


@pytest.fixture
def model():
    return seeded(Model)


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "addmm", "bmm", "softmax", "relu"),
    [
        (["attn.wo"], 5, 2, 1, 1),
        (["*.wo"], 5, 2, 1, 1),
        (["wo"], 5, 2, 1, 1),
        (["attn"], 2, 0, 0, 1),
        (["mlp"], 4, 2, 1, 0),
        (["mlp", "attn.w?"], 0, 2, 1, 0),
        (["mlp.*"], 4, 2, 1, 1),
        (["attn", "mlp"], 0, 0, 0, 0),
        (["*"], 0, 0, 0, 0),
        (["attn.*", "attn"], 2, 0, 0, 1),
    ],
)
def test_exactly_what_runs_inside_is_kept(block, patterns, addmm, bmm, softmax, relu):
    counts = again(block, inputs(), save(*patterns), early_stop=False)
    assert counts[aten.addmm.default] == addmm
    assert counts[aten.bmm.default] == bmm
    assert counts[aten._softmax.default] == softmax
    assert counts[aten.relu.default] == relu
    outside = counts[aten.native_layer_norm.default], counts[aten.sin.default]
    assert outside == ((0, 0) if patterns == ["*"] else (1, 1))


def test_what_is_offloaded_is_not_run_again(block):
    counts = again(block, inputs(), policy.offload_modules("mlp"), early_stop=False)
    assert counts[aten.addmm.default] == 4
    assert counts[aten.relu.default] == 0


def test_a_module_in_two_rules_obeys_the_first(block):
    first = policy.recompute_ops(aten.addmm) | save("mlp")
    second = save("mlp") | policy.recompute_ops(aten.addmm)
    run = functools.partial(again, block, inputs(), early_stop=False)
    assert run(first)[aten.addmm.default] == PROJECTIONS
    assert run(second)[aten.addmm.default] == PROJECTIONS - 2
    assert run(first)[aten.relu.default] == run(second)[aten.relu.default] == 0


def test_rules_about_modules_and_ops_add_up(block):
    counts = again(block, inputs(), save("mlp") | policy.matmuls(), early_stop=False)
    assert counts[aten.addmm.default] == counts[aten.bmm.default] == 0
    assert counts[aten.relu.default] == 0
    assert counts[aten._softmax.default] == 1


class Twice(nn.Module):
    """One module under two names, called twice, and once more inside another."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first
        self.other = nn.Sequential(nn.Linear(8, 8), self.first)

    def forward(self, x):
        return self.other(self.second(self.first(x).sin()).sin()).sin()


@pytest.mark.parametrize(("pattern", "addmm"), [("first", 1), ("other", 2), ("other.0", 3)])
def test_shared_modules_are_kept_at_every_call(pattern, addmm):
    counts = again(seeded(Twice), inputs(), save(pattern), early_stop=False)
    assert counts[aten.addmm.default] == addmm


@pytest.mark.parametrize("pattern", ["second", "other.1"])
def test_a_shared_module_is_known_by_all_its_names(pattern):
    counts = again(seeded(Twice), inputs(), save(pattern), early_stop=False)
    assert counts[aten.addmm.default] == 1


class Deep(nn.Module):
    """A module that calls itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.deep = Inner(self.linear)

    def forward(self, x):
        return self.linear(self.deep(x, 3)).sin()


class Inner(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x, depth):
        x = self.linear(x).sin()
        return x if depth == 0 else self(x, depth - 1)


def test_a_module_that_calls_itself_is_left_once():
    counts = again(seeded(Deep), inputs(), save("deep"), early_stop=False)
    assert counts[aten.addmm.default] == 1
    assert counts[aten.sin.default] == 1


# --- how a region is given ------------------------------------------------------------------------


def called(function, given):
    return functools.partial(recollect.checkpoint, function, policy=given)


def wrapped(function, given):
    return recollect.checkpointed(function, policy=given)


FORMS = {
    "module": lambda block: block,
    "bound method": lambda block: block.forward,
    "lambda": lambda block: lambda x: block(x),  # noqa: PLW0108
    "partial": functools.partial,
    "list in a closure": lambda block: first_of([block]),
    "method of an object": lambda block: Holder(block).run,
    "default": lambda block: lambda x, block=block: block(x),
}


def first_of(blocks):
    def run(x):
        return blocks[0](x)

    return run


class Holder:
    def __init__(self, block):
        self.block = block

    def run(self, x):
        return self.block(x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", [called, wrapped])
def test_modules_are_found_behind_functions(block, form, call):
    (x,) = inputs()
    expected = step(block, [x])
    region = call(FORMS[form](block), save("mlp.up"))
    weights = list(block.parameters())
    for _ in range(2):
        torch.manual_seed(7)
        out = region(x)
        grads = torch.autograd.grad(total(out), [x, *weights])
        assert_identical([out.detach(), *grads], expected[:-1])
    assert hooks_of(block) == 0


@pytest.mark.parametrize("form", FORMS)
def test_what_is_found_behind_functions_is_kept(block, form):
    function = FORMS[form](block)
    counts = again(function, inputs(), save("mlp.up"), early_stop=False)
    assert counts[aten.addmm.default] == PROJECTIONS - 1


def test_a_module_that_is_an_argument_is_found(block):
    (x,) = inputs()
    out = recollect.checkpoint(lambda m, x: m(x), block, x, policy=save("mlp.up"))
    expected = torch.autograd.grad(total(block(x)), x)
    assert_identical(torch.autograd.grad(total(out), x), expected)


def test_checkpoint_sequential_takes_module_rules():
    model = seeded(lambda: nn.Sequential(*[Block() for _ in range(5)]))
    (x,) = inputs()
    region = functools.partial(recollect.checkpoint_sequential, segments=2, policy=save("mlp.down"))
    expected = step(model, [x])
    torch.manual_seed(7)
    out = region(model, input=x)
    grads = torch.autograd.grad(total(out), [x, *model.parameters()])
    assert_identical([out.detach(), *grads], expected[:-1])
    assert hooks_of(model) == 0


def test_checkpoint_sequential_takes_rules_about_one_of_its_modules():
    model = seeded(lambda: nn.Sequential(*[Block() for _ in range(6)]))
    (x,) = inputs()
    out = recollect.checkpoint_sequential(model, 3, x, policy=save("2.mlp"))
    assert_identical(torch.autograd.grad(total(out), x), torch.autograd.grad(total(model(x)), x))


def test_a_wrapped_module_matches_itself_and_what_is_below(block):
    (x,) = inputs()
    expected = step(block, [x])
    recollect.checkpointed(block, policy=save("attn"))
    assert_identical(step(block, [x]), expected)


@pytest.mark.parametrize(
    "pattern", ["*.attn.wo", "attn.wo", "layers.*.attn.wo", "layers.?.attn.wo", "*.wo"]
)
def test_each_block_may_be_a_region(model, pattern):
    (x,) = inputs()
    expected = step(model, [x])
    model.region = selective(save(pattern), early_stop=False)
    assert_identical(step(model, [x]), expected)
    loss = total(model(x))
    with Ops() as ops:
        loss.backward()
    assert ops[aten.addmm] == 3 * (PROJECTIONS - 1)


def test_the_whole_model_may_be_a_region(model):
    counts = again(model, inputs(), save("layers.1.*", "layers.2.mlp"), early_stop=False)
    assert counts[aten.addmm.default] == 3 * PROJECTIONS - PROJECTIONS - 2


def test_a_policy_about_one_layer_serves_regions_of_all_layers(model):
    """The pattern is no typing error: it matches something in the model."""
    (x,) = inputs()
    expected = step(model, [x])
    model.region = selective(save("layers.1.mlp"))
    assert_identical(step(model, [x]), expected)


def test_one_policy_serves_two_models():
    given = save("mlp.up")
    for make in (Block, lambda: nn.Sequential(Block(), Block())):
        assert_right(seeded(make), inputs(), given)


def test_a_module_that_is_exchanged_is_noticed(block):
    given = save("mlp.up")
    assert_right(block, inputs(), given)
    block.mlp.up = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
    counts = again(block, inputs(), given, early_stop=False)
    assert counts[aten.addmm.default] == PROJECTIONS - 1
    assert counts[aten.tanh.default] == 0
    assert hooks_of(block) == 0


# --- loud -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["attn.w0", "mlp.upp", "*.nothing", "MLP"])
@pytest.mark.parametrize("make", [policy.save_modules, policy.offload_modules])
def test_a_pattern_that_matches_nothing_raises_at_the_call(block, pattern, make):
    ran = []
    block.register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match="matches no module") as info:
        recollect.checkpoint(block, *inputs(), policy=make("mlp", pattern))
    message = str(info.value)
    assert repr(pattern) in message
    assert all(name in message for name in ("attn.wo", "mlp.up", "norm"))
    assert not ran


def test_the_most_similar_path_comes_first(block):
    with pytest.raises(ValueError, match=r"are: mlp\.up,"):
        recollect.checkpoint(block, *inputs(), policy=save("mlp.upp"))


def test_a_region_without_modules_has_none_to_match():
    with pytest.raises(ValueError, match="are: none"):
        recollect.checkpoint(torch.sin, *inputs(), policy=save("mlp"))


def test_the_error_is_raised_every_time(block):
    given = save("mlpp")
    for _ in range(2):
        with pytest.raises(ValueError, match="matches no module"):
            recollect.checkpoint(block, *inputs(), policy=given)
    assert hooks_of(block) == 0


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x).sin()


def test_a_matched_module_in_which_no_op_ran_warns():
    with pytest.warns(UserWarning, match=r"save_modules\('unused'\) matched nothing"):
        recollect.checkpoint(seeded(Unused), *inputs(), policy=save("unused"))


def test_a_module_whose_weights_are_used_without_calling_it_warns():
    attention = seeded(lambda: nn.MultiheadAttention(8, 2, batch_first=True))
    (x,) = inputs()
    with pytest.warns(UserWarning, match="out_proj"):
        recollect.checkpoint(attention, x, x, x, policy=save("out_proj"))


def test_contexts_without_a_function_say_what_to_use(block):
    make = functools.partial(recollect.create_selective_checkpoint_contexts, save("mlp"))
    with pytest.raises(ValueError, match="needs to know the region's modules"), make()[0]:
        pass
    counts = backward_ops(block, inputs(), save("mlp")).count
    loss = total(recollect.checkpoint(block, *inputs(), context_fn=make))
    with Ops() as ops:
        loss.backward()
    assert ops.count == counts


# --- the model is left alone ----------------------------------------------------------------------


class Failing(nn.Module):
    """A module that may raise, in a region that goes on or does not."""

    def __init__(self, catch):
        super().__init__()
        self.bad = Bad()
        self.linear = nn.Linear(8, 8)
        self.catch = catch

    def forward(self, x):
        try:
            self.bad(x)
        except ArithmeticError:
            if not self.catch:
                raise
        return self.linear(x).sin()


class Bad(nn.Module):
    def forward(self, x):
        raise ArithmeticError(f"{x.cos().sum()}")


def test_a_module_that_raises_is_left():
    model = seeded(lambda: Failing(catch=True))
    counts = again(model, inputs(), save("bad"), early_stop=False)
    assert counts[aten.cos.default] == 0
    assert counts[aten.addmm.default] == counts[aten.sin.default] == 1
    assert hooks_of(model) == 0


def test_hooks_are_gone_after_an_exception():
    model = seeded(lambda: Failing(catch=False))
    given = save("bad", "linear")
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            recollect.checkpoint(model, *inputs(), policy=given)
        assert hooks_of(model) == 0


def test_no_hooks_are_left_and_none_are_there_in_backward(block):
    seen = []
    block.mlp.up.register_forward_hook(
        lambda *_: seen.append((recollect.is_recomputing(), hooks_of(block)))
    )
    own = hooks_of(block)
    recollect.checkpoint(block, *inputs(), policy=save("attn.wo")).sum().backward()
    assert hooks_of(block) == own
    assert seen == [(False, own + 3), (True, own)]


def test_hooks_of_the_user_are_undisturbed(block):
    order = []
    up = block.mlp.up
    up.register_forward_pre_hook(lambda *_: order.append("before"))
    up.register_forward_hook(lambda *_: order.append("after"))
    up.register_forward_hook(lambda m, a, out: out * 2, prepend=True)
    up.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    up.register_forward_pre_hook(lambda m, a, k: None, with_kwargs=True)
    up.register_full_backward_hook(lambda *_: order.append("backward"))
    expected = step(block, inputs())
    plain, order[:] = order[:], []
    assert_identical(step(block, inputs(), selective(save("mlp.up", "mlp"))), expected)
    assert plain == ["before", "after", "backward"]
    assert order == ["before", "after", "before", "after", "backward"]


def test_a_user_may_add_and_remove_hooks_inside(block):
    def adding(x):
        handle = block.mlp.up.register_forward_hook(lambda m, a, out: out * 2)
        try:
            return block(x)
        finally:
            handle.remove()

    assert_right(adding, inputs(), save("mlp.up"))
    assert hooks_of(block) == 0


def test_a_model_can_be_copied_and_pickled_inside(block):
    copies = []

    def copying(x):
        if not recollect.is_recomputing():
            copies.append(copy.deepcopy(block))
            copies.append(pickle.loads(pickle.dumps(block)))
        return block(x)

    out = recollect.checkpoint(copying, *inputs(), policy=save("mlp.up"))
    for each in copies:
        assert_identical(each(*inputs()), out)
    assert hooks_of(block) == 0


def test_a_wrapped_model_is_copied_with_its_policy(block):
    recollect.checkpointed(block, policy=save("mlp"))
    for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert list(copied.state_dict()) == list(seeded(Block).state_dict())
        loss = total(copied(*inputs()))
        with Ops() as ops:
            loss.backward()
        assert ops[aten.relu] == 0
        assert ops[aten._softmax] == 1
        assert hooks_of(copied) == 0


def test_a_policy_does_not_keep_a_model_alive():
    import gc
    import weakref

    given = save("mlp.up")
    model = seeded(Block)
    recollect.checkpoint(model, *inputs(), policy=given).sum().backward()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


# --- several at once ------------------------------------------------------------------------------


def test_threads_share_a_module(block):
    """Each counts its own calls, though both hang hooks on the same modules."""
    given = save("mlp")
    halfway = threading.Barrier(2, timeout=30)

    def meet(*_):
        if not recollect.is_recomputing():
            halfway.wait()

    block.norm.register_forward_hook(meet)
    (x,) = inputs()

    def run(_):
        out = recollect.checkpoint(block, x, policy=given, early_stop=False)
        loss = total(out)
        with Ops() as ops:
            grads = torch.autograd.grad(loss, x)
        return grads[0], ops[aten.addmm], ops[aten.relu]

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, range(2)))
    block.norm._forward_hooks.clear()
    (expected,) = torch.autograd.grad(total(block(x)), x)
    for gradient, addmm, relu in results:
        assert_identical(gradient, expected)
        assert (addmm, relu) == (PROJECTIONS - 2, 0)
    assert hooks_of(block) == 0


def test_many_threads_at_random(block):
    given = save("mlp", "attn.wo")
    (x,) = inputs()
    expected = torch.autograd.grad(total(block(x)), x)

    def run(_):
        return torch.autograd.grad(total(recollect.checkpoint(block, x, policy=given)), x)

    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(run, range(40)):
            assert_identical(result, expected)
    assert hooks_of(block) == 0


@pytest.mark.parametrize("inner", [None, save("up"), policy.everything(), policy.nothing()])
@pytest.mark.parametrize("outer", [save("mlp"), save("mlp.up"), save("*")])
def test_regions_in_regions(block, outer, inner):
    def nested(x):
        x = x + block.attn(block.norm(x))
        return x + recollect.checkpoint(block.mlp, x, policy=inner).sin()

    (x,) = inputs()
    expected = step(block, [x])
    weights = list(block.parameters())
    for _ in range(2):
        torch.manual_seed(7)
        out = recollect.checkpoint(nested, x, policy=outer)
        grads = torch.autograd.grad(total(out), [x, *weights])
        assert_identical([out.detach(), *grads], expected[:-1])
    assert hooks_of(block) == 0


def test_a_module_called_by_forward_alone_is_not_entered(block):
    """Hooks do not see it; that is said, not passed over."""

    def direct(x):
        return block.mlp.forward(x).sin()

    with pytest.warns(UserWarning, match="matched nothing"):
        recollect.checkpoint(direct, *inputs(), policy=save("mlp"))


def test_what_is_in_a_compiled_module_cannot_be_seen(block):
    torch._dynamo.reset()
    block.mlp = torch.compile(block.mlp, backend="aot_eager")
    with pytest.raises(ValueError, match="in compiled code cannot be seen"):
        recollect.checkpoint(block, *inputs(), policy=save("mlp.up"))


# Dynamo reads `.grad` of what goes into compiled code, and torch warns about that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("pattern", ["mlp", "*"])
def test_a_compiled_module_inside_is_compiled_once(block, pattern):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    expected = step(block, inputs())
    block.mlp = torch.compile(block.mlp, backend=counter, fullgraph=True)
    for _ in range(3):
        assert_identical(step(block, inputs(), selective(save(pattern))), expected)
    assert counter.frame_count == 1


def test_nothing_is_run_again_with_all_modules_kept(block):
    counts = backward_ops(block, inputs(), save("*")).count
    assert counts[aten.addmm.default] == 0
