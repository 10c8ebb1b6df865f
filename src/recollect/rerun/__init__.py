"""Ways to give backward the tensors that forward did not keep."""
