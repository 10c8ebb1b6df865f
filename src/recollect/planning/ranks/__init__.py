"""One plan for all processes of a distributed run (P5)."""
