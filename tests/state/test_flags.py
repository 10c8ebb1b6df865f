"""Process-wide switches, read and set again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from recollect.state.flags import read_flags, read_usual_flags, usual_flags, write_flags
from tests._support import Run, leaf, reentrant, rerun


@pytest.fixture(autouse=True)
def flags_as_before() -> Iterator[None]:
    flags = read_flags()
    yield
    write_flags(flags)
    assert read_flags() == flags


def _use_deterministic(value: bool) -> None:
    torch.use_deterministic_algorithms(value, warn_only=True)


def _set(owner: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)


#: How to read a switch by a public name, how to set it, and two values.
SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any, Any]] = {
    "default dtype": (
        torch.get_default_dtype,
        torch.set_default_dtype,
        torch.float32,
        torch.float64,
    ),
    "deterministic": (torch.are_deterministic_algorithms_enabled, _use_deterministic, False, True),
    "fill uninitialised": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        _set(torch.utils.deterministic, "fill_uninitialized_memory"),
        True,
        False,
    ),
    "flash": (
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.enable_flash_sdp,
        True,
        False,
    ),
    "math": (
        torch.backends.cuda.math_sdp_enabled,
        torch.backends.cuda.enable_math_sdp,
        True,
        False,
    ),
    "efficient": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
        True,
        False,
    ),
    "matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "highest",
        "high",
    ),
}
if torch.accelerator.current_accelerator() is not None:
    SWITCHES |= {
        "tf32": (
            lambda: torch.backends.cuda.matmul.allow_tf32,
            _set(torch.backends.cuda.matmul, "allow_tf32"),
            False,
            True,
        ),
        "bf16 reduction": (
            lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            _set(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
            True,
            False,
        ),
        "cudnn": (
            lambda: torch.backends.cudnn.deterministic,
            _set(torch.backends.cudnn, "deterministic"),
            False,
            True,
        ),
    }
EACH = pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)


@EACH
def test_a_switch_is_read_and_set_again(switch: Any) -> None:
    read, write, one, other = switch
    write(one)
    flags = read_flags()
    write(other)
    assert read_flags() != flags
    write_flags(flags)
    assert read() == one
    assert read_flags() == flags


@EACH
@pytest.mark.parametrize("run", [rerun, reentrant], ids=["rerun", "reentrant"])
def test_a_region_finds_the_switch_of_forward(run: Run, switch: Any) -> None:
    read, write, one, other = switch
    found = []

    def note(x: Tensor) -> Tensor:
        found.append(read())
        return x.sin()

    write(other)
    out = run(note, leaf(3))
    write(one)
    out.sum().backward()
    assert found == [other, other]
    assert read() == one


def test_switches_that_torch_refuses_to_read() -> None:
    """After one of the newer switches is used, torch raises when asked by the older name."""
    precision = torch.backends.cuda.matmul.fp32_precision
    plain = read_flags()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        newer = read_flags()
        assert newer == read_flags() != plain
        write_flags(plain)
        assert torch.get_float32_matmul_precision() == "highest"
        write_flags(newer)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("engine", ["rerun", "replay"])
def test_a_backward_elsewhere_leaves_the_number_of_threads_of_new_threads(engine: str) -> None:
    def of_new_thread() -> int:
        with ThreadPoolExecutor(1) as new:
            return new.submit(torch.get_num_threads).result()

    before = torch.get_num_threads()
    weight = torch.randn(4, 4, requires_grad=True)
    with ThreadPoolExecutor(1) as elsewhere:
        others = elsewhere.submit(torch.get_num_threads).result()
        torch.set_num_threads(others + 1)
        try:
            out = recollect.checkpoint(
                lambda x: (x @ weight).tanh().exp(),
                torch.randn(2, 4),
                use_reentrant=False,
                engine=engine,
            )
            elsewhere.submit(out.sum().backward).result()
            assert elsewhere.submit(torch.get_num_threads).result() == others
            assert torch.get_num_threads() == others + 1
            assert of_new_thread() == others + 1
        finally:
            torch.set_num_threads(before)


def test_the_flags_that_most_ops_heed_are_a_part_of_all() -> None:
    usual = read_usual_flags()
    assert usual == usual_flags(read_flags())
    assert len(usual) < len(read_flags())
    torch.set_default_dtype(torch.float64)
    assert read_usual_flags() == usual_flags(read_flags()) != usual
    torch.set_default_dtype(torch.float32)
    torch.backends.cuda.enable_flash_sdp(not torch.backends.cuda.flash_sdp_enabled())
    assert read_usual_flags() == usual_flags(read_flags()) == usual


def test_flags_that_cannot_be_read_are_compared_as_a_whole() -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    assert read_usual_flags() == usual_flags(read_flags())
