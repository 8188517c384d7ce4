"""The setup of a run, recorded in its checkpoints: a run that continued with another setup would be another run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from ..configuration_dcformer import DCFormerConfig
from ..errors import DCFormerError

# Arguments that do not change the resulting parameters, up to rounding: where results go, when the run evaluates and
# saves, how fast and in how much memory it computes. Its length may change too: that is how a run is extended.
_FREE_PREFIXES = (
    *("activation_checkpointing", "gradient_checkpointing"),  # the first is the second's name since Transformers 5.23
    *("ddp_", "hub_", "log_", "logging_", "save_", "torch_", "trackio_"),
)
_FREE = {
    *("output_dir", "resume_from_checkpoint", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
    *("max_steps", "num_train_epochs", "early_stopping_patience", "load_best_model_at_end"),
    *("metric_for_best_model", "greater_is_better", "per_device_eval_batch_size", "prediction_loss_only"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps"),
    *("eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics", "include_for_metrics"),
    *("bf16_full_eval", "fp16_full_eval", "do_train", "do_eval", "do_predict"),
    *("push_to_hub", "report_to", "run_name", "project", "disable_tqdm", "debug", "skip_memory_metrics"),
    *("include_num_input_tokens_seen", "full_determinism", "dataset_num_proc", "trust_remote_code"),
    *("activation_offloading", "use_cache", "use_cpu", "attn_implementation"),
    *("local_rank", "fsdp", "fsdp_config", "deepspeed", "parallelism_config"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
    *("preset", "recipe", "scale", "devices", "config_overrides"),  # what they make is compared instead
}
_FREE_CONFIG = {"architectures", "dtype", "save_maps", "transformers_version", "use_cache"}
_PATHS = {"model_name_or_path", "tokenizer", "data", "eval_data", "chat_template_path"}
_ABSENT = object()


def setup_of(config: DCFormerConfig, processes: int, *arguments: Any) -> dict[str, Any]:
    """Everything that affects the parameters that a run produces.

    Args:
        config: of the model.
        processes: the number of training processes.
        arguments: the dataclasses parsed from the command line.

    Returns:
        name -> value, as in JSON. Includes the adapters' fields only if adapters are used.
    """
    setup: dict[str, Any] = {"processes": processes}
    for part in arguments:
        fields = part.to_dict() if hasattr(part, "to_dict") else dict(vars(part))
        if not fields.get("use_peft", True):
            fields = {name: value for name, value in fields.items() if not name.startswith(("lora_", "use_"))}
            fields["use_peft"] = False
        setup |= {
            name: value
            for name, value in fields.items()
            if name not in _FREE and not name.startswith(("_", *_FREE_PREFIXES))
        }
    workers = max((getattr(part, "dataloader_num_workers", 0) for part in arguments), default=0)
    if setup.get("streaming") and workers > 1:  # which give the rows of a stream's files in turn
        setup["dataloader_num_workers"] = workers
    fields = {name: value for name, value in config.to_dict().items() if name not in _FREE_CONFIG and name[0] != "_"}
    setup |= {f"config.{name}": value for name, value in fields.items()}
    return json.loads(json.dumps(setup, sort_keys=True, default=str))


def check_setup(checkpoint: str, setup: Mapping[str, Any]) -> None:
    """Refuses to continue with a setup that differs from the checkpoint's.

    Args:
        checkpoint: folder of a complete checkpoint.
        setup: from `setup_of`.

    Raises:
        DCFormerError: naming every value that differs, or when the checkpoint holds no setup.
    """
    saved = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    for name in ("stateful_callbacks", SetupRecord.__name__, "args", "setup"):
        saved = saved.get(name) if isinstance(saved, dict) else None
    if not isinstance(saved, dict):
        raise DCFormerError(
            f"{checkpoint} holds no record of its setup: another program or an older version wrote it. Start a new run "
            "with another --output_dir"
        )
    names = [*saved, *(name for name in setup if name not in saved)]
    differing = [
        f"{name} is {_shown(saved, name)} in the checkpoint and {_shown(setup, name)} now"
        for name in names
        if not _same(name, saved.get(name, _ABSENT), setup.get(name, _ABSENT))
    ]
    if differing:
        raise DCFormerError(
            f"{checkpoint} is of another run: {'; '.join(differing)}. Give the values of the checkpoint to continue, "
            "or start a new run with another --output_dir (docs/training.md says what may change)"
        )


def _same(name: str, saved: Any, now: Any) -> bool:
    if name in _PATHS and isinstance(saved, str) and isinstance(now, str):
        return saved == now or Path(saved).resolve() == Path(now).resolve()
    return saved == now


def _shown(setup: Mapping[str, Any], name: str) -> str:
    return json.dumps(setup[name]) if name in setup else "absent"


class SetupRecord(TrainerCallback, ExportableState):
    """Records the setup in the state of every checkpoint, the last file that the trainer writes.

    Args:
        setup: from `setup_of`.
    """

    def __init__(self, setup: dict[str, Any]):
        self.setup = setup

    def state(self) -> dict:
        return {"args": {"setup": self.setup}, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Without this, a resumed trainer would log, evaluate and save at the checkpoint's intervals."""
        state.compute_steps(args, state.max_steps)


__all__ = ["SetupRecord", "check_setup", "setup_of"]
