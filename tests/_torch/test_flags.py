"""Switches that decide which kernels run."""

import pytest
import torch

from recollect._torch.flags import FLAGS


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag[0].__name__)
def test_a_flag_takes_back_what_it_gives(flag):
    read, write = flag
    value = read()
    write(value)
    assert read() == value


def test_denormal_numbers_are_seen_to_be_flushed():
    flags = dict(FLAGS)
    (read,) = [each for each in flags if each.__name__ == "_flushes_denormals"]
    assert not read()
    try:
        assert torch.set_flush_denormal(True)
        assert read()
    finally:
        torch.set_flush_denormal(False)
