"""The paper's training runs: model, hyper-parameters, tokens and steps (arXiv 2405.08553, section 4.1, table 3).

`recipe("dcformer-405m")` is a run of DCFormer++ (here DCFormer); `recipe("transformer++-405m")` its baseline. In the
published configurations DCFormer has two things besides composition that the baseline has not: norms of queries and
keys, and a window of 256 in every other layer. `transformer++-405m-qknorm` is the baseline with the first, so that both
comparisons can be made. TFM and DCFM are not among them: they have learned positions, and `DCFormerConfig` has none.
"""

import difflib
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

from .analysis import num_parameters
from .configuration_dcformer import DCFormerConfig
from .errors import DCFormerError

SEQUENCES = 256  # of a step
CONTEXT = 2048  # tokens of a sequence

# Size -> peak learning rate, steps. 405M: the published file; the others: the tokens of table 3 over those of a step.
_RUNS = {"405m": (3e-4, 13_500), "834m": (2.5e-4, 28_610), "1.4b": (2e-4, 49_591)}
_PLAIN = {
    **dict.fromkeys(("compose_pre", "compose_post", "compose_query", "compose_key"), False),
    "layer_pattern": "G",
    "sliding_window": None,
    "qk_norm": False,
}
# Family and suffix -> what is changed of the preset.
_VARIANTS: dict[tuple[str, str], dict[str, Any]] = {
    ("dcformer", ""): {},
    ("dcformer", "-3to1"): {"layer_pattern": "LGLL"},
    ("dcformer", "-query"): {"compose_key": False},
    ("transformer++", ""): _PLAIN,
    ("transformer++", "-qknorm"): _PLAIN | {"qk_norm": True},
}
# Arguments of a configuration -> fields that decide the same when they are given.
_PARTS = {
    "layer_pattern": "layer_types",
    "rope_theta": "rope_parameters",
    "partial_rotary_factor": "rope_parameters",
}
RECIPES = tuple(f"{family}-{size}{suffix}" for size in _RUNS for family, suffix in _VARIANTS)


@dataclass(frozen=True)
class Recipe:
    """A training run.

    Attributes:
        name: one of `RECIPES`.
        config: of the model, with the GPT-NeoX vocabulary's size.
        learning_rate: peak.
        steps: of the optimizer.
        sequences: of a step, each of CONTEXT tokens.
    """

    name: str
    config: DCFormerConfig
    learning_rate: float
    steps: int
    sequences: int = SEQUENCES

    @property
    def tokens(self) -> int:
        """Trained on."""
        return self.steps * self.sequences * CONTEXT

    @property
    def flops(self) -> float:
        """6 N tokens, with all parameters but those of composition: the paper's measure."""
        e, layers, vocabulary = self.config.hidden_size, self.config.num_hidden_layers, self.config.vocab_size
        return 6.0 * (12 * layers * e**2 + 2 * vocabulary * e) * self.tokens

    @property
    def parameters(self) -> int:
        """N, all of them."""
        return num_parameters(self.config)

    def scaled(self, scale: float) -> "Recipe":
        """The same with `scale` times the steps, and so tokens; at least one step.

        Raises:
            DCFormerError: unless 0 < scale <= 1.
        """
        if not 0 < scale <= 1:
            raise DCFormerError(f"scale is {scale}: expected more than 0 and at most 1")
        return replace(self, steps=max(1, round(self.steps * scale)))

    def arguments(self, devices: int = 1, per_device: int = 1) -> dict[str, Any]:
        """Fields of `transformers.TrainingArguments` for the run.

        Args:
            devices: that train together.
            per_device: sequences that one of them takes at once.

        Returns:
            name -> value: AdamW 0.9, 0.95, 1e-8, weight decay 0.1, clipping at 1, warm-up for 1 % of the steps (as a
            share, which holds for other steps too), cosine to 10 %; the accumulation that makes a step of `sequences`.
            Without `bf16`, in which the runs compute: `TrainingArguments` refuses it without a GPU, unless `use_cpu` is
            set. Add it where there is a GPU that has it, as examples/pretrain.py does.

        Raises:
            DCFormerError: for a number that is not a positive integer, and when the sequences of a step cannot be
                shared out; the message names the nearest that can.
        """
        for name, count in (("devices", devices), ("per_device_train_batch_size", per_device)):
            if type(count) is not int or count < 1:
                raise DCFormerError(f"{name} is {count!r}: expected an integer of at least 1")
        if self.sequences % (devices * per_device):
            raise DCFormerError(
                f"{devices} devices with {per_device} sequences each take {devices * per_device} at once, which does "
                f"not divide the {self.sequences} sequences of a step: {self._nearest(devices, per_device)}"
            )
        return {
            "max_steps": self.steps,
            "per_device_train_batch_size": per_device,
            "gradient_accumulation_steps": self.sequences // (devices * per_device),
            "learning_rate": self.learning_rate,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "warmup_steps": 0.01 if self.steps >= 100 else 0,  # rounded up, and the first step's rate is 0
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-8,
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
        }

    def _nearest(self, devices: int, per_device: int) -> str:
        """What to use instead, in words."""
        if self.sequences % devices == 0:
            share = self.sequences // devices
            sizes = [n for n in range(1, share + 1) if share % n == 0]
            nearest = sorted(sizes, key=lambda n: abs(n - per_device))[:2]
            return f"use {' or '.join(map(str, sorted(nearest)))} sequences per device"
        counts = [n for n in range(1, self.sequences + 1) if self.sequences % (n * per_device) == 0]
        if not counts:  # neither can stay
            pairs = [(n, m) for n in range(1, self.sequences + 1) if not self.sequences % n
                     for m in range(1, self.sequences // n + 1) if not self.sequences // n % m]  # fmt: skip
            n, m = min(pairs, key=lambda pair: abs(pair[0] - devices) + abs(pair[1] - per_device))
            return f"use {n} devices with {m} sequences each"
        nearest = sorted(counts, key=lambda n: abs(n - devices))[:2]
        return f"use {' or '.join(map(str, sorted(nearest)))} devices"


def check_overrides(config: DCFormerConfig, names: Collection[str]) -> None:
    """Refuses arguments that nothing of a model reads: a configuration keeps what it does not know.

    Args:
        config: made with the arguments.
        names: theirs. `layer_pattern` and `rope_theta` are not fields, but are read.

    Raises:
        DCFormerError: naming the first unknown one, or one that another leaves without effect.
    """
    if unknown := [name for name in names if name in vars(config) and not hasattr(type(config), name)]:
        near = difflib.get_close_matches(unknown[0], [field.name for field in fields(config)], 1)
        meant = f"did you mean {near[0]}?" if near else "docs/configuration.md lists them"
        raise DCFormerError(f"{type(config).__name__} has no field {unknown[0]!r}; {meant}")
    for part, whole in _PARTS.items():
        if part in names and whole in names:
            raise DCFormerError(f"{part} has no effect beside {whole}: leave one of the two out")


def recipe(name: str, **overrides: Any) -> Recipe:
    """A run of the paper.

    Args:
        name: one of `RECIPES`, such as "dcformer-405m", "transformer++-405m-qknorm" or "dcformer-405m-3to1" (three
            local layers to a global one; table 10).
        overrides: configuration fields to set otherwise.

    Returns:
        the recipe.

    Raises:
        DCFormerError: on an unknown name, of a recipe (the message lists the known ones) or of a field.
    """
    for (family, suffix), changes in _VARIANTS.items():
        for size, (rate, steps) in _RUNS.items():
            if name == f"{family}-{size}{suffix}":
                config = DCFormerConfig.from_preset(f"dcformer-{size}", **(changes | overrides))
                check_overrides(config, overrides)
                return Recipe(name, config, rate, steps)
    raise DCFormerError(f"recipe {name!r} is unknown: expected one of {', '.join(RECIPES)}")


__all__ = ["CONTEXT", "RECIPES", "SEQUENCES", "Recipe", "check_overrides", "recipe"]
