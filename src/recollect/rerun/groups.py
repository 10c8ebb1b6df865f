"""Several backwards that share one recomputation."""

from __future__ import annotations

from typing import Any

from recollect._torch.autograd import get_graph_exec_group, set_graph_exec_group

__all__ = ["GraphExecGroup"]


class GraphExecGroup:
    """A context in which each region is recomputed at most once, however many backwards run.

    The backwards must not overlap: no saved tensor may be needed by two of them, ``retain_graph``
    or not. Regions of the reentrant engine are not affected. Groups do not nest.
    """

    def __repr__(self) -> str:
        return f"<GraphExecGroup at {id(self):#x}>"

    def __enter__(self) -> GraphExecGroup:
        active = get_graph_exec_group()
        if active is not None:
            raise RuntimeError(
                f"GraphExecGroup contexts cannot be nested. Already inside group {active}"
            )
        set_graph_exec_group(self)
        return self

    def __exit__(self, *exc: object) -> None:
        set_graph_exec_group(None)

    @classmethod
    def _get_current_group(cls) -> Any:
        return get_graph_exec_group()
