"""The version, and nothing else: importing it needs no torch."""

__version__ = "0.2.0"
