"""Small models, configurations, paths and documented commands for tests."""

import itertools
import logging
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Trainer, TrainingArguments

from dcformer import DCFormerConfig

REPOSITORY = Path(__file__).resolve().parent.parent
FIXTURES = REPOSITORY / "tests" / "fixtures"
AUTHORS_WEIGHTS = ("pytorch_model.bin", "model.safetensors")
SWITCHES = (
    "compose_pre",
    "compose_post",
    "compose_query",
    "compose_key",
    "compose_projection",
    "compose_gate",
    "compose_static",
)
PLAIN = {name: False for name in ("compose_pre", "compose_post", "compose_query", "compose_key", "compose_static")}


def run_source(*arguments: str, interpreted: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs this Python on the source tree, in a process of its own: Triton decides on import whether it interprets."""
    path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": path} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def as_trained_here(train: Callable[[dict, str], dict], wanted: list[dict], workers: int) -> Iterator[dict]:
    """In place of `study.as_trained`: one run after the other in this process, without the imports of workers.

    What is sent to a worker has to be pickled, and is here, too.
    """
    threads = torch.get_num_threads()  # a run sets them, for its worker
    with tempfile.TemporaryDirectory() as folder:
        for settings in wanted:
            call, given = pickle.loads(pickle.dumps((train, settings)))
            try:
                run = call(given, folder)
            finally:
                torch.set_num_threads(threads)
            yield pickle.loads(pickle.dumps(run))


def hear(monkeypatch, *loggers: logging.Logger) -> None:
    """Lets pytest's `caplog` have what these loggers, of the package or of Transformers, say."""
    for logger in (*loggers, logging.getLogger("transformers"), logging.getLogger("dcformer")):
        monkeypatch.setattr(logger, "propagate", True, raising=False)


def describes_a_model(switches: dict[str, bool]) -> bool:
    """Whether a combination of switches is accepted: something to compose, something to compose it with, or nothing."""
    stage = switches["compose_pre"] or switches["compose_post"]
    dynamic = switches["compose_query"] or switches["compose_key"]
    if not stage:
        return not dynamic and not switches["compose_static"]
    if dynamic:
        return switches["compose_projection"] or switches["compose_gate"]
    return switches["compose_static"]


ALL_SWITCHES = [
    dict(zip(SWITCHES, values, strict=True)) for values in itertools.product((False, True), repeat=len(SWITCHES))
]
VALID_SWITCHES = [switches for switches in ALL_SWITCHES if describes_a_model(switches)]


def documented_commands(*pages: Path) -> list[list[str]]:
    """The commands of the bash blocks of pages, as lists of words, without comments."""
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def documented_rows(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading of docs/configuration.md."""
    text = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    lines = text.split(f"\n## {heading}\n", 1)[1].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[first + 2 :])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def authors_folder(folder: Path, weights: str = "pytorch_model.bin") -> Path:
    """Makes `folder` a hub folder: fixture B1, its tensors in a file named as one of `AUTHORS_WEIGHTS`."""
    source = FIXTURES / "B1"
    folder.mkdir(parents=True)
    shutil.copy(source / "config.json", folder)
    if weights == "pytorch_model.bin":
        shutil.copy(source / weights, folder)
    else:  # without merged copies, and without the identity in place of static projections
        state = torch.load(source / "pytorch_model.bin", weights_only=True)
        merged = (".dw_m", ".qkw_m", ".pre_proj.w", ".post_proj.w")
        kept = {name: tensor for name, tensor in state.items() if not name.endswith(merged)}
        save_file(kept, folder / weights, {"format": "pt"})
    return folder


def tiny_config(**overrides) -> DCFormerConfig:
    """A model small enough for float64 on a CPU, with both kinds of layers and grouped-query attention."""
    fields = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 8,
        "max_position_embeddings": 128,
    }
    return DCFormerConfig(**(fields | overrides))


class Logits(torch.nn.Module):
    """A model's logits [B, T, V] of ids [B, T], and perhaps a mask of tokens [B, T], without a cache: tensors alone, as
    tracing and exporting want them."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.model(ids, mask, use_cache=False).logits


def randomize(model: torch.nn.Module, scale: float = 0.3) -> torch.nn.Module:
    """Moves every parameter well away from its initialization, where composition hardly does anything."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.add_(noise.to(parameter.dtype) * (scale / max(1, parameter.shape[-1]) ** 0.5))
    return model.eval()


def kept_bytes(model: torch.nn.Module, call: Callable[[], Any]) -> int:
    """Bytes of all storages, a model's parameters and buffers aside, that autograd keeps in a call."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(storage.nbytes() for storage in kept.values())


def fields_of(config: DCFormerConfig) -> dict:
    """What a configuration says, without where it was loaded from."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def trainer_of(model: torch.nn.Module, rows: list, folder: Path, **options: Any) -> Trainer:
    """`Trainer` that takes one step with a rate of 0, on the CPU, and saves nothing."""
    arguments = TrainingArguments(
        str(folder), max_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, learning_rate=0.0, logging_steps=1, **options,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=rows)
