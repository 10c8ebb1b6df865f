"""What recording needs to know of an op. Read once: tags and schemas take microseconds."""

from __future__ import annotations

from typing import Any

import torch

from recollect._torch.ops import (
    OpOverload,
    changes_looks,
    changes_memory,
    dropout_of,
    generator_position,
    has_dynamic_shape,
    is_nondeterministic,
    is_op_of_others,
    is_pointwise,
    makes_lazy_view,
    offset_position,
    op_name,
    overwrites,
    takes_number,
    training_position,
    writes_unseen,
)
from recollect.policy.facts import facts_of
from recollect.policy.op_sets import ATTENTION, is_function
from recollect.replay.steps import tensors_in

__all__ = ["Kind", "kind_of"]

#: Beside those that are pointwise: ops of which no switch decides how they are computed.
_HEEDLESS = frozenset({"aten::_to_copy", "aten::cat", "aten::clone", "aten::copy_"})
#: Pointwise ops that libraries do otherwise.
_HEEDFUL = frozenset({"aten::gelu", "aten::gelu_"})


class Kind:
    """About one op."""

    __slots__ = (
        "_dropout",
        "_generator",
        "_is_function",
        "_offset",
        "_training",
        "call",
        "changes_looks",
        "facts",
        "gives_storage",
        "has_dynamic_shape",
        "heeds_switches",
        "is_attention",
        "is_index",
        "is_known",
        "is_nondeterministic",
        "is_view",
        "leaves_empty",
        "overwrites",
        "stops",
        "takes_number",
        "updates",
        "writes_unseen",
    )

    def __init__(self, op: Any) -> None:
        facts = self.facts = facts_of(op)
        self.call = facts.call
        self.is_known = type(op) is OpOverload
        #: Whether it returns memory that is known, or changes only how that is looked at.
        self.changes_looks = changes_looks(op)
        self.is_view = facts.is_view or facts.is_ignored or self.changes_looks
        #: Why nothing after it can be written down.
        self.stops: str | None = None
        if makes_lazy_view(op):
            self.stops = f"{op}: conjugate and negative views"
        elif changes_memory(op):
            self.stops = f"{op} gives a tensor another memory"
        self.gives_storage = op is torch.ops.aten.set_.source_Storage
        self.takes_number = takes_number(op)
        #: Whether it may write to any of its arguments.
        self.writes_unseen = writes_unseen(op)
        name = op_name(op)
        #: Whether a switch may decide how it is computed.
        self.heeds_switches = name in _HEEDFUL or not (name in _HEEDLESS or is_pointwise(op))
        self._is_function = is_function(op)
        #: The arguments that say what it draws from, how much it drops, where in memory it looks.
        self._generator = generator_position(op)
        self._dropout = dropout_of(op) if is_op_of_others(op) else None
        self._offset = offset_position(op)
        #: Whether the shape of its result may depend on data, and then whether it picks elements.
        self.has_dynamic_shape = has_dynamic_shape(op)
        self.is_index = op_name(op) in ("aten::index", "aten::_unsafe_index")
        self.is_nondeterministic = is_nondeterministic(op) and facts.can_be_kept
        self.overwrites = overwrites(op)
        self.is_attention = op_name(op) in ATTENTION
        #: Whether somebody else has to fill what it makes.
        self.leaves_empty = op_name(op).startswith(("aten::empty", "aten::new_empty"))
        self._training = training_position(op)
        #: Whether it may write to running statistics, of which its results are independent.
        self.updates = self._training is not None

    def generator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
        """The generator that a call of it is given."""
        return _value(self._generator, args, kwargs)  # type: ignore[no-any-return]

    def looks_anywhere(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of it makes a view that counts from the beginning of a memory."""
        return self._offset is not None and _value(self._offset, args, kwargs) is not None

    def is_function(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the same call gives the same, but for draws from a generator that is known."""
        return self._is_function and not _value(self._dropout, args, kwargs)

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that a call of it writes to."""
        if self.updates and not self._is_updating(args, kwargs):
            return []
        return tensors_in([_value(place, args, kwargs) for place in self.facts.written])

    def _is_updating(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of an op that may does write to running statistics."""
        position = self._training
        if position is None or position < 0:
            return position is not None
        return bool(args[position] if position < len(args) else kwargs.get("training", True))


def _value(place: tuple[int, str] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument at a position, or of a name; None if it was not given."""
    if place is None:
        return None
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name)


#: By id: ops live for good, and hash slowly.
_kinds: dict[int, Kind] = {}


def kind_of(op: Any) -> Kind:
    """What is known of ``op``."""
    known = _kinds.get(id(op))
    if known is None:
        known = _kinds[id(op)] = Kind(op)
    return known
