"""recollect.compat against torch.utils.checkpoint: names, signatures, warnings, errors."""

import functools
import inspect
import re

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as theirs

import recollect
from recollect import compat as ours

BOTH = pytest.mark.parametrize("module", [ours, theirs], ids=["recollect", "torch"])


def leaf():
    return torch.linspace(-1, 1, 5).requires_grad_()


# --- names and signatures -------------------------------------------------------------------------


def test_names_are_those_of_torch():
    assert ours.__all__ == theirs.__all__
    assert len(ours.__all__) == 17


@pytest.mark.parametrize("name", ours.__all__)
def test_every_name_is_of_the_same_kind_and_our_own(name):
    ours_, theirs_ = getattr(ours, name), getattr(theirs, name)
    assert inspect.isclass(ours_) == inspect.isclass(theirs_)
    assert callable(ours_) == callable(theirs_)
    assert ours_ is not theirs_


def parameters(function):
    """Name, kind and default of each parameter; a default that is a function goes by its name."""
    return [
        (p.name, p.kind, getattr(p.default, "__name__", p.default))
        for p in inspect.signature(function).parameters.values()
    ]


FUNCTIONS = [
    *(name for name in ours.__all__ if inspect.isfunction(getattr(ours, name))),
    "_infer_device_type",
    "_checkpoint_without_reentrant_generator",
    "SelectiveCheckpointContext",
    "CheckpointFunction.forward",
    "CheckpointFunction.backward",
    "DefaultDeviceType.set_device_type",
    "DefaultDeviceType.get_device_type",
    "GraphExecGroup.__enter__",
]


def of_torch_2_15(name):
    """The parameters that a function has since torch 2.15."""
    if name == "checkpoint":
        return {"preserve_rng_state", "respect_saved_tensors_hooks"}
    if name == "_checkpoint_without_reentrant_generator":
        return {"respect_saved_tensors_hooks"}
    return set()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_those_of_torch(name):
    if name == "SelectiveCheckpointContext" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 has no op_output: ours is that of torch 2.13")

    def find(module):
        return functools.reduce(getattr, name.split("."), module)

    # torch names the gradients `args`: they are passed by position.
    skip = 1 if name == "CheckpointFunction.backward" else None
    mine, yours = parameters(find(ours)), parameters(find(theirs))
    if torch.__version__ < "2.15":
        mine = [each for each in mine if each[0] not in of_torch_2_15(name)]
        if name == "checkpoint":  # without a function, it returns a decorator
            mine[0] = ("function", mine[0][1], "_empty")
    assert mine[:skip] == yours[:skip]
    assert [kind for _, kind, _ in mine] == [kind for _, kind, _ in yours]


def test_exceptions_of_ours_are_caught_as_torchs():
    assert issubclass(ours.CheckpointError, theirs.CheckpointError)
    assert issubclass(ours.CheckpointError, RuntimeError)


# --- warnings -------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "call",
    [
        lambda module, x: module.checkpoint(torch.sin, x),
        lambda module, x: module.checkpoint_sequential([torch.sin, torch.cos], 2, x),
    ],
    ids=["checkpoint", "checkpoint_sequential"],
)
def test_leaving_out_use_reentrant_warns_and_is_reentrant(module, call):
    message = "the use_reentrant parameter should be passed explicitly"
    with pytest.warns(UserWarning, match=message) as record:
        out = call(module, leaf())
    (warning,) = record
    assert warning.filename == __file__ or module is theirs
    nodes = {type(out.grad_fn).__name__, type(out.grad_fn.next_functions[0][0]).__name__}
    assert "CheckpointFunctionBackward" in nodes


@BOTH
def test_reentrant_without_an_input_that_requires_grad_warns(module):
    message = re.escape("None of the inputs have requires_grad=True. Gradients will be None")
    with pytest.warns(UserWarning, match=message):
        module.checkpoint(torch.sin, torch.ones(2), use_reentrant=True)
    with pytest.warns(UserWarning, match=message):
        module.check_backward_validity([torch.ones(2), 3])
    module.check_backward_validity([torch.ones(2), leaf()])


# --- errors ---------------------------------------------------------------------------------------

REENTRANT_ONLY = "is only supported when use_reentrant=False"

BAD_CALLS = {
    "kwargs when reentrant": (
        lambda m: m.checkpoint(torch.add, leaf(), other=leaf(), use_reentrant=True),
        ValueError,
        "Unexpected keyword arguments: other",
    ),
    "context_fn when reentrant": (
        lambda m: m.checkpoint(torch.sin, leaf(), use_reentrant=True, context_fn=lambda: None),
        ValueError,
        REENTRANT_ONLY,
    ),
    "debug when reentrant": (
        lambda m: m.checkpoint(torch.sin, leaf(), use_reentrant=True, debug=True),
        ValueError,
        REENTRANT_ONLY,
    ),
    "unknown determinism_check": (
        lambda m: m.checkpoint(
            torch.sin, leaf(), use_reentrant=False, determinism_check="sometimes"
        ),
        ValueError,
        "determinism_check",
    ),
    "detach a list": (
        lambda m: m.detach_variable([leaf()]),
        RuntimeError,
        "Only tuple of tensors is supported. Got Unsupported input type: ",
    ),
    "a packet in a list of ops": (
        lambda m: m.create_selective_checkpoint_contexts([torch.ops.aten.mm]),
        ValueError,
        "Expected op in `op_list` to be an OpOverload but got: aten.mm",
    ),
    "a function in a list of ops": (
        lambda m: m.create_selective_checkpoint_contexts([torch.mm]),
        ValueError,
        "Expected op in `op_list` to be an OpOverload",
    ),
    "a number for a policy": (
        lambda m: m.create_selective_checkpoint_contexts(3),
        TypeError,
        "policy_fn_or_list must be either a function or a list of ops",
    ),
    "a tuple for a list of ops": (
        lambda m: m.create_selective_checkpoint_contexts((torch.ops.aten.mm.default,)),
        TypeError,
        "policy_fn_or_list must be either a function or a list of ops",
    ),
    "kwargs in sequence": (
        lambda m: m.checkpoint_sequential([torch.sin], 1, leaf(), use_reentrant=False, debug=True),
        ValueError,
        "Unexpected keyword arguments: debug",
    ),
    "grad when reentrant": (
        lambda m: torch.autograd.grad(
            m.checkpoint(torch.sin, x := leaf(), use_reentrant=True).sum(), x
        ),
        RuntimeError,
        "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or",
    ),
    "nothing needs grad in the rerun": (
        lambda m: m.checkpoint(torch.Tensor.detach, leaf(), use_reentrant=True).sum().backward(),
        RuntimeError,
        "none of output has requires_grad=True, this checkpoint() is not necessary",
    ),
    "nested groups": (
        lambda m: m.GraphExecGroup().__enter__() and m.GraphExecGroup().__enter__(),
        RuntimeError,
        "GraphExecGroup contexts cannot be nested",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
@BOTH
def test_errors_are_of_torchs_types_and_words(module, call, error, message):
    try:
        with pytest.raises(error, match=re.escape(message)):
            call(module)
    finally:
        recollect.GraphExecGroup().__exit__()


# --- behaviour ------------------------------------------------------------------------------------


@BOTH
def test_detach_variable(module):
    x, y = leaf(), torch.ones(2)
    detached_x, detached_y, other = module.detach_variable((x, y, "z"))
    assert (detached_x.requires_grad, detached_y.requires_grad, other) == (True, False, "z")
    assert detached_x.is_leaf
    assert detached_x.data_ptr() == x.data_ptr()


@BOTH
def test_the_checkpoint_function_can_be_applied_directly(module):
    x = leaf()
    module.CheckpointFunction.apply(torch.sin, True, x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


@BOTH
def test_a_function_may_have_a_keyword_called_engine_or_policy(module):
    out = module.checkpoint(
        lambda x, *, engine, policy: x.sin() * engine * policy,
        x := leaf(),
        use_reentrant=False,
        engine=2,
        policy=3,
    )
    assert torch.equal(*torch.autograd.grad(out.sum(), x), 6 * x.detach().cos())


@BOTH
@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_switches_go_by_their_truth(module, value):
    x = leaf()
    out = module.checkpoint(
        torch.sin, x, use_reentrant=False, preserve_rng_state=value, early_stop=value
    )
    assert torch.equal(*torch.autograd.grad(out.sum(), x), x.detach().cos())


@BOTH
def test_reading_a_saved_tensor_twice_in_one_backward_is_refused(module):
    class ReadTwice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.exp())
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            (first,) = ctx.saved_tensors
            (second,) = ctx.saved_tensors
            return grad * (first + second) / 2

    out = module.checkpoint(ReadTwice.apply, leaf(), use_reentrant=False)
    with pytest.raises(RuntimeError, match="already unpacked once"):
        out.sum().backward()


class Counted(nn.Module):
    """Counts its runs."""

    def __init__(self):
        super().__init__()
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return x.sin().exp()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("segments", [1, 2, 3, 4, 5, 7])
def test_sequential_segments_are_cut_as_torch_cuts_them(use_reentrant, segments):
    def runs(module):
        model = nn.Sequential(*(Counted() for _ in range(7)))
        x = leaf()
        out = module.checkpoint_sequential(model, segments, x, use_reentrant=use_reentrant)
        out.sum().backward()
        return [step.runs for step in model], out, x.grad

    (counts, out, grad), (their_counts, their_out, their_grad) = runs(ours), runs(theirs)
    assert counts == their_counts
    plainly_run = 7 - 7 // segments * (segments - 1)
    assert counts == [2] * (7 - plainly_run) + [1] * plainly_run
    assert torch.equal(out, their_out)
    assert torch.equal(grad, their_grad)


def test_sequential_takes_preserve_rng_state():
    def draw(preserve_rng_state):
        torch.manual_seed(0)
        seen = []

        def step(x):
            seen.append(torch.rand(()).item())
            return x.sin() * seen[-1]

        x = leaf()
        ours.checkpoint_sequential(
            [step, torch.cos], 2, x, use_reentrant=False, preserve_rng_state=preserve_rng_state
        ).sum().backward()
        return seen

    first, again = draw(True)
    assert first == again
    first, again = draw(False)
    assert first != again


def test_infer_device_type_is_torchs():
    tensors = [torch.ones(1), [torch.ones(1, device="meta")]]
    assert ours._infer_device_type(*tensors) == theirs._infer_device_type(*tensors) == "meta"
    assert ours._infer_device_type(1) == theirs._infer_device_type(1)


def test_device_states_of_cpu_tensors_are_none():
    assert ours.get_device_states(torch.ones(1)) == theirs.get_device_states(torch.ones(1))
    assert ours.get_device_states() == ([], [])
    ours.set_device_states([], [])


# --- what came with torch 2.15 --------------------------------------------------------------------


def since_2_15(module):
    if module is theirs and torch.__version__ < "2.15":
        pytest.skip("this torch has no such thing")


@BOTH
def test_a_call_without_a_function_is_a_decorator(module):
    since_2_15(module)
    runs = []

    class Owner:
        scale = 3

        @module.checkpoint(use_reentrant=False, preserve_rng_state=False)
        def scaled(self, x, *, debug):
            """Scales."""
            runs.append(debug)
            return x.sin() * self.scale

    x = leaf()
    out = Owner().scaled(x, debug=2)
    assert torch.equal(*torch.autograd.grad(out.sum(), x), 3 * x.detach().cos())
    assert runs == [2, 2]
    assert Owner.scaled.__doc__ == "Scales."
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        module.checkpoint(use_reentrant=False, scale=2)


def test_a_decorated_function_in_compiled_code():
    decorated = ours.checkpoint(use_reentrant=False)(torch.exp)
    x = leaf()
    out = torch.compile(lambda x: decorated(x.sin()), backend="aot_eager", fullgraph=True)(x)
    (plain,) = torch.autograd.grad(x.sin().exp().sum(), x)
    assert torch.equal(*torch.autograd.grad(out.sum(), x), plain)


@BOTH
@pytest.mark.parametrize("respects", [True, False])
def test_hooks_of_the_user_without_a_policy(module, respects):
    since_2_15(module)
    with pytest.raises(ValueError, match=r"`respect_saved_tensors_hooks` is only supported when"):
        module.checkpoint(
            torch.sin, leaf(), use_reentrant=True, respect_saved_tensors_hooks=respects
        )
    with torch.autograd.graph.save_on_cpu():
        out = module.checkpoint(
            torch.sin, x := leaf(), use_reentrant=False, respect_saved_tensors_hooks=respects
        )
    assert torch.equal(*torch.autograd.grad(out.sum(), x), x.detach().cos())


def test_a_policy_that_is_to_respect_hooks_is_refused():
    def keep():
        return ours.create_selective_checkpoint_contexts([torch.ops.aten.sin.default])

    def call(respects):
        return ours.checkpoint(
            torch.sin,
            leaf(),
            use_reentrant=False,
            context_fn=keep,
            respect_saved_tensors_hooks=respects,
        )

    with pytest.raises(ValueError, match="respect_saved_tensors_hooks=True is not supported"):
        call(True)
    call(False).sum().backward()
    with (
        recollect.installed(policy=recollect.policy.matmuls()),
        pytest.raises(ValueError, match="respect_saved_tensors_hooks=True is not supported"),
    ):
        theirs.checkpoint(torch.sin, leaf(), respect_saved_tensors_hooks=True)


def test_the_generator_surrounds_a_forward_that_the_caller_runs():
    x = leaf()
    region = ours._checkpoint_without_reentrant_generator(
        lambda x: x.sin().exp(), True, ours.noop_context_fn, "default", False, True, x
    )
    next(region)
    out = x.sin().exp()
    with pytest.raises(StopIteration):
        next(region)
    (plain,) = torch.autograd.grad(x.sin().exp().sum(), x)
    assert torch.equal(*torch.autograd.grad(out.sum(), x), plain)


def test_a_counter_tells_a_rerun_under_torchs_composable_checkpoint():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.layer = 0, torch.nn.Linear(2, 2)

        def forward(self, x):
            seen.append(self.calls)
            self.calls += 1
            return self.layer(x).sin()

    composable = pytest.importorskip("torch.distributed._composable")
    seen, module = [], Counting()
    recollect.install()
    try:
        composable.checkpoint(module)
        module(torch.randn(3, 2)).sum().backward()
    finally:
        recollect.uninstall()
    assert (seen, module.calls) == ([0, 1], 2)
