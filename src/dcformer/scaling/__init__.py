"""What a better model is worth in compute: fits of loss against compute, and the factor between two families.

The paper's "1.7-2x the compute" (arXiv 2405.08553, figures 3 and 4, table 4) is such a factor. `python -m
dcformer.scaling` is the command; docs/scaling.md shows what it prints for the paper's own tables.
"""

from .fit import FORMS, Factor, JointFactor, Law, compute_factors, fit_law, joint_factor
from .points import MEASURES, Point, of_family, read_points

__all__ = [
    "FORMS",
    "MEASURES",
    "Factor",
    "JointFactor",
    "Law",
    "Point",
    "compute_factors",
    "fit_law",
    "joint_factor",
    "of_family",
    "read_points",
]
