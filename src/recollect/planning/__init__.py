"""Plans: what to keep, recompute and offload for a training step to stay within a budget.

One path leads through the package:

1. `api` takes a model, a `batch` and a `budget`; `step` runs the training step.
2. `record` runs it once under a `trace`, with `prices` for its ops (or on `fakes`), and `build`
   makes a graph of it.
3. `planner` has the graph solved (`solving`), tries schedules (`trial`, `ways`), and makes the
   `plan` for a budget, with figures from `describe`.
4. `runner` calls the model under the plan; `watch` compares what is in memory.
5. Another batch is rescaled (`planned`, `rescale`, `size_rules`, `sizes`); another step is
   estimated from its recording (`model_state`, `variant`, `estimate`).
"""
