"""Prints what is kept of the runs of the bundled checkpoint's recipe: trains nothing.

    python benchmarks/recipe_runs.py

The bundled checkpoint and its twin (`training.json` beside it), runs that went on until all was learned
(`results/synthetic_recipe.json`), and those of a forerunner of the script (`results/synthetic_curriculum.json`).
"""

import argparse
import json
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TRAINING = REPOSITORY / "checkpoints" / "dcformer-synthetic" / "training.json"
RESULTS = Path(__file__).resolve().parent / "results"


def curve(run: dict) -> str:
    """A run of `train_synthetic.py`, by checkpoints: loss of training rows, accuracy on validation questions."""
    lines = ["| step | stage | loss | alone | in context |", "|---|---|---|---|---|"]
    for line in run["curve"]:
        accuracies = f"{line['alone']:.1%} | {line['in_context']:.1%}".replace("%", " %")
        lines.append(f"| {line['step']} | {line['stage'] + 1} | {line['loss']:.2f} | {accuracies} |")
    return "\n".join(lines)


def recipe(runs: list[dict]) -> str:
    """Of runs of `train_synthetic.py` without `--steps`: when each stage and the decay began, and how they ended."""
    heads = ("seed", "rate", "first checkpoint of stages 2 to 5", "decay began", "steps", "minutes")
    heads += ("validation", "held out")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for run in runs:
        last, ended = run["curve"][-1], "test_accuracy" in run
        first = {line["stage"]: line["step"] for line in reversed(run["curve"])}
        stages = ", ".join(f"{first[stage]:,}" if stage in first else "-" for stage in range(1, 5))
        began = f"{last['step'] - run['decay_steps']:,}" if ended else "-"
        held_out = f"{run['test_accuracy']:.1%} of {run['test_answers']:,}" if ended else "stopped"
        lines.append(
            f"| {run['seed']} | {run['rate']} | {stages} | {began} | {last['step']:,} | {run['minutes']:.0f} | "
            f"{last['alone']:.1%} | {held_out} |"
        )
    return "\n".join(lines)


def forerunner(runs: dict[str, dict]) -> str:
    """Of the forerunner's runs: what was changed, when stages were learned, and losses: each of a hundred steps, and at
    the end by question."""
    lines = ["| run | what | rate | seed | stages learned at | losses of 100 steps each | at the end |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, run in runs.items():
        learned = [line.get("next_stage_at", line.get("learned")) for line in run["curve"]]
        steps = [line for line in run["curve"] if "step" in line]
        by_question = ", ".join(f"{question} {loss:.2f}" for question, loss in steps[-1]["ema"].items())
        lines.append(
            f"| {name} | {run['what']} | {run['settings']['lr']:g} | {run['settings']['seed']} | "
            f"{', '.join(f'{step:,}' for step in learned if step) or '-'} | "
            f"{' '.join(format(line['loss'], '.2f') for line in steps)} | {by_question} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    for run in json.loads(TRAINING.read_text()).values():
        print(
            f"{run['variant']}, seed {run['seed']}, rate {run['learning_rate']:g}, {run['steps']:,} steps: "
            f"{run['test_accuracy']:.1%} of {run['test_answers']:,} held-out answers, loss {run['test_loss']:.3f}, "
            f"{run['minutes']} minutes of one core\n\n{curve(run)}\n"
        )
    print(f"Until all is learned\n\n{recipe(json.loads((RESULTS / 'synthetic_recipe.json').read_text())['runs'])}\n")
    print(f"A forerunner\n\n{forerunner(json.loads((RESULTS / 'synthetic_curriculum.json').read_text()))}")


if __name__ == "__main__":
    main()
