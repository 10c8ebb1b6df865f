"""The parts of a model that run each by itself: whole modules, and the units of FSDP (P7)."""
