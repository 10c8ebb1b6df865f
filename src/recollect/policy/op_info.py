"""Everything that is known of an op, in one record per op.

It is read once from the schema and the tags, which takes microseconds, and from lists of names for
what those do not say.
"""

from __future__ import annotations

from typing import Any

import torch

from recollect._torch.ops import (
    CAST,
    OpOverload,
    arguments_of,
    bare_op,
    has_tag,
    is_op_of_others,
    metadata_ops,
    op_name,
    returned_aliases,
)
from recollect.policy.op_sets import ATTENTION, COLLECTIVES, DISCRETE, DISCRETE_OVERLOADS

__all__ = ["SAC_IGNORED_OPS", "OpInfo", "known_ops", "op_info"]

_Args = tuple[Any, ...]
#: Position and name of an argument.
_Place = tuple[int, str]

#: Ops that no policy is applied to. Forward and recomputation detach a different number of times,
#: and our own checks read the metadata of tensor subclasses through ops.
SAC_IGNORED_OPS: set[Any] = {
    torch.ops.aten.detach.default,
    torch.ops.prim.device.default,
} | metadata_ops()

_OF_TORCH = ("aten::", "prims::", "prim::", "rngprims::")

#: Namespaces whose ops return the same for the same arguments, or say by a tag that they draw
#: random numbers: torch, its own libraries, and bitsandbytes, which dequantizes weights at every
#: use (QLoRA): to keep those would take more memory than they take in full precision.
_FUNCTIONS = (
    *_OF_TORCH,
    *("mkl::", "mkldnn::", "mkldnn_prepacked::", "onednn::", "quantized::", "_quantized::"),
    *("torch_attn::", "torchvision::", "bitsandbytes::"),
)

#: Ops that write to running statistics although their schemas do not say so.
_HIDDEN_WRITES = frozenset(
    {
        "aten::batch_norm_gather_stats",
        "aten::batch_norm_gather_stats_with_counts",
        "aten::batch_norm_update_stats",
        "aten::cudnn_batch_norm",
        "aten::miopen_batch_norm",
        "aten::native_batch_norm",
    }
)
#: Normalizations whose results are independent of the running statistics that they update.
_UPDATING_NORMS = _HIDDEN_WRITES | {
    "aten::_native_batch_norm_legit",
    "aten::_batch_norm_with_update",
}
#: Namespaces of ops that write to their arguments although their schemas do not say so; and the one
#: higher-order op that is known to write to none.
_HIDDEN_WRITERS = ("c10d::", "symm_mem::")
_FLEX_ATTENTION = "flex_attention"
#: Namespaces of ops that are run for their effect: those, and the ranges of a profiler.
_EFFECTS = (*_HIDDEN_WRITERS, "profiler::")

#: Ops that replace what they write to without reading it. (bernoulli_ with a tensor of
#: probabilities reads that tensor, not the one it writes to.)
_OVERWRITING = frozenset(
    f"aten::{name}_"
    for name in (
        *("bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal"),
        *("normal", "random", "uniform", "zero"),
    )
)
#: Ops that allocate memory for somebody else to fill.
_ALLOCATING = ("aten::empty", "aten::new_", "aten::zeros", "aten::ones", "aten::full")
#: Views that show memory conjugated or negated.
_LAZY = ("aten::_conj", "aten::_neg_view", "aten::conj", "aten::resolve_conj", "aten::resolve_neg")
#: Ops that give their argument another memory.
_REPLACING = ("aten::resize_", "aten::resize_as_", "aten::set_", "aten::_resize_output_")
#: Views of a part of the whole memory, wherever in it their argument begins.
_ABSOLUTE = ("aten::as_strided", "aten::as_strided_")
#: Recurrent layers of a library. They draw from a state that the library has on the device. No
#: generator knows of it, but it is seeded again from one whose state has been set.
_RECURRENT = ("aten::_cudnn_rnn", "aten::miopen_rnn")
#: Beside pointwise ops: those that are computed in the same way under all global flags.
_FLAGLESS = frozenset({"aten::_to_copy", "aten::cat", "aten::clone", "aten::copy_"})
#: Pointwise ops that libraries compute in their own way.
_FLAGGED = frozenset({"aten::gelu", "aten::gelu_"})


class OpInfo:
    """What is known of one op. Immutable; use `op_info`."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.name = name = op_name(op)
        #: How to call it.
        self.call = bare_op(op)
        #: Whether it takes and returns nothing but tensors and plain values.
        self.is_overload = type(op) is OpOverload
        self._read_effects(op, name)
        self._read_randomness(op, name)
        self.is_cast = op is CAST
        self.is_ignored = op in SAC_IGNORED_OPS
        self.is_pointwise = has_tag(op, torch.Tag.pointwise) and not self.is_random
        self.is_attention = name in ATTENTION
        self.is_index = name in ("aten::index", "aten::_unsafe_index")
        #: Whether the shape of its result may depend on data.
        self.has_dynamic_shape = not self.is_overload or has_tag(op, torch.Tag.dynamic_output_shape)
        #: Whether it returns a Python number that it reads from a tensor.
        self.reads_number = has_tag(op, torch.Tag.data_dependent_output)
        #: Whether only the metadata of tensors is touched.
        self.runs_no_kernel = self.is_view or self.is_ignored or self.is_inplace_view
        #: Whether a global flag may decide how it is computed.
        self.depends_on_flags = name in _FLAGGED or not (name in _FLAGLESS or self.is_pointwise)
        #: Whether its results can be handed out in place of a second run. Those of views and of ops
        #: that write are memory of the inputs, and in a recomputation that memory is another.
        self.can_be_kept = not (
            self.is_alias or self.writes or self.allocates or name.startswith(_EFFECTS)
        )
        #: Whether it may return other bits for the same input.
        self.is_nondeterministic = self.can_be_kept and has_tag(
            op, torch.Tag.nondeterministic_bitwise
        )
        self.kept_by_default = self._kept_by_default()
        # An op of anybody may have a state of its own, or draw random numbers without a word.
        self._is_function = name.startswith(_FUNCTIONS) or self.is_attention or self.is_pointwise
        #: Whether there is nothing special about it: it writes and draws nothing, casts no weight.
        self.is_plain = self.is_overload and not (
            self.writes or self.is_cast or self.is_random or self.is_ignored
        )
        #: Why nothing after it can be recorded.
        self.unrecordable: str | None = None
        if name in _LAZY:
            self.unrecordable = f"{op}: conjugate and negative views"
        elif self.changes_memory:
            self.unrecordable = f"{op} gives a tensor another memory"

    def _read_effects(self, op: Any, name: str) -> None:
        arguments, is_hidden = arguments_of(op), name in _HIDDEN_WRITES
        #: For each result whether it is an argument or a view of one; None: there is no schema.
        self.returned_aliases = returned_aliases(op)
        # The one view that does not say so promises that its input is not used any more.
        self.is_alias = name == "aten::_unsafe_view" or any(self.returned_aliases or ())
        #: The arguments that it may write to.
        self.written_arguments: list[_Place] = [
            (each.position, each.name)
            for each in arguments
            if each.is_written or (is_hidden and each.name.startswith("running_"))
        ]
        self.writes = bool(self.written_arguments)
        #: Whether it may write to any of its arguments, and nothing says to which.
        self.writes_unseen = (
            name.startswith(_HIDDEN_WRITERS) if self.is_overload else name != _FLEX_ATTENTION
        )
        self.overwrites = name in _OVERWRITING or any(each.is_out for each in arguments)
        self.is_view = self.is_alias and not self.writes
        #: Whether it gives its argument another shape, on the same memory.
        self.is_inplace_view = has_tag(op, torch.Tag.inplace_view)
        self.changes_memory = name in _REPLACING
        self.sets_storage = op is torch.ops.aten.set_.source_Storage
        self.allocates = name.startswith(_ALLOCATING)
        #: Whether somebody else has to fill what it allocates.
        self.leaves_uninitialized = name.startswith(("aten::empty", "aten::new_empty"))
        self._absolute_offset = _find(op, "storage_offset") if name in _ABSOLUTE else None
        #: Whether it may update running statistics; the argument that says so, or None: it does.
        self.updates_statistics = name in _UPDATING_NORMS
        self._training = _find(op, "training") if self.updates_statistics else None

    def _read_randomness(self, op: Any, name: str) -> None:
        self.is_random = has_tag(op, torch.Tag.nondeterministic_seeded)
        generators = [each for each in arguments_of(op) if "Generator" in each.type]
        self._generator = (generators[0].position, generators[0].name) if generators else None
        others = is_op_of_others(op)
        self._dropout = _find(op, "dropout_p", "dropout", "p") if others else None
        #: Dropout, its switch and its state among the arguments.
        self._library_rng: tuple[int, int, int] | None = None
        if name in _RECURRENT:
            places = (_find(op, each) for each in ("dropout", "train", "dropout_state"))
            dropout, train, state = (-1 if place is None else place[0] for place in places)
            self._library_rng = dropout, train, state

    def _kept_by_default(self) -> str | None:
        """Why a policy keeps its result unless a rule insists on recomputing it; None for most ops.

        Under a plan, and in the rerun engine without a policy, nothing is kept by default.
        """
        if self.name in DISCRETE or str(self.op) in DISCRETE_OVERLOADS:
            return "discrete"
        if self.name.startswith(COLLECTIVES):
            return "collective"
        if self.is_random and not self.name.startswith(_OF_TORCH):
            return "random, by another library"
        return None

    # --- about one call ---------------------------------------------------------------------------

    def generator(self, args: _Args, kwargs: dict[str, Any]) -> torch.Generator | None:
        """The generator that the call is given."""
        return _value(self._generator, args, kwargs)  # type: ignore[no-any-return]

    def is_function(self, args: _Args, kwargs: dict[str, Any]) -> bool:
        """Whether the call returns the same each time, but for draws that a tag declares."""
        return self._is_function and not _value(self._dropout, args, kwargs)

    def has_absolute_offset(self, args: _Args, kwargs: dict[str, Any]) -> bool:
        """Whether the call makes a view that counts from the beginning of a memory."""
        place = self._absolute_offset
        return place is not None and _value(place, args, kwargs) is not None

    def written(self, args: _Args, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that the call writes to, or may write to."""
        if self.name.startswith(_HIDDEN_WRITERS):
            return _tensors_in([*args, *kwargs.values()])
        if self._training is not None and not _value(self._training, args, kwargs, True):
            return []
        return _tensors_in([_value(place, args, kwargs) for place in self.written_arguments])

    @property
    def has_library_rng(self) -> bool:
        """Whether it draws, if at all, from a random state of its library."""
        return self._library_rng is not None

    def uses_library_rng(self, args: _Args) -> bool:
        """Whether the call draws from a random state that no generator knows of."""
        if self._library_rng is None:
            return False
        dropout, train, _ = self._library_rng
        return bool(args[dropout] and args[train])

    def without_idle_state(self, args: _Args) -> _Args:
        """The arguments, without the library's random state if the call does not draw from it.

        It is shared with other layers.
        """
        if self._library_rng is None or self.uses_library_rng(args):
            return args
        state = self._library_rng[2]
        return *args[:state], None, *args[state + 1 :]


def _find(op: Any, *names: str) -> _Place | None:
    """The first argument with one of these names."""
    found = ((each.position, each.name) for each in arguments_of(op) if each.name in names)
    return next(found, None)


def _value(place: _Place | None, args: _Args, kwargs: dict[str, Any], default: Any = None) -> Any:
    """The argument at a place, or ``default`` if it was not given."""
    if place is None:
        return default
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name, default)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in _tensors_in(each)]
    return []


#: By id: ops hash slowly. The record holds the op, so that the id is not used again.
known_ops: dict[int, OpInfo] = {}


def op_info(op: Any) -> OpInfo:
    """What is known of ``op``."""
    known = known_ops.get(id(op))
    if known is None:
        known = known_ops[id(op)] = OpInfo(op)
    return known
