"""Policies under a compiler, which places the recomputation itself.

The ops of a region are traced into a graph. Each node is tagged with the policy's decision for the
compiler's partitioner; every result is kept during the trace. The compiler has noted the modules
that an op was called in, and the names of tensors.
"""

from __future__ import annotations

import warnings
from typing import Any

from recollect._torch.dynamo import tag_recompute_nodes, traced_graph, traced_modules, traced_tag
from recollect._torch.ops import OpOverload
from recollect.checks.names import names_in_memory
from recollect.errors import RecollectWarning
from recollect.policy.op_info import OpInfo, op_info
from recollect.policy.policy_call import PolicyCall
from recollect.policy.rules import CheckpointPolicy, fits, listed
from recollect.rerun.selective.ledger import Ledger


class Tracer:
    """Applies a policy to the ops of a region as they are traced."""

    def __init__(self, policy: PolicyCall, ledger: Ledger, graph_id: int | None) -> None:
        self._policy = policy
        self._ledger = ledger
        #: No op is this: a recomputation is never in step with a trace.
        ledger.sequence.append(None)
        self._graph_id = graph_id
        #: Whether there is a graph. The compiler also runs regions to see what they do.
        self.traces = False
        #: The paths of the modules in which ops were called.
        self._paths: set[str] = set()
        #: By node, the rank of the rule that has decided.
        self._ranks: dict[Any, int] = {}

    def run(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and tag the nodes that it becomes."""
        graph = traced_graph()
        before = len(graph.nodes) if graph is not None else 0
        out = info.op(*args, **kwargs)
        decision, rank = CheckpointPolicy.PREFER_RECOMPUTE, None
        if not info.is_ignored:
            modules = self._policy.rulebook.modules
            paths = traced_modules() if modules else []
            self._paths.update(paths)
            for rank, rule in modules.items():
                self._policy.inside[rank] = sum(map(rule.covers, paths))
            ruling = self._policy.decide(info, out, args, kwargs)
            decision, rank = ruling.decision, ruling.rank
            if ruling.offloads:
                decision = CheckpointPolicy.MUST_SAVE
                if graph is not None:
                    warnings.warn(
                        f"{ruling.reason}: compiled code offloads nothing, so the result is kept "
                        "on the device. Use a save_ rule, or keep the region from the compiler: "
                        "torch.compiler.disable",
                        stacklevel=2,
                    )
            ledger = self._ledger
            ledger.keep(len(ledger.sequence), out)
            ledger.sequence.append(ledger.key_of(info.op, args))
        if graph is not None:
            self.traces = True
            added = len(graph.nodes) - before
            nodes = [node for node, _ in zip(reversed(graph.nodes), range(added), strict=False)]
            tag_recompute_nodes(nodes, decision.name, self._graph_id)
            if rank is not None:
                self._ranks.update(dict.fromkeys(nodes, rank))
            self._tag_named(nodes)
        return out

    def check_modules(self) -> None:
        """Warn of patterns that match no module of the region, nor of any other model."""
        for rule in self._policy.rulebook.modules.values():
            for pattern in rule.patterns:
                if not any(fits(path, pattern) for path in self._paths | names_in_memory()):
                    warnings.warn(
                        f"{rule.title}: {pattern!r} matches no module. "
                        f"There are: {listed(self._paths, pattern)}",
                        RecollectWarning,
                        stacklevel=2,
                    )

    def _tag_named(self, nodes: list[Any]) -> None:
        """If the op names a tensor, keep the result of the op that computed it."""
        rules = self._policy.rulebook.names
        name = traced_tag() if rules else None
        if name is None or not nodes:
            return
        self._policy.names.append(name)
        for rank, rule in rules.items():
            if rule.covers(name):
                producer = nodes[-1].args[0]
                while type(producer.target) is OpOverload and op_info(producer.target).is_alias:
                    producer = producer.args[0]
                if producer.op == "call_function" and rank < self._ranks.get(producer, rank + 1):
                    tag_recompute_nodes([producer], rule.decision.name, self._graph_id)
                return
