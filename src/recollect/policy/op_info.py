"""Properties of an op (`OpInfo`), from its schema, its tags and lists of names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from recollect._torch.modes import COUNTED_WRITES, LAZY_VIEWS, with_keys
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

_Args = tuple[Any, ...]
#: Position and name of an argument.
_Place = tuple[int, str]

# Sets of ops hold the dispatcher's names: the ops of other libraries exist only once imported.


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


#: Matrix products.
MATMULS = _aten(
    "mm addmm bmm baddbmm addbmm mv addmv linear mkldnn_linear "
    "_addmm_activation _grouped_mm _int_mm _scaled_grouped_mm _scaled_mm"
)

#: Attention kernels: torch's, and those that other libraries register.
ATTENTION = _aten(
    "_efficient_attention_forward _flash_attention_forward "
    "_scaled_dot_product_attention_math_for_mps _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_fused_attention_overrideable"
) | {
    *("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
    *("flash_attn_3::fwd", "torch_attn::_varlen_attn", "flex_attention"),
    *("xformers::efficient_attention_forward_cutlass", "xformers_flash::flash_fwd"),
}

#: Discrete choices: if the input differs in the last bit, a token may go to another expert, and
#: everything after it differs.
_DISCRETE = _aten(
    "argmax argmin argsort bincount bucketize cummax cummin histc kthvalue mode multinomial "
    "nonzero nonzero_static searchsorted sort topk unique_consecutive unique_dim _unique _unique2"
)

#: The same, in these overloads only.
_DISCRETE_OVERLOADS = ("aten.max.dim", "aten.min.dim", "aten.median.dim", "aten.nanmedian.dim")

#: Namespaces of communication between processes. The results of functional collectives are complete
#: after one of these waits, which return their argument.
_FUNCTIONAL = ("_c10d_functional::", "_dtensor::")
_COLLECTIVES = (*_FUNCTIONAL, "_c10d_functional_autograd::")
_WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")

#: Why a policy keeps the results of collectives.
COLLECTIVE = "collective"

#: Ops that policies never see. Forward and recomputation detach a different number of times, and
#: our checks read the metadata of tensor subclasses through ops.
SAC_IGNORED_OPS: set[Any] = {
    torch.ops.aten.detach.default,
    torch.ops.prim.device.default,
} | metadata_ops()

_OF_TORCH = ("aten::", "prims::", "prim::", "rngprims::")

#: Namespaces whose ops keep no state, and tag the random ones: torch, its own libraries, and
#: bitsandbytes, which dequantizes weights at every use (QLoRA). Keeping those would take more
#: memory than weights in full precision.
_PURE = (
    *_OF_TORCH,
    *("mkl::", "mkldnn::", "mkldnn_prepacked::", "onednn::", "quantized::", "_quantized::"),
    *("torch_attn::", "torchvision::", "bitsandbytes::"),
    *_FUNCTIONAL,
)

#: Ops that write to running statistics although their schemas do not say so.
_HIDDEN_WRITES = _aten(
    "batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_update_stats "
    "cudnn_batch_norm miopen_batch_norm native_batch_norm"
)
#: Normalizations whose results are independent of the running statistics that they update.
_UPDATING_NORMS = _HIDDEN_WRITES | _aten("_native_batch_norm_legit _batch_norm_with_update")
#: In-place collectives write to their first argument. Schemas do not say so, and autograd does not
#: count it. Only these write to none.
_IN_PLACE_COLLECTIVES = "c10d::"
_WRITING_NOTHING = frozenset(
    f"c10d::{name}" for name in ("barrier", "check_for_nan", "monitored_barrier_", "send")
)
#: A namespace of ops that may write to any argument although their schemas do not say so; and the
#: one higher-order op that is known to write to none.
_HIDDEN_WRITERS = "symm_mem::"
_FLEX_ATTENTION = "flex_attention"
#: The ranges of a profiler.
_RANGES = "profiler::"
#: Namespaces of ops that are run for their effect.
_EFFECTS = (_IN_PLACE_COLLECTIVES, _HIDDEN_WRITERS, _RANGES)

#: Ops that overwrite a tensor without reading it. (bernoulli_ with a tensor of probabilities reads
#: that tensor, not the one it writes to.)
_OVERWRITING = _aten(
    "bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_ "
    "zero_"
)
#: Ops that allocate memory for others to fill.
_ALLOCATING = ("aten::empty", "aten::new_", "aten::zeros", "aten::ones", "aten::full")
#: Views that show memory conjugated or negated.
_LAZY = _aten("_conj _neg_view conj resolve_conj resolve_neg")
#: Ops that give their argument another storage.
_REPLACING = _aten("resize_ resize_as_ set_ _resize_output_")
#: Views by an absolute offset into the storage.
_ABSOLUTE = _aten("as_strided as_strided_")
#: Recurrent layers of a library. They draw from the library's own state on the device, which is
#: seeded from a torch generator whenever the generator's state was set.
_RECURRENT = _aten("_cudnn_rnn miopen_rnn")
#: Attention on the CPU. It has no dropout, so it draws nothing, whatever its tag says.
_NEVER_RANDOM = "aten::_scaled_dot_product_flash_attention_for_cpu"
#: Ops whose kernels make conjugate views of complex tensors.
_CONJUGATING = _aten("linalg_lstsq linalg_pinv")
#: Ops on lists of tensors. Those that write, whose names end so, run ops that count the writes.
_WRITES_INSIDE = "aten::_foreach_"
#: Ops, besides pointwise ones, that no global flag affects.
_FLAGLESS = _aten("_to_copy cat clone copy_")
#: Pointwise ops that libraries compute in their own way.
_FLAGGED = _aten("gelu gelu_")


def communicates(name: str) -> bool:
    """Whether the op of this name communicates with other processes."""
    return name.startswith((_IN_PLACE_COLLECTIVES, *_COLLECTIVES))


class OpInfo:
    """Properties of one op. Immutable; use `op_info`."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.name = name = op_name(op)
        #: How to call it, from a dispatch mode too.
        self.call = _callable_from_modes(op, name)
        #: Whether it takes and returns nothing but tensors and plain values.
        self.is_overload = type(op) is OpOverload
        self._read_effects(op, name)
        self._read_randomness(op, name)
        #: Whether it communicates with other processes.
        self.communicates = communicates(name)
        #: Whether its results are there only after a wait.
        self.is_asynchronous = name.startswith(_FUNCTIONAL) and name not in _WAITS
        #: Whether it waits for them.
        self.is_wait = name == _WAITS[0]
        self.is_cast = op is CAST
        self.is_ignored = op in SAC_IGNORED_OPS
        #: Whether it begins or ends a range of a profiler.
        self.is_range = name.startswith(_RANGES)
        self.is_pointwise = has_tag(op, torch.Tag.pointwise) and not self.is_random
        self.is_attention = name in ATTENTION
        self.is_index = name in ("aten::index", "aten::_unsafe_index")
        #: Whether the shape of its result may depend on data.
        self.has_dynamic_shape = has_tag(op, torch.Tag.dynamic_output_shape) or not (
            self.is_overload or name.startswith((_IN_PLACE_COLLECTIVES, _RANGES))
        )
        #: Whether it returns a Python number read from a tensor.
        self.reads_number = has_tag(op, torch.Tag.data_dependent_output)
        #: Whether it touches only metadata.
        self.runs_no_kernel = self.is_view or self.is_ignored or self.is_inplace_view
        #: Whether a global flag may decide how it is computed.
        self.depends_on_flags = name in _FLAGGED or not (name in _FLAGLESS or self.is_pointwise)
        self._read_keeping(op, name)
        #: Whether it neither writes, draws nor casts, and opens no range.
        self.is_plain = self.is_overload and not (
            self.writes or self.is_cast or self.is_random or self.is_ignored or self.is_range
        )
        #: Why nothing after it can be recorded.
        self.unrecordable: str | None = None
        if name in _LAZY:
            self.unrecordable = f"{op}: conjugate and negative views"
        elif self.changes_memory:
            self.unrecordable = f"{op} gives a tensor another storage"

    def _read_effects(self, op: Any, name: str) -> None:
        arguments, is_hidden = arguments_of(op), name in _HIDDEN_WRITES
        #: For each result whether it is an argument or a view of one; None: there is no schema.
        self.returned_aliases = returned_aliases(op)
        # `_unsafe_view` is a view whose schema does not say so.
        self.is_alias = name == "aten::_unsafe_view" or any(self.returned_aliases or ())
        is_in_place = name.startswith(_IN_PLACE_COLLECTIVES)
        #: Whether autograd does not count its writes, and would use the changed tensor.
        self.writes_uncounted = is_in_place and name not in _WRITING_NOTHING
        #: The arguments that it may write to.
        self.written_arguments: list[_Place] = [
            (each.position, each.name)
            for each in arguments
            if each.is_written
            or (is_hidden and each.name.startswith("running_"))
            or (self.writes_uncounted and each.position == 0)
        ]
        self.writes = bool(self.written_arguments)
        #: Whether it may write to any of its arguments, and its schema does not say to which.
        self.writes_unseen = name.startswith(_HIDDEN_WRITERS) or not (
            self.is_overload or is_in_place or name.startswith(_RANGES) or name == _FLEX_ATTENTION
        )
        self.overwrites = name in _OVERWRITING or any(each.is_out for each in arguments)
        self.is_view = self.is_alias and not self.writes
        #: Whether it gives its argument another shape, on the same memory.
        self.is_inplace_view = has_tag(op, torch.Tag.inplace_view)
        self.changes_memory = name in _REPLACING
        self.sets_storage = op is torch.ops.aten.set_.source_Storage
        self.allocates = name.startswith(_ALLOCATING)
        #: Whether it allocates uninitialized memory.
        self.leaves_uninitialized = name.startswith(("aten::empty", "aten::new_empty"))
        self._absolute_offset = _find(op, "storage_offset") if name in _ABSOLUTE else None
        #: Whether it may update running statistics, and the argument that decides; None: always.
        self.updates_statistics = name in _UPDATING_NORMS
        self._training = _find(op, "training") if self.updates_statistics else None

    def _read_randomness(self, op: Any, name: str) -> None:
        self.is_random = has_tag(op, torch.Tag.nondeterministic_seeded) and name != _NEVER_RANDOM
        generators = [each for each in arguments_of(op) if "Generator" in each.type]
        self._generator = (generators[0].position, generators[0].name) if generators else None
        #: Whether another library has registered it.
        self.is_of_others = is_op_of_others(op)
        self._dropout = _find(op, "dropout_p", "dropout", "p") if self.is_of_others else None
        #: The positions of dropout, of its switch and of its state among the arguments.
        self._library_rng: tuple[int, int, int] | None = None
        if name in _RECURRENT:
            places = (_find(op, each) for each in ("dropout", "train", "dropout_state"))
            dropout, train, state = (-1 if place is None else place[0] for place in places)
            self._library_rng = dropout, train, state
        #: Whether it draws, if at all, from a random state of its library.
        self.has_library_rng = self._library_rng is not None

    def _read_keeping(self, op: Any, name: str) -> None:
        #: Whether its results can be kept instead of rerunning it. Results of views and of ops that
        #: write are memory of the inputs, and a recomputation has other inputs.
        self.can_be_kept = not (
            self.is_alias or self.writes or self.allocates or name.startswith(_EFFECTS)
        )
        #: Whether it may return other bits for the same input.
        self.is_nondeterministic = self.can_be_kept and has_tag(
            op, torch.Tag.nondeterministic_bitwise
        )
        #: Why a policy keeps its result unless a rule insists on recomputing it; None for most ops.
        #: Plans, and the rerun engine without a policy, keep nothing by default.
        self.kept_by_default: str | None = None
        if name in _DISCRETE or str(op) in _DISCRETE_OVERLOADS:
            self.kept_by_default = "discrete"
        elif name.startswith(_COLLECTIVES):
            self.kept_by_default = COLLECTIVE
        elif self.is_random and not name.startswith(_OF_TORCH):
            self.kept_by_default = "random, by another library"
        # An op of another library may keep state, or draw random numbers without a tag.
        self._is_pure = name.startswith(_PURE) or self.is_attention or self.is_pointwise

    # --- about one call ---------------------------------------------------------------------------

    def generator(self, args: _Args, kwargs: dict[str, Any]) -> torch.Generator | None:
        return _value(self._generator, args, kwargs)  # type: ignore[no-any-return]

    def is_pure(self, args: _Args, kwargs: dict[str, Any]) -> bool:
        """Whether the call keeps no state, and draws no random numbers unless a tag says so."""
        if self._dropout is None:
            return self._is_pure
        return self._is_pure and not _value(self._dropout, args, kwargs)

    def has_absolute_offset(self, args: _Args, kwargs: dict[str, Any]) -> bool:
        """Whether the call makes a view by an absolute storage offset."""
        place = self._absolute_offset
        return place is not None and _value(place, args, kwargs) is not None

    def written(self, args: _Args, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that the call writes to, or may write to."""
        if self.name.startswith(_HIDDEN_WRITERS):
            return tensors_in([*args, *kwargs.values()])
        if self._training is not None and not _value(self._training, args, kwargs, True):
            return []
        return tensors_in([_value(place, args, kwargs) for place in self.written_arguments])

    def uses_library_rng(self, args: _Args) -> bool:
        """Whether the call draws from a random state that no generator knows of."""
        if self._library_rng is None:
            return False
        dropout, train, _ = self._library_rng
        return bool(args[dropout] and args[train])

    def without_idle_state(self, args: _Args) -> _Args:
        """The arguments, without the library's random state, shared by layers, if it is unused."""
        if self._library_rng is None or self.uses_library_rng(args):
            return args
        state = self._library_rng[2]
        return *args[:state], None, *args[state + 1 :]


def _callable_from_modes(op: Any, name: str) -> Callable[..., Any]:
    """The function to call ``op`` by, which does the same in a dispatch mode as outside."""
    if name in _CONJUGATING:
        return with_keys(bare_op(op), LAZY_VIEWS)
    if name.startswith(_WRITES_INSIDE) and name.endswith("_"):
        return with_keys(bare_op(op), COUNTED_WRITES)
    return bare_op(op)


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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, in lists and tuples too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in tensors_in(each)]
    return []


#: By id, because ops hash slowly. The record keeps the op, and so its id, alive.
known_ops: dict[int, OpInfo] = {}


def op_info(op: Any) -> OpInfo:
    """The properties of ``op``."""
    known = known_ops.get(id(op))
    if known is None:
        known = known_ops[id(op)] = OpInfo(op)
    return known
