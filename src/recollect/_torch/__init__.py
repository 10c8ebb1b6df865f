"""The only package that uses private names of torch, by topic.

Everything here was tried on torch 2.11 and 2.13 (on CPUs and GPUs) and 2.15 (on CPUs). Their
differences are handled here and nowhere else. ``tests/_torch`` fails by name when a release drops
or changes one.
"""
