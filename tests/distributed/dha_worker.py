"""Searches, fuses and folds heads of a small Llama: dha_worker.py OUTPUT --accumulation N.

Processes share the batches. The search trains as well, and leaves the model as it was for the fusion.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import LlamaConfig, LlamaForCausalLM

from dcformer import dha

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8}


def main():
    output, accumulation = Path(sys.argv[1]), int(sys.argv[3])
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(61, (2, 16), generator=generator) for _ in range(12)]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    plan = dha.search(
        model, 0.25, "function", batches=batches, steps=6, lr=3e-2, accumulation=accumulation, progress=False,
        checkpoint=output.with_suffix(".search"), save_steps=3,
    )  # fmt: skip
    after = dict(model.named_parameters())
    same = all(torch.equal(after[name], old) and after[name].requires_grad for name, old in before.items())
    fused = dha.fuse(
        model, plan, batches, 6, lr=1e-3, margin_steps=3, closing_steps=2, accumulation=accumulation, progress=False,
        held_out=batches[:1], checkpoint=output.with_suffix(".run"), save_steps=3,
    )  # fmt: skip
    if PartialState().is_main_process:
        folded = fused.fold()
        with torch.no_grad():
            logits = [m.eval()(batches[0][:, :8].cpu()).logits for m in (fused.model, folded)]
        result = {
            "losses": fused.losses, "difference": (logits[0] - logits[1]).abs().max().item(),
            "logits": logits[1].flatten().tolist(), "processes": PartialState().num_processes, "gap": fused.gap,
            "plan": plan.to_json(), "same": same and after.keys() == before.keys(),
        }  # fmt: skip
        output.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
