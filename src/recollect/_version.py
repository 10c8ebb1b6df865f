"""The version, and nothing else: importing it needs no torch."""

__all__ = ["__version__"]

__version__ = "0.2.0"
