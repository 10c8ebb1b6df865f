"""recollect: activation checkpointing for PyTorch.

It forgets activations in forward and recollects them in backward. ``recollect.checkpoint`` and
``recollect.checkpointed`` are the place to start; ``recollect.install()`` puts recollect in the
place of ``torch.utils.checkpoint``.
"""

from recollect import policy, store
from recollect.api import checkpoint, checkpoint_sequential, checkpointed, unwrap
from recollect.errors import CheckpointError, InfeasibleBudget, PlanWarning
from recollect.explaining import explain
from recollect.installing import install, installed, uninstall
from recollect.naming import tag
from recollect.options import noop_context_fn
from recollect.planning.api import Frontier, fit, frontier, plan
from recollect.planning.plan import Plan
from recollect.policy.decisions import CheckpointPolicy, SelectiveCheckpointContext
from recollect.rerun.groups import GraphExecGroup
from recollect.rerun.reentrant import (
    CheckpointFunction,
    check_backward_validity,
    detach_variable,
)
from recollect.rerun.selective import SAC_IGNORED_OPS, create_selective_checkpoint_contexts
from recollect.settings import (
    is_recomputing,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
    set_checkpoint_version_guard,
)
from recollect.state.devices import DefaultDeviceType
from recollect.state.rng import get_device_states, set_device_states

__version__ = "0.1.0"

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "Frontier",
    "GraphExecGroup",
    "InfeasibleBudget",
    "Plan",
    "PlanWarning",
    "SelectiveCheckpointContext",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "checkpointed",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "explain",
    "fit",
    "frontier",
    "get_device_states",
    "install",
    "installed",
    "is_recomputing",
    "noop_context_fn",
    "plan",
    "policy",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_checkpoint_version_guard",
    "set_device_states",
    "store",
    "tag",
    "uninstall",
    "unwrap",
]
