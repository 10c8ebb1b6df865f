"""Set-up of all tests."""

from __future__ import annotations

import torch

# The tensors of the tests are small: a second thread costs more than it gives, and on a busy
# machine the two wait for each other.
torch.set_num_threads(1)
