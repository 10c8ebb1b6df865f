"""Runs and watches the steps of the user's loop under a plan (P7, P8).

1. `runner` takes the place of the model's forward, which `play` runs by a schedule. `kinds`
   identifies the kind of step that a call belongs to, and keeps a `variant` for each forward: its
   schedule.
2. A batch of another shape is another kind. Its schedule is chosen by simulation (`choice`), on a
   graph that was predicted (`shapes`) or traced as the loop ran the step (`live`).
3. What other models under plans keep inside of a traced step is a part of it (`companions`).
4. When a step exceeds its budget, `Kinds.exceeded` has later ones keep less, and a `PlanWarning`
   says so. On CUDA `watch.PeakWatch` notices; elsewhere the simulation of the traced step tells.
   After running out of memory, `Kinds.tighten` does the same, and forward is repeated if possible
   (`attempt`).
"""
