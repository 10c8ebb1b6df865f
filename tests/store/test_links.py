"""Which tensors have a link. (How the links of devices behave is in test_cuda.py.)"""

from __future__ import annotations

import torch

from recollect.store.links import cuda_links


def test_a_tensor_on_the_cpu_has_no_link():
    assert cuda_links()(torch.ones(2)) is None


def test_a_meta_tensor_has_no_link():
    assert cuda_links()(torch.ones(2, device="meta")) is None
