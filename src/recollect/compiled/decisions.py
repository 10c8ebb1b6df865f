"""What a plan decides for the graphs of a compiled step: part of a `Plan`, and of its file (P6)."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from recollect._version import __version__


@dataclass(frozen=True)
class Away:
    """A tensor that forward saves on the host.

    Args:
        name: Of its node.
        freed: The node of forward after which its memory on the device is free; empty: at its end.
        fetched: The node of backward after which it begins to be fetched; empty: at once.
    """

    name: str
    freed: str
    fetched: str


@dataclass(frozen=True)
class GraphDecision:
    """What is saved of one joint graph.

    Args:
        key: Of the joint graph.
        source: The key of the graph that dynamo made it from.
        kept: The names of the nodes that forward saves for backward; None: as torch chooses.
        variant: The number of the variant; sites of one variant share it.
        sizes: The dynamic sizes that it was planned for.
        away: The results of what is saved that are held on the host, in the order of forward.
    """

    key: str
    source: str
    kept: tuple[str, ...] | None
    variant: int = 0
    sizes: tuple[int, ...] = ()
    away: tuple[Away, ...] = ()


@dataclass(frozen=True)
class CompiledStep:
    """The decisions for all graphs of a step.

    Args:
        graphs: Those that were planned.
        sites: The paths of the compiled modules, each with its variant.
        backend: The name of their backend.
        target: The bytes that a graph which was not planned is solved for.
        base: The bytes that are there throughout.
        around: If there is one graph: the bytes that are held before its forward, before its
            backward and after that, and are not its own; each with the most that there are.
        returned: The bytes that its forward returns.
        forwards: How often the step calls the first compiled module.
        made: If there is one graph: the numbers of the tangents that its backward makes.
        code: What was compiled to try the plan, for the model not to be compiled again; not part
            of files.
    """

    graphs: tuple[GraphDecision, ...]
    sites: tuple[tuple[str, int], ...]
    backend: str
    target: int
    base: int
    around: tuple[tuple[int, int], ...] = ()
    returned: int = 0
    forwards: int = 1
    made: tuple[int, ...] = ()
    code: Any = field(default=None, compare=False, repr=False)

    @property
    def offloads(self) -> bool:
        """Whether anything is held on the host."""
        return any(each.away for each in self.graphs)

    @cached_property
    def uuid(self) -> str:
        """What the compiler's caches know these decisions by."""
        content = repr((__version__, self.graphs))
        return "recollect-" + hashlib.sha256(content.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """What is written to a file."""
        content = {**self.__getstate__(), "graphs": [asdict(each) for each in self.graphs]}
        del content["code"]
        return content

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> CompiledStep:
        """The inverse, with tuples for lists."""
        graphs = [
            GraphDecision(**{**each, "away": tuple(Away(**a) for a in each.get("away", ()))})
            for each in content["graphs"]
        ]
        return cls(**{**content, "graphs": tuple(graphs)})

    def __getstate__(self) -> dict[str, Any]:
        return {**{name: vars(self)[name] for name in self.__dataclass_fields__}, "code": None}
