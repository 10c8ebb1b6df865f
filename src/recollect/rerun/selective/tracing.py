"""Policies under a compiler, which places the recomputation itself.

The ops of a region are traced into a graph. Each node is tagged with what the policy says, every
result is kept for the time of the trace, and the compiler's partitioner does the rest. The modules
that an op was called in, and the names of tensors, are found in what the compiler noted.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from recollect._torch.dynamo import tag_recompute_nodes, traced_graph, traced_modules, traced_tag
from recollect._torch.modes import detach_below_autograd
from recollect._torch.ops import returns_alias
from recollect._torch.pytree import tree_map_only
from recollect.checks.names import names_in_memory
from recollect.policy.decisions import CheckpointPolicy
from recollect.policy.facts import facts_of
from recollect.policy.patterns import fits, listed
from recollect.policy.rulings import Asker, Rulebook, Ruling
from recollect.rerun.selective.ledger import Entry, Kept, Ledger

__all__ = ["Tracer"]


class Tracer:
    """Applies a policy to the ops of a region as they are traced."""

    __slots__ = ("_graph_id", "_ledger", "_ranks", "_rulebook", "paths", "traces")

    def __init__(self, rulebook: Rulebook, ledger: Ledger, graph_id: int | None) -> None:
        self._rulebook = rulebook
        self._ledger = ledger
        #: No op is this: a recomputation is never in step with a trace.
        ledger.sequence.append(None)
        self._graph_id = graph_id
        #: Whether there is a graph. The compiler also runs regions to see what they do.
        self.traces = False
        #: The paths of the modules in which ops were called.
        self.paths: set[str] = set()
        #: By node, the rank of the rule that has decided.
        self._ranks: dict[Any, int] = {}

    def run(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asker: Asker, names: list[str]
    ) -> Any:
        """Run ``op`` and tag the nodes that it becomes."""
        graph = traced_graph()
        before = len(graph.nodes) if graph is not None else 0
        out = op(*args, **kwargs)
        decision, rank = CheckpointPolicy.PREFER_RECOMPUTE, None
        if not facts_of(op).is_ignored:
            ruling = self._decide(op, out, args, kwargs, asker)
            decision, rank = ruling.decision, ruling.rank
            self._keep(op, out, args)
        if graph is not None:
            self.traces = True
            added = len(graph.nodes) - before
            nodes = [node for node, _ in zip(reversed(graph.nodes), range(added), strict=False)]
            tag_recompute_nodes(nodes, decision.name, self._graph_id)
            if rank is not None:
                self._ranks.update(dict.fromkeys(nodes, rank))
            self._tag_named(nodes, names)
        return out

    def check_modules(self) -> None:
        """Be loud about patterns that match no module of the region. Others may have it."""
        for rule in self._rulebook.modules.values():
            for pattern in rule.patterns:
                if not any(fits(path, pattern) for path in self.paths | names_in_memory()):
                    warnings.warn(
                        f"{rule.title}: {pattern!r} matches no module. "
                        f"There are: {listed(self.paths, pattern)}",
                        stacklevel=2,
                    )

    def _decide(
        self, op: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asker: Asker
    ) -> Ruling:
        rulebook, facts = self._rulebook, facts_of(op)
        if rulebook.modules:
            paths = traced_modules()
            self.paths.update(paths)
            for rank, rule in rulebook.modules.items():
                asker.inside[rank] = sum(map(rule.covers, paths))
        answer = rulebook.answer_to(facts, protects=True)
        return asker.decide(answer, facts, out, args, kwargs)

    def _keep(self, op: Any, out: Any, args: tuple[Any, ...]) -> None:
        ledger = self._ledger
        results = tree_map_only(Tensor, lambda tensor: Kept(detach_below_autograd(tensor)), out)
        ledger.entries[len(ledger.sequence)] = Entry(results, (), None)
        ledger.sequence.append(ledger.key_of(op, args))

    def _tag_named(self, nodes: list[Any], names: list[str]) -> None:
        """If the op names a tensor, see that what made it is kept."""
        name = traced_tag() if self._rulebook.names else None
        if name is None or not nodes:
            return
        names.append(name)
        for rank, rule in self._rulebook.names.items():
            if rule.covers(name):
                producer = nodes[-1].args[0]
                while returns_alias(producer.target):
                    producer = producer.args[0]
                if producer.op == "call_function" and rank < self._ranks.get(producer, rank + 1):
                    tag_recompute_nodes([producer], rule.decision.name, self._graph_id)
                return
