"""What a plan decides for the graphs of a compiled step: part of a `Plan`, and of its file (P6)."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from recollect._version import __version__


@dataclass(frozen=True)
class Away:
    """A tensor that forward saves on the host."""

    name: str  #: of its node
    #: The node of forward after which its memory on the device is free; empty: at its end.
    freed: str
    fetched: str  #: the node of backward after which it begins to be fetched; empty: at once


@dataclass(frozen=True)
class GraphDecision:
    """What is saved of one joint graph."""

    key: str  #: of the joint graph
    source: str  #: the key of the graph that dynamo made it from
    #: The names of the nodes that forward saves for backward; None: as torch chooses.
    kept: tuple[str, ...] | None
    variant: int = 0  #: the number of the variant; sites of one variant share it
    sizes: tuple[int, ...] = ()  #: the dynamic sizes that it was planned for
    #: The results of what is saved that are held on the host, in the order of forward.
    away: tuple[Away, ...] = ()


@dataclass(frozen=True)
class CompiledStep:
    """The decisions for all graphs of a step."""

    graphs: tuple[GraphDecision, ...]  #: those that were planned
    sites: tuple[tuple[str, int], ...]  #: the paths of the compiled modules, each with its variant
    backend: str  #: the name of their backend
    target: int  #: the bytes that a graph which was not planned is solved for
    base: int  #: the bytes that are there throughout
    #: If there is one graph: the bytes that are held before its forward, before its backward and
    #: after that, and are not its own; each with the most that there are.
    around: tuple[tuple[int, int], ...] = ()
    returned: int = 0  #: the bytes that its forward returns
    forwards: int = 1  #: how often the step calls the first compiled module
    #: If there is one graph: the numbers of the tangents that its backward makes.
    made: tuple[int, ...] = ()
    #: What was compiled to try the plan, for the model not to be compiled again; not part of files.
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
