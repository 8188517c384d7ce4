"""Fusion: trains a model and the mixtures of its heads until the heads of a group are equal, and can be folded.

    loss = L_lm + λ · c · max(L_fusion - t, 0)

λ rises from 0 while the fusion loss is above its margin t, which falls to 0; c is the number of trained factors in the
operators, so that their gradient does not shrink with the model. The last steps close the operators: they move each row
of a group to their mean. Source: arXiv 2406.06567, section 4.2 and Algorithm 3, with the corrections that docs/dha.md
lists. Training is a plain loop with Accelerate: processes, FSDP2 and mixed precision are as `accelerate launch` says.
"""

import copy
import itertools
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel, default_data_collator, set_seed
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import DCFormerError, first_line, require_extra
from ..files import lacks_room, why_not_written, write_whole
from ..loading import OPERATORS
from ..shards import gathered, is_sharded
from .folding import fold_model, load_model
from .mixing import HeadMixer, Part, attach_mixers, detach_mixers, mixers_of, only_trains
from .plan import KINDS, HeadPlan, as_plan, check_seed
from .sources import HeadSource

MARGIN_DECAY, MARGIN_STEPS = 0.999, 200
CLOSED = 1e-6  # largest difference of a group's rows at which folding counts as exact
SMALL_LOSS = 1e-3  # of the paper's stop rule
_CLOSING_STEPS = 60
TRAINED = ("all", "attention", "none")
_MIN_LR, _WARMUP = 0.1, 0.1  # of θ: shares of the peak and of the steps
_BETAS = (0.9, 0.95)


def margin(step: int, steps: int = MARGIN_STEPS, decay: float = MARGIN_DECAY) -> float:
    """The fusion loss that is tolerated at a step, from 0: max(0, decay^step · (1 - step / steps))."""
    return max(0.0, decay**step * (1 - step / steps))


def ascend(multiplier: float, fusion_loss: float, tolerated: float, lr: float) -> float:
    """λ after a step: raised by `lr` times what the fusion loss exceeds its margin by; it never falls."""
    return max(0.0, multiplier + lr * max(fusion_loss - tolerated, 0.0))


def theta_lr(step: int, steps: int, peak: float) -> float:
    """The learning rate of the model's parameters: 10 % warm-up, then a cosine to 10 % of the peak."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (_MIN_LR + (1 - _MIN_LR) * (1 + math.cos(math.pi * progress)) / 2)


# --- data -------------------------------------------------------------------------------------------------------------


def batch_iterator(data: Any, batch_size: int, seed: int) -> Callable[[], Iterator[dict[str, torch.Tensor]]]:
    """Endless batches from any data, the same for the same seed.

    Args:
        data: batches, as a list, a `DataLoader` or anything that can be iterated again, each `input_ids` [B, T] or a
            mapping with them; or a data set of rows with `input_ids` [T], as for `Trainer`, all of one length.
        batch_size: of a data set's rows.
        seed: of the order of a data set's rows, and of all that the data draws from torch's generator.

    Returns:
        a function that starts over. Data that ends is repeated, with a warning.

    Raises:
        DCFormerError: when it is not such data, there are no batches, rows differ in length, or data that has ended
            cannot be iterated again.
    """
    if isinstance(data, str | os.PathLike) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise DCFormerError(f"batches={data!r}: expected batches [B, T] of tokens, a DataLoader or a data set of rows.")
    _check_count("batch_size", batch_size)
    rows = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, DataLoader)
    if rows and len(data) and isinstance(data[0], Mapping):
        rows = torch.as_tensor(data[0].get("input_ids", 0)).ndim == 1
    else:
        rows = False

    def start() -> Iterator[dict[str, torch.Tensor]]:
        source: Iterable[Any] = data
        if rows:
            order = torch.Generator().manual_seed(seed)
            size = min(batch_size, len(data))
            source = DataLoader(data, size, shuffle=True, drop_last=True, collate_fn=_collate, generator=order)
        for repeat in itertools.count():
            found = 0
            for batch in _with_own_draws(source, seed + repeat):
                found += 1
                yield _batch(batch)
            if not found:
                what = "has no batches" if not repeat else "has ended and cannot be read again"
                raise DCFormerError(f"the data {what}: give a list, a DataLoader or a data set with enough rows.")
            if not repeat:
                warnings.warn(f"the data has ended after {found} batches and is repeated", stacklevel=2)

    return start


def _with_own_draws(source: Iterable[Any], seed: int) -> Iterator[Any]:
    """What a source gives, of which random numbers of torch, as of a `DataLoader` that shuffles, are its own.

    A run that continues then skips the batches that it has seen, and no others; and dropout is as it would have been.
    """
    state, batches, end = torch.Generator().manual_seed(seed).get_state(), None, object()
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            batches = iter(source) if batches is None else batches
            batch = next(batches, end)
            state = torch.get_rng_state()
        if batch is end:
            return
        yield batch


def _collate(rows: list[Any]) -> dict[str, Any]:
    lengths = {len(row["input_ids"]) for row in rows}
    if len(lengths) > 1:
        raise DCFormerError(
            f"a batch has rows of {min(lengths)} to {max(lengths)} tokens: give rows of one length, or a DataLoader "
            "whose collator pads them."
        )
    return default_data_collator(rows)


def _batch(batch: Any) -> dict[str, torch.Tensor]:
    """A batch with labels."""
    given: dict[str, Any] = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    if "input_ids" not in given:
        raise DCFormerError(f"a batch has {', '.join(given) or 'nothing'}: expected input_ids [B, T].")
    given = {name: torch.as_tensor(value) for name, value in given.items()}
    for name in given.keys() & {"input_ids", "labels"}:
        dtype = given[name].dtype
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise DCFormerError(f"a batch has {name} of {dtype}: expected token ids, whole numbers.")
        given[name] = given[name].long()
    if given["input_ids"].ndim != 2:
        raise DCFormerError(
            f"a batch has input_ids of shape {list(given['input_ids'].shape)}: expected [B, T]. Rows that come in a "
            "stream become batches by torch.utils.data.DataLoader(stream, batch_size=...)."
        )
    if "labels" not in given:
        given["labels"] = given["input_ids"]
        if "attention_mask" in given:
            given["labels"] = given["labels"].masked_fill(given["attention_mask"] == 0, -100)
    return given


def _check_tokens(model: Any, batch: Mapping[str, torch.Tensor]) -> None:
    """Names a token id that a model does not have, which a GPU would end its process for."""
    size = getattr(model, "module", model).get_input_embeddings().num_embeddings
    for name in ("input_ids", "labels"):
        ids = batch[name]
        is_wrong = (ids < 0) | (ids >= size)
        if len(wrong := ids[is_wrong & (ids != -100) if name == "labels" else is_wrong]):
            raise DCFormerError(
                f"{name} holds token id {int(wrong[0])}, outside the source's vocabulary of {size} ids (0 to "
                f"{size - 1}): is the tokenizer the model's own?"
            )


@torch.no_grad()
def evaluate_loss(model: Any, batches: Iterable[Any]) -> float:
    """The mean loss per predicted token of a model on batches, in evaluation mode."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    total = count = 0
    for batch in map(_batch, batches):
        _check_tokens(model, batch)
        given = {name: value.to(device) for name, value in batch.items()}
        predicted = int((given["labels"][:, 1:] != -100).sum())
        total, count = total + model(**given).loss.item() * predicted, count + predicted
    model.train(training)
    return total / max(1, count)


# --- the loop ---------------------------------------------------------------------------------------------------------


@dataclass
class _Penalty:
    """The constraint that heads of a group become equal."""

    mixers: list[HeadMixer]
    lr: float
    margin_steps: int
    scale: float
    multiplier: float = 0.0

    def losses(self) -> torch.Tensor:
        """The fusion loss of every part that has groups of two or more; of none, a single 0."""
        losses = [mixer.fusion_loss() for mixer in self.mixers if mixer.shape[1] > 1]
        return torch.stack(losses) if losses else torch.zeros(1)


def train_mixers(
    model: Any,
    mixers: Mapping[Part, HeadMixer],
    batches: Any,
    *,
    steps: int,
    mixer_lr: float,
    lr: float = 0.0,
    trained: Iterable[torch.nn.Parameter] = (),
    penalty: _Penalty | None = None,
    closing_steps: int = 0,
    stop_at_loss: float | None = None,
    seed: int = 0,
    batch_size: int = 8,
    accumulation: int = 1,
    checkpoint: str | os.PathLike | None = None,
    save_steps: int = 100,
    setup: Mapping[str, Any] | None = None,
    on_step: Callable[[int, Any], None] | None = None,
    progress: bool = True,
    what: str = "fusion",
) -> tuple[Any, Any, list[dict[str, float]]]:
    """Trains mixers, and parameters of the model beside them.

    Args:
        model: with the mixers attached.
        mixers: to train.
        batches: data; see `batch_iterator`.
        steps: optimizer steps.
        mixer_lr: learning rate of the mixers, constant, without weight decay.
        lr: peak learning rate of `trained`, with weight decay 0.1.
        trained: parameters of the model that are trained.
        penalty: the constraint, or None.
        closing_steps: the last steps, in which the mixers are closed.
        stop_at_loss: end as soon as the fusion loss is below.
        seed: of the order of rows, and of dropout.
        batch_size: rows of a data set in a batch.
        accumulation: batches of a step.
        checkpoint: folder for the state of the run, from which it continues if it holds one.
        save_steps: steps between states.
        setup: what the run is, compared with that of the state to continue from.
        on_step: called after each step with the number of steps taken and the model.
        progress: show a progress bar.
        what: name of the run.

    Returns:
        the model as trained (prepared for several processes where there are), the accelerator, and one record per step:
        `step`, `loss`, and with a penalty `fusion`, `worst`, `margin`, `lambda`.

    Raises:
        DCFormerError: on invalid arguments, when the loss is not finite, naming the step, or when the state is of
            another run or damaged.
    """
    require_extra("train", what, "accelerate")
    from accelerate import Accelerator

    for name, value in (("steps", steps), ("accumulation", accumulation), ("save_steps", save_steps)):
        _check_count(name, value)
    check_seed(seed)
    _check_factor("lr", lr)
    _check_factor("mixer_lr", mixer_lr)
    on_cpu = not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    accelerator = Accelerator(cpu=on_cpu)
    set_seed(seed)
    groups = [{"params": [mixer.weight for mixer in mixers.values()], "lr": mixer_lr, "weight_decay": 0.0}]
    if theta := list(trained):
        groups.append({"params": theta, "lr": lr, "weight_decay": 0.1})
    start_batches = batch_iterator(batches, batch_size, seed)
    optimizer: Any = torch.optim.AdamW(groups, betas=_BETAS)
    model, optimizer = accelerator.prepare(model, optimizer)
    world, rank = accelerator.num_processes, accelerator.process_index
    setup = {**(setup or {}), "steps": steps, "seed": seed, "accumulation": accumulation, "processes": world}
    setup["batch_size"] = batch_size
    history: list[dict[str, float]] = []
    state = _State(Path(checkpoint), setup, what) if checkpoint is not None else None
    if state is not None and (loaded := state.load(accelerator)) is not None:
        history = loaded
        if penalty is not None and history:
            penalty.multiplier = history[-1]["lambda"]
        if accelerator.is_main_process:
            print(f"{what} continues after step {len(history)} of {steps}")

    source = itertools.islice(start_batches(), rank + len(history) * accumulation * world, None, world)
    with tqdm(
        total=steps, initial=len(history), desc=what, disable=not (progress and accelerator.is_local_main_process)
    ) as bar:
        for step in range(len(history), steps):
            if stop_at_loss is not None and history and history[-1].get("fusion", math.inf) < stop_at_loss:
                break
            for group in optimizer.param_groups[1:]:
                group["lr"] = theta_lr(step, steps, lr)
            record = {"step": step, "loss": 0.0}
            for part in range(accumulation):
                batch = next(source)
                _check_tokens(model, batch)
                batch = {name: value.to(accelerator.device) for name, value in batch.items()}
                loss = model(**batch, use_cache=False).loss  # layers that are computed again would write to it twice
                value = accelerator.reduce(loss.detach(), "mean").item()
                if not math.isfinite(value):
                    raise DCFormerError(
                        f"{what}: the loss is {value} at step {step}: lower the learning rates ({lr:g} of the model, "
                        f"{mixer_lr:g} of the operators), or look at this batch and at the source's parameters."
                    )
                record["loss"] += value / accumulation
                total = loss / accumulation
                if penalty is not None and part == accumulation - 1:
                    parts, tolerated = penalty.losses(), margin(step, penalty.margin_steps)
                    fusion = parts.mean()
                    total = total + penalty.multiplier * penalty.scale * (fusion - tolerated).clamp_min(0)
                    record |= {"fusion": fusion.item(), "worst": parts.max().item(), "margin": tolerated}
                accelerator.backward(total)
            optimizer.step()
            optimizer.zero_grad()
            if penalty is not None:
                penalty.multiplier = ascend(penalty.multiplier, record["fusion"], record["margin"], penalty.lr)
                record["lambda"] = penalty.multiplier
            if (closing := step - steps + closing_steps + 1) > 0:
                for mixer in mixers.values():
                    mixer.close(closing / closing_steps)
            history.append(record)
            if on_step is not None:
                on_step(len(history), model)
            bar.update()
            bar.set_postfix({name: f"{value:.4g}" for name, value in record.items() if name != "step"})
            if state is not None and ((step + 1) % save_steps == 0 or step + 1 == steps):
                state.save(accelerator, history)
    return model, accelerator, history


class _State:
    """Parameters, optimizer, random numbers and records of a run, in folders step-N; a complete one has run.json."""

    def __init__(self, folder: Path, setup: Mapping[str, Any], what: str):
        self.folder, self.what = folder, what
        self.setup = json.loads(json.dumps(setup, default=str))

    def load(self, accelerator: Any) -> list[dict[str, float]] | None:
        """Continues from the newest complete state; its records, or None."""
        runs = sorted(self.folder.glob("step-*/run.json"), key=lambda file: int(file.parent.name.partition("-")[2]))
        if not runs:
            return None
        saved = _read_record(runs[-1], f"Remove {self.folder} to start anew", setup=dict, history=list)
        names = {*saved["setup"], *self.setup}
        if differing := sorted(name for name in names if saved["setup"].get(name) != self.setup.get(name)):
            shown = "; ".join(
                f"{name} is {saved['setup'].get(name)!r} there and {self.setup.get(name)!r} now" for name in differing
            )
            raise DCFormerError(
                f"{self.folder} holds another run of {self.what}: {shown}. Give the same values to continue it, or "
                "remove the folder to start anew."
            )
        accelerator.load_state(os.fspath(runs[-1].parent))
        return saved["history"]

    def save(self, accelerator: Any, history: list[dict[str, float]]) -> None:
        """Saves a state, and removes the one before it.

        Raises:
            DCFormerError: when it cannot be written, as on a full disk; the one before it is then kept.
        """
        target = self.folder / f"step-{len(history)}"
        try:
            self._write(target, accelerator, history)
        except (OSError, RuntimeError, SafetensorError) as error:
            if (reason := why_not_written(error)) is None:
                raise
            if accelerator.is_main_process:
                shutil.rmtree(target, ignore_errors=True)
            what = f"{self.folder}: the state of {self.what} after step {len(history)} cannot be saved: {reason}"
            if lacks_room(error) and self.folder.is_dir():
                what += f"; {shutil.disk_usage(self.folder).free / 1e9:.2f} GB are free there. Make room"
            else:
                what += ". Correct that"
            raise DCFormerError(
                f"{what}, then call it again in the same way: it continues after the last state that was saved, if any."
            ) from error

    def _write(self, target: Path, accelerator: Any, history: list[dict[str, float]]) -> None:
        if accelerator.is_main_process:
            shutil.rmtree(target, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(os.fspath(target))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            write_whole(target / "run.json", json.dumps({"setup": self.setup, "history": history}))
            for other in self.folder.glob("step-*"):
                if other != target:
                    shutil.rmtree(other, ignore_errors=True)


def _read_record(file: Path, otherwise: str, **kinds: type) -> dict[str, Any]:
    """The JSON object in a file, with fields of these kinds.

    Raises:
        DCFormerError: when it is damaged; the message ends with what to do otherwise.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not JSON, or no text
        raise DCFormerError(f"{file} is damaged ({error}). {otherwise}.") from error
    for name, kind in kinds.items():
        if not isinstance(record, dict) or not isinstance(record.get(name), kind):
            raise DCFormerError(f"{file} is damaged: it has no {kind.__name__} {name!r}. {otherwise}.")
    return record


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise DCFormerError(f"{name}={value!r} must be a whole number of at least 1.")


def _check_factor(name: str, value: float) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise DCFormerError(f"{name}={value!r} must be a finite number of at least 0.")


def _check_trainable(model: Any) -> None:
    if isinstance(model, str | os.PathLike):
        raise DCFormerError(f"{os.fspath(model)} is a folder, and what is trained is a model in memory: load it first.")
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        raise DCFormerError(
            "the model is in float16, which needs a gradient scaler: load it in float32 or bfloat16; Accelerate's "
            "mixed precision makes float16 of float32."
        )


def train_search(
    model: Any, batches: Any, *, steps: int, lr: float, seed: int, progress: bool, **options: Any
) -> dict[Part, torch.Tensor]:
    """Trains mixtures over all heads of every part, with the model's parameters frozen; for `search`.

    Args:
        model: in memory, and afterwards as it was. With several processes a copy is trained, as FSDP leaves a model in
            shards.
        batches: data; see `batch_iterator`.
        steps, lr, seed, progress: of the training.
        options: others of `train_mixers`.

    Returns:
        operators [n, n, D] by part.
    """
    source = HeadSource(model)
    _check_trainable(model)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        source = HeadSource(model := copy.deepcopy(model))
    sizes = source.sizes
    one_group = {
        (layer, kind): [list(range(sizes.heads(layer, kind)))] for layer in range(sizes.num_layers) for kind in KINDS
    }
    mixers = attach_mixers(source, one_group)
    try:
        with only_trains(model, [mixer.weight for mixer in mixers.values()]):
            model.eval()
            for layer in model.modules():  # which checkpoint in training only; all that is in them stays as it is
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.training = layer.gradient_checkpointing
            setup = {"fingerprint": sizes.fingerprint, "lr": lr}
            train_mixers(
                model, mixers, batches, steps=steps, mixer_lr=lr, seed=seed, progress=progress, setup=setup,
                what="search", **options,
            )  # fmt: skip
        return {part: gathered(mixer.weight).detach()[0].clone() for part, mixer in mixers.items()}
    finally:
        detach_mixers(source)


# --- fusion -----------------------------------------------------------------------------------------------------------


@dataclass
class FusedModel:
    """A model whose heads are mixed within groups; soft, until `fold` makes the groups heads.

    Attributes:
        model: the source's architecture, trained, with a `HeadMixer` behind each projection.
        plan: its groups.
        losses: a record per step: `step`, `loss` (of language modeling), `fusion`, `worst` part, `margin`, `lambda`.
        summary: what was trained and how; `source_loss`, `soft_loss` and `folded_loss`, and what they were
            `measured_on`, "held-out batches" or "a training batch"; `gap`, and `small_at`, the step at which the fusion
            loss fell below 1e-3 (None: never).
        batches: those on which losses are measured.
    """

    model: Any
    plan: HeadPlan
    losses: list[dict[str, float]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    batches: list[Any] = field(default_factory=list)

    @property
    def _source(self) -> HeadSource:
        return HeadSource(self.model, fused=True)

    @property
    def gap(self) -> float:
        """The largest difference of a head's mixture from the mean of its group; 0 when folding is exact."""
        return max(mixer.gap() for mixer in mixers_of(self._source).values())

    @property
    def operators(self) -> dict[Part, torch.Tensor]:
        """What each group takes of its members' channels, the mean over its heads: [G, g, D] by part."""
        mixers = mixers_of(self._source)
        return {part: mixer.weight.detach().mean(1) for part, mixer in mixers.items()}

    def fold(self, accept_gap: bool = False) -> PreTrainedModel:
        """The folded model: heads of a group become one.

        Args:
            accept_gap: fold although the heads of a group are not equal yet; with a warning that says what it costs.

        Returns:
            `DHAForCausalLM`; of one of this package's models one of the same class.

        Raises:
            DCFormerError: when the heads are not equal: how far off they are, and what loss folding costs.
        """
        folded = fold_model(self._source, self.plan, self.operators)
        if (gap := self.gap) > CLOSED:
            if self.batches:
                soft, hard = evaluate_loss(self.model, self.batches), evaluate_loss(folded, self.batches)
                cost = f"changes the loss from {soft:.4f} to {hard:.4f} on {len(self.batches)} batches"
            else:
                cost = "costs a loss that is not known, as there are no batches (FusedModel.batches)"
            message = f"the operators are not closed: mixtures in a group differ by up to {gap:.3g}, and folding {cost}"
            if not accept_gap:
                raise DCFormerError(f"{message}. Fuse with closing_steps, or fold(accept_gap=True) all the same.")
            warnings.warn(message, stacklevel=2)
        return folded

    def save(self, folder: str | os.PathLike) -> None:
        """Writes a model folder of the source's architecture, and beside it operators, plan and records.

        The folder loads as the source's architecture without the mixtures; `load`, or `dcformer-dha fold`, uses them.
        """
        path = Path(folder)
        state = {name: value for name, value in self.model.state_dict().items() if "_mixer." not in name}
        self.model.save_pretrained(path, state_dict=state)
        mixers = mixers_of(self._source)
        tensors = {f"{kind}.{i}": mixer.weight.detach().cpu().contiguous() for (i, kind), mixer in mixers.items()}
        save_file(tensors, path / OPERATORS, {"format": "pt"})
        self.plan.save(path / "plan.json")
        record = {"summary": self.summary, "losses": self.losses}
        (path / "fusion.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "FusedModel":
        """Reads what `save` wrote.

        Raises:
            DCFormerError: when the folder holds no such model.
        """
        plan, weights, record = load_fused(folder)
        model = load_model(folder, fused=True)
        mixers = attach_mixers(HeadSource(model), {(layer, kind): groups for layer, kind, groups in plan.parts})
        with torch.no_grad():
            for part, mixer in mixers.items():
                mixer.weight.copy_(weights[part])
        return cls(model, plan, record["losses"], record["summary"])


def load_fused(folder: str | os.PathLike) -> tuple[HeadPlan, dict[Part, torch.Tensor], dict[str, Any]]:
    """Plan, mixers' weights [G, g, g, D] by part, and records of a folder that `FusedModel.save` wrote.

    Raises:
        DCFormerError: when one of them is missing or damaged, or does not fit.
    """
    path, otherwise = Path(folder), "Copy the folder again, or fuse again"
    for name in ("plan.json", OPERATORS, "fusion.json"):
        if not (path / name).is_file():
            raise DCFormerError(f"{path} has no {name}: dcformer-dha fuse, or FusedModel.save, writes such a folder.")
    plan = HeadPlan.load(path / "plan.json")
    try:
        tensors = load_file(path / OPERATORS)
    except (SafetensorError, OSError) as error:
        raise DCFormerError(f"{path / OPERATORS} is damaged ({first_line(error)}). {otherwise}.") from error
    weights = {}
    for layer, kind, groups in plan.parts:
        weight = tensors.get(f"{kind}.{layer}")
        shape = (len(groups), len(groups[0]), len(groups[0]), plan.source.head_dim)
        if weight is None or tuple(weight.shape) != shape:
            raise DCFormerError(f"{path}: the operator of layer {layer}, {kind}, is not {list(shape)}: another plan's.")
        weights[layer, kind] = weight
    return plan, weights, _read_record(path / "fusion.json", otherwise, summary=dict, losses=list)


def fuse(
    model: PreTrainedModel,
    plan: HeadPlan | str | os.PathLike,
    batches: Any,
    steps: int = 800,
    *,
    lr: float = 1e-4,
    mixer_lr: float = 1e-2,
    train: str = "all",
    closing_steps: int | None = None,
    stop_at_loss: float | None = None,
    margin_steps: int = MARGIN_STEPS,
    scale: float | None = None,
    held_out: Iterable[Any] = (),
    copy_model: bool = True,
    seed: int = 0,
    batch_size: int = 8,
    accumulation: int = 1,
    checkpoint: str | os.PathLike | None = None,
    save_steps: int = 100,
    on_step: Callable[[int, Any], None] | None = None,
    progress: bool = True,
) -> FusedModel:
    """Trains a model until the heads of each group are equal.

    Args:
        model: the source.
        plan: for it, or its file.
        batches: data: batches, or a data set of rows, as `batch_iterator` describes.
        steps: optimizer steps, closing included.
        lr: peak learning rate of the model's parameters, with 10 % warm-up and a cosine to 10 %.
        mixer_lr: learning rate of the operators and of λ.
        train: "all" parameters of the model, those of "attention", or "none", only the operators.
        closing_steps: the last steps, in which the operators are moved to equality; by default 60, or all where there
            are fewer. 0 leaves them as they are, and `fold` refuses what is not equal.
        stop_at_loss: end when the fusion loss is below, as the paper does at 1e-3; needs `closing_steps=0`.
        margin_steps: steps after which no difference is tolerated.
        scale: of the penalty; by default the number of factors in the operators.
        held_out: batches on which losses are measured before and after; by default the first training batch, and then
            nothing is held out.
        copy_model: leave `model` as it is; False trains it itself, in half the memory. One whose training fails then
            has the parameters of that moment, and no mixtures.
        seed: of the order of rows, and of dropout.
        batch_size: rows of a data set in a batch.
        accumulation: batches of a step.
        checkpoint: folder for the state of the run, from which it continues if it holds one.
        save_steps: steps between states.
        on_step: called after each step with the number of steps taken and the model.
        progress: show a progress bar.

    Returns:
        the soft model. With FSDP only the main process has it; in the others its `model` is None.

    Raises:
        DCFormerError: on invalid arguments, a plan for another source, or a loss that is not finite.
    """
    if train not in TRAINED:
        raise DCFormerError(f"train={train!r} is unknown: expected one of {', '.join(TRAINED)}.")
    if closing_steps is not None and closing_steps > steps:
        raise DCFormerError(f"closing_steps={closing_steps} are more than steps={steps}, of which they are the last.")
    closing_steps = _CLOSING_STEPS if closing_steps is None else closing_steps
    if stop_at_loss is not None and closing_steps:
        raise DCFormerError(
            f"stop_at_loss={stop_at_loss} would end before closing_steps={closing_steps} close: give closing_steps=0."
        )
    if closing_steps < 0 or margin_steps < 1:
        raise DCFormerError(f"closing_steps={closing_steps}, margin_steps={margin_steps}: expected 0 and 1 or more.")
    for name, value in (("scale", scale), ("stop_at_loss", stop_at_loss)):
        if value is not None:
            _check_factor(name, value)
    check_seed(seed)
    source, plan = HeadSource(model), as_plan(plan)
    _check_trainable(model)
    plan.check_source(source.sizes)
    if copy_model:
        source = HeadSource(model := copy.deepcopy(model))
    family, closing_steps = source.family, min(closing_steps, steps)
    held, measured_on = [*held_out], "held-out batches"
    if not held:
        held, measured_on = [next(batch_iterator(batches, batch_size, seed)())], "a training batch"
        if isinstance(batches, Iterator):  # it has given that batch away
            batches = itertools.chain(held, batches)
    source_loss = evaluate_loss(model, held)
    mixers = attach_mixers(source, {(layer, kind): groups for layer, kind, groups in plan.parts})
    chosen = [] if train == "none" else [
        parameter for name, parameter in model.named_parameters()
        if "_mixer." not in name and parameter.requires_grad and (train == "all" or f".{family.attention}." in name)
    ]  # fmt: skip
    entries = sum(mixer.weight.numel() for mixer in mixers.values() if mixer.shape[1] > 1)
    penalty = _Penalty([*mixers.values()], mixer_lr, margin_steps, float(entries if scale is None else scale))
    setup = {
        "plan": plan.to_json(), "lr": lr, "mixer_lr": mixer_lr, "train": train, "closing_steps": closing_steps,
        "stop_at_loss": stop_at_loss, "margin_steps": margin_steps, "scale": penalty.scale,
    }  # fmt: skip
    try:
        with only_trains(model, [*chosen, *(mixer.weight for mixer in mixers.values())]):
            model.train()
            trained, accelerator, losses = train_mixers(
                model, mixers, batches, steps=steps, mixer_lr=mixer_lr, lr=lr, trained=chosen, penalty=penalty,
                closing_steps=closing_steps, stop_at_loss=stop_at_loss, seed=seed, batch_size=batch_size,
                accumulation=accumulation, checkpoint=checkpoint, save_steps=save_steps, on_step=on_step,
                progress=progress, setup=setup,
            )  # fmt: skip
            soft_loss = evaluate_loss(trained, held)
    except BaseException:
        detach_mixers(source)
        raise
    summary = {name: value for name, value in setup.items() if name != "plan"} | {
        "steps": len(losses), "seed": seed, "source_loss": source_loss, "soft_loss": soft_loss,
        "measured_on": measured_on,
        "small_at": next((int(r["step"]) for r in losses if r["fusion"] < SMALL_LOSS), None),
    }  # fmt: skip
    model = _gathered(trained, accelerator, source, plan)
    fused = FusedModel(model, plan, losses, summary, held)
    if model is not None:
        folded = fold_model(HeadSource(model, fused=True), plan, fused.operators)
        summary |= {"gap": fused.gap, "folded_loss": evaluate_loss(folded, held)}
    return fused


def _gathered(trained: Any, accelerator: Any, source: HeadSource, plan: HeadPlan) -> Any:
    """The trained model as a plain one, on the main process; elsewhere None where it was distributed."""
    model = accelerator.unwrap_model(trained)
    if not is_sharded(model):
        return model
    state = accelerator.get_state_dict(trained)
    if not accelerator.is_main_process:
        return None
    plain = type(source.model)._from_config(copy.deepcopy(source.config))
    attach_mixers(HeadSource(plain), {(layer, kind): groups for layer, kind, groups in plan.parts})
    plain.load_state_dict(state, assign=True)
    plain.tie_weights()
    return plain.train(source.model.training)


__all__ = [
    "FusedModel",
    "ascend",
    "batch_iterator",
    "evaluate_loss",
    "fuse",
    "load_fused",
    "margin",
    "theta_lr",
    "train_mixers",
    "train_search",
]
