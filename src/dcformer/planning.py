"""Memory and communication of training a DCFormer on many GPUs: `dcformer-plan`.

Parameters, gradients and optimizer states are computed from the model's shapes. The memory of a training step is
measured: the model runs it on the meta device, without data, under PyTorch's memory tracker. `gathered` and `workspace`
are estimates.
"""

import argparse
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers.modeling_rope_utils import RopeParameters

from .chunked_dcformer import BLOCK_SCORES
from .configuration_dcformer import DCFormerConfig
from .errors import CONFIG_ERRORS, DCFormerError, raise_bug, refused, reports
from .head_systems import HeadSystemsConfig, HeadSystemsForCausalLM
from .head_systems.costs import count_parameters
from .head_systems.registry import system_class
from .heads_dcformer import MAP_FIELDS
from .implementations_dcformer import CHUNKED, FUSED_ATTENTION, TRITON
from .kernels import unsupported_reason
from .kernels.schemas import UNBOUNDED, new_kept
from .modeling_dcformer import DCFormerForCausalLM
from .parallel_dcformer import check_tensor_parallel
from .recipes import check_overrides

FP32, GIB = 4, 1 << 30  # bytes
IMPLEMENTATIONS = (TRITON, CHUNKED, "eager")
# Bytes of state per parameter; AdamW has two moments in float32. (Steps, 4 bytes per tensor, are left out.)
OPTIMIZERS = {"adamw": 8, "adamw_8bit": 2, "sgd_momentum": 4, "sgd": 0}
GPUS = {"h100": 80e9, "h200": 141e9}  # bytes of memory


@dataclass(frozen=True)
class Setup:
    """A training setup: model, hardware and batch.

    Attributes:
        config: the model.
        gpus: total number of GPUs.
        tensor_parallel: GPUs that share a layer; over gpus / tensor_parallel such groups FSDP2 shards parameters.
        batch: sequences per forward pass of a data-parallel rank.
        length: tokens of a sequence.
        accumulation: forward passes per optimizer step.
        dtype: compute dtype; parameters, gradients and optimizer states are in float32.
        optimizer: a name in `OPTIMIZERS`.
        checkpointing: gradient checkpointing of every layer.
        attention: attention implementation.
        memory: bytes of a GPU.

    Raises:
        DCFormerError: on numbers below 1, unknown names, sizes that do not divide, sizes beyond the model's, and models
            beyond the fused kernels.
    """

    config: DCFormerConfig
    gpus: int = 64
    tensor_parallel: int = 1
    batch: int = 1
    length: int = 2048
    accumulation: int = 1
    dtype: torch.dtype = torch.bfloat16
    optimizer: str = "adamw"
    checkpointing: bool = False
    attention: str = TRITON
    memory: float = GPUS["h100"]

    def __post_init__(self) -> None:
        for name in ("gpus", "tensor_parallel", "batch", "length", "accumulation"):
            if getattr(self, name) < 1:
                raise DCFormerError(f"{name}={getattr(self, name)}: expected at least 1")
        if (layers := self.config.num_hidden_layers) < 1:
            raise DCFormerError(f"num_hidden_layers={layers}: expected at least 1")
        if not 0 < self.memory < math.inf:
            raise DCFormerError(f"memory={self.memory:g}: expected the bytes of a GPU, above 0")
        if self.gpus % self.tensor_parallel:
            raise DCFormerError(f"gpus={self.gpus} is not a multiple of tensor_parallel={self.tensor_parallel}")
        if self.optimizer not in OPTIMIZERS:
            raise DCFormerError(f"optimizer={self.optimizer!r}: expected one of {sorted(OPTIMIZERS)}")
        if self.attention not in IMPLEMENTATIONS:
            raise DCFormerError(f"attention={self.attention!r}: expected one of {IMPLEMENTATIONS}")
        if self.attention == TRITON:
            reason = FUSED_ATTENTION[self.attention].unsupported_reason(self.config)
            if reason := reason or unsupported_reason(dropout=self.config.attention_dropout):
                raise DCFormerError(
                    f"attention='dcformer_triton' cannot train this model: {reason}; plan it with "
                    "'dcformer_chunked' or 'eager'"
                )
        if self.length > (limit := self.config.max_position_embeddings):
            raise DCFormerError(f"length={self.length} is above max_position_embeddings={limit}")
        if self.tensor_parallel > 1:
            name = getattr(self.config, "head_system", "plain")
            if not system_class(name).splits_by_heads:
                raise DCFormerError(f"head_system={name!r} has no tensor parallelism: plan it with tensor_parallel=1")
            with refused(ValueError):
                check_tensor_parallel(self.config, self.tensor_parallel)

    @property
    def shards(self) -> int:
        """The number of GPUs over which parameters are sharded."""
        return self.gpus // self.tensor_parallel


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU.

    Attributes:
        parameters, gradients, optimizer: the GPU's shard, in float32.
        gathered: parameters and gradients of the layers that FSDP holds unsharded at a time; an estimate.
        activations: memory held at the end of the forward pass; measured, and with `save_maps` the maps of all layers.
        step: additional memory at the peak of the step (logits, their gradient, intermediate results); measured.
        workspace: memory allocated inside attention's operator; an estimate. With `save_maps` and checkpointing, one
            layer's maps, too.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    step: int
    workspace: int

    @property
    def total(self) -> int:
        """The sum of all parts, as if all peaked at once: an upper bound."""
        return sum(vars(self).values())


# --- memory -----------------------------------------------------------------------------------------------------------


def _build(setup: Setup, layers: int = 1, split_vocabulary: bool = True) -> DCFormerForCausalLM:
    """The first layers as one tensor-parallel GPU holds them, without data: fewer heads, a narrower MLP."""
    config, parts = setup.config, setup.tensor_parallel
    kinds = sorted(set(config.layer_types)) or [None]  # both types among the first two layers, for both masks
    maps = {
        field: [row[: len(row) // parts] for row in rows[:layers]]
        for field in MAP_FIELDS
        if (rows := getattr(config, field)) is not None
    }
    changed = maps | {
        "num_hidden_layers": layers,
        "layer_types": (kinds * layers)[:layers] if config.layer_types else None,
        "num_attention_heads": config.num_attention_heads // parts,
        "num_key_value_heads": 1 if config.head_embeddings else config.num_key_value_heads // parts,
        "head_dim": config.head_dim,
        "compose_groups": max(1, config.compose_groups // parts),
        # multi-gate MLPs stay whole; logits are gathered
        "intermediate_size": config.intermediate_size if config.mlp_gates else -(-config.intermediate_size // parts),
        "vocab_size": -(-config.vocab_size // parts) if split_vocabulary else config.vocab_size,
        "pad_token_id": None,  # it need not be in this part of the vocabulary
    }
    with torch.device("meta"):
        model_class = HeadSystemsForCausalLM if isinstance(config, HeadSystemsConfig) else DCFormerForCausalLM
        return model_class(type(config).from_dict(config.to_dict() | changed))


def measure_step(setup: Setup, layers: int) -> tuple[int, int]:
    """Runs a forward and backward pass on the meta device. Gradients are dropped at once, as under FSDP.

    For the fused kernels the chunked implementation is measured, which holds a little more. (For rows of at most
    `FEW_QUERIES` tokens it holds their maps, too.)

    Returns:
        bytes at the end of the forward pass, without parameters; additional bytes at the peak of the step.
    """
    model = _build(setup, layers, split_vocabulary=False).train()
    model.to(setup.dtype)  # type: ignore[arg-type]  # the library's decorator hides the signature
    model.set_attn_implementation("eager" if setup.attention == "eager" else CHUNKED)
    ids = torch.zeros((setup.batch, setup.length), dtype=torch.long, device="meta")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    tracker = MemTracker()
    tracker.track_external(model, ids)

    def total(when: str) -> int:
        return tracker.get_tracker_snapshot(when)[ids.device]["Total"]

    own = total("current")
    with warnings.catch_warnings(action="ignore"), tracker:  # the tracker warns about arguments that are not tensors
        if setup.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        loss = model(ids, labels=ids, use_cache=False).loss
        kept = total("current")
        loss.backward()
    return kept - own, total("peak") - kept


def workspace_bytes(setup: Setup) -> int:
    """Memory that the backward pass of attention allocates inside its operator: an estimate.

    Kernels: attention maps of a chunk of queries, 3 of B · H · T · n_t numbers, and matrices of each key, H · H / G
    numbers for each stage and for each 64 queries, together at most 256 MiB or 1/64 of the device's memory, whichever
    is more; accumulators of dQ, dK, dV in float32. Chunked: a few blocks of scores in float32, and float32 copies of q,
    k, v and their gradients. Eager attention is not an operator.
    """
    config, parts = setup.config, setup.tensor_parallel
    heads = config.num_attention_heads // parts
    states = FP32 * setup.batch * setup.length * heads * config.head_dim
    if setup.attention == "eager":
        return 0
    if setup.attention == CHUNKED:
        return 8 * FP32 * BLOCK_SCORES + 6 * states
    of_key = 3 * heads * setup.length + (2 + setup.length / 64) * heads * heads / config.compose_groups * parts
    maps = 2 * setup.batch * setup.length * int(of_key)
    return min(maps, max(256 << 20, int(setup.memory) // 64)) + 3 * states


def map_bytes(setup: Setup) -> list[int]:
    """Memory for the maps that each layer keeps for its backward pass."""
    config = setup.config
    if not config.save_maps or setup.attention != TRITON:
        return [0] * config.num_hidden_layers
    shape = (setup.batch, config.num_attention_heads // setup.tensor_parallel, setup.length, 1)
    states = torch.empty(shape, dtype=setup.dtype, device="meta")
    lows: dict[str, int] = {"full_attention": -UNBOUNDED, "sliding_attention": 1 - (config.sliding_window or 1)}
    return [new_kept(states, states, lows[kind], 0).nbytes for kind in config.layer_types or ()]


def gathered_units(setup: Setup) -> tuple[int, int, int]:
    """Number of parameters, on one tensor-parallel GPU, of each unit that accelerate's FSDP2 gathers at once.

    Returns:
        for a layer; the input embedding; the last norm and the output layer (with the embedding, if tied).
    """
    model = _build(setup, _measured_layers(setup)[-1])
    layer = max(sum(p.numel() for p in layer.parameters()) for layer in model.model.layers)
    embedding = 0 if setup.config.tie_word_embeddings else model.model.embed_tokens.weight.numel()
    tail = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("model.layers.")) - embedding
    return layer, embedding, tail


def _measured_layers(setup: Setup) -> tuple[int, ...]:
    """Depths of the models that are measured: two where layers are alike, the model's where head maps differ."""
    config = setup.config
    return (2, 3) if config.key_head_map is None and config.value_head_map is None else (config.num_hidden_layers,)


def memory(setup: Setup) -> Memory:
    """Bytes on the fullest GPU, part by part.

    Where layers are alike, models of two and three layers are extrapolated to all.

    A GPU holds ceil(rows / shards) rows of each parameter, as FSDP2's first rank does. FSDP gathers, in the compute
    dtype, the parameters of two layers (the running one and the next) and one layer's gradients before they are
    reduced, or the embedding's; and the output layer, which stays gathered, with its gradients.
    """

    depths = _measured_layers(setup)

    def of_all(measured: Sequence[int]) -> int:
        if len(measured) == 1:
            return measured[0]
        two, three = measured
        return two + (setup.config.num_hidden_layers - 2) * (three - two)

    def rows(layers: int) -> int:
        shapes = [parameter.shape for parameter in _build(setup, layers).parameters()]
        return sum(-(-shape[0] // setup.shards) * math.prod(shape[1:]) for shape in shapes)

    own = of_all([rows(layers) for layers in depths])
    layer, embedding, tail = gathered_units(setup)
    gathered = setup.dtype.itemsize * (max(3 * layer, 2 * embedding) + 2 * tail) if setup.shards > 1 else 0
    kept, steps = zip(*(measure_step(setup, layers) for layers in depths), strict=True)
    state = OPTIMIZERS[setup.optimizer] * own
    maps, workspace = map_bytes(setup), workspace_bytes(setup)
    activations = of_all(kept) + (0 if setup.checkpointing else sum(maps))
    workspace += max(maps, default=0) if setup.checkpointing else 0
    return Memory(FP32 * own, FP32 * own, state, gathered, activations, steps[-1], workspace)


# --- communication ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in a step. `sent`: bytes that a GPU sends in ring algorithms, (n-1)/n of the data; twice
    that for an all-reduce."""

    kind: str
    group: str
    count: int
    sent: float


def collectives(setup: Setup) -> list[Collective]:
    """The collectives of a step of `accumulation` forward and backward passes.

    FSDP2, over n GPUs: the parameters of each layer and of the input embedding are gathered for the forward and again
    for the backward pass, those of the output layer once; gradients are reduced and scattered once. Tensor parallelism,
    over t GPUs, on hidden states [B, T, E]: 2 all-reduces per layer and 1 for the embedding in the forward pass, and as
    many in the backward pass (for the inputs of attention, of the MLP and of the output layer). Logits are gathered
    once. With checkpointing, layers run forward twice. Gradients of QK-norm scales (D numbers) are
    reduced, too, and with `head_embeddings` those of the three seeds (D·E numbers, and D of a bias), which are whole.
    """
    config, n, t, width, times = (
        setup.config, setup.shards, setup.tensor_parallel, setup.dtype.itemsize, setup.accumulation
    )  # fmt: skip
    layers, tokens = config.num_hidden_layers, setup.batch * setup.length
    found = []
    if n > 1:
        layer, embedding, tail = gathered_units(setup)
        blocks, twice = layers + bool(embedding), layers * layer + embedding
        ring = times * width * (n - 1) / n
        found += [
            Collective("all-gather", "FSDP", times * (2 * blocks + 1), ring * (2 * twice + tail)),
            Collective("reduce-scatter", "FSDP", times * (blocks + 1), ring * (twice + tail)),
        ]
    if t > 1:
        inputs = (1 + (not config.mlp_gates)) * layers
        count = times * (inputs * (2 + setup.checkpointing) + 2)
        each = 2 * (t - 1) / t * tokens * config.hidden_size * width
        found.append(Collective("all-reduce", "tensor parallel", count, count * each))
        if config.qk_norm:
            small = times * 2 * layers
            found.append(Collective("all-reduce", "QK-norm", small, small * 2 * (t - 1) / t * config.head_dim * FP32))
        if config.head_embeddings is not None:
            numbers = 3 * layers * config.head_dim * (config.hidden_size + config.attention_bias)
            small = times * 3 * layers * (1 + config.attention_bias)
            found.append(Collective("all-reduce", "seeds", small, times * 2 * (t - 1) / t * numbers * FP32))
        logits = tokens * config.vocab_size * width
        found.append(Collective("all-gather", "tensor parallel", times, times * (t - 1) / t * logits))
    return found


# --- command ----------------------------------------------------------------------------------------------------------


def report(setup: Setup, title: str) -> str:
    """Memory and communication, formatted in Markdown."""
    parts, n, t = memory(setup), setup.shards, setup.tensor_parallel
    where = f"{setup.gpus} GPUs" + (f", {t} share a layer and {n} parameters" if t > 1 else " that share parameters")
    batch = setup.batch * setup.accumulation * n
    lines = [
        f"{title}: {count_parameters(setup.config):,} parameters, {where}; {batch} sequences of {setup.length} tokens "
        f"per step ({batch * setup.length / 1e6:.2f}M tokens); {setup.attention}"
        + (", gradient checkpointing" if setup.checkpointing else ""),
        "",
        "| memory per GPU | GiB |",
        "|---|---|",
        *(f"| {name} | {size / GIB:.2f} |" for name, size in vars(parts).items()),
        f"| **total** of {setup.memory / GIB:.1f} | **{parts.total / GIB:.2f}**"
        + (" |" if parts.total <= 0.92 * setup.memory else " does not fit |"),
        "",
        "| collectives per step | group | number | GB sent per GPU |",
        "|---|---|---|---|",
        *(f"| {c.kind} | {c.group} | {c.count} | {c.sent / 1e9:.2f} |" for c in collectives(setup)),
    ]
    return "\n".join(lines)


def configuration(preset: str, items: Sequence[str]) -> DCFormerConfig:
    """The configuration of a published size, with some fields changed.

    Args:
        preset: a name in `PRESETS`.
        items: "FIELD=VALUE", with values in JSON or as plain text: `compose_rank=1`, `layer_pattern=LGLL`,
            `rope_theta=5e5`.

    Raises:
        DCFormerError: on a malformed item, an unknown field, or an invalid value.
    """
    values = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not value:
            raise DCFormerError(f"--set {item}: expected FIELD=VALUE, such as num_hidden_layers=16")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    try:
        config = DCFormerConfig.from_preset(preset, **values)
        check_overrides(config, values)
        if unknown := config.rope_parameters.keys() - RopeParameters.__annotations__.keys():
            names = ", ".join(sorted(unknown))
            raise DCFormerError(f"rope_parameters has unknown keys, {names}: expected rope_type, rope_theta, ...")
    except CONFIG_ERRORS as error:
        raise_bug(error)
        raise DCFormerError(f"--set {' '.join(items)}: {' '.join(str(error).split())}") from error
    return config


@reports
def run(options: argparse.Namespace) -> int:
    """Prints a plan.

    Args:
        options: from the command line.

    Returns:
        0, or 1 on input that cannot be planned; then it prints one line, the reason.
    """
    if options.memory is not None and not 0 < options.memory < math.inf:
        raise DCFormerError(f"--memory {options.memory:g}: expected the GB of a GPU, above 0")
    config = configuration(options.preset, options.set)
    setup = Setup(
        config, options.gpus, options.tensor_parallel, options.batch, options.length, options.accumulation,
        getattr(torch, options.dtype), options.optimizer, options.checkpointing, options.attention,
        GPUS[options.gpu] if options.memory is None else options.memory * 1e9,
    )  # fmt: skip
    print(report(setup, " ".join([options.preset, *options.set])))
    return 0


if __name__ == "__main__":
    from dcformer_commands.plan import main

    raise SystemExit(main())
