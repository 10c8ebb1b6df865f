"""The rerun engine: drop what autograd saves, run the function again when backward needs it.

    forward                                     backward

    (1) Frame: inputs, RNG, ambient modes
    (2) function runs under pack and unpack     (5) unpack(ticket): first of this backward?
    (3) for each saved tensor autograd gets         rerun the function with the state of (1)
        a ticket, with its number, shape        (6) the n-th tensor saved now is the n-th of the
        and dtype; the tensor is freed              RecomputedTensors, if its ticket is alive
    (4) settle: inputs that the region          (7) all tensors are there: stop the rerun early
        changed, devices that it started        (8) unpack hands the tensor out, and forgets it

Forward is in `frame`, (5) to (7) in `recompute`. A tensor is freed as it is unpacked, also with
``retain_graph``: a second backward reruns. Tickets of a part of the graph that has been freed are
dead, and nothing is kept for them. Recomputed tensors belong to one backward (a graph task of
autograd's, or the ``GraphExecGroup`` around several); others that run at the same time do not see
them.

The hooks run three times for every saved tensor of a model; they are written for speed.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch

from recollect._torch.autograd import (
    at_end_of_backward,
    current_graph_task,
    get_graph_exec_group,
    set_graph_exec_group,
)
from recollect._torch.dynamo import hide_from_dynamo, never_traced
from recollect.checks.changed_input import saved_tensor_changed
from recollect.errors import AlreadyUnpacked
from recollect.rerun.frame import ForwardFrame, RecomputedTensors, Ticket
from recollect.rerun.recompute import Recomputation


class Frame(ForwardFrame):
    """One call of a checkpointed function, and the tensors recomputed for it."""

    __slots__ = ()

    def unpack(self, ticket: Ticket) -> torch.Tensor:
        """The saved-tensor hook that gives autograd a tensor back."""
        number = ticket[0]
        found = self.recomputed.get(current_graph_task())
        if found is None or (tensor := found.tensors[number]) is None:
            found, tensor = self._recompute(number)
        found.tensors[number] = None
        if tensor._version != found.versions[number]:
            raise saved_tensor_changed(tensor)
        return tensor

    @hide_from_dynamo
    def _recompute(self, number: int) -> tuple[RecomputedTensors, torch.Tensor]:
        """The tensors recomputed for this backward, perhaps now, and that of ``number``."""
        backward = get_graph_exec_group()
        if backward is None:
            backward = current_graph_task()
        if backward == _OUTSIDE:
            # Read outside of backward (node._saved_self): keep nothing.
            found = Recomputation(self).run()
        else:
            # Of two threads of one backward, one reruns, and the other waits for it.
            with self.locks.setdefault(backward, threading.RLock()):
                known = self.recomputed.get(backward)
                if known is None or number >= len(known.tensors):
                    if known is None and type(backward) is int:
                        at_end_of_backward(partial(_end_backward, ref(self), backward))
                elif (tensor := known.tensors[number]) is not None:
                    return known, tensor
                else:
                    self._check_reread(backward)
                found = self.recomputed[backward] = Recomputation(self).run()
        tensor = found.tensors[number]
        assert tensor is not None
        return found, tensor

    def _check_reread(self, backward: Any) -> None:
        if type(backward) is not int:
            raise AlreadyUnpacked(
                "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already "
                "unpacked once. Performing two backward calls that overlap (i.e. require the same "
                "saved activation) is not allowed under one GraphExecGroup: it recomputes at most "
                "once. Run the second backward outside of the group."
            )
        if self.read_once:
            raise AlreadyUnpacked(
                "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already "
                "unpacked once. Read ctx.saved_tensors once in backward and keep the result, or "
                "use recollect.checkpoint, which recomputes for every further read."
            )


#: The graph task outside of backward.
_OUTSIDE = -1


def _end_backward(frame: ReferenceType[Frame], backward: int) -> None:
    """Free the tensors recomputed for a backward that is over, and not used by it."""
    alive = frame()
    if alive is not None:  # a backward over the whole graph has freed the frame with it
        alive.recomputed.pop(backward, None)
        alive.locks.pop(backward, None)


# A region that ran in eager is recomputed in eager, whoever runs backward.
never_traced(Frame.unpack)


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
