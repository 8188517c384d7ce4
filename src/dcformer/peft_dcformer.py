"""Which layers PEFT's adapters go to when their configuration names none.

PEFT has no place where a model could say that: it looks the model type up in tables of its own, one per method, and
models that it does not know need `target_modules`. The entries made here are put into those tables.
"""

import sys

# The linear layers of a DCFormer: attention, MLP and the generators of composition weights. (`qkw`, the generators'
# second layer, is a bare parameter and stays as it is; see docs/training.md.)
ATTENTION_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP_TARGETS = ["mlp.gate_proj", "up_proj", "down_proj", "multi_gate_proj"]
COMPOSE_TARGETS = ["dw1_proj", "compose.gate_proj"]
LORA_TARGETS = [*ATTENTION_TARGETS, *MLP_TARGETS, *COMPOSE_TARGETS]


def register_peft_targets(model_type: str) -> None:
    """Tells PEFT the default layers of a model type; does nothing while PEFT has not been imported.

    LoRA gets `LORA_TARGETS`. Other methods get what PEFT gives Llama, whose names of attention, MLP and norms are ours
    (but `gate_proj` is also a layer of composition).

    Args:
        model_type: "dcformer" or "dcpythia". What a table already says of it is kept.
    """
    constants = sys.modules.get("peft.utils.constants")
    for name, table in list(vars(constants).items()) if constants is not None else ():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and name.endswith("_MODULES_MAPPING") and "llama" in table:
            targets = ["mlp.gate_proj" if target == "gate_proj" else target for target in table["llama"]]
            is_lora = name == "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"
            table.setdefault(model_type, list(LORA_TARGETS) if is_lora else targets)


__all__ = ["ATTENTION_TARGETS", "COMPOSE_TARGETS", "LORA_TARGETS", "MLP_TARGETS", "register_peft_targets"]
