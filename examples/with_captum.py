"""captum on a DCFormer: layer integrated gradients of one layer's heads, with the completeness gap that is left.

    pip install "captum>=0.9"
    python examples/with_captum.py --steps 16 64

captum's hooks work on any module. Between token embeddings the path is rough, and 16 steps leave a gap of several
logits. One layer's heads never explain the whole change: what is missing there flows past them in the residual stream,
whatever the steps. `dcformer.analysis.attribute_heads` scales the outputs of all layers' heads together, and refuses
gaps above 5 %.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from dcformer.analysis import single_token

CHECKPOINT = Path(__file__).resolve().parent.parent / "checkpoints" / "dcformer-synthetic"
PROMPT = "\n< Peter owns the desk. Boris owns the tuna. Olga owns the banana. >. Boris owns a kind of"


def run(checkpoint: str, target: str, steps: int) -> dict[str, tuple[float, float]]:
    """Where gradients are integrated -> the sum of the attributions, and how far it is from the change of the logit."""
    from captum.attr import LayerIntegratedGradients

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    baseline = ids.clone().fill_(tokenizer.pad_token_id)

    def last_logits(ids):
        return model(ids, use_cache=False).logits[:, -1]

    found = {}
    places = {
        "embed_tokens": (model.model.embed_tokens, False),
        "o_proj's input, layer 3": (model.model.layers[3].self_attn.o_proj, True),
    }
    for name, (module, at_input) in places.items():
        parts, gap = LayerIntegratedGradients(last_logits, module).attribute(
            ids,
            baselines=baseline,
            target=single_token(tokenizer, target),
            n_steps=steps,
            attribute_to_layer_input=at_input,
            return_convergence_delta=True,
        )
        parts = parts[0] if isinstance(parts, tuple) else parts
        found[name] = parts.sum().item(), gap.abs().item()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default=str(CHECKPOINT))
    parser.add_argument("--target", default=" fish")
    parser.add_argument("--steps", type=int, nargs="+", default=[16, 64, 256])
    options = parser.parse_args()
    for steps in options.steps:
        try:
            found = run(options.checkpoint, options.target, steps)
        except ImportError as error:
            parser.error(f'{error}: pip install "captum>=0.9"')
        for name, (total, gap) in found.items():
            print(f"{steps:4} steps, {name}: {total:.2f} logits attributed, {gap:.2f} from the change of the logit")


if __name__ == "__main__":
    main()
