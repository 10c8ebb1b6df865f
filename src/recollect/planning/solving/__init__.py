"""The solver: schedules for a graph on the memory/time frontier, and a lower bound."""
