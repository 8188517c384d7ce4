"""DHA: fewer key and value heads from a checkpoint. Search a plan, fuse heads, fold them. docs/dha.md explains.

Source: arXiv 2406.06567 (NeurIPS 2024).
"""

from .folding import expand, fold_folder, from_plan, to_gqa
from .fusion import FusedModel, evaluate_loss, fuse
from .mixing import HeadMixer
from .plan import HeadPlan
from .reporting import report
from .search import search, uniform_plan
from .sources import HeadSource

__all__ = [
    "FusedModel",
    "HeadMixer",
    "HeadPlan",
    "HeadSource",
    "evaluate_loss",
    "expand",
    "fold_folder",
    "from_plan",
    "fuse",
    "report",
    "search",
    "to_gqa",
    "uniform_plan",
]
