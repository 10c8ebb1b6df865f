"""The interface: all that ``import recollect`` gives, loaded when the first of it is used."""

from recollect import policy, store
from recollect.api import checkpoint, checkpoint_sequential, checkpointed, unwrap
from recollect.errors import CheckpointError, InfeasibleBudget, PlanWarning, RecollectWarning
from recollect.explaining import Explanation, explain
from recollect.installing import install, installed, uninstall
from recollect.naming import tag
from recollect.options import noop_context_fn
from recollect.planning.api import Frontier, fit, frontier, plan
from recollect.planning.plan import Plan
from recollect.planning.sizes.largest import LargestBatch
from recollect.planning.sizes.largest_batch import largest_batch
from recollect.policy.rules import CheckpointPolicy, Policy, SelectiveCheckpointContext
from recollect.rerun.engine import GraphExecGroup
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
from recollect.state.rng import DefaultDeviceType, get_device_states, set_device_states

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "Explanation",
    "Frontier",
    "GraphExecGroup",
    "InfeasibleBudget",
    "LargestBatch",
    "Plan",
    "PlanWarning",
    "Policy",
    "RecollectWarning",
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
    "largest_batch",
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
