"""Switches that decide which kernels run."""

import pytest
import torch

from recollect._torch.flags import FLAGS, SPECIAL_FLAGS


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag[0].__name__)
def test_a_flag_takes_back_what_it_gives(flag):
    read, write = flag
    value = read()
    write(value)
    assert read() == value


def test_denormal_numbers_are_seen_to_be_flushed():
    flags = dict(FLAGS)
    (read,) = [each for each in flags if each.__name__ == "keeps_denormals"]
    assert read()
    try:
        assert torch.set_flush_denormal(True)
        assert not read()
    finally:
        torch.set_flush_denormal(False)


def test_products_heed_the_flags_that_are_not_special():
    names = {read.__name__ for read, _ in FLAGS}
    assert names > SPECIAL_FLAGS
    usual = names - SPECIAL_FLAGS
    assert {"get_default_dtype", "get_num_threads", "_get_mkldnn_enabled"} <= usual
    assert "_get_float32_matmul_precision" in usual
    assert not any("sdp" in name or "cudnn" in name for name in usual)
