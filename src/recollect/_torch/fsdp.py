"""FSDP2: the modules that ``fully_shard`` was applied to, their parameters, and what is gathered.

A *unit* is a module with the state of ``fully_shard``: its hooks gather the parameters of the unit
before forward and before backward, and free them afterwards. A gathered parameter is the same
object in every step; its memory comes and goes by resizing its storage, which is no op.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import distributed, nn

from recollect._torch.dtensors import is_dtensor
from recollect._torch.modules import known_class
from recollect._torch.tensors import storage_key


def is_unit(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to ``module``."""
    kind = known_class("torch.distributed.fsdp", "FSDPModule")
    return kind is not None and isinstance(module, kind)


#: How many threads gloo has for the collectives of a group.
BACKEND_THREADS = 2

#: By model: its shards, and whether it was a unit itself.
_known: WeakKeyDictionary[nn.Module, tuple[Shards, bool]] = WeakKeyDictionary()


def shards_of(model: nn.Module) -> Shards | None:
    """The FSDP units of ``model`` and the modules inside; None if there are none."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    known, is_root = _known.get(model, (None, None))
    if known is None or is_root is not is_unit(model):  # it may have become one since
        states = _states_in(model)
        if not states:
            return None
        known = Shards(states)
        _known[model] = known, is_unit(model)
    return known


def _states_in(model: nn.Module) -> list[Any]:
    """The states of all units, each once; of outer ones first."""
    units: Iterable[Any] = (module for module in model.modules() if is_unit(module))
    states = [unit._get_fsdp_state() for unit in units]
    return [*{id(state): state for state in states}.values()]


def is_parallel(model: nn.Module) -> bool:
    """Whether the ops of ``model`` are on ``DTensor``: as with tensor parallelism.

    Those that ``fully_shard`` makes of parameters are gathered before ops read them.
    """
    shards = shards_of(model)
    own = {} if shards is None else shards.kinds()
    return any(is_dtensor(each) and own.get(id(each), True) for each in model.parameters())


def is_shared(model: nn.Module) -> bool:
    """Whether ``model`` is distributed over processes, which then run its steps equally often."""
    return shards_of(model) is not None or is_parallel(model)


class Shards:
    """The units of a model. Does not keep them alive."""

    def __init__(self, states: list[Any]) -> None:
        self._references = [ref(state) for state in states]

    @property
    def _states(self) -> list[Any]:
        return [state for each in self._references if (state := each()) is not None]

    def initialize(self) -> None:
        """Do what the first forward would do once: find the root, set up hooks and streams."""
        for state in self._states:  # outer ones first: they initialize those inside
            if state._is_root is None:
                state._lazy_init()

    @property
    def device(self) -> torch.device:
        """Where the units compute."""
        device: torch.device = self._states[0]._device
        return device

    @property
    def ranks(self) -> list[int]:
        """The ranks that hold parts of the parameters, in order."""
        meshes = {id(mesh): mesh for mesh in (group.mesh_info.mesh for group in self._groups())}
        return sorted({rank for mesh in meshes.values() for rank in mesh.mesh.flatten().tolist()})

    def _groups(self) -> Iterator[Any]:
        for state in self._states:
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # before torch 2.13 there is one, or none
                groups = [state._fsdp_param_group]
            yield from (group for group in groups if group is not None)

    def _parameters(self) -> Iterator[Any]:
        for group in self._groups():
            yield from group.fsdp_params

    def parameters(self) -> list[torch.Tensor]:
        """The parts of the parameters that are here, as ``DTensor``."""
        return [each.sharded_param for each in self._parameters()]

    def kinds(self) -> dict[int, bool]:
        """By the id of a part of a parameter: whether the gathered one is a ``DTensor`` too."""
        return {id(each.sharded_param): each.is_dtensor for each in self._parameters()}

    def sharded(self) -> dict[int, torch.Tensor]:
        """By the id of a gathered parameter: the part of it that stays, a ``DTensor``."""
        gathered = ((p, getattr(p, "_unsharded_param", None)) for p in self._parameters())
        return {id(whole): each.sharded_param for each, whole in gathered if whole is not None}

    # --- memory that no op allocates --------------------------------------------------------------

    def gathered_bytes(self) -> int:
        """The bytes of gathered parameters that are allocated now."""
        total = 0
        for group in self._groups():
            # All of a group are allocated and freed together.
            if any(map(_nbytes, group.fsdp_params[0].all_gather_outputs)):
                outputs = (each for p in group.fsdp_params for each in p.all_gather_outputs)
                total += sum(map(_nbytes, outputs))
        return total

    def in_flight_bytes(self) -> int:
        """Bytes of collectives that may be freed late.

        On a CPU each thread of the backend holds the buffers of its last collective, those of the
        whole and of the part, until it finds the time to drop them. A device has no such threads.
        """
        if self.device.type != "cpu":
            return 0
        sizes = (sum(map(_buffer_bytes, group.fsdp_params)) for group in self._groups())
        return BACKEND_THREADS * max(sizes, default=0)

    def gathered_storages(self) -> set[int]:
        """The keys of the storages of gathered parameters, whether allocated or not."""
        outputs = (each for p in self._parameters() for each in p.all_gather_outputs)
        return {key for key in map(storage_key, outputs) if key is not None}

    # --- gradients that are not reduced yet -------------------------------------------------------

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that wait to be reduced: of whole parameters, or of parts (HSDP)."""
        places = (place for each in self._parameters() for place in _grad_places(each))
        found = [getattr(owner, name) for owner, name in places]
        found += [group._partial_reduce_output for group in self._groups()]
        return [grad for grad in found if grad is not None]

    def take_gradients(self) -> list[tuple[Any, str, Any]]:
        """Remove these gradients. Returns what `put_gradients` takes to put them back."""
        taken: list[tuple[Any, str, Any]] = []
        for each in self._parameters():
            taken += [(owner, name, getattr(owner, name)) for owner, name in _grad_places(each)]
        taken += [
            (group, "_partial_reduce_output", group._partial_reduce_output)
            for group in self._groups()
        ]
        put_gradients((owner, name, None) for owner, name, _ in taken)
        # Where each is in those of groups (torch 2.15): a step with others changes it.
        layout = "_partial_reduce_output_layout"
        groups = [group for group in self._groups() if layout in vars(group)]
        return taken + [(group, layout, dict(vars(group)[layout])) for group in groups]

    def reshard(self) -> None:
        """Free what is gathered, and have the modules refer to the parts of parameters again.

        `set_reshard_after_backward(False)` keeps parameters gathered when a step is over.
        """
        for group in self._groups():
            for parameter in group.fsdp_params:
                parameter.to_sharded()
            group._sharded_state = group.fsdp_params[0].sharded_state

    # --- what a plan does not support -------------------------------------------------------------

    def obstacle(self) -> str | None:
        """Why no plan can be made for it, and the fix; None if one can."""
        resharded = self.obstacle_to_rerun()
        if resharded is not None:
            return resharded
        for each in self._parameters():
            name = each._module_info.param_name
            kind = type(getattr(each, "_sharded_local_tensor", None))
            if hasattr(kind, "fsdp_pre_all_gather"):
                return (
                    f"its {name} is a {kind.__name__}, which is gathered in a way of its own. "
                    "Leave the quantized all-gather out, or checkpoint blocks in place of a plan: "
                    "recollect.checkpointed(block)"
                )
        return None

    def obstacle_to_rerun(self) -> str | None:
        """Why its ops cannot run again in backward, and the fix; None if they can.

        It may change from step to step. An op that reads memory which is not there would crash.
        """
        for group in self._groups():
            if not group.unshard_in_backward:
                where = type(group.modules[0]).__name__
                return (
                    f"set_unshard_in_backward(False) was called on a {where}, so its parameters "
                    "would not be there when an op of it runs again. Call "
                    "set_unshard_in_backward(True), or leave it out"
                )
        return None


class HookRanges:
    """Tells which ops are run by hooks that gather or free parameters, for a dispatch mode.

    Forward runs such ops and a rerun does not, if the parameters are still gathered or prefetched.
    FSDP opens a range of the profiler around them, whether or not there is a profiler.
    """

    __slots__ = ("depth",)

    def __init__(self) -> None:
        #: How many ranges are open, of those hooks and inside; no op is theirs if there are none.
        self.depth = 0

    def owns(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether the op that is about to run is of such a hook.

        Has to be asked about each op that begins or ends a range, and about all while `depth`.
        """
        is_inside = self.depth > 0
        if name in _RANGE_BEGINS:
            is_inside = is_inside or _is_of_hook(args[0])
            self.depth += is_inside
        elif name == _RANGE_ENDS:
            self.depth -= is_inside
        return is_inside


_RANGE_BEGINS = ("profiler::_record_function_enter_new", "profiler::_record_function_enter")
_RANGE_ENDS = "profiler::_record_function_exit"


def _is_of_hook(range_name: str) -> bool:
    # What the casts of inputs and outputs compute is part of the model.
    return range_name.startswith("FSDP::") and not range_name.startswith("FSDP::cast_")


def put_gradients(taken: Iterable[tuple[Any, str, Any]]) -> None:
    """Put back what `Shards.take_gradients` has removed."""
    for owner, name, value in taken:
        setattr(owner, name, value)


def _grad_places(parameter: Any) -> list[tuple[Any, str]]:
    """Where a gradient of ``parameter`` may wait: objects and their attributes."""
    whole = getattr(parameter, "_unsharded_param", None)
    places = [] if whole is None else [(whole, "grad")]
    # Since torch 2.15 this is no attribute, but another name of the gradient above.
    if "unsharded_accumulated_grad" in vars(parameter):
        places.append((parameter, "unsharded_accumulated_grad"))
    return places


def _buffer_bytes(parameter: Any) -> int:
    """The bytes of a whole parameter and of the part that is here."""
    sharded: Any = parameter.sharded_param
    return (sharded.numel() + sharded.to_local().numel()) * sharded.dtype.itemsize  # type: ignore[no-any-return]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
