"""Reports: who holds what after a forward or under a plan; tables for a terminal, and a page."""
