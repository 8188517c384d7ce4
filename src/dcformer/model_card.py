"""Model cards: sizes, composition settings, what composition costs, and the scores that lm-eval wrote.

The numbers come from the configuration and from the JSON of ``dcformer-eval --output_path``; nothing else is claimed.
Training data, limits and the licence are the author's to write: the card has places for them.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .analysis import compose_overhead, num_parameters
from .configuration_dcformer import DCFormerConfig
from .errors import DCFormerError


@dataclass(frozen=True)
class Score:
    """One number of lm-eval's results.

    Attributes:
        task, metric, filter: as lm-eval names them.
        value: the score.
        stderr: its standard error, None where lm-eval has none.
        higher_is_better: None where lm-eval does not say.
        shots: examples before each item, None where lm-eval does not say (groups).
        items: number of items that were scored, None where lm-eval does not say.
        limited: whether `--limit` left items out.
    """

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    higher_is_better: bool | None
    shots: int | None
    items: int | None
    limited: bool


def read_results(path: str | os.PathLike) -> list[Score]:
    """Reads the results file of lm-eval (``--output_path``: ``results_<date>.json``).

    Args:
        path: the file.

    Returns:
        The scores, in the order of the file.

    Raises:
        DCFormerError: when there is no such file, it is no JSON, or not lm-eval's results.
    """
    path = Path(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DCFormerError(
            f"{path} cannot be read ({error.strerror}): expected the results_*.json of lm-eval."
        ) from error
    except ValueError as error:
        raise DCFormerError(f"{path} is no JSON ({error}): expected the results_*.json of lm-eval.") from error
    results = record.get("results") if isinstance(record, dict) else None
    if not isinstance(results, dict) or not all(isinstance(metrics, dict) for metrics in results.values()):
        raise DCFormerError(
            f'{path} has no object "results" of tasks: expected the results_*.json that `dcformer-eval --output_path` '
            "writes, not its samples_*.jsonl or another file."
        )
    scores = [score for task, metrics in results.items() for score in _task_scores(record, task, metrics)]
    if not scores:
        raise DCFormerError(f"{path} holds no scores: was the evaluation run to its end?")
    return scores


def _of_task(record: dict[str, Any], field: str, task: str) -> Any:
    held = record.get(field)
    return held.get(task) if isinstance(held, dict) else None


def _counts(record: dict[str, Any], task: str) -> dict[str, int]:
    """Items of a task, "original" and "effective"; of a group, which lm-eval does not count, those of its tasks."""
    counts = _of_task(record, "n-samples", task)
    if isinstance(counts, dict):
        return counts
    of_tasks = [_counts(record, name) for name in _of_task(record, "group_subtasks", task) or []]
    if not of_tasks or not all(of_tasks):
        return {}
    return {name: sum(counts[name] for counts in of_tasks) for name in ("original", "effective")}


def _task_scores(record: dict[str, Any], task: str, metrics: dict[str, Any]) -> list[Score]:
    counts, better = _counts(record, task), _of_task(record, "higher_is_better", task)
    better = better if isinstance(better, dict) else {}
    scores = []
    for key, value in metrics.items():  # "acc,none": 0.5, "acc_stderr,none": 0.01 or "N/A"
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not _is_number(value):
            continue
        stderr: Any = metrics.get(f"{metric}_stderr,{filter_name}")
        items = counts.get("effective")
        scores.append(
            Score(
                task=task,
                metric=metric,
                filter=filter_name,
                value=float(value),
                stderr=float(stderr) if _is_number(stderr) else None,
                higher_is_better=better.get(metric),
                shots=_of_task(record, "n-shot", task),
                items=items,
                limited=items is not None and items != counts.get("original"),
            )
        )
    return scores


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def model_card(
    config: DCFormerConfig,
    name: str,
    scores: list[Score] | None = None,
    license: str | None = None,
    remote_code: bool = False,
) -> ModelCard:
    """The card of a causal language model.

    Args:
        config: its configuration.
        name: what the card calls it, and the argument of `from_pretrained` in its snippet: usually `user/name`.
        scores: those of `read_results`; without, the card says that there is no evaluation. Limited ones are in its
            table, where it says so, and not in its metadata.
        license: identifier of the Hub, such as "mit"; without, the card has none and says so.
        remote_code: whether the folder also loads with `trust_remote_code=True`.

    Returns:
        The card: `.save(path)` writes it, `.data` is its metadata.
    """
    shown = name.rsplit("/", 1)[-1]
    data = ModelCardData(
        model_name=shown,
        library_name="transformers",
        pipeline_tag="text-generation",
        license=license,
        tags=[config.model_type, "dcmha", "arxiv:2405.08553"],
        eval_results=[_eval_result(score) for score in scores or [] if not score.limited] or None,
    )
    parts = [
        f"# {shown}",
        f"A causal language model with dynamically composable multi-head attention "
        f"([arXiv 2405.08553](https://arxiv.org/abs/2405.08553)) of {num_parameters(config):,} parameters, in the "
        "format of the package `dcformer` for Transformers.",
        _usage(name, remote_code),
        "## Sizes\n\n" + _table(("", ""), _sizes(config)),
        "## Composition\n\n" + _table(("", ""), _composition(config)),
        "## What composition adds\n\n" + _table(("", "added", "of the plain model"), _overhead(config)),
        "## Evaluation\n\n" + _evaluation(scores),
        "## Training\n\nNot described here yet: data, tokens and settings are the author's to add.",
        f"## Licence\n\n{license or 'Not stated: set `license` in the metadata above before you publish.'}",
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n", ignore_metadata_errors=False)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _usage(name: str, remote_code: bool) -> str:
    code = f"""## Use

```python
import dcformer  # registers the model type
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
batch = tokenizer("...", return_tensors="pt")
print(tokenizer.decode(model.generate(**batch, max_new_tokens=20)[0]))
```"""
    if remote_code:
        code += (
            "\n\nWithout the package: leave out the first line, and pass `trust_remote_code=True` to load the model."
        )
    return code


def _sizes(config: DCFormerConfig) -> list[tuple[str, ...]]:
    local = sum(kind == "sliding_attention" for kind in config.layer_types or ())
    layers = f"{config.num_hidden_layers}"
    if local:
        layers += (
            f" ({local} local with a window of {config.sliding_window}, {config.num_hidden_layers - local} global)"
        )
    return [
        ("Parameters", f"{num_parameters(config):,}"),
        ("... outside the embeddings", f"{num_parameters(config, exclude_embeddings=True):,}"),
        ("Layers", layers),
        ("Hidden size", f"{config.hidden_size}"),
        ("MLP width", f"{config.intermediate_size}"),
        ("Query heads", f"{config.num_attention_heads}"),
        ("Key/value heads", f"{config.num_key_value_heads}"),
        ("Head dim", f"{config.head_dim}"),
        ("Context", f"{config.max_position_embeddings}"),
        ("Vocabulary", f"{config.vocab_size}"),
        ("Weights' dtype", str(config.dtype).removeprefix("torch.")),
    ]


def _composition(config: DCFormerConfig) -> list[tuple[str, ...]]:
    fields = (
        "compose_pre",
        "compose_post",
        "compose_query",
        "compose_key",
        "compose_projection",
        "compose_rank",
        "compose_gate",
        "compose_static",
        "compose_groups",
        "compose_act",
    )
    return [(f"`{name}`", f"{getattr(config, name)}") for name in fields]


def _overhead(config: DCFormerConfig) -> list[tuple[str, ...]]:
    overhead = compose_overhead(config)
    channels = sum(config.compose_cache_channels(stage) for stage in ("pre", "post"))
    sizes: Any = config  # Optional only until __post_init__
    head_dim = sizes.head_dim
    numbers = channels * sizes.num_key_value_heads * sizes.num_hidden_layers
    context = config.max_position_embeddings
    return [
        ("Parameters (outside the embeddings)", f"{overhead.parameters:,}", f"{overhead.parameter_ratio:.2%}"),
        (
            f"FLOPs of the forward pass, per token at {context} tokens",
            f"{overhead.flops_per_token:,}",
            f"{overhead.flops_ratio:.2%}",
        ),
        ("Cache, numbers per token", f"{numbers:,}", f"{channels / (2 * head_dim):.2%}"),
    ]


def _evaluation(scores: list[Score] | None) -> str:
    if not scores:
        return "None yet: `python -m dcformer.hub_folder --results` reads what `dcformer-eval --output_path` writes."
    rows = [
        (
            score.task,
            "" if score.shots is None else f"{score.shots}",
            score.metric + {None: "", True: " ↑", False: " ↓"}[score.higher_is_better],
            score.filter,
            f"{score.value:.4f}",
            "" if score.stderr is None else f"{score.stderr:.4f}",
            "" if score.items is None else f"{score.items}{' (not all)' if score.limited else ''}",
        )
        for score in scores
    ]
    table = _table(("Task", "Shots", "Metric", "Filter", "Value", "Stderr", "Items"), rows)
    return f"By [lm-eval](https://github.com/EleutherAI/lm-evaluation-harness) (`dcformer-eval`).\n\n{table}"


def _eval_result(score: Score) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=score.task,
        dataset_name=score.task,
        metric_type=score.metric,
        metric_name=f"{score.metric} ({score.filter})",
        metric_value=score.value,
    )


__all__ = ["Score", "model_card", "read_results"]
