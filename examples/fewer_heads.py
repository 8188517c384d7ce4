"""A Llama with a quarter of its key and value heads: trained, searched, fused, folded, evaluated, used.

    python examples/fewer_heads.py --output runs/dha                  # two minutes on one core
    python examples/fewer_heads.py --output runs/dha --only-source    # the Llama folder alone, to try the commands on

It prints every command before it runs it. The texts are those of examples/data, the tokenizer is that of the bundled
checkpoint. What exists already is not made again.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TEXTS = REPOSITORY / "examples" / "data" / "text_train.jsonl"
TOKENIZER = REPOSITORY / "checkpoints" / "dcformer-synthetic"
SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 8}
LENGTH, BATCH, RATE = 128, 8, 2e-3
PROMPT = "\n< Peter owns the desk. Boris owns the tuna. Olga owns the banana. >. Boris owns a kind of"


def train_llama(folder: Path, steps: int) -> None:
    """A small Llama with as many key and value heads as query heads, trained on the texts."""
    import torch
    from tqdm import tqdm
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed

    from dcformer.dha.fusion import theta_lr

    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    texts = [json.loads(line)["text"] for line in TEXTS.read_text(encoding="utf-8").splitlines()]
    ids = [token for text in texts for token in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    ids = torch.tensor(ids)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    special = {name: getattr(tokenizer, name) for name in names}
    config = LlamaConfig(**SIZES, **special, vocab_size=len(tokenizer), max_position_embeddings=1024)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in tqdm(range(steps), desc="training a Llama"):
        optimizer.param_groups[0]["lr"] = theta_lr(step, steps, RATE)
        starts = torch.randint(len(ids) - LENGTH, (BATCH,)).tolist()
        rows = torch.stack([ids[start : start + LENGTH] for start in starts])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"wrote {folder}: a Llama of {model.num_parameters():,} parameters, training loss {loss.item():.3f}")


def call(command: str, *words: object) -> None:
    """Runs one of the package's commands as from a shell; ends the program when it fails."""
    import importlib

    line = [*map(str, words)]
    print(f"\n$ {command} {shlex.join(line)}", flush=True)
    if status := importlib.import_module(f"dcformer_commands.{command.removeprefix('dcformer-')}").main(line):
        sys.exit(status)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for everything")
    parser.add_argument("--steps", type=int, default=600, help="to train the Llama (default: %(default)s)")
    parser.add_argument("--fusion-steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--limit", type=int, default=200, help="questions to evaluate on (default: %(default)s)")
    parser.add_argument("--only-source", action="store_true", help="stop after the Llama")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.fusion_steps < 1:
        parser.error(f"--steps {options.steps}, --fusion-steps {options.fusion_steps}: expected at least 1")
    out = options.output
    llama, plan, fused, model = (out / name for name in ("llama", "plan.json", "fused", "model"))
    if not (llama / "tokenizer.json").exists():
        train_llama(llama, options.steps)
    if options.only_source:
        return
    call("dcformer-dha", "search", "--model", llama, "--output", plan, "--kv-ratio", 0.25)
    call("dcformer-dha", "fuse", "--model", llama, "--plan", plan, "--output", fused, "--data", TEXTS,
         "--steps", options.fusion_steps, "--lr", 1e-3, "--length", LENGTH)  # fmt: skip
    call("dcformer-dha", "fold", "--model", fused, "--output", model)
    call("dcformer-dha", "report", "--model", model, "--context", 1024)
    for folder in (llama, model):
        call("dcformer-eval", "--model_args", f"pretrained={folder}", "--tasks", "dcformer_synthetic_heldout",
             "--batch_size", 37, "--limit", options.limit)  # fmt: skip

    from transformers import pipeline

    generator = pipeline("text-generation", model=str(model))
    text = generator(PROMPT, max_new_tokens=1, do_sample=False, return_full_text=False)[0]["generated_text"]
    print(f"\n{PROMPT.strip()} -> {text}")


if __name__ == "__main__":
    main()
