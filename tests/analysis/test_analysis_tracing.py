"""A trace changes nothing, holds what it says, and takes the memory that it promises."""

import itertools
import weakref

import numpy as np
import pytest
import torch
from analysis_models import PROMPT, random_model
from helpers import randomize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcformer import (
    ComposeTrace,
    DCFormerForQuestionAnswering,
    DCFormerForSequenceClassification,
    DCFormerForTokenClassification,
    DCFormerModel,
    DCPythiaConfig,
    DCPythiaForCausalLM,
    DCViTConfig,
    DCViTForImageClassification,
)
from dcformer.analysis import MAPS, map_diversity, trace, tracing
from dcformer.errors import DCFormerError


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside have taken at a time; each storage counts once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = set()

    def _forget(self, key, size):
        self.now -= size
        self.known.discard(key)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.known:
                    self.known.add(key)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._forget, key, size)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_nothing_changes(dtype):
    model, ids = random_model(dtype, compose_static=True), torch.randint(97, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        expected = model(**inputs, use_cache=False)
    run = trace(model, inputs)
    assert torch.equal(run.logits, expected.logits)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    for layer in run.layers.values():
        assert layer.composed_weights.dtype == compute
        total = layer.head_outputs.double().sum(2)  # [B, T, E]
        # the products of H heads are added in another order, in the model's dtype
        bound = 8 * torch.finfo(dtype).eps * layer.head_outputs.double().abs().sum(2).max()
        assert (total - layer.attention_output.double()).abs().max() <= bound
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_maps_are_those_of_compose_trace(bundled, prompt):
    model, tokenizer = bundled
    low = ComposeTrace()
    with torch.no_grad():
        model(**prompt, compose_trace=low)
    run = trace(model, prompt, tokenizer=tokenizer)
    for number, layer in run.layers.items():
        assert all(torch.equal(getattr(layer, name), getattr(low.layers[number], name)) for name in MAPS)
    assert " ".join(run.tokens[-3:]) == "a kind of" and PROMPT.endswith("a kind of")


@pytest.mark.parametrize("mask", [None, torch.tensor([[0, 0, 1, 1, 1, 1, 1]]), torch.tensor([[1, 1, 1, 1, 1, 0, 0]])])
@pytest.mark.parametrize("given", [{}, {"is_causal": False}, {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}])
@pytest.mark.parametrize("is_causal", [True, False])
def test_visible_keys_are_those_that_have_weights(is_causal, given, mask):
    """Local and global layers, masks, packed documents, and models and calls that look ahead."""
    model, ids = random_model(is_causal=is_causal), torch.randint(97, (1, 7))
    for layer in trace(model, {"input_ids": ids, "attention_mask": mask} | given).layers.values():
        assert torch.equal(layer.visible.expand_as(layer.weights), layer.weights > 0)


def test_residual_stream(bundled, prompt):
    """Each layer begins where the one before ends, and attention's output is what it adds."""
    model, _ = bundled
    run = trace(model, prompt)
    layers = list(run.layers.values())
    assert torch.equal(layers[0].resid_pre, model.model.embed_tokens(prompt["input_ids"]))
    for before, after in itertools.pairwise(layers):
        assert torch.equal(before.resid_post, after.resid_pre)
    middle = layers[2].resid_mid
    block = model.model.layers[2]
    with torch.no_grad():
        assert torch.equal(layers[2].resid_post, middle + block.mlp(block.post_attention_layernorm(middle)))
    parallel = trace(random_model(use_parallel_residual=True), {"input_ids": torch.arange(5)[None]})
    with pytest.raises(DCFormerError, match="attention and MLP are parallel"):
        _ = parallel.layers[0].resid_mid


def test_layers_and_positions():
    """What is kept is what a whole trace has there."""
    model, ids = random_model(), torch.randint(97, (2, 9))
    whole, part = trace(model, ids), trace(model, ids, layers=[-1], positions=[8, 3, -2])
    assert list(part.layers) == [1] and part.positions == [8, 3, 7]
    for name in (*MAPS, "visible"):
        assert torch.equal(getattr(part.layers[1], name), getattr(whole.layers[1], name)[:, :, [8, 3, 7]])
    for name in ("z", "resid_pre", "resid_post", "attention_output"):
        assert torch.equal(getattr(part.layers[1], name), getattr(whole.layers[1], name)[:, [8, 3, 7]])
    assert torch.equal(part.logits, whole.logits[:, [8, 3, 7]])
    assert torch.equal(part.layers[1].post.query.packed, whole.layers[1].post.query.by_head[..., [8, 3, 7]])
    assert part.layer(-1) is part.layers[1]


def test_one_token_can_be_asked_for_twice():
    model, ids = random_model(), torch.randint(97, (2, 1))
    twice = trace(model, ids, positions=[0, -1])
    assert twice.logits.shape[1] == twice.layers[0].weights.shape[2] == len(twice.positions) == 2


@pytest.mark.parametrize(
    ("layers", "positions"),
    [(None, None), ([2], None), (None, [5, 6]), ([0, 3], [1])],
    ids=("all", "1", "rows", "2"),
)
def test_peak_memory_is_as_promised(layers, positions):
    """Maps that are kept, and one layer's working maps; everything else is small at this shape."""
    model = random_model(hidden_size=8, intermediate_size=8, head_dim=2, num_hidden_layers=4, sliding_window=None)
    ids, length = torch.randint(97, (1, 400)), 400
    count, rows = len(layers or range(4)), len(positions or range(length))
    keeps, works = tracing.map_bytes(1, 4, rows, length, count)
    with LiveBytes() as memory:
        run = trace(model, ids, layers, positions)
    kept = sum(getattr(layer, name).untyped_storage().nbytes() for layer in run.layers.values() for name in MAPS)
    assert kept == keeps
    masks = 2 * length * length * 5 + sum(layer.visible.numel() for layer in run.layers.values())
    states = 60 * length * 8 * 4 * 4 + 4 * length * 97
    assert memory.peak <= keeps + works + masks + states
    assert memory.peak >= keeps + 2 * 4 * length**2 * 4  # the measurement sees the maps


def test_too_many_maps_are_refused(monkeypatch):
    model, ids = random_model(), torch.randint(97, (1, 40))
    keeps, works = tracing.map_bytes(1, 4, 40, 40, 2)
    monkeypatch.setattr(tracing, "LIMIT", keeps + works)
    trace(model, ids)
    monkeypatch.setattr(tracing, "LIMIT", keeps + works - 1)
    with pytest.raises(DCFormerError, match=r"2 layers, 1 x 4 heads, 40 queries and 40 keys .* Restrict layers=, pos"):
        trace(model, ids)
    trace(model, ids, layers=[0])
    trace(model, ids, positions=[3])
    monkeypatch.setattr(tracing, "LIMIT", works)
    with pytest.raises(DCFormerError, match=r"0 GB\. Take a smaller batch, or take a shorter text"):
        trace(model, ids, positions=[3], layers=[0])  # nothing that could still be restricted


def test_two_gigabytes_are_refused_before_anything_runs():
    model = random_model(max_position_embeddings=20000)
    with pytest.raises(DCFormerError, match="the limit is 2 GB"):
        trace(model, torch.zeros(1, 20000, dtype=torch.long))
    assert tracing.LIMIT == 2e9


@pytest.mark.parametrize("implementation", ["dcformer_chunked", None])
def test_models_without_maps_are_refused(implementation):
    model = random_model()
    model.set_attn_implementation(implementation)
    with pytest.raises(DCFormerError, match=r"call model.set_attn_implementation\('eager'\)"):
        trace(model, torch.zeros(1, 3, dtype=torch.long))


def test_bad_input():
    model, ids = random_model(), torch.zeros(1, 3, dtype=torch.long)
    for call, message in (
        (lambda: trace(model, ids, layers=[2]), "layer 2 is out of range: there are 2, numbered 0 to 1"),
        (lambda: trace(model, ids, positions=[3]), "position 3 is out of range"),
        (lambda: trace(model, ids, positions=[1.5]), "position 1.5 is not a whole number"),
        (lambda: trace(model, ids[:, :0]), "inputs of 1 sequences of 0 tokens"),
        (lambda: trace(model, {"pixel_values": torch.rand(1, 3, 4, 4)}), "inputs without tokens"),
        (lambda: trace(model, ids, positions=[]), "no position is named: name some, or None for all"),
        (lambda: trace(model, "text"), "inputs of type str: expected what a tokenizer returns"),
        (lambda: trace(model, {"attention_mask": ids}), "inputs without tokens"),
        (lambda: trace(model, {"input_ids": ids, "past_key_values": 1}), "whole texts, without a cache"),
        (lambda: trace(model, {"input_ids": ids, "logits_to_keep": 1}), "logits_to_keep: .* logits of all positions"),
        (lambda: trace(model, {"input_ids": [[1, 2]]}), r"input_ids of type list: .* return_tensors='pt'"),
        (lambda: trace(model, {"input_ids": ids.numpy()}), "input_ids of type ndarray: expected a tensor"),
        (lambda: trace(model, {"input_ids": ids, "attention_mask": [[1] * 3]}), "attention_mask of type list"),
        (lambda: trace(model, ids.float()), r"input_ids of torch.float32: expected token ids, of torch.long"),
        (lambda: trace(torch.nn.Linear(2, 2), ids), "Linear"),
        (lambda: trace("folder", ids), "a model of type str: expected a DCFormer, DCPythia or DCViT model"),
        (lambda: trace(model, ids).layer("0"), "layer '0' is not a whole number of type int"),
    ):
        with pytest.raises(DCFormerError, match=message):
            call()
    for number in ("a", None, float("nan"), 1.0, [1], object()):
        with pytest.raises(DCFormerError, match=r"layer .* is not a whole number of type int"):
            trace(model, ids, layers=[number])
    for part in (model, model.model.layers[1].mlp):  # parts may train alone
        part.train()
        with pytest.raises(DCFormerError, match=r"in training mode, and may compute at random: call model.eval\(\)"):
            trace(model, ids)
        model.eval()


def test_nan_is_named_by_layer():
    model, ids = random_model(), torch.zeros(1, 3, dtype=torch.long)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(DCFormerError, match=r"layer 1: self_attn.k_proj.weight of DCFormerForCausalLM holds NaN"):
        trace(model, ids)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj", "lm_head", "model.embed_tokens", "model.norm"])
def test_nan_that_no_map_shows_is_named(name):
    """What comes after the last attention, or before the first, is named as well."""
    model = random_model()
    with torch.no_grad():
        model.get_submodule(name).weight.view(-1)[0] = float("nan")
    where = name.replace("model.layers.1.", "layer 1: ")
    with pytest.raises(DCFormerError, match=f"{where}.weight of DCFormerForCausalLM holds NaN"):
        trace(model, torch.zeros(1, 3, dtype=torch.long))


def test_nan_of_no_parameter(bundled):
    model = random_model()
    states = torch.full((1, 3, model.config.hidden_size), float("nan"))
    with pytest.raises(DCFormerError, match="hold NaN or infinity, and no parameter does"):
        trace(model, {"inputs_embeds": states})


def test_labels_are_those_of_the_sequence(bundled):
    """Each sequence has its own tokens; a trace of many numbers is shown in a line."""
    model, tokenizer = bundled
    inputs = tokenizer(["Peter owns", "Boris owns"], return_tensors="pt")
    run = trace(model, inputs, tokenizer=tokenizer)
    assert run.labels() == run.tokens == ["Peter", "owns"] and run.labels(1) == run.labels(-1) == ["Boris", "owns"]
    assert run.labels(1, ["a", "b"]) == ["a", "b"] and trace(model, inputs).labels(1) == ["0", "1"]
    assert repr(run) == "AnalysisTrace(positions=[0, 1], length=2, grid=None)"
    with pytest.raises(DCFormerError, match="batch index 2 is out of range"):
        run.labels(2)


def test_texts_of_byte_level_tokens():
    """Spaces and letters of other scripts are shown as such, and half a letter by its name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_of = {piece: number for number, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = {piece: len(bytes_of) + number for number, piece in enumerate(["Ġa", "Ã©"])}
    own = Tokenizer(models.BPE(bytes_of | words, [("Ġ", "a"), ("Ã", "©")]))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own)
    ids = tokenizer("é a\n½")["input_ids"]
    assert tracing.token_texts(tokenizer, ids) == ["é", " a", "\n", "Â", "½"]


def test_every_model_of_the_package(bundled):
    pythia = DCPythiaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        sliding_window=4, attn_implementation="eager",
    )  # fmt: skip
    ids = torch.randint(97, (1, 8))
    run = trace(randomize(DCPythiaForCausalLM(pythia)), ids)
    layer = run.layers[1]
    assert torch.allclose(layer.head_outputs.sum(2) + layer.b_O, layer.attention_output, atol=1e-5)
    for head in (DCFormerForSequenceClassification, DCFormerForTokenClassification, DCFormerForQuestionAnswering):
        config = random_model(pad_token_id=0).config
        assert len(trace(randomize(head(config)), ids, layers=np.arange(1, 2)).layers) == 1
    decoder = trace(randomize(DCFormerModel(random_model().config)), ids)
    assert decoder.logits is None and len(decoder.layers) == 2
    config = DCViTConfig(
        image_size=16, patch_size=4, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_labels=5, attn_implementation="eager",
    )  # fmt: skip
    vision, pixels = randomize(DCViTForImageClassification(config)), torch.randn(2, 3, 16, 16)
    run = trace(vision, pixels)
    with torch.no_grad():
        assert torch.equal(run.logits, vision(pixels).logits)
    with pytest.raises(DCFormerError, match=r"pixel_values are \(1, 8\): expected images"):
        trace(vision, ids)
    assert run.grid == (4, 4) and run.length == 16 and run.layers[0].visible.all()
    assert map_diversity(run, "weights").shape == (2,)


def test_layers_that_the_configuration_leaves_out():
    model, ids = random_model(), torch.randint(97, (1, 5))
    model.config.num_hidden_layers = 1
    with pytest.raises(DCFormerError, match=r"layer 1 was not run: the model has 2 layers, and .*num_hidden_layers=1"):
        trace(model, ids)
    assert list(trace(model, ids, layers=[0]).layers) == [0]
