"""Splits joint graphs into forward and backward: as torch does, or as a plan decides (P7)."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from recollect._torch.dynamo import tag_recompute_nodes
from recollect._torch.inductor import Split, copied, min_cut, simplify
from recollect.compiled.decisions import Away, GraphDecision
from recollect.compiled.joint import Joint, key_of, returned_by, tensors_of
from recollect.compiled.offload import offload
from recollect.errors import CheckpointError

_Halves = tuple[fx.GraphModule, fx.GraphModule]
#: Decides which nodes of a graph that was not planned are kept.
Decide = Callable[[str, Joint], Collection[str]]


@dataclass(frozen=True)
class SeenGraph:
    """A joint graph that was split."""

    key: str  #: of the joint graph
    joint: Joint  #: the graph
    saved: Sequence[fx.Node]  #: the nodes of the results that forward saves for backward
    torch_saves: Sequence[fx.Node]  #: the same as torch would split it


class ObservingSplit:
    """Splits as torch does, or as ``decide`` says, and keeps what it has seen."""

    def __init__(self, decide: Decide | None = None) -> None:
        self.seen: list[SeenGraph] = []
        self._decide = decide
        self._count = 0
        #: Whether anything is decided, and not left to torch; and whether anything is offloaded.
        self.decides, self.offloads = decide is not None, False

    def uuid(self) -> str:
        """Of its own at each call: out of a cache, nothing would be seen."""
        self._count += 1
        return f"recollect-observer-{id(self)}-{time.time_ns()}-{self._count}"

    def __call__(
        self, graph: fx.GraphModule, inputs: Any, plain: Split = min_cut, **kwargs: Any
    ) -> _Halves:
        """Split a graph. ``plain``: how the user's backend does."""
        simplify(graph)
        key, outputs = key_of(graph), kwargs["num_fwd_outputs"]
        joint = Joint(graph, outputs)
        torch_saves: Sequence[fx.Node] | None = None
        if self._decide is not None:
            torchs = plain(copied(graph), inputs, **kwargs)[0]
            torch_saves = _saved(joint, torchs, outputs)
            tag(joint, self._decide(key, joint))
            plain = min_cut
        halves = plain(graph, inputs, **kwargs)
        saved = _saved(joint, halves[0], outputs)
        torch_saves = saved if torch_saves is None else torch_saves
        self.seen.append(SeenGraph(key, joint, saved, torch_saves))
        return halves


class PlannedSplit:
    """Splits as decided. ``decisions``: by key of a joint graph.

    ``sizes``: by key of a graph of dynamo that these were made from, its dynamic sizes; ``uuid``:
    what the compiler's caches know the decisions by.
    """

    #: For graphs without a decision. While a plan is tried there should be none.
    decide: Decide | None = None

    def __init__(
        self,
        decisions: Mapping[str, GraphDecision],
        sizes: Mapping[str, Sequence[int]],
        uuid: str,
        *,
        fused: bool,
    ) -> None:
        self._decisions, self._fused = decisions, fused
        self.sizes = sizes
        self._uuid = uuid
        self._count = 0
        #: Whether anything is decided, and not left to torch.
        self.decides = any(each.kept is not None for each in decisions.values())
        #: Whether anything is held on the host.
        self.offloads = any(each.away for each in decisions.values())
        #: The key of the graph of dynamo that is being compiled.
        self.source = ""

    def uuid(self) -> str:
        """The same for the same decisions.

        For a graph that was not planned it is another one each time: out of a cache, nobody would
        know whether it fits.
        """
        if self.source in self.sizes:
            return self._uuid
        self._count += 1
        return f"{self._uuid}-{id(self)}-{time.time_ns()}-{self._count}"

    def __call__(
        self, graph: fx.GraphModule, inputs: Any, plain: Split = min_cut, **kwargs: Any
    ) -> _Halves:
        """Split a graph. ``plain``: how the user's backend does."""
        simplify(graph)
        key = key_of(graph)
        joint = Joint(graph, kwargs["num_fwd_outputs"])
        away: Sequence[Away] = ()
        kept: Collection[str] | None
        if key in self._decisions:
            kept, away = self._decisions[key].kept, self._decisions[key].away
        elif self.decide is not None:
            kept = self.decide(key, joint)
        else:
            raise CheckpointError(
                "model: compiling the same step again gave another graph. Its forward depends on "
                "chance, or on what earlier steps left behind, and cannot be planned compiled: "
                "plan for the model without torch.compile"
            )
        if kept is None:
            return plain(graph, inputs, **kwargs)
        tag(joint, kept)
        halves = min_cut(graph, inputs, **kwargs)
        if away:
            offload(*halves, kwargs["num_fwd_outputs"], away, fused=self._fused)
        return halves


def tag(joint: Joint, kept: Collection[str]) -> None:
    """Say of every node that backward needs whether it is saved or recomputed.

    The partitioner is left with nothing to choose. What checkpointed regions in the compiled code
    say is taken back: it may contradict. From a schedule to here: `Merged.kept_in` ->
    `CompiledTrials.decisions` -> `GraphDecision.kept` -> `applied.make_code` -> `PlannedSplit`.
    """
    for node in joint.nodes:
        node.meta.pop("recompute", None)
    keep = {node for node in joint.makers if node.name in set(kept)}
    saved: dict[fx.Node, None] = {}
    recomputed: dict[fx.Node, None] = {}
    own = set(joint.backward) - joint.unclaimed
    pending = [each for node in own for each in node.all_input_nodes if each not in own]
    pending += [node for _, node in joint.backward_outputs if node not in own]
    while pending:
        node = pending.pop()
        if node.op != "call_function" or node in saved or node in recomputed:
            continue
        if node in keep:
            saved[node] = None
        elif node.target is operator.getitem and node.all_input_nodes[0] in keep:
            # The tuple cannot be saved, but its maker must not run again: so this is saved.
            saved[node.all_input_nodes[0]] = None
        else:
            recomputed[node] = None
            pending += node.all_input_nodes
    tag_recompute_nodes(list(saved), "MUST_SAVE", None)
    tag_recompute_nodes([n for n in recomputed if tensors_of(n)], "MUST_RECOMPUTE", None)


def _saved(joint: Joint, forward: fx.GraphModule, outputs: int) -> list[fx.Node]:
    """The results that forward returns for backward."""
    nodes = {node.name: node for node in joint.nodes}
    saved = [each for each in returned_by(forward)[outputs:] if isinstance(each, fx.Node)]
    names = [each.name for each in saved if not _is_generator_state(each)]
    bases = dict.fromkeys(joint.base(nodes[name]) for name in names if name in nodes)
    return [base for base in bases if base.op == "call_function"]


def _is_generator_state(node: fx.Node) -> bool:
    """Whether forward saves it to draw the same numbers again: another node has had its name."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return False
    return str(node.all_input_nodes[0].target) == "run_and_save_rng_state"
