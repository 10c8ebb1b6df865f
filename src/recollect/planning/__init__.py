"""Plans: what to keep, recompute and offload for a training step to stay within a budget.

One path leads through the package (P1 to P8 of docs/internals.md):

1. `api` takes a model, a batch and a `budget`, and `prepare` checks them. Models that are trained
   by several processes plan together (`distributed`, `ranks`) or are refused.
2. `recording` runs the training step, records it, and makes a priced graph of it.
3. `planner` has the graph solved (`solving`), tries schedules (`trial`, `ways`), and makes the
   `plan` for a budget, with a report from `describe`.
4. `loop` runs the model under the plan: the whole of it, or its `regions` each by itself. Another
   kind of step is traced while the loop runs it, and gets a schedule of its own. `lazy` makes a
   whole plan from such a step.
5. `sizes` finds the largest batch that fits. `progress` shows what is being done.
"""
