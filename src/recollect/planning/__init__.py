"""Plans: what to keep, recompute and offload for a training step to stay within a budget.

One path leads through the package (P1 to P8 of docs/internals.md):

1. `api` takes a model, a `batch` and a `budget`; `step` runs the training step. Models that are
   `distributed` over processes are refused.
2. `record` runs it under a `trace`, with `prices` for its ops, or on `fakes`. `build` makes a
   graph of it.
3. `planner` has the graph solved (`solving`), tries schedules (`trial`, `ways`), and makes the
   `plan` for a budget, with a report from `describe`.
4. `runner` calls the model under the plan, or with whole modules checkpointed (`module_regions`).
   `watch` compares memory with the plan.
5. Another kind of step (`model_state`) is traced while the loop runs it (`live`), and gets a
   schedule of its own (`variant`). `lazy` makes a whole plan from such a step.
6. `largest_batch` searches for the largest size that fits (`largest`): `sized_steps` makes steps
   of each size, `growth` and `forecast` predict those that were not run. `progress` shows what is
   being done.
"""
