"""Bad input: an error at the call that names the argument, and nothing left half-entered."""

import functools
import inspect
import re
import sys
from contextlib import nullcontext

import pytest
import torch

import recollect
from recollect.options import Options

BAD = {
    "use_reentrant": [None, 0, 1, "no"],
    "debug": [None, 1, "yes"],
    "early_stop": [None, 0, "yes"],
    "preserve_rng_state": [None, 0, "yes", torch.tensor(True)],
    "context_fn": [None, 3, nullcontext(), (nullcontext(), nullcontext())],
    "determinism_check": [None, 3, "always", "values ", True, ["default"]],
    "policy": [3, "mm", [torch.mm], ["mm"], (None,), {"mm": 1}],
    "engine": [3, "fast", "RERUN", True, ["rerun"]],
    "offload_inputs": [None, 0, "yes"],
    "store": [3, "host", {}, recollect.store.HostStore],
}

BAD_OPTIONS = [(name, value) for name, values in BAD.items() for value in values]
IDS = [f"{name}={str(value)[:30]}" for name, value in BAD_OPTIONS]

CONFLICTS = {
    "use_reentrant against engine": ({"use_reentrant": True, "engine": "rerun"}, "use_reentrant"),
    "store with nothing to keep": ({"store": recollect.store.HostStore()}, "store"),
    "policy and context_fn": ({"policy": [], "context_fn": lambda: None}, "policy"),
    "policy when reentrant": ({"policy": [], "engine": "reentrant"}, "policy"),
    "policy function when reentrant": ({"policy": len, "use_reentrant": True}, "policy"),
    "context_fn when reentrant": (
        {"context_fn": lambda: None, "engine": "reentrant"},
        "context_fn",
    ),
    "debug when reentrant": ({"debug": True, "use_reentrant": True}, "debug"),
    "check when reentrant": (
        {"determinism_check": len, "engine": "reentrant"},
        "determinism_check",
    ),
}

BAD_CONTEXTS = {
    "none": None,
    "one context": nullcontext(),
    "three": (nullcontext(), nullcontext(), nullcontext()),
    "a list of three": [nullcontext(), nullcontext(), nullcontext()],
    "no contexts": (1, 2),
    "one that is none": (nullcontext(), None),
}


def ambient():
    """What a region that was not left properly would change."""
    return (
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch.is_grad_enabled(),
        recollect.is_recomputing(),
        torch.get_rng_state().tolist(),
    )


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """After each of these tests: no hook, mode, random draw or grad mode of ours remains."""
    torch.manual_seed(0)
    before = ambient()
    assert before[:5] == (0, 0, None, True, False)
    yield
    assert ambient() == before
    x = torch.ones(2, requires_grad=True)
    (x.sin() * x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2).cos() + torch.ones(2).sin())


def untouched(x):
    """A region that must not be run."""
    raise AssertionError("ran in spite of the bad option")


ENTRANCES = {
    "checkpoint": lambda **options: recollect.checkpoint(
        untouched, torch.ones(2, requires_grad=True), **options
    ),
    "checkpointed": lambda **options: recollect.checkpointed(untouched, **options),
    "decorator": recollect.checkpointed,
    "sequential": lambda **options: recollect.checkpoint_sequential(
        [untouched], 1, torch.ones(2, requires_grad=True), **options
    ),
    "without grad": lambda **options: torch.no_grad()(recollect.checkpoint)(
        untouched, torch.ones(2), **options
    ),
}
EVERYWHERE = pytest.mark.parametrize("call", ENTRANCES.values(), ids=ENTRANCES)


@EVERYWHERE
@pytest.mark.parametrize(("name", "value"), BAD_OPTIONS, ids=IDS)
def test_a_bad_value_is_an_error_that_names_the_option(call, name, value):
    # The words about a policy are torch's, who calls it policy_fn_or_list, and its list op_list.
    named = "policy|op_list" if name == "policy" else name
    with pytest.raises((TypeError, ValueError), match=named):
        call(**{name: value})


@EVERYWHERE
@pytest.mark.parametrize(("options", "named"), CONFLICTS.values(), ids=CONFLICTS)
def test_options_that_contradict_each_other(call, options, named):
    with pytest.raises(ValueError, match=named):
        call(**options)


@pytest.mark.parametrize("contexts", BAD_CONTEXTS.values(), ids=BAD_CONTEXTS)
def test_context_fn_must_return_two_contexts(contexts):
    with pytest.raises(TypeError, match="context_fn should return a tuple of two context managers"):
        recollect.checkpoint(
            untouched, torch.ones(2, requires_grad=True), context_fn=lambda: contexts
        )


@pytest.mark.parametrize("function", [None, 3, "sin", torch.ones(2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"engine": "reentrant"}, {"policy": []}], ids=str)
def test_a_function_that_cannot_be_called(function, options):
    with pytest.raises(TypeError, match="function should be callable"):
        recollect.checkpoint(function, torch.ones(2, requires_grad=True), **options)


def test_a_result_in_the_place_of_the_function():
    message = r"but got Tensor\. .*: checkpoint\(module, x\), not checkpoint\(module\(x\)\)$"
    with pytest.raises(TypeError, match=message):
        recollect.checkpoint(torch.ones(2, requires_grad=True).sin())


def test_keywords_for_a_reentrant_region_are_refused():
    with pytest.raises(ValueError, match="Unexpected keyword arguments: other"):
        recollect.checkpoint(torch.add, torch.ones(2), other=1, engine="reentrant")


class Refuses:
    """A context manager that fails where it is told to."""

    def __init__(self, where):
        self.where = where
        self.log = []

    def __enter__(self):
        self.log.append("enter")
        if self.where == "enter":
            raise LookupError("on entering")

    def __exit__(self, *exc):
        self.log.append("exit")
        if self.where == "exit":
            raise LookupError("on leaving")


@pytest.mark.parametrize("where", ["enter", "exit"])
@pytest.mark.parametrize("place", ["forward", "recompute"])
@pytest.mark.parametrize("debug", [False, True])
def test_a_context_that_raises_leaves_nothing_entered(where, place, debug):
    bad = Refuses(where)
    contexts = (bad, nullcontext()) if place == "forward" else (nullcontext(), bad)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(LookupError, match="on "):
        out = recollect.checkpoint(torch.sin, x, context_fn=lambda: contexts, debug=debug)
        out.sum().backward()
    assert bad.log == (["enter"] if where == "enter" else ["enter", "exit"])


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("engine", ["rerun", "reentrant", "selective"])
def test_a_function_that_raises_leaves_nothing_entered(engine, debug):
    def fails(x):
        x.sin()
        raise LookupError("mine")

    options = {"policy": [torch.ops.aten.sin]} if engine == "selective" else {"engine": engine}
    if engine != "reentrant":
        options["debug"] = debug
    with pytest.raises(LookupError, match="mine"):
        recollect.checkpoint(fails, torch.ones(2, requires_grad=True), **options)


@pytest.mark.parametrize("options", [{}, {"policy": [torch.ops.aten.sin]}], ids=str)
def test_a_rerun_that_raises_leaves_nothing_entered(options):
    def fails_later(x):
        if recollect.is_recomputing():
            raise LookupError("mine")
        return x.sin()

    out = recollect.checkpoint(fails_later, torch.ones(2, requires_grad=True), **options)
    with pytest.raises(LookupError, match="mine"):
        out.sum().backward()


# --- options and switches -------------------------------------------------------------------------


def test_unknown_options_name_the_known_ones():
    with pytest.raises(TypeError, match="unknown option 'rng'; the options are ") as caught:
        recollect.checkpointed(torch.sin, rng=True)
    assert set(re.findall(r"\w+", str(caught.value))) >= set(BAD)


def test_every_option_of_checkpoint_is_an_option_everywhere():
    parameters = inspect.signature(recollect.checkpoint).parameters.values()
    given = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert given.keys() == BAD.keys()
    x = torch.ones(2, requires_grad=True)
    recollect.checkpointed(torch.sin, **given)(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2).cos())


@pytest.mark.parametrize("switch", ["early_stop", "debug_enabled"])
@pytest.mark.parametrize("value", [0, "yes", torch.tensor(True)])
def test_switches_take_truth_values_only(switch, value):
    set_switch = getattr(recollect, f"set_checkpoint_{switch}")
    with pytest.raises(TypeError, match="enable"), set_switch(value):
        pass


def test_good_options_are_taken():
    x = torch.ones(3, requires_grad=True)
    make = functools.partial(recollect.create_selective_checkpoint_contexts, [])
    for options in [
        {"use_reentrant": True, "engine": "reentrant"},
        {"use_reentrant": False, "engine": "rerun"},
        {"engine": "reentrant", "determinism_check": "none"},
        {"determinism_check": "none"},
        {"determinism_check": lambda t: t.sum().item()},
        {"policy": []},
        {"context_fn": make, "debug": True, "early_stop": False},
    ]:
        x.grad = None
        recollect.checkpoint(torch.sin, x, **options).sum().backward()
        assert torch.equal(x.grad, torch.ones(3).cos())


def test_the_option_that_has_no_effect_is_the_one_that_was_given() -> None:
    for name, value in (("policy", []), ("context_fn", nullcontext)):
        with pytest.raises(ValueError, match=f"^{name} has no effect with the reentrant engine"):
            Options.from_keywords({name: value, "engine": "reentrant"})


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_a_misspelt_option_is_asked_about() -> None:
    with pytest.raises(TypeError, match="polcy") as caught:
        recollect.checkpoint(torch.sin, torch.ones(2), polcy=[])
    (note,) = caught.value.__notes__
    assert "did you mean policy=" in note
