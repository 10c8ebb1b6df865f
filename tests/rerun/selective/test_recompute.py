"""Regions in which a kept result could be given to the wrong call, or be given out changed."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recollect
from recollect import policy
from recollect.errors import KeptTensorError
from tests.rerun.selective._helpers import again, square

aten = torch.ops.aten


class Accumulates(torch.autograd.Function):
    """Adds to zeros without an op, as a kernel with atomic additions does."""

    @staticmethod
    def forward(ctx, x):
        out = torch.zeros_like(x)
        out.numpy()[:] += x.detach().numpy() * 2
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def written_through_an_alias(x):
    y = x * 1
    view = y.view(-1)
    before = view.mul(2)
    y.add_(1)
    return before.sin() * view.mul(2).cos().sum()


def written_buffer(x):
    buffer = torch.zeros(4)
    buffer[0] = 1.0
    first = buffer + 1
    buffer[1] = 2.0
    return (x * first).sin() * (x * (buffer + 1)).cos()


def hidden_write(x):
    mean, variance = torch.zeros(4).clone(), torch.ones(4).clone()
    y = F.batch_norm(x, mean, variance, training=True)
    return (y * mean).sin() + (x * variance).cos()


def filled_cache(cache, x):
    if not cache:
        with torch.no_grad():
            cache.append(x * 3)
    return F.dropout(x).sin() * F.dropout(x).cos() + cache[0]


def autocast_and_cache(cache, x):
    weight = torch.eye(4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        if not cache:
            with torch.no_grad():
                cache.append(F.linear(x, torch.ones(4, 4)))
        return F.linear(x, weight).sin() * F.linear(x, weight * 2).cos() + cache[0]


def shared_with_an_array(x):
    y = (x * 2).detach().mul(1)
    array = y.numpy()
    before = (x * y).sin()
    array *= 3
    return before * (x * y).cos() * F.dropout(x) * y.argmax()


CASES = {
    "two dropouts": (lambda x: F.dropout(x).sin() * F.dropout(x).cos(), aten.mul),
    "two draws": (lambda x: (x * torch.rand(4)).sin() * (x * torch.rand(4)).cos(), aten.rand),
    "alias": (written_through_an_alias, aten.mul),
    "buffer": (written_buffer, aten.add),
    "cumsum": (lambda x: x.cumsum(-1).sin() * x.cumsum(-2).cos(), aten.cumsum),
    "softmax": (lambda x: x.softmax(-1) * x.softmax(-2).cos(), aten._softmax),
    "factors": (lambda x: (x * -1).sin() * (x * -2).cos(), aten.mul),
    "hidden write": (hidden_write, aten.clone),
    "array": (shared_with_an_array, aten.mul),
    "zeros": (lambda x: Accumulates.apply(x).sin(), aten.zeros_like),
    "nan": (lambda x: (x @ x).masked_fill(x > 0, float("nan")).nan_to_num().sin(), aten.mm),
    "nested vmap": (
        torch.func.vmap(torch.func.vmap(lambda a: (a * 2).sin())),
        aten.mul,
    ),
}


def gradient(function, region=None):
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)
    torch.manual_seed(1)
    out = function(x) if region is None else region(function, x)
    (grad,) = torch.autograd.grad(out.float().sin().sum(), x)
    return grad


def with_policy(given):
    return functools.partial(recollect.checkpoint, policy=given)


@pytest.mark.filterwarnings("ignore:the policy's .* matched nothing:UserWarning")
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(("function", "op"), CASES.values(), ids=CASES)
def test_every_nth(function, op, number):
    given = policy.every_nth(op, number)
    assert torch.equal(gradient(function, with_policy(given)), gradient(function))


@pytest.mark.parametrize("function", [function for function, _ in CASES.values()], ids=CASES)
def test_everything(function):
    assert torch.equal(gradient(function, with_policy(policy.everything())), gradient(function))


@pytest.mark.parametrize("function", [filled_cache, autocast_and_cache])
@pytest.mark.parametrize(
    "given",
    [policy.every_nth(aten.mul, 2), policy.everything(), policy.save_ops(aten.mm, aten.mul)],
)
def test_a_cache_that_forward_fills(function, given):
    expected = gradient(functools.partial(function, []))
    assert torch.equal(gradient(functools.partial(function, []), with_policy(given)), expected)


#: Ways to a tensor with the values of another and without its history.
CUT_OFF = {
    "detach": lambda h: h.detach(),
    "data": lambda h: h.data,
    "a copy": lambda h: h.detach().clone(),
    "a view": lambda h: h.detach().view(-1, 4),
    "a view of data": lambda h: h.data.t(),
    "twice": lambda h: h.detach().data.detach(),
    "alias": lambda h: aten.alias(h.detach()),
    "by way of numpy": lambda h: torch.from_numpy(h.detach().numpy()),
    "by way of DLPack": lambda h: torch.from_dlpack(h.detach()),
    "by way of a list": lambda h: torch.tensor(h.tolist()),
}


def tables(cut_off, of_argument, fewer, table, x):
    """Multiplies something without a history, and then fills a table if there is none."""
    h = x if of_argument else x.sin()
    y = cut_off(h) @ x
    if not table:
        with torch.no_grad():
            table.append(torch.arange(4.0).outer(torch.ones(4)).cos())
    out = (h * y * table[0]).sin() if not fewer else (h * y).exp()
    return out.mm(x).cos()


@pytest.mark.parametrize("fewer", [False, True])
@pytest.mark.parametrize("of_argument", [False, True])
@pytest.mark.parametrize("cut_off", CUT_OFF.values(), ids=CUT_OFF)
@pytest.mark.parametrize("given", [policy.everything(), policy.matmuls(), [aten.mm.default]])
def test_what_has_no_history_and_a_table_that_forward_fills(given, cut_off, of_argument, fewer):
    function = functools.partial(tables, cut_off, of_argument, fewer)
    expected = gradient(functools.partial(function, []))
    region = with_policy(given)
    assert torch.equal(gradient(functools.partial(function, []), region), expected)


def test_what_was_kept_of_a_detached_tensor_is_not_run_again():
    def function(x):
        return (x.sin().detach() @ x).cos() @ (x.data @ x).sin()

    assert again(function, square(1), policy.matmuls())[aten.mm.default] == 0


@pytest.mark.parametrize("given", [policy.everything(), policy.matmuls()])
def test_a_guess_that_turns_out_wrong_is_an_error(given):
    cache, weights = [], torch.randn(4, 4)

    def function(x):
        if not cache:
            cache.append(torch.tensor([[0.5] * 4] * 4) @ weights)
        a = torch.tensor([[0.25] * 4] * 4) @ weights
        b = torch.tensor([[0.125] * 4] * 4) @ weights
        return (x * a).sin() * (x * b).cos()

    with pytest.raises(KeptTensorError, match="on the condition that"):
        gradient(function, with_policy(given))


def test_choices_that_change_places_are_an_error():
    def function(x):
        scores = [x.sin().detach(), x.cos().detach()]
        if recollect.is_recomputing():
            scores.reverse()
        first, second = (each.topk(2).indices for each in scores)
        return x.gather(-1, first).sin() * x.gather(-1, second).exp()

    with pytest.raises(KeptTensorError, match="gets other inputs now"):
        gradient(function, with_policy([aten.topk]))


@pytest.mark.parametrize("given", [policy.everything(), policy.offload_ops(aten.mul, aten.argmax)])
def test_what_shares_memory_with_an_array_is_computed_again(given):
    """The region writes to it through the array, which nobody sees."""
    expected = gradient(shared_with_an_array)
    assert torch.equal(gradient(shared_with_an_array, with_policy(given)), expected)


#: How often the ops below have run.
RUNS: list[None] = []


@torch.library.custom_op("recollect_test::counted_array", mutates_args=())
def counted_array(x: torch.Tensor) -> torch.Tensor:
    """Another result for each run, in memory of numpy."""
    RUNS.append(None)
    return torch.from_numpy(x.detach().numpy() * len(RUNS))


@torch.library.custom_op("recollect_test::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    """The same, in memory of torch."""
    RUNS.append(None)
    return x * len(RUNS)


@pytest.fixture
def runs():
    RUNS.clear()
    return RUNS


@pytest.mark.parametrize("op", [counted, counted_array])
@pytest.mark.parametrize("rule", [policy.save_ops, policy.offload_ops])
def test_a_kept_result_of_another_library_is_not_computed_again(rule, op, runs):
    def function(x):
        return (op(x.detach()).sin() * x).exp()

    expected = gradient(function)
    runs.clear()
    given = rule(op._opoverload)
    assert torch.equal(gradient(function, with_policy(given)), expected)
    assert len(runs) == 1


def test_an_op_of_another_library_that_may_neither_run_again_nor_be_kept_is_an_error(runs):
    def function(x):
        y = counted(x.detach())
        y.numpy()  # for a log, say
        return (y.sin() * x).exp()

    with pytest.raises(KeptTensorError, match=r"recollect_test.counted.default .* keeps state"):
        gradient(function, with_policy(policy.save_ops(counted._opoverload)))


def test_writes_to_an_array_that_an_op_has_returned_are_repeated():
    """An op of another library that computes the same again."""

    def function(x):
        y = doubled_array(x.detach())
        before = (x * y).sin()
        array = y.numpy()
        array *= 3
        return before * (x * y).cos()

    expected = gradient(function)
    given = policy.save_ops(doubled_array._opoverload)
    assert torch.equal(gradient(function, with_policy(given)), expected)


@torch.library.custom_op("recollect_test::doubled_array", mutates_args=())
def doubled_array(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


def test_a_recomputation_that_fails_and_is_repeated():
    fails = [True]

    def function(x):
        first, second = F.dropout(x), F.dropout(x)
        if recollect.is_recomputing() and fails:
            fails.clear()
            raise OSError("for once")
        return first.sin() * second.cos()

    def region(function, x):
        out = recollect.checkpoint(function, x, policy=policy.everything())
        with pytest.raises(OSError, match="for once"):
            out.sum().backward(retain_graph=True)
        return out

    assert torch.equal(gradient(function, region), gradient(function))


def test_a_tied_layer():
    torch.manual_seed(0)
    first, middle = nn.Linear(4, 4), nn.Linear(4, 4)
    second = nn.Sequential(first)
    model = nn.ModuleDict({"middle": middle, "second": second})

    def function(x):
        a = first(x)
        return (a * model["middle"](a.sin())).sin() * model["second"](x).cos()

    given = policy.save_modules("middle", "second")
    assert torch.equal(gradient(function, with_policy(given)), gradient(function))


@pytest.mark.parametrize("given", [policy.save_ops(aten._to_copy), policy.everything()])
def test_offloaded_inputs_under_autocast(given):
    layer = nn.Linear(4, 4, bias=False)

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            h = layer(x * 1)
        return h.float().sin().bfloat16() * h.float().cos().bfloat16()

    def region(function, x):
        return recollect.checkpoint(function, x * 1, policy=given, offload_inputs=True)

    assert torch.equal(gradient(function, region), gradient(lambda x: function(x * 1)))


@pytest.mark.parametrize("wrong", [lambda t: t[:1], lambda t: t.double(), lambda t: None])
def test_a_store_that_gives_back_something_else_is_named(wrong):
    class Careless:
        def put(self, tensor):
            return tensor

        def get(self, handle):
            return wrong(handle)

        def drop(self, handle):
            pass

    region = functools.partial(
        recollect.checkpoint, policy=policy.save_ops(aten.mm), store=Careless()
    )
    with pytest.raises(KeptTensorError, match=r"get\(\) of Careless returned"):
        gradient(lambda x: (x @ x).sin(), region)
