"""Which learning rate composition wants, where it can be seen in seconds: to find the fact of a person.

    python benchmarks/composition_rates.py --rates plain 1 0.1 rule --seeds 0 1

"Anna visited Paris. Boris visited Rome. Boris saw" is answered by a model of two layers; chance is a loss of 0.693. For
each rate of composition's parameters relative to the others' ("rule": `composition_rate_ratios`; "plain": a model
without composition) and each seed it prints the mean loss of every 50 steps, as JSON. One thread.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import torch

import dcformer
from dcformer.optimization import composition_rate_ratios
from dcformer.synthetic.vocabulary import COUNTRY_TO_CITIES, NAMES, entities

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from synthetic_rows import collate, token_ids

ROWS, TOKENS, WINDOW, LEARNING_RATE, WARMUP = 48, 22, 8, 2e-3, 50
PLAIN = {"compose_pre": False, "compose_post": False, "compose_query": False, "compose_key": False}


def make_row(rng: random.Random) -> dict[str, list[int]]:
    """Two people, two cities, and a question about each person, as `synthetic_rows.make_row` lays them out."""
    facts = list(zip(rng.sample(NAMES, 2), rng.sample(entities(COUNTRY_TO_CITIES), 2), strict=True))
    ids = token_ids("\n< " + " ".join(f"{person} visited {city}." for person, city in facts) + " >.")
    shared = len(ids)
    positions, branches, labels = list(range(shared)), [0] * shared, {}
    rng.shuffle(facts)
    for number, (person, city) in enumerate(facts, 1):
        query = token_ids(f"{person} saw")
        ids, branches = ids + query, branches + [number] * len(query)
        positions += range(shared, shared + len(query))
        labels[len(ids)] = token_ids(city)[0]
    padding = TOKENS - len(ids)
    return {
        "input_ids": ids + [0] * padding,
        "labels": [labels.get(index, -100) for index in range(TOKENS)],
        "position_ids": positions + [0] * padding,
        "branch": branches + [-1] * padding,
    }


def run(rate: str, seed: int, steps: int) -> list[float]:
    """Mean loss of every 50 steps."""
    torch.manual_seed(seed)
    config = dcformer.DCFormerConfig(
        vocab_size=288,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=8,
        sliding_window=WINDOW,
        max_position_embeddings=512,
        initializer_range=0.06,
        pad_token_id=0,
        attn_implementation="eager",
        **(PLAIN if rate == "plain" else {}),
    )
    model = dcformer.DCFormerForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.3)
    ratios = composition_rate_ratios(config)
    if rate not in ("rule", "plain"):
        ratios = dict.fromkeys(ratios, float(rate))
    groups = dcformer.parameter_groups(model, LEARNING_RATE, 0.1, ratios)
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    rng, losses = random.Random(seed), []
    for _ in range(steps):
        loss = model(**collate([make_row(rng) for _ in range(ROWS)], WINDOW), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        losses.append(loss.item())
    return [round(sum(losses[start : start + 50]) / 50, 3) for start in range(0, steps - 49, 50)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["plain", "1", "0.1", "0.02", "rule"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=250)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in arguments.seeds:
        for rate in arguments.rates:
            losses = run(rate, seed, arguments.steps)
            print(json.dumps({"rate": rate, "seed": seed, "losses": losses}), flush=True)


if __name__ == "__main__":
    main()
