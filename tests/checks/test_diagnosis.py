"""What is found out about a mismatch once it has happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recollect.checks import diagnosis
from recollect.checks.diagnosis import (
    OTHER_BRANCH,
    RANDOM_OP,
    UNSTABLE_OP,
    Cause,
    MismatchContext,
    TensorSpec,
    describe,
    likely_causes,
    saved_by_forward,
    saved_by_recomputation,
)
from tests._support import leaf


class Mine(torch.autograd.Function):
    """Saves two tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y, grad * x


class Packed:
    """Runs a function as an engine would: each saved tensor is packed as a ticket."""

    def __init__(self, function: Callable[..., Tensor], *args: Tensor) -> None:
        self.tickets: list[Any] = []
        self.tensors: list[Tensor] = []
        #: What `ask` returned, each time that backward asked.
        self.answers: list[Any] = []
        self.ask: Callable[[], Any] = lambda: saved_by_forward(self.tickets)
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            self.out = function(*args)

    def pack(self, tensor: Tensor) -> Any:
        ticket = (len(self.tickets), tensor.shape, tensor.dtype)
        self.tickets.append(ticket)
        self.tensors.append(tensor.detach())
        return ticket

    def unpack(self, ticket: Any) -> Tensor:
        self.answers.append(self.ask())
        return self.tensors[ticket[0]]


def chain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x = F.linear(x.sin(), weight, bias).exp()
    return Mine.apply(x, x.relu())


def weights() -> tuple[Tensor, ...]:
    return leaf(2, 3), leaf(4, 3), leaf(4)


def test_the_ops_that_saved_are_named() -> None:
    run = Packed(chain, *weights())
    run.out.sum().backward()
    assert run.answers[0] == {
        0: "sin",
        1: "addmm",
        2: "addmm",
        3: "exp",
        4: "relu",
        5: "Mine",
        6: "Mine",
    }


def test_what_has_been_run_is_not_found_any_more() -> None:
    run = Packed(chain, *weights())
    run.out.sum().backward()
    assert run.answers[-1] == {0: "sin"}


def test_tickets_of_others_are_not_mistaken() -> None:
    """Equal tickets of another region are others all the same."""
    x = leaf(3)
    inner = Packed(lambda x: x.sin(), x)
    outer = Packed(lambda x: x.exp().cos(), inner.out)
    assert inner.tickets[0] == outer.tickets[0]
    outer.out.sum().backward()
    assert outer.answers[0] == {0: "exp", 1: "cos"}
    assert inner.answers == [{0: "sin"}]


def test_outside_of_backward_nothing_is_known() -> None:
    assert saved_by_forward(Packed(chain, *weights()).tickets) == {}
    assert saved_by_forward([]) == {}


def test_a_graph_is_searched_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def deep(x: Tensor) -> Tensor:
        x = x.sin()
        for _ in range(30):
            x = x + 1
        return x.exp()

    assert described(deep) == {0: "sin", 1: "exp"}
    monkeypatch.setattr(diagnosis, "_NODES", 10)
    assert described(deep) == {1: "exp"}


def described(function: Callable[[Tensor], Tensor]) -> Any:
    run = Packed(function, leaf(2))
    run.out.sum().backward()
    return run.answers[0]


def recomputed(function: Callable[..., Tensor], *args: Tensor) -> list[Tensor | None]:
    """What was saved, numbered as the rerun engine does."""
    tensors: list[Tensor | None] = []

    def pack(tensor: Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda n: tensors[n])
    with torch.enable_grad(), hooks:
        function(*args)
    return tensors


def test_the_ops_of_a_recomputation_are_named() -> None:
    found = saved_by_recomputation(recomputed(lambda x: x.sin().exp().cos().tanh(), leaf(3)))
    assert found == {0: "sin", 1: "exp", 2: "cos", 3: "tanh"}


def test_dead_tensors_and_leaves_tell_nothing() -> None:
    assert saved_by_recomputation([None, leaf(2), torch.ones(1)]) == {}


# --- in words -------------------------------------------------------------------------------------


def context(
    forward: Callable[[Tensor], Tensor], again: Callable[[Tensor], Tensor], **parts: Any
) -> str:
    """The description of a region that was ``forward`` once and ``again`` in backward."""
    x = leaf(2, 3)
    run = Packed(forward, x)

    def ask() -> str:
        return describe(MismatchContext(again, run.tickets, recomputed(again, x), **parts))

    run.ask = ask
    run.out.sum().backward()
    return run.answers[0]


def test_first_divergence_by_shape() -> None:
    text = context(lambda x: x.sin().exp(), lambda x: x[:, :2].sin().exp())
    assert text.startswith("In region `test_first_divergence_by_shape.<locals>.<lambda>` (test_")
    assert (
        "First divergence, tensor 0: saved by forward: sin, float32 [2, 3]; "
        "recomputation: sin, float32 [2, 2].\n"
    ) in text
    assert "Likely cause: the region depends on something that has changed" in text
    assert "\nFix: pass it as an argument" in text


def test_first_divergence_by_dtype() -> None:
    text = context(lambda x: x.sin().exp(), lambda x: x.sin().to(torch.bfloat16).exp().sin())
    assert "tensor 1: saved by forward: exp, float32 [2, 3]; recomputation: exp, bfloat16" in text
    assert "autocast" in text


def test_first_divergence_by_number() -> None:
    text = context(lambda x: x.sin().exp().tanh(), lambda x: x.sin().exp())
    assert "tensor 2: saved by forward: tanh, float32 [2, 3]; recomputation: nothing more." in text
    assert "a counter" in text
    text = context(lambda x: x.sin(), lambda x: x.sin().exp())
    assert "tensor 1: saved by forward: nothing more; recomputation: exp, float32 [2, 3]." in text


def test_what_saved_it_is_unknown_but_not_what_made_it() -> None:
    """The op that saved the tensor has made nothing that was saved, so there is no way to it."""
    text = context(lambda x: x.exp().sin(), lambda x: x.exp()[:1].sin())
    assert "tensor 1: saved by forward: sin, float32 [2, 3]; recomputation: made by slice" in text


def test_a_cache_among_the_arguments_is_suspected() -> None:
    class DynamicCache:
        pass

    def text(**parts: Any) -> str:
        return context(lambda x: x.sin(), lambda x: x[:, 1:].sin(), **parts)

    assert "its argument past (DynamicCache)" in text(kwargs={"past": DynamicCache()})
    assert "its argument args[1] (DynamicCache)" in text(args=(1, DynamicCache()))
    assert "its argument kv_cache:" in text(kwargs={"kv_cache": {}})
    assert "its argument" not in text(kwargs={"use_cache": True, "past_key_values": None})


def test_a_module_in_eval_mode_is_suspected() -> None:
    module = nn.Linear(3, 3).eval()
    text = context(lambda x: module(x).exp().sin(), lambda x: module(x).sin())
    assert "In region Linear." in text
    assert "Linear is in eval mode now" in text


def test_a_check_of_the_users_own() -> None:
    """Its descriptions are not understood, but where they differ is known."""
    tickets = [(0, "a"), (1, "b")]
    text = describe(MismatchContext(torch.sin, tickets, [torch.ones(1), torch.ones(2)]), 1)
    assert "tensor 1: saved by forward: a tensor; recomputation: float32 [2]." in text
    nested = [(0, (torch.Size([2]), torch.float32, torch.device("cpu")))]
    text = describe(MismatchContext(torch.sin, nested, [torch.ones(3)]))
    assert "saved by forward: float32 [2]; recomputation: float32 [3]" in text


def test_without_a_divergence_there_is_the_region() -> None:
    text = describe(
        MismatchContext(torch.sin, [(0, torch.Size([2]), torch.float32)], [torch.ones(2)])
    )
    assert text.startswith("In region `")
    assert text.count("\n") == 1


def test_dead_tensors_are_passed_over() -> None:
    tickets = [(n, torch.Size([2]), torch.float32) for n in range(3)]
    text = describe(MismatchContext(torch.sin, tickets, [None, torch.ones(2), torch.ones(3)]))
    assert "First divergence, tensor 2:" in text


def test_never_raises() -> None:
    text = describe(MismatchContext(torch.sin, [()], [torch.ones(1)]), 0)
    assert text.startswith("(no more can be said: ")


# --- causes ---------------------------------------------------------------------------------------


def look(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> TensorSpec:
    return TensorSpec(shape, dtype, device)


def cause(*specs: TensorSpec | None, **evidence: Any) -> Cause:
    return next(likely_causes(*specs, **evidence))


HALF = look(4, 8, dtype=torch.bfloat16)
SOMETHING = (look(4, 8), look(8, 4))

CASES: dict[str, tuple[Cause, str, str]] = {
    "sharded": (
        cause(look(8, 8), look(0)),
        "freed by sharding",
        "checkpoint(block, x), not checkpoint(block.forward, x)",
    ),
    "sharded in forward": (cause(look(0), look(8)), "freed by sharding", "fully_shard("),
    "autocast": (
        cause(look(4, 8), HALF),
        "float32 and the other in bfloat16",
        'with torch.autocast("cpu", torch.bfloat16):',
    ),
    "autocast elsewhere": (
        cause(look(2, dtype=torch.float16), look(2, device=torch.device("cuda", 1))),
        "in float16",
        'with torch.autocast("cuda", torch.float16):',
    ),
    "compiled": (
        cause(*SOMETHING, savers=frozenset({"addmm", "CompiledFunction"})),
        "two graphs",
        "torch._dynamo.mark_dynamic(x, 0)",
    ),
    "cache": (
        cause(*SOMETHING, cache="past_key_values (DynamicCache)"),
        "past_key_values (DynamicCache)",
        "use_cache=False",
    ),
    "cache before routing": (cause(look(4, 8), look(8, 8), cache="cache"), "cache", "use_cache"),
    "routing": (
        cause(look(5, 8), look(6, 8)),
        "routed",
        "policy=[torch.ops.aten.topk, torch.ops.aten.sort, torch.ops.aten.nonzero]",
    ),
    "routing of no token": (cause(look(0, 8), look(6, 8)), "routed", "policy="),
    "eval mode": (
        cause(*SOMETHING, module=nn.Linear(1, 1).eval()),
        "Linear is in eval mode",
        "model.eval() after loss.backward()",
    ),
    "counter": (
        cause(look(4), None, counts_differ=True),
        "a counter",
        "if not recollect.is_recomputing()",
    ),
    "counter, more": (cause(None, look(4), counts_differ=True), "a counter", "is_recomputing"),
    "other": (cause(*SOMETHING), "has changed since forward", "checkpoint(block, x, mask)"),
    "other dimension": (cause(look(4, 8), look(4, 9)), "has changed since", "as an argument"),
    "in training mode": (
        cause(*SOMETHING, module=nn.Linear(1, 1)),
        "has changed since",
        "as an argument",
    ),
    "both precise": (
        cause(look(2), look(2, dtype=torch.float64)),
        "has changed since",
        "as an argument",
    ),
    "counts differ and shapes too": (
        cause(*SOMETHING, counts_differ=True),
        "has changed since",
        "as an argument",
    ),
}


@pytest.mark.parametrize(("cause", "sentence", "fix"), CASES.values(), ids=CASES)
def test_likely_cause(cause: Cause, sentence: str, fix: str) -> None:
    assert sentence in cause.sentence
    assert fix in cause.fix
    assert str(cause) == f"Likely cause: {cause.sentence}\nFix: {cause.fix}"


def test_other_values_have_their_own_causes() -> None:
    assert "preserve_rng_state=True" in RANDOM_OP.fix
    assert "use_deterministic_algorithms(True)" in UNSTABLE_OP.fix
    assert "another branch" in OTHER_BRANCH.sentence


def test_the_ops_in_the_advice_exist() -> None:
    for name in ("topk", "sort", "nonzero"):
        assert isinstance(getattr(torch.ops.aten, name), torch._ops.OpOverloadPacket)


def test_a_look_in_words() -> None:
    assert str(look(4, 8)) == "float32 [4, 8]"
    assert str(look(dtype=torch.int64, device=torch.device("cpu"))) == "int64 []"
    assert str(look(2, device=torch.device("cuda:1"))) == "float32 [2] on cuda:1"


def test_devices_are_compared_where_both_are_known() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert look(2, device=cpu).differs_from(look(2, device=cuda))
    assert not look(2).differs_from(look(2, device=cuda))
    assert look(2).differs_from(look(3))
