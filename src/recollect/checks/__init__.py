"""Compares a recomputation with forward, and explains a difference."""
