"""Which heads answer "same person, object to superclass", and from whom they borrow: a case study with accuracies.

    python examples/case_study.py                      # 200 held-out questions, a minute or two on a CPU
    python examples/case_study.py --questions 40 --output runs/case_study

The bundled checkpoint reads, after two examples, "Peter owns the desk. Boris owns the tuna. ... Boris owns a kind of",
and answers "fish". Heads are chosen on questions of the validation split; all accuracies are of the test split, no
question line of which occurs in training or validation. Heads and terms are ablated, and what a head had gathered is
patched back. Writes results.json, table.md, heads.png and accuracy.png.
"""

import argparse
import json
from contextlib import ExitStack
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import dcformer
from dcformer.analysis import TERMS, ablate, attribute_heads, patch_heads, single_token, trace
from dcformer.analysis.terms import term_maps
from dcformer.errors import DCFormerError, refused
from dcformer.loading import check_parameters
from dcformer.synthetic import get_task, iterate_contexts, questions

REPOSITORY = Path(__file__).resolve().parent.parent
CHECKPOINT = REPOSITORY / "checkpoints" / "dcformer-synthetic"
OUTPUT = REPOSITORY / "docs" / "analysis"
TASK = "same-person.object->superclass.plain"
EXAMPLES = 3  # lines of a context, the question's included
BATCH = 50
STEPS = 16  # of the attribution's integral; the gap is reported


def ask(split: str, count: int, seed: int, tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Questions of the task, all of one length: token ids [count, T], and the ids of their answers [count]."""
    asked = [questions(record)[-1] for record in iterate_contexts(split, count, EXAMPLES, seed, tasks=[get_task(TASK)])]
    ids = tokenizer([question["prompt"] for question in asked], return_tensors="pt", padding=True)
    if not ids["attention_mask"].all():
        raise DCFormerError(f"questions of {TASK} differ in length")
    return ids["input_ids"], torch.tensor([single_token(tokenizer, question["answer"]) for question in asked])


def borrowed(model, ids: torch.Tensor, layer: int, head: int) -> dict[str, list[float]]:
    """What a head's attention weights at the last token get from each head, per term: mean over texts of Σ_s |part|."""
    totals = {term: torch.zeros(model.config.num_attention_heads, dtype=torch.float64) for term in TERMS}
    for batch in ids.split(BATCH):
        run = trace(model, batch, layers=[layer], positions=[-1])
        found = run.layers[layer]
        keys = torch.arange(run.length)
        for row in range(len(batch)):
            maps = term_maps(found.post, found.weights.shape[1], row, torch.tensor([0]), keys)
            for term, matrices in maps.items():
                given = found.weights[row, :, 0].double().T * matrices[0, :, :, head]  # [S, H]
                totals[term] += given.abs().sum(0) / len(ids)
    return {term: total.tolist() for term, total in totals.items()}


class Study:
    """Accuracies of a model on questions while things are changed."""

    def __init__(self, model, ids: torch.Tensor, answers: torch.Tensor):
        self.model, self.batches = model, list(zip(ids.split(BATCH), answers.split(BATCH), strict=True))
        self.count, self.results = len(ids), {}

    @torch.no_grad()
    def measure(self, name: str, *ablations: dict, patch: list[tuple[int, int]] | None = None) -> float:
        """The share of right answers with `ablations`, and z of the heads `patch` as it was without them."""
        right = 0
        for ids, answers in self.batches:
            clean = None if patch is None else trace(self.model, ids, sorted({layer for layer, _ in patch}))
            with ExitStack() as stack:
                for ablation in ablations:
                    stack.enter_context(ablate(self.model, **ablation))
                if patch is not None:
                    stack.enter_context(patch_heads(self.model, clean, patch))
                given = self.model(ids, use_cache=False, logits_to_keep=1).logits[:, -1].argmax(-1)
            right += int((given == answers).sum())
        self.results[name] = right / self.count
        return self.results[name]


def table(results: dict[str, float], count: int) -> str:
    """The accuracies in Markdown, with Wilson's 95 % interval of a share of `count`."""
    lines = ["| what was changed | right | 95 % interval |", "|---|---|---|"]
    z = 1.96**2 / count
    for name, share in results.items():
        middle, wide = share + z / 2, (z * (share * (1 - share) + z / 4)) ** 0.5
        low, high = ((middle + sign * wide) / (1 + z) for sign in (-1, 1))
        lines.append(f"| {name} | {share:.1%} | {low:.1%} to {high:.1%} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs the study; returns the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default=str(CHECKPOINT))
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--chosen-on", type=int, default=50, help="validation questions that heads are chosen on")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    for name in ("questions", "chosen_on"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: expected at least 1")
    try:
        with refused(OSError, KeyError, RuntimeError, ValueError):
            tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
            check_parameters(options.checkpoint, AutoConfig.from_pretrained(options.checkpoint))
            model = AutoModelForCausalLM.from_pretrained(options.checkpoint, attn_implementation="eager")
        found = study(model, tokenizer, options)
    except DCFormerError as error:
        parser.error(str(error))
    options.output.mkdir(parents=True, exist_ok=True)
    write(found, options)
    return found["accuracy"]


def study(model, tokenizer, options: argparse.Namespace) -> dict:
    """All numbers of the study."""
    ids, answers = ask("validation", options.chosen_on, options.seed, tokenizer)
    parts = [
        attribute_heads(model, batch, target, STEPS, return_gap=True)
        for batch, target in tqdm(list(zip(ids.split(10), answers.split(10), strict=True)), desc="attribution")
    ]
    scores = torch.stack([part for part, _ in parts]).mean(0)  # [L, H]
    heads = model.config.num_attention_heads
    ranked = [divmod(index, heads) for index in scores.flatten().argsort(descending=True).tolist()]
    (layer, head), least = ranked[0], min(ranked, key=lambda at: abs(scores[at]))
    name = f"head {layer}.{head}"
    given = borrowed(model, ids, layer, head)
    term = max(TERMS[1:], key=lambda term: sum(given[term]))
    source = max(range(heads), key=lambda j: given[term][j])

    ids, answers = ask("test", options.questions, options.seed, tokenizer)
    run, alone = Study(model, ids, answers), Study(model, ids, answers)
    top = ranked[:4]
    other = min(range(heads), key=lambda h: abs(scores[layer, h]))  # whose contribution in the layer is nearest to 0
    into = {"terms": term, "stages": "post", "heads": [(layer, head)], "layers": [layer]}
    plan: dict[str, tuple] = {
        "nothing": (),
        f"{name} off, the one that contributes most": ({"heads": [(layer, head)]},),
        f"the {len(top)} that contribute most off, {', '.join(f'{a}.{b}' for a, b in top)}": ({"heads": top},),
        f"head {least[0]}.{least[1]} off, whose contribution is nearest to 0": ({"heads": [least]},),
        f"post {term} into {name} off": (into,),
        f"post {term} into all heads of layer {layer} off": (into | {"heads": None},),
        f"all terms but the input into {name} off": (into | {"terms": None},),
        "composition off after the softmax, in all layers": ({"stages": "post"},),
        "composition off before the softmax, in all layers": ({"stages": "pre"},),
    }
    for one in ("q_proj", "k_proj", "q_gate", "k_gate"):
        plan[f"{one} off, both stages, all layers"] = ({"terms": one},)
    patched = {
        f"post {term} into {name} off, {name} patched back": ((into,), [(layer, head)]),
        f"post {term} into all heads of layer {layer} off, {name} patched back": (
            (into | {"heads": None},), [(layer, head)],
        ),
        f"post {term} into all heads of layer {layer} off, head {layer}.{other} patched back": (
            (into | {"heads": None},), [(layer, other)],
        ),
        f"post {term} into all heads of layer {layer} off, the layer's heads patched back": (
            (into | {"heads": None},), [(layer, h) for h in range(heads)],
        ),
    }  # fmt: skip
    progress = tqdm(total=len(plan) + len(patched) + len(ranked), desc="ablations")
    for at in ranked:
        alone.measure(f"{at[0]}.{at[1]}", {"heads": [at]})
        progress.update()
    worst = min(alone.results, key=lambda one: alone.results[one])
    for what, ablations in plan.items():
        run.measure(what, *ablations)
        if what == "nothing":
            run.results[f"one head off, the worst of {len(ranked)}: {worst}"] = alone.results[worst]
        progress.update()
    for what, (ablations, patch) in patched.items():
        run.measure(what, *ablations, patch=patch)
        progress.update()
    progress.close()
    return {
        "task": TASK,
        "questions": options.questions,
        "chosen_on": options.chosen_on,
        "seed": options.seed,
        "head": [layer, head],
        "term": term,
        "source": source,
        "borrowed": given,
        "attribution": scores.tolist(),
        "completeness_gap": max(gap for _, gap in parts),
        "accuracy": run.results,
        "one_head_off": alone.results,
        "versions": {"dcformer": dcformer.__version__, "torch": torch.__version__.split("+")[0]},
    }


def write(found: dict, options: argparse.Namespace) -> None:
    """Numbers, the table and both figures."""
    from dcformer.analysis import plots

    layer, head = found["head"]
    totals = {term: sum(parts) for term, parts in found["borrowed"].items()}
    summary = (
        f"Head {layer}.{head} contributes most to the answer's logit: {found['attribution'][layer][head]:.2f} (largest "
        f"completeness gap {found['completeness_gap']:.1%}). At the last token its attention weights are made of "
        f"{totals['input']:.2f} of its own, and of "
        + ", ".join(f"{totals[term]:.2f} by {term}" for term in TERMS[1:] if totals[term])
        + f" (sums of absolute parts over keys, mean over {found['chosen_on']} questions); most by {found['term']}"
        f" from head {found['source']} ({found['borrowed'][found['term']][found['source']]:.2f})."
    )
    text = summary + "\n\n" + table(found["accuracy"], found["questions"])
    print("\n" + text)
    figures = {
        "heads": plots.attribution_heatmap(torch.tensor(found["attribution"]), "the answer"),
        "accuracy": plots.accuracy_bars(found["accuracy"], title=f"{found['questions']} held-out questions"),
    }
    for name, figure in figures.items():
        figure.savefig(options.output / f"{name}.png", dpi=110)
    (options.output / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (options.output / "table.md").write_text(text, encoding="utf-8")
    print(f"wrote results.json, table.md, heads.png and accuracy.png to {options.output}")


if __name__ == "__main__":
    main()
