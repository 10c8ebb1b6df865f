"""The streams of random and numpy, read and written as memory."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from recollect.state import libraries
from recollect.state.libraries import read_libraries, write_libraries

np = pytest.importorskip("numpy")


@pytest.fixture(autouse=True)
def streams_as_before() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


DRAWS: dict[str, Callable[[], Any]] = {
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.getrandbits": lambda: random.getrandbits(64),
    "random.shuffle": lambda: random.sample(range(100), 100),
    "numpy.rand": np.random.rand,
    "numpy.randn": np.random.randn,
    "numpy.randint": lambda: np.random.randint(1 << 30),
    "more than a twist of both": lambda: (np.random.rand(700).sum(), random.randbytes(4000)),
}


@pytest.mark.parametrize("before", [0, 1, 2, 623, 624])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_streams_go_on_from_where_they_were_read(draw: Callable[[], Any], before: int) -> None:
    for _ in range(before):
        random.gauss(0, 1), np.random.randn(), random.random()
    state = read_libraries()
    expected = [draw() for _ in range(3)]
    write_libraries(state)
    assert [draw() for _ in range(3)] == expected


def test_the_public_functions_see_what_is_written() -> None:
    random.seed(1)
    np.random.seed(1)
    np.random.randn()
    random.gauss(0, 1)
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    state = read_libraries()
    random.seed(2)
    np.random.seed(2)
    write_libraries(state)
    assert random.getstate() == python
    found = np.random.get_state(legacy=False)
    assert found["state"]["key"].tolist() == numpy["state"]["key"].tolist()
    assert (found["state"]["pos"], found["has_gauss"], found["gauss"]) == (
        numpy["state"]["pos"],
        numpy["has_gauss"],
        numpy["gauss"],
    )


def test_streams_are_read_as_memory_here() -> None:
    """On the interpreters we test, the quick way is the one in use."""
    numpy = libraries._numpy_stream()
    assert numpy is not None
    assert libraries._python.is_memory
    assert numpy.is_memory


@pytest.mark.parametrize("kind", [libraries._python_by_memory, libraries.stream_of])
def test_both_ways_of_reading_random(kind: Any) -> None:
    generator = random.Random(3)
    generator.gauss(0, 1)
    stream = kind(generator)
    state = stream.read()
    expected = [generator.gauss(0, 1), generator.random(), generator.gauss(0, 1)]
    stream.write(state)
    assert [generator.gauss(0, 1), generator.random(), generator.gauss(0, 1)] == expected


def test_numpy_by_its_public_functions() -> None:
    generator = np.random.RandomState(3)
    generator.randn()
    stream = libraries.stream_of(generator)
    state = stream.read()
    expected = generator.randn(5).tolist()
    stream.write(state)
    assert generator.randn(5).tolist() == expected


def test_another_bit_generator_behind_the_functions_of_numpy() -> None:
    original = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        state = read_libraries()
        expected = np.random.rand(3).tolist()
        write_libraries(state)
        assert np.random.rand(3).tolist() == expected
    finally:
        np.random.set_bit_generator(original)
    state = read_libraries()
    expected = np.random.rand(3).tolist()
    write_libraries(state)
    assert np.random.rand(3).tolist() == expected


def test_numpy_is_not_imported_for_it() -> None:
    program = """
import sys
sys.modules["numpy"] = None  # as if it were not installed
del sys.modules["numpy"]
import random
from recollect.state.libraries import read_libraries, write_libraries
for name in [name for name in sys.modules if name.partition(".")[0] == "numpy"]:
    del sys.modules[name]
state = read_libraries()
assert state[1] is None and "numpy" not in sys.modules
write_libraries(state)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
