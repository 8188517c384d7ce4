"""Counts what processes communicate."""

from collections import Counter

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# How names of PyTorch's operators begin -> kind.
KINDS = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}


class Collectives(TorchDispatchMode):
    """Counts collectives by (kind, shape of what is sent)."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first takes itself apart
        name = function._schema.name.split("::")[-1].lstrip("_")
        kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), None)
        if function.namespace in ("c10d", "_c10d_functional") and kind is not None:
            sent = next(t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor))
            self.counts[kind, tuple(sent.shape)] += 1
        return function(*args, **(kwargs or {}))
