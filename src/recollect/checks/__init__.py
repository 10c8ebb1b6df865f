"""Telling whether a recomputation did what forward did."""
