"""Train PyTorch models whose state does not fit in memory: ``with infinity.offload(model,
nvme="/mnt"): ...``.
"""

from checkpoint.errors import RankFailedError
from infinity.model import OffloadedModel
from infinity.offloaded_adamw import OffloadedAdamW, StateReport
from infinity.offloading import offload
from infinity.optimizer import AdamW
from infinity.planning import Plan, plan
from infinity.rank_agreement import RankDifferenceError
from infinity.report import Report
from infinity.restoring import RestoreError
from infinity.tiled import TiledLinear
from swap.tiers import BudgetError

__all__ = [
    "AdamW",
    "BudgetError",
    "OffloadedAdamW",
    "OffloadedModel",
    "Plan",
    "RankDifferenceError",
    "RankFailedError",
    "Report",
    "RestoreError",
    "StateReport",
    "TiledLinear",
    "offload",
    "plan",
]
__version__ = "0.1.0"
