"""nnsight on a DCFormer: reads what heads gathered, edits it, and reads composed attention weights.

    pip install "nnsight>=0.8"
    python examples/with_nnsight.py

nnsight runs the model's own forward pass, so composition is in what it shows. `attn_implementation="eager"` is needed
for attention weights: other implementations never hold them.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dcformer.analysis.layers import chosen
from dcformer.errors import DCFormerError

CHECKPOINT = Path(__file__).resolve().parent.parent / "checkpoints" / "dcformer-synthetic"
PROMPT = "\n< Peter owns the desk. Boris owns the tuna. Olga owns the banana. >. Boris owns a kind of"


def run(checkpoint: str, layer: int, head: int) -> dict[str, torch.Tensor]:
    """Logits as they are and with a head's output set to zero, and the layer's composed weights."""
    from nnsight import NNsight

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    (layer,) = chosen([layer], model.config.num_hidden_layers, "layer")
    (head,) = chosen([head], model.config.num_attention_heads, "head")
    ids, size = tokenizer(PROMPT, return_tensors="pt")["input_ids"], model.config.head_dim
    wrapped = NNsight(model)
    with torch.no_grad(), wrapped.trace(ids, use_cache=False):
        attention = wrapped.model.layers[layer].self_attn
        z = attention.o_proj.input.save()  # [1, T, H·D]
        weights = attention.output[1].save()  # [1, H, T, T], composed
        logits = wrapped.output.logits.save()
    with torch.no_grad(), wrapped.trace(ids, use_cache=False):
        wrapped.model.layers[layer].self_attn.o_proj.input[:, :, head * size : (head + 1) * size] = 0
        ablated = wrapped.output.logits.save()
    return {"z": z, "weights": weights, "logits": logits, "ablated": ablated}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default=str(CHECKPOINT))
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--head", type=int, default=6)
    options = parser.parse_args()
    try:
        found = run(options.checkpoint, options.layer, options.head)
    except DCFormerError as error:
        parser.error(str(error))
    except ImportError as error:
        parser.error(f'{error}: pip install "nnsight>=0.8"')
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    rows = found["weights"][0, options.head]
    print(f"composed weights of head {options.layer}.{options.head}: from {rows.min():.2f} to {rows.max():.2f}")
    for name in ("logits", "ablated"):
        best = found[name][0, -1].argmax().item()
        print(f"{name}: {tokenizer.decode(best)!r}, {found[name][0, -1, best]:.2f}")


if __name__ == "__main__":
    main()
