"""Figures about models, from their configurations: parameters, and what composition costs."""

from .overhead import ComposeOverhead, compose_overhead, num_compose_parameters, num_parameters, training_flops

__all__ = ["ComposeOverhead", "compose_overhead", "num_compose_parameters", "num_parameters", "training_flops"]
