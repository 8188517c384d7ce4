"""The layers that PEFT adapts when its configuration names none.

A model cannot declare these: PEFT looks its type up in tables, one per method, and requires `target_modules` for types
that it does not know. This module adds entries to those tables.
"""

import sys

# The linear layers of a DCFormer: attention, MLP and the generators of composition weights. (`qkw`, the generators'
# second layer, is a parameter rather than a layer and is not adapted; see docs/training.md.)
ATTENTION_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP_TARGETS = ["mlp.gate_proj", "up_proj", "down_proj", "multi_gate_proj"]
COMPOSE_TARGETS = ["dw1_proj", "compose.gate_proj"]
LORA_TARGETS = [*ATTENTION_TARGETS, *MLP_TARGETS, *COMPOSE_TARGETS]


def register_peft_targets(model_type: str) -> None:
    """Adds the default layers of a model type to PEFT's tables; does nothing unless PEFT has been imported.

    LoRA gets `LORA_TARGETS`. Other methods get their layers for Llama, whose attention, MLP and norms have the same
    names; `gate_proj` becomes `mlp.gate_proj`, as composition has a layer of that name too.

    Args:
        model_type: such as "dcformer". Existing entries are kept.
    """
    constants = sys.modules.get("peft.utils.constants")
    for name, table in list(vars(constants).items()) if constants is not None else ():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and name.endswith("_MODULES_MAPPING") and "llama" in table:
            targets = ["mlp.gate_proj" if target == "gate_proj" else target for target in table["llama"]]
            is_lora = name == "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"
            table.setdefault(model_type, list(LORA_TARGETS) if is_lora else targets)


__all__ = ["ATTENTION_TARGETS", "COMPOSE_TARGETS", "LORA_TARGETS", "MLP_TARGETS", "register_peft_targets"]
