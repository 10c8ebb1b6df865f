"""`recollect.explain`: what it says is held is what the allocator says, and it changes nothing."""

import contextvars
import copy
import io
import random
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import recollect
from recollect import policy
from recollect.observer import observing
from tests._support import assert_identical, gradients, leaf, measure

WIDTH, HEADS, VOCABULARY = 32, 4, 40
BYTES = 64 * 64 * 4
aten = torch.ops.aten


class Block(nn.Module):
    """A block of a decoder, as in benchmarks/_decoder.py."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.dropout = dropout
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        x = x + F.dropout(self.attend(self.attention_norm(x)), self.dropout, self.dropout > 0)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x):
        batch, tokens, width = x.shape
        heads = self.qkv(x).view(batch, tokens, 3, HEADS, width // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Decoder(nn.Module):
    def __init__(self, dropout=0.0, depth=3, vocabulary=VOCABULARY):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def decoder(options=None, **sizes):
    torch.manual_seed(0)
    model = Decoder(**sizes)
    if options is not None:
        for block in model.blocks:
            recollect.checkpointed(block, **options)
    return model


def tokens(vocabulary=VOCABULARY):
    return torch.randint(vocabulary, (2, 17), generator=torch.Generator().manual_seed(0))


def held_by(model, *inputs):
    def backward(loss):
        loss.backward()
        model.zero_grad()

    return measure(lambda: model(*inputs), backward).held


def held(function):
    return measure(function, lambda out: None).held


def rows_of(explanation, **wanted):
    return [
        row
        for row in explanation.rows
        if all(getattr(row, name) == value for name, value in wanted.items())
    ]


def only(explanation, **wanted):
    (row,) = rows_of(explanation, **wanted)
    return row


VARIANTS = {
    "plain": None,
    "checkpointed": {},
    "no_rng": {"preserve_rng_state": False},
    "full": {"early_stop": False},
    "debug": {"debug": True},
    "matmuls_and_attention": {"policy": policy.matmuls() | policy.attention()},
    "save_modules": {"policy": policy.save_modules("qkv", "gate")},
    "everything": {"policy": policy.everything()},
    "nothing": {"policy": policy.nothing()},
    "list": {"policy": [aten.mm]},
    "function": {"policy": lambda ctx, op, *args, **kwargs: op is aten.mm.default},
    "offload": {"policy": policy.offload_ops(aten.mm), "offload_inputs": True},
    "reentrant": {"engine": "reentrant"},
}


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["", "dropout"])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_held_bytes_are_those_of_the_allocator(options, dropout):
    model = decoder(options, dropout=dropout)
    explanation = recollect.explain(model, tokens())
    assert explanation.held_bytes == held_by(model, tokens())
    assert explanation.held_bytes == sum(
        row.bytes for row in explanation.rows if row.fate in ("kept", "input")
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["", "dropout"])
@pytest.mark.parametrize("name", ["checkpointed", "matmuls_and_attention", "save_modules"])
def test_what_is_recomputed_is_what_plain_autograd_holds_besides(name, dropout):
    plain = recollect.explain(decoder(dropout=dropout), tokens())
    ours = recollect.explain(decoder(VARIANTS[name], dropout=dropout), tokens())
    needed = sum(
        row.bytes
        for row in ours.rows
        if row.op != "(random state)" and row.fate in ("kept", "input", "recomputed")
    )
    # What a policy keeps may be more than autograd would: then it is not saved.
    assert needed >= plain.held_bytes
    if name == "checkpointed":
        assert needed == plain.held_bytes
    assert ours.held_bytes < plain.held_bytes


# --- fates and reasons ----------------------------------------------------------------------------


def test_a_model_without_regions():
    explanation = recollect.explain(decoder(), tokens())
    assert {row.fate for row in explanation.rows} == {"kept"}
    assert {row.reason for row in explanation.rows} == {"autograd", "part of the result"}
    assert {row.region for row in explanation.rows} == {None}
    assert explanation.regions == 0
    assert explanation.recomputed_bytes == 0
    assert "No checkpointed region" in explanation.remarks[0]


def test_a_region_without_a_policy():
    explanation = recollect.explain(decoder({}), tokens())
    assert explanation.regions == 3
    inside = rows_of(explanation, path="blocks.1.gate")
    assert [(r.op, r.fate, r.reason, r.region) for r in inside] == [
        ("aten.mm", "recomputed", "no policy", "blocks.1")
    ]
    row = only(explanation, reason="input of blocks.0")
    assert (row.fate, row.path, row.bytes) == ("input", "embedding", 2 * 16 * WIDTH * 4)
    # Of the last block backward needs nothing that comes after the input of its last product.
    assert rows_of(explanation, path="blocks.1.down") == []


def test_a_policy():
    options = {"policy": policy.matmuls() | policy.attention()}
    explanation = recollect.explain(decoder(options), tokens())
    row = only(explanation, path="blocks.1.gate")
    assert (row.fate, row.reason, row.region) == ("kept", "matmuls()", "blocks.1")
    assert row.bytes == 2 * 16 * 2 * WIDTH * 4
    assert row.shape == (32, 2 * WIDTH)
    assert row.dtype is torch.float32
    (row, _) = rows_of(explanation, path="blocks.1", reason="attention()")
    assert row.fate == "kept"
    row = only(explanation, path="blocks.1", op="aten.silu")
    assert (row.fate, row.reason) == ("recomputed", "no rule matches")
    row = only(explanation, path="blocks.1.down")
    assert (row.fate, row.reason) == ("not held", "matmuls(), but nothing needs it")


def test_an_op_whose_result_nobody_saves_spares_nothing():
    x = leaf(64, 64)
    explanation = recollect.explain(lambda: recollect.checkpoint(lambda x: (x + 1).sin().sin(), x))
    assert [(r.op, r.bytes) for r in rows_of(explanation, fate="recomputed")] == [
        ("aten.add", BYTES),
        ("aten.sin", BYTES),
    ]
    explanation = recollect.explain(lambda: recollect.checkpoint(lambda x: (x + 1 + 1).sin(), x))
    assert [r.bytes for r in rows_of(explanation, op="aten.add")] == [0, BYTES]


def test_results_that_are_not_to_be_repeated():
    x = leaf(64, 64)
    explanation = recollect.explain(
        lambda: recollect.checkpoint(
            lambda x: x.sin().topk(3).values, x, policy=policy.save_ops(aten.sin)
        )
    )
    indices = only(explanation, op="aten.topk", dtype=torch.int64)
    assert (indices.fate, indices.reason) == ("kept", "discrete")


def test_named_tensors():
    def function(x):
        y = recollect.tag((x + 1).sin(), "waves")
        return y.sin().sin()

    x = leaf(64, 64)
    explanation = recollect.explain(
        lambda: recollect.checkpoint(function, x, policy=policy.save_named("waves"))
    )
    row = only(explanation, fate="kept", reason="save_named('waves')")
    assert (row.op, row.bytes) == ("aten.sin", BYTES)


class CopyingStore:
    """Holds copies, in what stands for other memory."""

    def put(self, tensor):
        return [tensor.clone()]

    def get(self, handle):
        return handle[0]

    def drop(self, handle):
        handle.clear()


def test_offloaded_results_and_inputs():
    options = {"policy": policy.matmuls(), "offload_inputs": True, "store": CopyingStore()}
    explanation = recollect.explain(decoder(options), tokens())
    row = only(explanation, path="blocks.1.gate")
    assert (row.fate, row.reason, row.region) == ("offloaded", "matmuls()", "blocks.1")
    row = only(explanation, path="embedding")
    assert (row.fate, row.reason, row.region) == ("offloaded", "offload_inputs", "blocks.0")
    assert explanation.totals.by_fate["input"] == 0
    assert explanation.offloaded_bytes == sum(
        row.bytes for row in explanation.rows if row.fate == "offloaded"
    )


def test_what_a_host_store_leaves_on_the_cpu_is_held():
    explanation = recollect.explain(decoder(VARIANTS["offload"]), tokens())
    row = only(explanation, path="blocks.1.gate")
    assert row.fate == "kept"
    assert row.reason == "offload_ops(aten.mm), but stays where it is"
    row = only(explanation, path="embedding")
    assert row.fate == "input"
    assert "stays where it is" in row.reason


def test_a_reentrant_region():
    explanation = recollect.explain(decoder({"engine": "reentrant"}), tokens())
    row = only(explanation, path="blocks.1.gate")
    assert (row.fate, row.region) == ("recomputed", "blocks.1")
    assert row.reason == "reentrant: forward runs without grad"
    assert len(rows_of(explanation, fate="input")) == 3


def test_reentrant_inputs_in_a_store():
    options = {"engine": "reentrant", "offload_inputs": True, "store": CopyingStore()}
    explanation = recollect.explain(decoder(options), tokens())
    assert len(rows_of(explanation, fate="offloaded", reason="offload_inputs")) == 3


def test_a_region_inside_a_region():
    x = leaf(64, 64)

    def inner(x):
        return (x.sin() @ x.cos()).sin()

    def outer(x):
        return recollect.checkpoint(inner, x + 1, policy=policy.matmuls()).sin()

    def function():
        return recollect.checkpoint(outer, x)

    explanation = recollect.explain(function)
    assert explanation.held_bytes == held(function)
    # The input of the inner one is computed again by the outer one.
    assert only(explanation, op="aten.add").fate == "recomputed"
    assert rows_of(explanation, fate="input") == []
    product = only(explanation, op="aten.mm")
    assert (product.fate, product.reason, product.region) == ("kept", "matmuls()", "inner")
    assert explanation.regions == 2


def test_what_an_outer_policy_keeps_of_an_inner_region():
    x = leaf(64, 64)

    def outer(x):
        return recollect.checkpoint(lambda x: (x.sin() @ x).sin(), x + 1).sin()

    def function():
        return recollect.checkpoint(outer, x, policy=policy.matmuls())

    explanation = recollect.explain(function)
    assert explanation.held_bytes == held(function)
    product = only(explanation, op="aten.mm")
    assert product.reason.startswith("matmuls()")


def test_calls_of_torch_when_installed():
    x = leaf(64, 64)

    def function():
        y = torch.utils.checkpoint.checkpoint(lambda x: x.sin().sin(), x, use_reentrant=False)
        return y.sin()

    recollect.install()
    try:
        explanation = recollect.explain(function)
    finally:
        recollect.uninstall()
    assert explanation.regions == 1
    assert explanation.recomputed_bytes == BYTES


def test_contexts_of_the_user():
    x = leaf(64, 64)
    explanation = recollect.explain(
        lambda: recollect.checkpoint(
            lambda x: x.sin().sin(), x, context_fn=lambda: (torch.no_grad(), torch.no_grad())
        )
    )
    assert explanation.held_bytes >= BYTES
    explanation = recollect.explain(
        lambda: recollect.checkpoint(
            lambda x: x.sin().sin(),
            x,
            context_fn=lambda: (torch.autograd.profiler.record_function("a"),) * 2,
        )
    )
    assert only(explanation, fate="recomputed").reason == "context_fn"


def test_a_region_that_is_named_by_its_function():
    x = leaf(64, 64)

    def chunk(x):
        return x.sin().sin()

    explanation = recollect.explain(lambda: recollect.checkpoint(chunk, x))
    assert only(explanation, fate="recomputed").region == "chunk"


# --- counted once ---------------------------------------------------------------------------------


def test_views_and_two_saves_of_one_storage_count_once():
    x = leaf(64, 64)

    def function():
        y = x.sin()
        return y.sin() + y.view(-1).cos().view(64, 64) + y.t().exp()

    explanation = recollect.explain(function)
    assert explanation.held_bytes == held(function)
    assert [row.op for row in explanation.rows].count("aten.sin") == 1


def test_parameters_buffers_and_inputs_do_not_count():
    layer = nn.BatchNorm1d(64, affine=True)
    x = torch.randn(64, 64)

    def function():
        return (layer(x) * x).sum()

    explanation = recollect.explain(function)
    assert explanation.held_bytes == held(function)
    assert {row.bytes for row in explanation.rows} <= {BYTES, 64 * 4, 4}
    assert recollect.explain(lambda x: x, x).rows == ()


def test_tensors_made_from_python_numbers_count():
    x = leaf(64)

    def function():
        return x * torch.tensor([2.0] * 64)

    explanation = recollect.explain(function)
    assert explanation.held_bytes == held(function) == 2 * 64 * 4


def test_memory_that_no_op_was_seen_to_make():
    class Hoarder(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.big = x.sin()
            return x.cos()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.big

    x = leaf(64, 64)
    explanation = recollect.explain(lambda: Hoarder.apply(x))
    assert only(explanation, op="aten.sin").reason == "autograd"


def test_memory_that_other_code_holds():
    x, found = leaf(64, 64), []

    class Hook:
        def __call__(self):
            found.append(x.detach().sin())
            return x.sum()

    explanation = recollect.explain(Hook())
    assert only(explanation, op="aten.sin").reason == "held by other code"


# --- nothing changes ------------------------------------------------------------------------------


class Counting(nn.Module):
    """Changes whatever a module can change in forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("average", torch.zeros(8))
        self.calls = 0
        self.history = []

    def forward(self, x):
        self.calls += 1
        self.history.append(x.shape)
        self.cache = x.detach()
        self.average = 0.9 * self.average + x.detach().mean(0)
        return F.dropout(self.norm(x), 0.5) * random.random()


def test_everything_is_as_it_was():
    model, x = Counting(), torch.randn(4, 8)
    model(x).sum().backward()
    before = copy.deepcopy(model.state_dict())
    grads = [grad.clone() for grad in gradients(model)]
    versions = [buffer._version for buffer in model.buffers()]
    streams = torch.get_rng_state(), random.getstate()
    names, average = set(vars(model)), model.average
    recollect.explain(model, x)
    assert_identical(model.state_dict(), before)
    assert_identical(gradients(model), grads)
    assert [buffer._version for buffer in model.buffers()] == versions
    assert model.average is average
    assert (model.calls, len(model.history)) == (1, 1)
    assert set(vars(model)) - {"_recollect_index"} == names
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]


def test_new_attributes_are_gone():
    model = Counting()
    recollect.explain(model, torch.randn(4, 8))
    assert not hasattr(model, "cache")


def test_backward_inside_leaves_gradients_alone():
    layer = nn.Linear(8, 8)
    layer(torch.ones(2, 8)).sum().backward()
    grads = gradients(layer)
    copies = [grad.clone() for grad in grads]

    def step(x):
        loss = layer(x).sum()
        loss.backward()
        return loss

    recollect.explain(step, torch.ones(2, 8))
    assert [a is b for a, b in zip(gradients(layer), grads, strict=True)] == [True, True]
    assert_identical(gradients(layer), copies)


def test_variables_and_arguments_are_put_back():
    calls = 0
    variable = contextvars.ContextVar("variable", default=0)

    def function(x, log):
        nonlocal calls
        calls += 1
        variable.set(1)
        log.append(x)
        return x.sin()

    log = []
    recollect.explain(function, leaf(8), log)
    assert (calls, log, variable.get()) == (0, [], 0)


def test_a_failure_changes_nothing_either():
    layer = nn.BatchNorm1d(8)

    def function(x):
        recollect.checkpoint(layer, x)
        recollect.checkpoint(lambda x: 1 / 0, x)

    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ZeroDivisionError):
        recollect.explain(function, torch.randn(4, 8))
    assert_identical(layer.state_dict(), before)
    assert observing.observer is None
    assert not torch._C._len_torch_dispatch_stack()


@pytest.mark.parametrize("options", [{}, VARIANTS["matmuls_and_attention"]], ids=["", "selective"])
def test_training_goes_on_as_if_nothing_had_been_asked(options):
    def train(ask):
        model = decoder(options, dropout=0.1)
        for _ in range(2):
            if ask:
                recollect.explain(model, tokens())
            model(tokens()).backward()
        return gradients(model), torch.get_rng_state()

    assert_identical(train(True), train(False))


@pytest.mark.parametrize("name", ["plain", "checkpointed", "matmuls_and_attention", "offload"])
def test_no_graph_and_no_tensor_is_left(name):
    model = decoder(VARIANTS[name])
    recollect.explain(model, tokens())
    ours = measure(lambda: recollect.explain(model, tokens()), lambda _: None)
    assert ours.held == 0
    # Nor does it take more memory than forward does.
    forward = measure(lambda: model(tokens()), lambda _: None)
    assert ours.peak <= forward.peak + 32 * 1024


def test_the_output_is_let_go():
    freed = io.StringIO()  # a log, which is not put back

    def function():
        out = leaf(8).sin()
        weakref.finalize(out, freed.write, "freed")
        return out

    recollect.explain(function)
    assert freed.getvalue() == "freed"


def test_a_list_in_a_closure_is_put_back():
    outputs = []

    def function():
        outputs.append(leaf(8).sin())
        return outputs[0]

    recollect.explain(function)
    assert outputs == []


# --- ways to call it ------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_grad_is_enabled(context):
    model = decoder({})
    expected = recollect.explain(model, tokens()).held_bytes
    x = tokens()
    with context():
        assert recollect.explain(model, x).held_bytes == expected
        assert not torch.is_grad_enabled()


def test_keywords_are_passed_on():
    assert recollect.explain(lambda *, x: x.sin(), x=leaf(8)).held_bytes == 8 * 4


def test_not_callable():
    with pytest.raises(TypeError, match="function_or_module should be callable, but got int"):
        recollect.explain(3)


def test_an_iterator_would_be_used_up():
    with pytest.raises(TypeError, match="iterator"):
        recollect.explain(sum, iter([leaf(8)]))


def test_under_autocast():
    model = decoder({})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        explanation = recollect.explain(model, tokens())
    assert {row.dtype for row in explanation.rows} >= {torch.bfloat16}


def test_on_the_meta_device():
    with torch.device("meta"):
        model = Decoder()
        batch = torch.zeros(2, 17, dtype=torch.int64)
    real = recollect.explain(decoder(), tokens())
    assert recollect.explain(model, batch).held_bytes == pytest.approx(real.held_bytes, rel=0.5)


# --- as text --------------------------------------------------------------------------------------


def test_rows_that_say_the_same_are_one_line():
    text = str(recollect.explain(decoder(VARIANTS["matmuls_and_attention"]), tokens()))
    (line,) = [line for line in text.splitlines() if line.startswith("blocks.*.gate x3")]
    assert line.split() == [
        *("blocks.*.gate", "x3", "aten.mm", "32x64", "float32"),
        *("24.00", "KiB", "kept", "matmuls()"),
    ]
    assert "inputs of regions" in text
    assert "held after forward" in text


def test_numbers_that_are_the_same_stay():
    model = nn.ModuleDict({"a1": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))})
    text = str(recollect.explain(lambda x: model["a1"](x).sin(), leaf(2, 8)))
    assert "aten.addmm" in text
    assert " 0 x2" not in text


def test_totals():
    explanation = recollect.explain(decoder(VARIANTS["matmuls_and_attention"]), tokens())
    totals = explanation.totals
    assert sum(totals.by_fate.values()) == sum(row.bytes for row in explanation.rows)
    assert totals.by_module["blocks.0.gate"]["kept"] == 2 * 16 * 2 * WIDTH * 4
    assert totals.by_fate["input"] == 3 * 2 * 16 * WIDTH * 4
    assert repr(explanation).startswith("<Explanation: ")


def test_a_remark_about_inputs():
    explanation = recollect.explain(decoder({"preserve_rng_state": False}, depth=12), tokens())
    (remark,) = explanation.remarks
    assert "Inputs of regions are 48.00 KiB" in remark
    *_, shown = str(explanation).split("\n\n")
    assert shown.split() == remark.split()
    assert max(map(len, shown.splitlines())) <= 80


def test_a_remark_about_what_is_outside():
    explanation = recollect.explain(decoder({}, vocabulary=4000), tokens(4000))
    (remark,) = explanation.remarks
    assert "outside of any region" in remark
    assert "aten._log_softmax" in remark


def test_a_balanced_model_gets_no_remark():
    explanation = recollect.explain(decoder(VARIANTS["matmuls_and_attention"]), tokens())
    assert explanation.remarks == ()


def test_nothing_at_all():
    explanation = recollect.explain(lambda: None)
    assert explanation.held_bytes == 0
    assert "Nothing is held" in str(explanation)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_a_batch_as_plan_takes_it():
    with pytest.raises(TypeError) as caught:
        recollect.explain(torch.nn.Linear(2, 2), (leaf(2),))
    (note,) = caught.value.__notes__
    assert note.endswith("recollect.explain(model, *batch)")
