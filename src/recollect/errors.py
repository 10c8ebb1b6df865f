"""Errors and warnings of recollect, and the one signal it uses internally (R10).

    RuntimeError
    └── torch.utils.checkpoint.CheckpointError
        └── CheckpointError             root of recollect's errors
            ├── RecomputeMismatch       the recomputation saved other tensors than forward
            ├── InputChanged            an input was modified in place between forward and backward
            ├── KeptTensorError         a tensor kept by selective checkpointing cannot be used
            ├── AlreadyUnpacked         a saved tensor was read again where that is not allowed
            └── InfeasibleBudget        no plan brings the step into the budget
    UserWarning
    └── RecollectWarning                root of recollect's warnings
        └── PlanWarning                 a plan is not in effect, or a step went over its budget
    BaseException
    └── StopRecompute                   internal: everything needed has been recomputed

``CheckpointError`` derives from torch's class of the same name: code that catches torch's catches
ours too.
"""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError as _TorchCheckpointError


class CheckpointError(_TorchCheckpointError):
    """Backward could not restore a tensor as it was in forward."""


class RecomputeMismatch(CheckpointError):
    """The recomputation saved other tensors than the original forward."""


class InputChanged(CheckpointError):
    """An input of a region was modified in place before backward used it."""


class KeptTensorError(CheckpointError):
    """Selective checkpointing cannot give back a tensor it kept."""


class AlreadyUnpacked(CheckpointError):
    """A saved tensor was read a second time where each may be read once."""


class InfeasibleBudget(CheckpointError):
    """No plan brings the peak of a training step down to the budget.

    ``least`` is the least feasible number of bytes, ``budget`` the one requested.
    """

    def __init__(self, message: str, *, budget: int = 0, least: int = 0) -> None:
        super().__init__(message)
        self.budget = budget
        self.least = least


class RecollectWarning(UserWarning):
    """Something works, but not as you may expect: a rule matches nothing, an engine falls back.

    ``warnings.simplefilter("error", recollect.RecollectWarning)`` makes all of them errors.
    """


class PlanWarning(RecollectWarning):
    """A plan is not in effect, or a step went over its budget. Says why, and what to do."""


class StopRecompute(BaseException):
    """Early stop: ends a recomputation once every needed tensor is there.

    `rerun.recompute` raises and catches it. It is not an ``Exception``, so ``except Exception`` in
    user code cannot catch it.
    """
