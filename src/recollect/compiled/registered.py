"""What ``torch.compile(model, backend="recollect")`` finds: an entry point of the package."""

from __future__ import annotations

from typing import Any

from torch import fx

from recollect._torch.inductor import backend_of, default_partition, simplify
from recollect.compiled.gradients import separate_gradients
from recollect.compiled.straight import straight_line
from recollect.compiled.views import fold_views


def split(graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Split a joint graph where there is no plan."""
    fold_views(graph, kwargs["num_fwd_outputs"])
    separate_gradients(graph, **kwargs)
    simplify(graph)
    return default_partition(graph, inputs, **kwargs)


#: Runs the ops of a graph as they are, and does nothing else at each step.
backend = backend_of("recollect", straight_line, split)
