"""The switches: scoped to a thread or task, checked at once, restored whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import recollect
from tests._support import Counted, leaf, rerun


def early_stop_in_force() -> bool:
    function = Counted(lambda x: x.sin().exp())
    rerun(function, leaf(3)).sum().backward()
    return function.finished == 1


def debug_in_force() -> bool:
    def differs(x: Tensor) -> Tensor:
        return x.sin() if recollect.is_recomputing() else x.sin().exp()

    with pytest.raises(recollect.CheckpointError) as info:
        rerun(differs, leaf(3)).sum().backward()
    return "Operations executed" in str(info.value)


SWITCHES = pytest.mark.parametrize(
    ("switch", "in_force", "default"),
    [
        (recollect.set_checkpoint_early_stop, early_stop_in_force, True),
        (recollect.set_checkpoint_debug_enabled, debug_in_force, False),
    ],
    ids=["early_stop", "debug"],
)


@SWITCHES
def test_set_and_restored(switch: Any, in_force: Callable[[], bool], default: bool) -> None:
    assert in_force() is default
    with switch(not default):
        assert in_force() is not default
        with switch(default):
            assert in_force() is default
        assert in_force() is not default
    assert in_force() is default


@SWITCHES
def test_restored_after_an_exception(
    switch: Any, in_force: Callable[[], bool], default: bool
) -> None:
    with pytest.raises(KeyError), switch(not default):
        raise KeyError
    assert in_force() is default


@SWITCHES
def test_tasks_do_not_see_each_others_settings(
    switch: Any, in_force: Callable[[], bool], default: bool
) -> None:
    async def main() -> list[bool]:
        inside, checked = asyncio.Event(), asyncio.Event()

        async def sets() -> bool:
            with switch(not default):
                inside.set()
                await checked.wait()
                return in_force()

        async def looks() -> bool:
            await inside.wait()
            try:
                return in_force()
            finally:
                checked.set()

        return list(await asyncio.gather(sets(), looks()))

    assert asyncio.run(main()) == [not default, default]


@pytest.mark.parametrize("value", [1, "yes", None], ids=repr)
def test_early_stop_takes_a_boolean(value: Any) -> None:
    switch = recollect.set_checkpoint_early_stop(value)
    with pytest.raises(TypeError, match="enable should be True or False"), switch:
        pytest.fail("entered")


@pytest.mark.parametrize("value", [1, "yes"], ids=repr)
def test_debug_takes_a_boolean_or_none(value: Any) -> None:
    switch = recollect.set_checkpoint_debug_enabled(value)
    with pytest.raises(TypeError, match="enabled should be True, False or None"), switch:
        pytest.fail("entered")
