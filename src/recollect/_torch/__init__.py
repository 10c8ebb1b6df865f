"""The only package that touches names of torch which are not public, by topic.

Everything here was tried on torch 2.11 and 2.13 (CPU and CUDA builds). Where the two differ, the
difference is handled here and nowhere else. ``tests/torch`` fails by name when a release drops or
changes one of them.
"""
