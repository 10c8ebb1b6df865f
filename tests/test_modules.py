"""checkpointed() and unwrap(): functions, methods and modules that look as they did before."""

import copy
import functools
import gc
import inspect
import io
import pickle
import typing
import weakref

import pytest
import torch
from torch import nn

import recollect


class Block(nn.Module):
    """Two linear layers with dropout and a buffer; counts its runs."""

    def __init__(self, width=4):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.tensor(0.5))
        self.runs = 0

    def forward(self, x, *, shift=0.0):
        self.runs += 1
        hidden = nn.functional.dropout(self.up(x).tanh(), 0.25, self.training)
        return x + self.scale * self.down(hidden).sin() + shift


class LikeLora(nn.Module):
    """A frozen weight and a small trainable one beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down = nn.Linear(4, 2, bias=False)
        self.up = nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return (self.base(x) + self.up(self.down(x))).tanh()


class Slotted(nn.Module):
    """Has its own idea of what is pickled."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cache = {"big": 1}

    def forward(self, x):
        return self.linear(x).sin()

    def __getstate__(self):
        return {**self.__dict__, "cache": {}}


def make(cls=Block, **options):
    return recollect.checkpointed(plain(cls), **options)


def plain(cls=Block):
    torch.manual_seed(0)
    return cls()


def step(module, **kwargs):
    """One step from a fixed seed: output, gradients of input and parameters."""
    torch.manual_seed(1)
    x = torch.randn(3, 4, requires_grad=True)
    out = module(x, **kwargs)
    out.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return {"out": out.detach(), "x": x.grad, **grads}


def assert_same(ours, expected):
    assert ours.keys() == expected.keys()
    for name in expected:
        assert torch.equal(ours[name], expected[name]), name


# --- functions ------------------------------------------------------------------------------------


def test_every_keyword_goes_to_the_function():
    seen = {}

    @recollect.checkpointed
    def function(x, **kwargs):
        seen.update(kwargs)
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    given = {
        "debug": 1,
        "use_reentrant": 2,
        "policy": 3,
        "engine": 4,
        "context_fn": 5,
        "function": 6,
        "preserve_rng_state": 7,
        "early_stop": 8,
        "determinism_check": 9,
        "options": 10,
        "args": 11,
        "kwargs": 12,
        "self": 13,
    }
    function(x, **given).sum().backward()
    assert seen == given
    assert torch.equal(x.grad, torch.ones(2).cos())


def counted(calls):
    def function(x):
        calls.append(recollect.is_recomputing())
        return x.sin().exp()

    return function


@pytest.mark.parametrize(
    "wrap",
    [
        recollect.checkpointed,
        recollect.checkpointed(),
        recollect.checkpointed(preserve_rng_state=False),
        functools.partial(recollect.checkpointed, early_stop=False),
        functools.partial(recollect.checkpointed, engine="reentrant"),
    ],
    ids=["bare", "called", "options", "function and options", "reentrant"],
)
def test_a_function_is_checkpointed_on_every_call(wrap):
    calls = []
    function = wrap(counted(calls))
    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        out = function(x)
        out.sum().backward()
        plain_x = torch.ones(3, requires_grad=True)
        plain_x.sin().exp().sum().backward()
        assert torch.equal(x.grad, plain_x.grad)
    assert calls == [False, True, False, True]


def test_options_are_heeded():
    x = torch.ones(3, requires_grad=True)
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        return False

    recollect.checkpointed(torch.sin, policy=policy)(x)
    assert asked == [torch.ops.aten.sin.default]


def test_a_wrapped_function_looks_like_the_function():
    def function(x: int) -> int:
        """Doc."""

    wrapped = recollect.checkpointed(function)
    assert (wrapped.__name__, wrapped.__doc__) == ("function", "Doc.")
    assert wrapped.__wrapped__ is function
    assert recollect.unwrap(wrapped) is function


def test_a_callable_object_can_be_wrapped():
    class Scale:
        def __call__(self, x):
            return 2 * x.sin()

    x = torch.ones(3, requires_grad=True)
    wrapped = recollect.checkpointed(Scale())
    wrapped(x).sum().backward()
    assert torch.equal(x.grad, 2 * torch.ones(3).cos())


def test_methods_are_decorated_and_called_with_their_object():
    calls = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @recollect.checkpointed(preserve_rng_state=False)
        def forward(self, x, *, debug):
            calls.append(recollect.is_recomputing())
            return self.linear(x).sin() * debug

        @staticmethod
        @recollect.checkpointed
        def helper(x):
            return x.sin()

    model = Model()
    model(torch.ones(2, 4), debug=2).sum().backward()
    assert calls == [False, True]
    assert model.linear.weight.grad is not None
    assert torch.equal(model.helper(torch.ones(1)), torch.ones(1).sin())
    assert recollect.checkpointed(model.linear.forward)(torch.ones(2, 4)).shape == (2, 4)


@pytest.mark.parametrize("target", [torch.sin, nn.Linear(2, 2), None])
def test_unknown_options_are_listed(target):
    args = () if target is None else (target,)
    with pytest.raises(TypeError, match=r"'polcy'.*use_reentrant.*early_stop.*policy.*engine"):
        recollect.checkpointed(*args, polcy=[])
    assert target is None or not hasattr(target, "_recollect_options")


@pytest.mark.parametrize("bad", [3, "sin", torch.ones(1), []])
def test_only_callables_can_be_wrapped(bad):
    with pytest.raises(TypeError, match="function_or_module"):
        recollect.checkpointed(bad)
    with pytest.raises(TypeError, match="function_or_module"):
        recollect.checkpointed()(bad)


@pytest.mark.parametrize("target", [torch.sin, nn.Linear(2, 2), 3])
def test_only_what_is_wrapped_can_be_unwrapped(target):
    with pytest.raises(ValueError, match="nothing to unwrap"):
        recollect.unwrap(target)


# --- modules: the same but for their memory -------------------------------------------------------


def test_wrapping_returns_the_same_object():
    module = plain()
    assert recollect.checkpointed(module) is module
    assert recollect.unwrap(module) is module


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine": "reentrant"},
        {"policy": [torch.ops.aten.addmm]},
        {"early_stop": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_bitwise_those_of_the_plain_module(options, training):
    module = make(**options)
    assert_same(step(module.train(training)), step(plain().train(training)))
    assert module.runs == 2


def test_keywords_reach_forward():
    assert_same(step(make(), shift=2.0), step(plain(), shift=2.0))
    assert step(make(), shift=2.0)["out"].sum() != step(make())["out"].sum()


def test_without_grad_it_runs_once():
    module = make()
    with torch.no_grad():
        module(torch.ones(2, 4))
    assert module.runs == 1


def test_it_looks_like_the_plain_module():
    module, expected = make(), plain()
    assert repr(module) == repr(expected)
    assert str(module) == str(expected)
    assert isinstance(module, Block)
    assert type(module).__name__ == "Block"
    assert type(module).__qualname__ == type(expected).__qualname__
    assert type(module).__module__ == type(expected).__module__
    for listing in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        names = [name for name, _ in getattr(module, listing)()]
        assert names == [name for name, _ in getattr(expected, listing)()]
    assert_same(module.state_dict(), expected.state_dict())


def test_weights_are_exchanged_with_a_plain_module():
    torch.manual_seed(5)
    other = Block()
    module = make()
    module.load_state_dict(other.state_dict())
    assert_same(step(module), step(other))
    assert_same(step(recollect.checkpointed(other)), step(module))


def test_hooks_run_as_before():
    def log_hooks(module, log):
        module.register_forward_pre_hook(lambda *_: log.append("pre"))
        module.register_forward_hook(lambda *_: log.append("post"))
        module.register_full_backward_pre_hook(lambda *_: log.append("backward pre"))
        module.register_full_backward_hook(lambda *_: log.append("backward"))

    ours, theirs, added_later = [], [], []
    module = plain()
    log_hooks(module, ours)
    recollect.checkpointed(module)
    log_hooks(module, added_later)
    expected = plain()
    log_hooks(expected, theirs)
    assert_same(step(module), step(expected))
    assert ours == added_later == theirs == ["pre", "post", "backward pre", "backward"]


def test_apply_and_conversions_keep_it_checkpointed():
    module = make().double()
    x = torch.ones(2, 4, dtype=torch.float64)
    module(x).sum().backward()
    assert module.runs == 2
    assert module.up.weight.grad.dtype == torch.float64


def test_inside_a_model():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    expected = copy.deepcopy(model)
    for block in model:
        recollect.checkpointed(block)
    assert_same(step(model), step(expected))
    assert [block.runs for block in model] == [2, 2, 2]
    assert list(model.state_dict()) == list(expected.state_dict())


def test_a_sequential_is_wrapped_as_a_whole():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    expected = copy.deepcopy(model)
    recollect.checkpointed(model)
    assert_same(step(model), step(expected))
    assert len(model) == 3
    assert isinstance(model[0:2], nn.Sequential)


def test_frozen_weights_and_an_input_without_grad_still_train():
    def train(module):
        module(torch.ones(2, 4)).sum().backward()
        return {name: p.grad for name, p in module.named_parameters()}

    ours, expected = train(make(LikeLora)), train(plain(LikeLora))
    trained = {"down.weight", "up.weight"}
    assert {name for name, grad in ours.items() if grad is not None} == trained
    assert_same({n: ours[n] for n in trained}, {n: expected[n] for n in trained})


# --- copies ---------------------------------------------------------------------------------------


def torch_saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(module):
    return pickle.loads(pickle.dumps(module))


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, torch_saved, pickled])


@COPIES
@pytest.mark.parametrize("cls", [Block, LikeLora, Slotted])
def test_a_copy_is_checkpointed_and_independent(copied, cls):
    module = make(cls)
    other = copied(module)
    assert type(other) is type(module)
    assert isinstance(other, cls)
    expected = step(plain(cls))
    assert_same(step(other), expected)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert_same(step(module), expected)
    recollect.unwrap(other)
    assert type(other) is cls
    assert type(module) is not cls


@COPIES
def test_a_copy_runs_itself_not_the_original(copied):
    module = make()
    other = copied(module)
    step(other)
    assert (module.runs, other.runs) == (0, 2)


@COPIES
def test_a_copy_has_the_options_of_the_original(copied):
    other = copied(make(engine="reentrant"))
    out = other(torch.ones(2, 4, requires_grad=True))
    assert type(out.grad_fn).__name__ == "CheckpointFunctionBackward"


@COPIES
def test_what_a_class_leaves_out_of_its_state_stays_out(copied):
    assert copied(make(Slotted)).cache == {}


def test_a_shallow_copy_shares_parameters_and_is_checkpointed():
    module = make()
    other = copy.copy(module)
    assert other.up.weight is module.up.weight
    assert_same(step(other), step(plain()))
    assert (module.runs, other.runs) == (0, 2)


def test_a_copy_of_a_model_with_wrapped_parts():
    model = nn.Sequential(make(), nn.Linear(4, 4), make())
    other = copy.deepcopy(model)
    assert_same(step(other), step(model))
    assert (other[0].runs, other[2].runs) == (2, 2)


# --- a forward of the instance's own --------------------------------------------------------------


def test_a_forward_on_the_instance_is_what_is_checkpointed():
    module = plain()
    calls = []
    original = module.forward

    def forward(x):
        calls.append(recollect.is_recomputing())
        return original(x) * 2

    module.forward = forward
    expected = step(module)
    calls.clear()
    recollect.checkpointed(module)
    assert_same(step(module), expected)
    assert calls == [False, True]
    recollect.unwrap(module)
    assert module.forward is forward
    assert type(module) is Block


def test_a_forward_on_the_instance_that_calls_that_of_its_class():
    def patched(module):
        module.forward = lambda x: type(module).forward(module, x) * 2
        return module

    module = patched(plain())
    expected = step(module)
    assert_same(step(recollect.checkpointed(module)), expected)
    assert module.runs == 3
    recollect.unwrap(module)
    assert_same(step(module), expected)


# --- what others look at --------------------------------------------------------------------------


def bound(module, x, extra=1, *rest, flag: bool = False, **others) -> int:
    """Another forward."""
    return module.up(x)


FORWARDS = {
    "of the class": lambda module: None,
    "a method": bound.__get__,
    "a function": lambda module: lambda x, *, factor=2.0: module.up(x) * factor,
    "a partial": lambda module: functools.partial(bound, module, extra=3),
    "a wrapped partial": lambda module: functools.update_wrapper(
        functools.partial(lambda m, *args, **kwargs: m.up(*args), module), module.forward
    ),
}


def looks_of(module):
    """What a framework can ask of a module and its forward."""
    forward, cls = module.forward, type(module)
    names = ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__")
    return {
        "signature": inspect.signature(forward),
        **{name: getattr(forward, name) for name in names if hasattr(forward, name)},
        "unwrapped": getattr(inspect.unwrap(forward), "__func__", inspect.unwrap(forward)),
        "of the class": [inspect.signature(cls.forward), inspect.getfullargspec(cls.forward)],
        "names of the class's": [getattr(cls.forward, name) for name in names],
        "source": inspect.getsource(cls.forward),
        "hints": typing.get_type_hints(cls.forward),
        "class": [getattr(cls, name) for name in names],
        "source of the class": inspect.getsource(cls),
        "signature of the class": inspect.signature(cls),
    }


class Documented(Block):
    """Has a forward to look at."""

    size: int = 3

    def forward(self, x: torch.Tensor, mask: "typing.Any" = None, *rest, flag=True, **more):
        """Computes something."""
        return super().forward(x)


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_what_frameworks_look_at_is_as_before(forward):
    module = Documented()
    own = forward(module)
    if own is not None:
        module.forward = own
    expected, attributes = looks_of(module), dict(vars(module))
    recollect.checkpointed(module)
    looks = looks_of(module)
    for name, value in expected.items():
        assert looks[name] == value, name
    recollect.unwrap(module)
    assert looks_of(module) == expected
    assert vars(module) == attributes
    assert type(module) is Documented


def test_a_forward_of_the_class_that_is_replaced_is_looked_at_by_the_next(monkeypatch):
    make(Documented)
    monkeypatch.setattr(Documented, "forward", lambda self, other: other)
    module = make(Documented)
    assert [*inspect.signature(module.forward).parameters] == ["other"]


def test_marks_that_are_for_torch_or_for_us_are_not_taken_over():
    class Marked(Block):
        @recollect.checkpointed
        def forward(self, x):
            return super().forward(x)

    Marked.forward.own = 1
    Marked.forward._torchdynamo_orig_callable = None
    forward = make(Marked).forward
    assert forward.own == 1
    assert not hasattr(forward, "_torchdynamo_orig_callable")
    with pytest.raises(ValueError, match="not checkpointed"):
        recollect.unwrap(forward)


def test_a_function_has_its_signature():
    wrapped = recollect.checkpointed(bound)
    assert inspect.signature(wrapped) == inspect.signature(bound)
    assert inspect.getfullargspec(wrapped) == inspect.getfullargspec(bound)


def test_a_callable_without_a_signature_is_wrapped():
    assert recollect.checkpointed(torch.sin)(torch.zeros(2)).tolist() == [0, 0]


# --- errors and undoing ---------------------------------------------------------------------------


def test_wrapping_twice_is_refused():
    module = make()
    with pytest.raises(ValueError, match=r"Block is checkpointed already.*unwrap"):
        recollect.checkpointed(module)
    assert_same(step(module), step(plain()))


@pytest.mark.parametrize("container", [nn.ModuleList(), nn.ModuleDict()])
def test_containers_without_forward_are_refused(container):
    with pytest.raises(TypeError, match=rf"{type(container).__name__}.*for block in blocks"):
        recollect.checkpointed(container)
    assert type(container) in (nn.ModuleList, nn.ModuleDict)


def test_unwrap_restores_type_attributes_and_behaviour():
    module = plain()
    attributes = set(vars(module))
    recollect.unwrap(recollect.checkpointed(module))
    assert type(module) is Block
    assert set(vars(module)) == attributes
    assert_same(step(module), step(plain()))
    assert module.runs == 1


def test_wrapping_again_takes_the_new_options():
    module = recollect.unwrap(make())
    recollect.checkpointed(module, engine="reentrant")
    out = module(torch.ones(2, 4, requires_grad=True))
    assert type(out.grad_fn).__name__ == "CheckpointFunctionBackward"


def test_a_bad_option_leaves_the_module_as_it_was():
    module = plain()
    with pytest.raises(TypeError, match="early_stop"):
        recollect.checkpointed(module, early_stop="yes")
    assert type(module) is Block


# --- classes that change under the wrapper --------------------------------------------------------


def test_a_lazy_module_is_refused_until_it_has_become_what_it_will_be():
    """It exchanges its own class at the first call, and would silently stop being checkpointed."""
    module = nn.LazyLinear(4)
    with pytest.raises(TypeError, match="run it once"):
        recollect.checkpointed(module)
    module(torch.ones(2, 3))
    recollect.checkpointed(module)(torch.ones(2, 3)).sum().backward()
    assert recollect.unwrap(module) is module
    assert type(module) is nn.Linear


def test_a_forward_taken_while_wrapped_works_after_unwrap():
    module = make()
    wrapped_forward = module.forward
    module.forward = lambda x: wrapped_forward(x) * 2  # as accelerate does to place its hooks
    expected = step(module)["out"]
    recollect.unwrap(module)
    assert torch.equal(step(module)["out"], expected)


def test_a_class_that_registers_its_subclasses():
    registered = []

    class Registered(nn.Module):
        def __init_subclass__(cls, *, key):
            registered.append(key)

        def forward(self, x):
            return x.sin()

    class Member(Registered, key="member"):
        pass

    x = torch.ones(2, requires_grad=True)
    recollect.checkpointed(Member())(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2).cos())
    assert registered == ["member"]


def test_parametrizations_go_on_top_and_below():
    def parametrized(module):
        return nn.utils.parametrizations.weight_norm(module.linear) and module

    expected = step(parametrized(plain(Slotted)))
    wrapped_below = parametrized(plain(Slotted))
    recollect.checkpointed(wrapped_below.linear)
    assert_same(step(wrapped_below), expected)
    wrapped_first = plain(Slotted)
    recollect.checkpointed(wrapped_first.linear)
    parametrized(wrapped_first)
    assert_same(step(wrapped_first), expected)
    recollect.unwrap(wrapped_first.linear)
    assert_same(step(wrapped_first), expected)


# --- lifetime -------------------------------------------------------------------------------------


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("used", [False, True])
def test_a_wrapped_module_dies_when_dropped(used):
    module = make()
    if used:
        step(module)
    alive = weakref.ref(module), weakref.ref(module.up.weight)
    del module
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.parametrize("has_forward", [False, True])
def test_a_class_whose_modules_were_wrapped_dies_when_dropped(has_forward):
    """And with it what its functions hold: a class may be defined in a function, for one model."""

    class Local(nn.Linear):
        pass

    modules = [Local(2, 2), Local(2, 2)]
    for module in modules:
        if has_forward:
            module.forward = functools.partial(Local.forward, module)
        recollect.checkpointed(module)
        module(torch.ones(1, 2)).sum().backward()
    assert type(modules[0]) is type(modules[1])
    alive = weakref.ref(Local)
    del Local, module, modules
    gc.collect()
    assert alive() is None


@pytest.mark.usefixtures("no_gc")
def test_a_graph_keeps_the_module_until_backward():
    module = make()
    out = module(torch.ones(2, 4))
    alive = weakref.ref(module)
    del module
    assert alive() is not None
    out.sum().backward()
    del out
    assert alive() is None


@pytest.mark.usefixtures("no_gc")
def test_a_wrapped_function_dies_when_dropped():
    wrapped = recollect.checkpointed(lambda x: x.sin())
    wrapped(torch.ones(2, requires_grad=True)).sum().backward()
    alive = weakref.ref(recollect.unwrap(wrapped))
    del wrapped
    assert alive() is None


def test_a_module_with_a_policy_is_pickled():
    module = recollect.checkpointed(
        nn.Linear(3, 3), policy=[torch.ops.aten.addmm], early_stop=False
    )
    copy = pickle.loads(pickle.dumps(module))
    x = torch.ones(2, 3, requires_grad=True)
    copy(x).sum().backward()
    expected = torch.autograd.grad(recollect.unwrap(module)(x).sum(), x)[0]
    assert torch.equal(x.grad, expected)
    assert type(recollect.unwrap(copy)) is nn.Linear


def test_classes_and_generator_functions_are_refused():
    def steps(x):
        yield x

    for wrong in (nn.Linear, steps):
        with pytest.raises(TypeError, match="function_or_module"):
            recollect.checkpointed(wrong)
