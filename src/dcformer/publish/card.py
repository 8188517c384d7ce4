"""Model cards: sizes, composition settings, the cost of composition, and lm-eval's scores.

All numbers come from the configuration and from the JSON of ``dcformer-eval --output_path``. Training data, limits and
the license are left to the model's author: the template, `card.md`, has places for them.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..analysis import compose_overhead
from ..cache_report import cache_bytes_per_token
from ..configuration_dcformer import DCFormerConfig
from ..errors import DCFormerError
from ..head_systems import HeadSystemsConfig, system_costs
from ..head_systems.costs import count_parameters

_TEMPLATE = Path(__file__).with_name("card.md")


@dataclass(frozen=True)
class Score:
    """One score of lm-eval's results.

    Attributes:
        task, metric, filter: as lm-eval names them.
        value: the score.
        stderr: its standard error, or None.
        higher_is_better: None if lm-eval does not report it.
        shots: examples before each item; None if not reported, as for groups.
        items: number of scored items; None if not reported.
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


def read_results(path: str | os.PathLike, models: Sequence[str] = ()) -> list[Score]:
    """Reads the results file of lm-eval (``--output_path``: ``results_<date>.json``).

    Args:
        path: the file.
        models: names and folders of the model that the scores have to be of; by default they may be of any.

    Returns:
        The scores, in the order of the file.

    Raises:
        DCFormerError: when the file cannot be read, is not JSON, does not contain lm-eval's results, or those of
            another model.
    """
    expected = "expected the results_*.json of lm-eval"
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DCFormerError(f"{path} cannot be read ({error.strerror}): {expected}.") from error
    except ValueError as error:
        raise DCFormerError(f"{path} is not JSON ({error}): {expected}.") from error
    results = record.get("results") if isinstance(record, dict) else None
    if not isinstance(results, dict) or not all(isinstance(metrics, dict) for metrics in results.values()):
        raise DCFormerError(
            f'{path} has no object "results" of tasks: {expected} (`dcformer-eval --output_path`), not its '
            "samples_*.jsonl or another file."
        )
    scores = [score for task, metrics in results.items() for score in _task_scores(record, task, metrics)]
    if not scores:
        raise DCFormerError(f"{path} holds no scores: was the evaluation run to its end?")
    evaluated = record.get("model_name")
    if models and Path(str(evaluated)).resolve() not in [Path(model).resolve() for model in models]:
        raise DCFormerError(
            f"{path} has the scores of {evaluated}, expected those of {' or '.join(models)}: give this model's, or the "
            "model under the name by which it was evaluated."
        )
    return scores


def _counts(record: dict[str, Any], task: str) -> dict[str, int]:
    """Items of a task, "original" and "effective"; of a group, which lm-eval does not count, summed over its tasks."""
    counts = record.get("n-samples", {}).get(task)
    if counts is not None:
        return counts
    of_tasks = [_counts(record, name) for name in record.get("group_subtasks", {}).get(task, [])]
    if not of_tasks or not all(of_tasks):
        return {}
    return {name: sum(counts[name] for counts in of_tasks) for name in ("original", "effective")}


def _task_scores(record: dict[str, Any], task: str, metrics: dict[str, Any]) -> list[Score]:
    counts, better = _counts(record, task), record.get("higher_is_better", {}).get(task, {})
    items, shots = counts.get("effective"), record.get("n-shot", {}).get(task)
    scores = []
    for key, value in metrics.items():  # "acc,none": 0.5, "acc_stderr,none": 0.01 or "N/A"
        metric, comma, filter_name = key.partition(",")
        if comma and not metric.endswith("_stderr") and _is_number(value):
            stderr: Any = metrics.get(f"{metric}_stderr,{filter_name}")
            stderr = float(stderr) if _is_number(stderr) else None
            limited = items is not None and items != counts.get("original")
            scores.append(
                Score(task, metric, filter_name, float(value), stderr, better.get(metric), shots, items, limited)
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
    """The card of a causal language model. It speaks of composition only if the model has any.

    Args:
        config: its configuration.
        name: the model's name in the card and in its snippet's `from_pretrained`, usually `user/name`.
        scores: from `read_results`; without them the card states that the model has not been evaluated. Limited scores
            are marked in its table and left out of its metadata.
        license: identifier of the Hub, such as "mit"; without it the card states that there is none.
        remote_code: whether the folder also loads with `trust_remote_code=True`.

    Returns:
        The card: `.save(path)` writes it, `.data` is its metadata.
    """
    title = name.rsplit("/", 1)[-1]
    kinds, sources = _attention(config)
    data = ModelCardData(
        model_name=title,
        library_name="transformers",
        pipeline_tag="text-generation",
        license=license,
        tags=[config.model_type, *["dcmha"] * bool(config.compose_generators), *(f"arxiv:{id}" for id in sources)],
        eval_results=[_eval_result(score) for score in scores or [] if not score.limited] or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        title=title,
        name=name,
        attention=kinds,
        parameters=f"{count_parameters(config):,}",
        sizes=_sizes(config),
        composition=[(f"`{field}`", getattr(config, field)) for field in _COMPOSITION] if config.composes else [],
        overhead=_overhead(config) if config.composes else [],
        scores=[_row(score) for score in scores or []],
        license=license,
        remote_code=remote_code,
    )


_COMPOSITION = (
    *("compose_pre", "compose_post", "compose_query", "compose_key", "compose_projection", "compose_rank"),
    *("compose_gate", "compose_static", "compose_groups", "compose_act"),
)


def _attention(config: DCFormerConfig) -> tuple[str, list[str]]:
    """What a model's attention is, for the card's first sentence, and the numbers at arXiv of what it is from."""
    kinds = []
    if config.compose_generators:
        kinds.append(("dynamically composable multi-head attention", "2405.08553"))
    elif config.compose_static:
        kinds.append(("talking heads, composed by static projections alone", "2003.02436"))
    if config.key_head_map is not None or config.value_head_map is not None:
        kinds.append(("decoupled-head attention (DHA)", "2406.06567"))
    if config.head_embeddings is not None:
        kinds.append(("head embeddings (MHE)", "2310.07911"))
    parts = [f"{kind}, [arXiv {source}](https://arxiv.org/abs/{source})" for kind, source in kinds]
    if isinstance(config, HeadSystemsConfig) and config.head_system != "plain":
        parts.append(f"the head system `{config.head_system}`")
    return " and ".join(parts) or "multi-head attention whose heads are not composed", [source for _, source in kinds]


def _sizes(config: DCFormerConfig) -> list[tuple[Any, ...]]:
    layers = f"{config.num_hidden_layers}"
    if local := sum(kind == "sliding_attention" for kind in config.layer_types or ()):
        others = config.num_hidden_layers - local
        layers += f" ({local} local with a window of {config.sliding_window}, {others} global)"
    system: list[tuple[Any, ...]] = []
    if isinstance(config, HeadSystemsConfig):
        system = [
            ("Head system", config.head_system),
            ("Cache, numbers per token", f"{system_costs(config).cache_channels:,}"),
        ]
    return [
        ("Parameters", f"{count_parameters(config):,}"),
        ("... outside the embeddings", f"{count_parameters(config, exclude_embeddings=True):,}"),
        ("Layers", layers),
        ("Hidden size", config.hidden_size),
        ("MLP width", config.intermediate_size),
        ("Query heads", config.num_attention_heads),
        ("Key/value heads", _key_value_heads(config)),
        ("Head dim", config.head_dim),
        ("Context", config.max_position_embeddings),
        ("Vocabulary", config.vocab_size),
        ("Parameters' dtype", str(config.dtype).removeprefix("torch.")),
        *system,
    ]


def _key_value_heads(config: DCFormerConfig) -> str:
    keys, values = config.num_key_heads, config.num_value_heads
    if config.key_head_map is None and config.value_head_map is None:
        return f"{config.num_key_value_heads}"
    return f"{sum(keys)} key and {sum(values)} value heads in all layers, {config.kv_saving:.1%} saved"


def _overhead(config: DCFormerConfig) -> list[tuple[str, ...]]:
    overhead = compose_overhead(config)
    flops = f"FLOPs of the forward pass, per token at {config.max_position_embeddings} tokens"
    rows = [
        ("Parameters (outside the embeddings)", f"{overhead.parameters:,}", f"{overhead.parameter_ratio:.2%}"),
        (flops, f"{overhead.flops_per_token:,}", f"{overhead.flops_ratio:.2%}"),
    ]
    if isinstance(config, HeadSystemsConfig):  # the ratios above are to plain attention; the sizes have the whole cache
        return [(f"{name}; of plain attention", *figures) for name, *figures in rows]
    plain, composed = cache_bytes_per_token(config, torch.int8)  # a byte for each number
    return [*rows, ("Cache, numbers per token", f"{composed - plain:,}", f"{composed / plain - 1:.2%}")]


def _row(score: Score) -> tuple[Any, ...]:
    return (
        score.task,
        "" if score.shots is None else score.shots,
        score.metric + {None: "", True: " ↑", False: " ↓"}[score.higher_is_better],
        score.filter,
        f"{score.value:.4f}",
        "" if score.stderr is None else f"{score.stderr:.4f}",
        "" if score.items is None else f"{score.items}{' (not all)' if score.limited else ''}",
    )


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
