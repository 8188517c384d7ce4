"""The JAX models in plain `jax.numpy`, forward only, on the arrays of their own checkpoints.

An independent definition to hold conversions against: written from the specification of the models and of the two
checkpoint layouts, it shares no code with the package. A test module that imports it skips where JAX is absent.
"""

import pytest

pytest.importorskip("jax", reason="the JAX reference needs JAX: pip install 'dcformer[jax]'")

from jax_reference.model import Settings, maxtext_forward, pax_forward
from jax_reference.parameters import random_maxtext_params, random_pax_params

__all__ = ["Settings", "maxtext_forward", "pax_forward", "random_maxtext_params", "random_pax_params"]
