"""Train PyTorch models whose state does not fit in memory: ``with infinity.offload(model,
nvme="/mnt"): ...``.
"""

from checkpoint.errors import RankFailedError
from infinity.adamw.engine import StateReport
from infinity.adamw.optimizer import OffloadedAdamW
from infinity.autograd.lost_values import RestoreError
from infinity.model import OffloadedModel
from infinity.offloading import offload
from infinity.optim.adamw import AdamW
from infinity.planning.plan import Plan, plan
from infinity.ranks.agreement import RankDifferenceError
from infinity.report import Report
from infinity.snapshots.entries import Snapshot
from infinity.snapshots.pending import PendingSnapshot
from infinity.tiling.tiled_linear import TiledLinear
from swap.interruptions.mixture import MixedStateError
from swap.storage.checksums import CorruptSwapError
from swap.tiers import BudgetError

__all__ = [
    "AdamW",
    "BudgetError",
    "CorruptSwapError",
    "MixedStateError",
    "OffloadedAdamW",
    "OffloadedModel",
    "PendingSnapshot",
    "Plan",
    "RankDifferenceError",
    "RankFailedError",
    "Report",
    "RestoreError",
    "Snapshot",
    "StateReport",
    "TiledLinear",
    "offload",
    "plan",
]
__version__ = "0.1.0"
