"""Solving: of all schedules for a graph, those worth having, and the time none can be below."""
