"""Plans for compiled models: our solver in the place where the compiler splits a step.

AOTAutograd traces forward and backward of a step into one joint graph, and a partitioner chooses
which tensors forward saves for backward. The path through the package:

1. `sites` finds the compiled modules of a model, and has them compiled with a `backend` of ours.
2. The step runs with the split that torch chooses. The `split` of each graph is observed: `joint`
   reads the joint graph, and knows which of its tensors get memory from Inductor.
3. `part` makes ops, values and events of it, `timeline` measures what the step holds around the
   graphs, and `merge` makes the `Graph` of the whole step.
4. `planner` solves it, with `tied` where graphs share code, and compiles and runs what the solver
   found. The target is corrected by what the simulation was off.
5. `applied` plays the `decisions` of a plan in a model. A graph that was not planned is solved
   where it is split, and `watch` warns of steps that do not run by the plan.
6. Without a batch, `lazy` has the loop's own steps take the place of those that the planner runs:
   `loop` measures them, and makes and corrects the plan.

Where a plan holds saved tensors on the host, `offload` puts ops that copy into the halves of a
graph that was split. `registered` is a backend of our own, which runs the ops of a graph as they
are: `rewrites` prepares its joint graph.
"""
