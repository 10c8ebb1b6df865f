"""Private names of torch: a release that drops or changes one fails here, by name."""

import ast
import functools
import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import recollect._torch

PACKAGE = Path(recollect._torch.__file__).parent
SOURCES = {path.stem: path.read_text() for path in PACKAGE.glob("*.py")}
TOPICS = [importlib.import_module(f"recollect._torch.{topic}") for topic in SOURCES]
#: All names of the package.
private = SimpleNamespace(**{name: each for topic in TOPICS for name, each in vars(topic).items()})

#: Looked up with a fallback: absent from torch 2.11.
OPTIONAL = {
    "torch._C._autograd._make_saved_tensor",
    "torch.compiler._is_non_strict_tracing",
    "torch._higher_order_ops.wrap.inductor_compiled_code",
}


def relied_upon():
    """Every dotted name below torch that the sources of ``_torch`` use."""
    names = set()
    for node in [node for source in SOURCES.values() for node in ast.walk(ast.parse(source))]:
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "torch":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            for alias, name in (("_autograd.", "torch._C._autograd."), *ALIASES):
                if dotted.startswith(alias):
                    dotted = name + dotted.removeprefix(alias)
            if dotted.startswith("torch."):
                names.add(dotted)
    return sorted(names)


ALIASES = (
    ("_eval_frame.", "torch._C._dynamo.eval_frame."),
    ("partitioners.", "torch._functorch.partitioners."),
    ("pyfunctorch.", "torch._functorch.pyfunctorch."),
    ("_functorch.", "torch._C._functorch."),
)


def find(dotted):
    """The object behind a dotted name, importing modules on the way."""
    found, path = torch, "torch"
    for part in dotted.split(".")[1:]:
        path += f".{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", relied_upon())
def test_the_name_exists(name):
    try:
        find(name)
    except (AttributeError, ModuleNotFoundError):
        pytest.fail(f"torch {torch.__version__} has no {name}")


def test_the_search_for_names_finds_them():
    names = relied_upon()
    assert len(names) > 30
    assert {
        "torch._C._set_grad_enabled",
        "torch._C._autograd._push_saved_tensors_default_hooks",
        "torch._C._dynamo.eval_frame.get_eval_frame_callback",
        "torch._ops.OpOverload",
    } <= set(names)


@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_what_came_with_torch_2_12_is_found_there(name):
    if torch.__version__ >= "2.12":
        find(name)


# --- autograd -------------------------------------------------------------------------------------


class Probe(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return grad, None


def in_backward(function, **options):
    """What ``function`` returns when called in a backward."""
    seen = []
    x = torch.ones(1, requires_grad=True)
    Probe.apply(x, lambda: seen.append(function())).backward(**options)
    (result,) = seen
    return result


def test_graph_tasks_are_numbered():
    assert private.current_graph_task() == -1
    first, second = (in_backward(private.current_graph_task) for _ in range(2))
    assert first >= 0
    assert second != first


def test_whether_a_nested_backward_is_allowed():
    assert in_backward(private.backward_allows_reentrant) is True
    seen = []
    x = torch.ones(1, requires_grad=True)
    out = Probe.apply(x, lambda: seen.append(private.backward_allows_reentrant()))
    torch.autograd.grad(out, x)
    assert seen == [False]


def test_callbacks_run_at_the_end_of_backward():
    order = []

    def queue():
        private.at_end_of_backward(lambda: order.append("end"))
        order.append("queued")

    in_backward(queue)
    assert order == ["queued", "end"]


def test_saved_tensor_hooks_nest_as_the_public_ones_do():
    assert not private.saved_tensor_hooks_active()
    private.push_saved_tensor_hooks(lambda t: t * 2, lambda t: t + 1)
    try:
        assert private.saved_tensor_hooks_active()
        saved = torch.ones(1, requires_grad=True).exp().grad_fn
    finally:
        private.pop_saved_tensor_hooks()
    assert not private.saved_tensor_hooks_active()
    assert torch.equal(saved._saved_result, torch.ones(1).exp() * 2 + 1)


@pytest.mark.parametrize("make", [private.save_tensor, private._SavedByNode])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_tensor_is_saved_through_hooks(make, requires_grad):
    x = torch.ones(2, requires_grad=requires_grad)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t + 1):
        saved = make(x)
    assert torch.equal(saved.unpack(), torch.full((2,), 3.0))
    assert torch.equal(make(x).unpack(), x)


def test_the_node_that_is_run_is_known():
    assert private.current_node() is None
    assert in_backward(lambda: private.current_node().name()) == "ProbeBackward"


def test_what_a_node_saved_is_found_as_it_was_packed():
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ("packed", t), lambda p: p[1]):
        sin, custom = x.sin(), Custom.apply(x, x)
    for out, count in ((sin, 1), (custom, 2), (x + 1, 0)):
        packed = private.packed_by(out.grad_fn)
        assert [each[0] for each in packed] == ["packed"] * count
    sin.sum().backward()
    assert private.packed_by(sin.grad_fn) == []


def test_grad_mode_is_set_for_good():
    private.set_grad_enabled(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        private.set_grad_enabled(True)


def test_the_group_of_backwards_is_put_down_and_found():
    assert private.get_graph_exec_group() is None
    group = object()
    private.set_graph_exec_group(group)
    try:
        assert private.get_graph_exec_group() is group
    finally:
        private.set_graph_exec_group(None)


# --- modes ----------------------------------------------------------------------------------------


def test_modes_are_counted():
    assert (private.function_mode_count(), private.dispatch_modes_active()) == (0, False)
    with torch.device("cpu"):
        assert private.function_mode_count() == 1
    with private.DispatchMode():
        assert private.dispatch_modes_active()


def test_function_modes_are_exchanged():
    assert private.function_modes() == []
    with torch.device("meta"):
        modes = private.function_modes()
        private.set_function_modes([])
        assert not torch.ones(1).is_meta
        private.set_function_modes(modes)
        assert torch.ones(1).is_meta
    private.set_function_modes(modes)
    assert torch.get_default_device().type == "meta"
    private.set_function_modes([])
    assert not torch.ones(1).is_meta


def test_nobody_observes():
    with Log() as log, torch.device("meta"), private.unobserved():
        assert not torch.ones(1).is_meta
        assert not torch.is_grad_enabled()
    assert log.ops == []
    assert torch.is_grad_enabled()


def test_a_version_is_set():
    tensor = torch.ones(2)
    tensor.add_(1)
    private.set_version(tensor, 0)
    assert tensor._version == 0


def test_tensors_are_copied():
    targets, sources = [torch.zeros(2), torch.zeros(3, dtype=torch.long)], [1.5, 2]
    private.copy_tensors(
        targets, [torch.full_like(t, s) for t, s in zip(targets, sources, strict=True)]
    )
    assert [t.tolist() for t in targets] == [[1.5, 1.5], [2, 2, 2]]
    private.copy_tensors([], [])


@pytest.mark.parametrize("flag", private.FLAGS, ids=lambda flag: flag[0].__name__)
def test_a_flag_takes_back_what_it_gives(flag):
    read, write = flag
    value = read()
    write(value)
    assert read() == value


def test_arguments_are_found_by_schema():
    aten = torch.ops.aten
    assert private.generator_position(aten.poisson.default) == (1, "generator")
    assert private.generator_position(aten.normal_.default) == (3, "generator")
    assert private.generator_position(aten.mm.default) is None
    assert private.generator_position(torch.ops.higher_order.cond) is None
    assert private.offset_position(aten.as_strided.default) == (3, "storage_offset")
    assert private.offset_position(aten.as_strided_.default) == (3, "storage_offset")
    assert private.offset_position(aten.view.default) is None
    place = private.dropout_of(aten._scaled_dot_product_flash_attention.default)
    assert place == (3, "dropout_p")


def test_pointwise_ops_are_known():
    aten = torch.ops.aten
    assert private.is_pointwise(aten.sin.default)
    assert not private.is_pointwise(aten.mm.default)
    assert not private.is_pointwise(aten.bernoulli.default)  # pointwise, and random
    assert not private.is_pointwise(torch.ops.higher_order.cond)


def test_ops_that_write_unseen_are_known():
    assert private.writes_unseen(torch.ops.c10d.allreduce_.default)
    assert private.writes_unseen(torch.ops.higher_order.cond)
    assert not private.writes_unseen(torch.ops.higher_order.flex_attention)
    assert not private.writes_unseen(torch.ops.aten.mul_.Tensor)


def test_factories_make_tensors_on_the_cpu():
    assert private.default_device_type() == "cpu"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_ad_is_seen():
    assert not private.forward_ad_active()
    with forward_ad.dual_level():
        assert private.forward_ad_active()
        x = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        private.copy_tensors([torch.zeros(2)], [x])
    assert not private.forward_ad_active()


def test_a_custom_function_that_is_applied_is_seen():
    found = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            found.append(private.is_in_custom_function(sys._getframe()))
            return x.clone()

    Looks.apply(torch.ones(1))
    assert found == [True]
    assert not private.is_in_custom_function(sys._getframe())


def test_denormal_numbers_are_seen_to_be_flushed():
    flags = dict(private.FLAGS)
    (read,) = [each for each in flags if each.__name__ == "_flushes_denormals"]
    assert not read()
    try:
        assert torch.set_flush_denormal(True)
        assert read()
    finally:
        torch.set_flush_denormal(False)


def test_a_tensor_of_zeros_without_memory_is_not_plain():
    zeros = torch._efficientzerotensor(2)
    assert not private.is_plain_tensor(zeros)
    assert private.unsupported_tensor(zeros) == "a tensor of zeros without memory"


def test_autocast_of_any_device_is_seen():
    assert not private.any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert private.any_autocast_enabled()


class Log(private.DispatchMode):
    """Remembers ops, and calls them without their Python wrapper."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return private.bare_op(func)(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_ops_and_nests():
    x = torch.ones(2, requires_grad=True)
    with Log() as outer, Log() as inner:
        x.sin().sum()
    expected = [torch.ops.aten.sin.default, torch.ops.aten.sum.default]
    assert outer.ops == inner.ops == expected
    assert issubclass(private.DispatchMode, TorchDispatchMode)


def test_a_mode_of_ours_leaves_no_flag_that_a_mode_of_another_thread_had_set():
    """The flags are the process's: a mode that put back what it found would leave them set."""

    class Theirs(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    names = [name for name in vars(_python_dispatch) if name.startswith("_is_in")]

    def flags():
        return [name for name in names if getattr(_python_dispatch, name)]

    assert "_is_in_any_mode_without_ignore_compile_internals" in names
    assert flags() == []
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(Theirs().__enter__).result()
        with private.DispatchMode():
            assert _python_dispatch.is_in_torch_dispatch_mode()
            other.submit(theirs.__exit__, None, None, None).result()
    assert flags() == []


def test_a_detached_alias_shares_the_version():
    x = torch.ones(2)
    versions = []

    class Detach(private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.sin.default:
                versions.append(private.detach_below_autograd(out))
            return out

    with Detach():
        y = x.requires_grad_().sin()
    (alias,) = versions
    assert alias._version == 0
    y.detach().mul_(2)
    assert (alias._version, alias.requires_grad) == (1, False)
    assert torch.equal(alias, y)


def test_metadata_ops_are_those_that_torch_ignores():
    assert private.metadata_ops() < torch.utils.checkpoint.SAC_IGNORED_OPS
    assert torch.ops.aten.sym_size.default in private.metadata_ops()


def test_below_python_nothing_sees_an_op():
    x = torch.ones(2, requires_grad=True)
    with Log() as log, torch.device("meta"):
        with private.below_python():
            y = x * torch.ones(2)
        assert torch.ones(1).is_meta
    assert log.ops == [torch.ops.aten.ones.default]
    assert (y.device.type, y.requires_grad) == ("cpu", False)
    assert (x * 1).requires_grad


def test_below_python_a_transform_is_not_seen_either():
    def function(x):
        with private.below_python():
            seen.append(torch.ones(2).sum().item())
        return x.sum()

    seen = []
    torch.func.vmap(function)(torch.ones(2, 3))
    assert seen == [2.0]


def test_inner_tensors():
    x = torch.ones(2, 2)
    sparse = x.to_sparse()
    with private.below_python():
        assert private.inner_tensors(x)[0] is x
        assert private.inner_tensors(torch.nn.Parameter(x))[0].shape == (2, 2)
        assert [t.shape for t in private.inner_tensors(sparse)] == [(2, 4), (4,)]
        assert private.inner_tensors(x.to("meta")) is None


def test_the_memory_of_tensors_is_told_apart():
    x, y = torch.ones(2), torch.ones(2)
    assert private.storage_key(x) == private.storage_key(x[1:]) != private.storage_key(y)
    assert private.storage_key(torch.eye(2).to_sparse()) is None


def test_what_a_schema_says_an_op_does():
    aten = torch.ops.aten
    assert private.effects_of(aten.sin.default) == ([True], [])
    assert private.effects_of(aten.add_.Tensor) == ([False], [(0, "self")])
    assert private.effects_of(aten.sin.out) == ([False], [(1, "out")])
    assert private.effects_of(aten.topk.default) == ([True, True], [])
    assert private.effects_of(aten.view.default) == ([False], [])
    assert private.effects_of(torch.ops.higher_order.cond) is None


def test_forward_hooks_are_where_they_are_looked_for():
    def hook(*args):
        pass

    module = torch.nn.Linear(2, 2)
    handles = [
        module.register_forward_pre_hook(hook),
        module.register_forward_hook(hook),
        module.register_forward_pre_hook(hook, with_kwargs=True),
        module.register_forward_hook(hook, with_kwargs=True),
        module.register_forward_hook(hook, always_call=True),
    ]
    places = [vars(module)[name] for name in private.FORWARD_HOOKS]
    assert [[*place] for place in places] == [
        [handles[0].id, handles[2].id],
        [handles[1].id, handles[3].id, handles[4].id],
        [handles[2].id],
        [handles[3].id],
        [handles[4].id],
    ]


def test_forward_hooks_of_all_modules_are_where_they_are_looked_for():
    def hook(*args):
        pass

    register = torch.nn.modules.module
    handles = [
        register.register_module_forward_pre_hook(hook),
        register.register_module_forward_hook(hook),
        register.register_module_forward_hook(hook, with_kwargs=True),
        register.register_module_forward_hook(hook, always_call=True),
    ]
    try:
        places = [[*place] for place in private.GLOBAL_FORWARD_HOOKS]
    finally:
        for handle in handles:
            handle.remove()
            private.GLOBAL_FORWARD_HOOKS[2].pop(handle.id, None)  # which `remove` leaves behind
    first, *others = [handle.id for handle in handles]
    assert places == [[first], others, [others[1]], [others[2]]]


def test_a_call_of_a_module_is_known_by_its_code():
    class Module(torch.nn.Module):
        def forward(self):
            frame = sys._getframe()
            while frame.f_code is not private.MODULE_CALL:
                frame = frame.f_back
            return frame.f_locals["self"]

    module = Module()
    assert module() is module
    module.register_forward_hook(lambda module, args, out: None)
    assert module() is module


# --- the compiler ---------------------------------------------------------------------------------


def test_nothing_is_compiling_here():
    assert not private.is_tracing()
    assert not private.is_nonstrict_tracing()
    assert not private.dynamo_is_watching()
    assert private.traced_graph() is None
    assert private.nested_trace_policy() is None


def test_tracing_is_noticed():
    from torch.fx.experimental.proxy_tensor import make_fx

    seen = []

    def function(x):
        seen.append((private.is_tracing(), private.traced_graph() is not None))
        return x.sin()

    make_fx(function)(torch.ones(2))
    assert seen == [(True, True)]


def test_nodes_are_tagged_for_the_partitioner():
    from torch._functorch import partitioners

    graph = torch.fx.symbolic_trace(lambda x: x + 1).graph
    nodes = list(graph.nodes)
    private.tag_recompute_nodes(nodes[:1], "MUST_SAVE", 7)
    private.tag_recompute_nodes(nodes[1:2], "PREFER_RECOMPUTE", None)
    policy = partitioners.CheckpointPolicy
    assert nodes[0].meta == {"recompute": policy.MUST_SAVE, "ac_graph_id": 7}
    assert nodes[1].meta["recompute"] is policy.PREFER_RECOMPUTE
    assert "ac_graph_id" not in nodes[1].meta


def test_a_hidden_function_is_run_as_it_is():
    def function(x):
        return torch.compiler.is_compiling()

    hidden = private.hide_from_dynamo(function)
    assert hidden is function
    assert torch.compile(hidden, backend="eager")(torch.ones(1)) is False
    torch._dynamo.reset()


def test_running_without_dynamo():
    def add(x, *, other):
        return x + other

    assert private.run_without_dynamo(add, 1, other=2) == 3


def test_an_op_is_known_by_itself():
    op = torch.ops.higher_order.cond
    assert private.inductor_region_key(op, (1,)) is op
    assert private.bare_op(functools.reduce) is functools.reduce


def test_what_is_excluded_does_not_depend_on_the_importer():
    with torch.inference_mode():
        found = private._keys_above_kernels()
    assert found.raw_repr() == private._ABOVE_KERNELS.raw_repr()
    x = torch.randn(3, requires_grad=True)
    with private.below_python():
        assert not (x * 2).requires_grad


def test_the_hooks_of_a_tensor_are_taken_away():
    parameter, calls = torch.nn.Parameter(torch.ones(2)), []
    before = private.tensor_hooks(parameter)
    assert before == (None, None)
    for _ in range(2):
        parameter.register_hook(lambda _: calls.append("gradient"))
        parameter.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
        parameter.sum().backward()
        assert calls == ["gradient", "after"]
        private.write_tensor_hooks(parameter, before)
        parameter.sum().backward()
        assert calls == ["gradient", "after"]
        assert private.tensor_hooks(parameter) == before
        calls.clear()


def test_hooks_for_all_modules_and_optimizers_are_found():
    module, optimizer = (
        sys.modules[cls.__module__] for cls in (torch.nn.Module, torch.optim.Optimizer)
    )
    handles = [
        module.register_module_forward_pre_hook(print),
        module.register_module_forward_hook(print),
        module.register_module_full_backward_pre_hook(print),
        module.register_module_full_backward_hook(print),
        optimizer.register_optimizer_step_pre_hook(print),
        optimizer.register_optimizer_step_post_hook(print),
    ]
    found = [list(hooks.values()) for hooks in private.global_hooks()]
    for handle in handles:
        handle.remove()
    assert found == [[print]] * 6
    assert [dict(hooks) for hooks in private.global_hooks()] == [{}] * 6


def test_names_of_arguments():
    aten = torch.ops.aten
    assert private.argument_names(aten.view.default) == ["self", "size"]
    assert private.argument_names(aten.slice_backward.default, lists=True) == ["input_sizes"]
    assert private.argument_names(aten.full.default, lists=True) == ["size"]
    assert private.argument_names(aten.unfold.default, lists=True) == []
    assert private.argument_names(aten.upsample_nearest2d.default, lists=True) == ["output_size"]


def test_the_op_that_a_function_is_named_after():
    aten = torch.ops.aten
    assert private.packet_of(torch.mm) is aten.mm
    assert private.packet_of(torch.Tensor.mm) is aten.mm
    assert private.packet_of(torch.nn.functional.gelu) is aten.gelu
    assert private.packet_of(print) is None
    assert private.packet_of(3) is None
    assert private.packet_of(lambda x: x) is None


def test_what_is_never_traced_says_why_where_there_is_to_be_one_graph():
    def inner(x):
        return x + 1

    private.never_traced(inner, "for a reason of its own")
    torch.compiler.reset()
    assert torch.compile(lambda x: inner(x) * 2, backend="eager")(torch.ones(1)) == 4
    with pytest.raises(torch._dynamo.exc.Unsupported, match="for a reason of its own"):
        torch.compile(lambda x: inner(x) * 2, backend="eager", fullgraph=True)(torch.ones(1))
    torch.compiler.reset()
