"""What composed heads do: traces, terms, diversity, circuits, attribution, and changes of a forward pass.

`overhead` computes figures from configurations alone. Pictures are in `dcformer.analysis.plots` and
`dcformer.analysis.html`; docs/analysis.md is the way in.
"""

from .attribution import attribute_heads, attribute_terms
from .circuits import CircuitScores, OVTable, circuit_scores, ov_table, single_token
from .diversity import Diversity, head_diversity, head_similarity
from .interventions import ablate, patch_heads
from .maps import map_diversity
from .overhead import ComposeOverhead, compose_overhead, num_compose_parameters, num_parameters, training_flops
from .summary import StageSummary, composition_summary
from .terms import TERMS, Breakdown, Projection, breakdown, component_over_keys, compose_map
from .tracing import MAPS, AnalysisTrace, LayerAnalysis, trace
from .weights import CircuitWeights, StoredModel, circuit_weights

__all__ = [
    "MAPS",
    "TERMS",
    "AnalysisTrace",
    "Breakdown",
    "CircuitScores",
    "CircuitWeights",
    "ComposeOverhead",
    "Diversity",
    "LayerAnalysis",
    "OVTable",
    "Projection",
    "StageSummary",
    "StoredModel",
    "ablate",
    "attribute_heads",
    "attribute_terms",
    "breakdown",
    "circuit_scores",
    "circuit_weights",
    "component_over_keys",
    "compose_map",
    "compose_overhead",
    "composition_summary",
    "head_diversity",
    "head_similarity",
    "map_diversity",
    "num_compose_parameters",
    "num_parameters",
    "ov_table",
    "patch_heads",
    "single_token",
    "trace",
    "training_flops",
]
