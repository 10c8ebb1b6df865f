"""The hooks of modules, and the code of a call."""

import sys

import torch

from recollect._torch.modules import (
    FORWARD_HOOKS,
    GLOBAL_FORWARD_HOOKS,
    MODULE_CALL,
    global_hooks,
    known_class,
    sharded_part,
)


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
    places = [vars(module)[name] for name in FORWARD_HOOKS]
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
        places = [[*place] for place in GLOBAL_FORWARD_HOOKS]
    finally:
        for handle in handles:
            handle.remove()
            GLOBAL_FORWARD_HOOKS[2].pop(handle.id, None)  # which `remove` leaves behind
    first, *others = [handle.id for handle in handles]
    assert places == [[first], others, [others[1]], [others[2]]]


def test_a_call_of_a_module_is_known_by_its_code():
    class Module(torch.nn.Module):
        def forward(self):
            frame = sys._getframe()
            while frame.f_code is not MODULE_CALL:
                frame = frame.f_back
            return frame.f_locals["self"]

    module = Module()
    assert module() is module
    module.register_forward_hook(lambda module, args, out: None)
    assert module() is module


def test_hooks_for_all_modules_and_optimizers_are_found():
    module, optimizer = (
        sys.modules[cls.__module__] for cls in (torch.nn.Module, torch.optim.Optimizer)
    )
    # A fit leaves hooks of its own on optimizers, perhaps in a test before this one.
    before = [[*hooks.values()] for hooks in global_hooks()]
    handles = [
        module.register_module_forward_pre_hook(print),
        module.register_module_forward_hook(print),
        module.register_module_full_backward_pre_hook(print),
        module.register_module_full_backward_hook(print),
        optimizer.register_optimizer_step_pre_hook(print),
        optimizer.register_optimizer_step_post_hook(print),
    ]
    pairs = zip(before, global_hooks(), strict=True)
    added = [[*hooks.values()][len(known) :] for known, hooks in pairs]
    for handle in handles:
        handle.remove()
    assert [each for each in added if each] == [[print]] * 6
    assert [[*hooks.values()] for hooks in global_hooks()] == before


def test_classes_are_known_once_their_module_is_imported():
    assert known_class("recollect_tests.no_such_module", "DTensor") is None
    assert known_class("torch.nn", "Linear") is torch.nn.Linear


def test_a_module_of_one_process_has_no_parts_elsewhere():
    assert sharded_part(torch.nn.Linear(2, 2)) is None
