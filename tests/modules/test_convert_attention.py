"""Models of Transformers whose heads are composed, against what they were."""

import copy
import gc
import json
import pickle
import threading
import warnings
import weakref

import pytest
import torch
import transformers as t
import yaml
from helpers import randomize, tiny_config
from safetensors.torch import load_file, save_file
from tiny_models import IMAGE, KINDS, SEQ2SEQ, TEXT, ids, make, noise, text
from torch import nn
from torch.nn.utils import prune
from transformers.models.bert.modeling_bert import BertCrossAttention, BertSelfAttention
from transformers.models.mllama import MllamaTextConfig

import dcformer
from dcformer.cache_dcformer import CACHE_NAME
from dcformer.errors import DCFormerError
from dcformer.modules import (
    convert,
    convert_attention,
    from_pretrained_converted,
    interface,
    load_compose,
    save_compose,
)
from dcformer.modules.dcmha import make_generators
from dcformer.modules.finding import _is_cross
from dcformer.modules.interface import IMPLEMENTATIONS
from dcformer.modules.saving import from_pretrained_any

TOLERANCE = 1e-6  # the specification's, in float32
SIDES = ("compose", "compose_query", "compose_key")


def generators(model):
    """Every `DCFormerCompose` of a converted model, by its path."""
    return {path: module for path, module in model.named_modules() if path.rpartition(".")[2] in SIDES}


def stir(model, scale=1.0):
    """Moves composition, and nothing else, well away from where it does nothing."""
    for module in generators(model).values():
        randomize(module, scale)
    return model


def partly(name):
    """SigLIP pools with PyTorch's own attention, which stays."""
    return {"allow_partial": name.startswith("siglip")}


def converted(name, layers=2, **options):
    return stir(convert_attention(make(name, layers), **partly(name), **options))


def logits(model, inputs=None, name=None):
    """The first output, of the tokens that are not padding."""
    inputs = KINDS[name].inputs() if inputs is None else inputs
    output = model(**inputs)[0]
    if "attention_mask" in inputs and output.shape[:2] == inputs["attention_mask"].shape:
        output = output[inputs["attention_mask"].bool()]
    return output


# --- every kind of model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_without_composition_it_is_the_model(name):
    model = make(name)
    expected = logits(model, name=name)
    convert_attention(model, **partly(name))
    assert len(generators(model)) == KINDS[name].generators
    for implementation in IMPLEMENTATIONS:
        if implementation == "dcmha_chunked" and name in ("swin", "beit", "t5"):  # they train a bias of the scores
            continue
        model.set_attn_implementation(implementation)
        torch.testing.assert_close(logits(model, name=name), expected, rtol=0, atol=TOLERANCE)
    stir(model)
    assert (logits(model, name=name) - expected).abs().max() > 1e-4


@pytest.mark.parametrize("name", KINDS)
def test_composition_learns_with_all_else_frozen(name):
    """Every generator gets a gradient in the first step; ten lower the loss; nothing else has changed."""
    model = make(name)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    before = {path: p.clone() for path, p in model.named_parameters()}
    convert_attention(model, compose_static=True, **partly(name))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.03)
    target = torch.randn_like(logits(model, name=name).detach())
    losses = []
    for step in range(11):
        loss = (logits(model, name=name) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            for path, module in generators(model).items():
                for tensor, parameter in module.named_parameters():
                    reached = tensor != "dw1_proj.weight"  # its gradient goes through what is zero at first
                    assert bool(parameter.grad.any()) == reached, f"{path}.{tensor}"
        optimizer.step()
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, before[path]) for path, p in model.named_parameters() if path in before)


@pytest.mark.parametrize("name", KINDS)
def test_saved_and_loaded(name, tmp_path):
    kind, model = KINDS[name], converted(name, compose_rank=3)
    expected = logits(model, name=name)
    model.save_pretrained(tmp_path / "model")
    assert "from_pretrained_converted" in (tmp_path / "model" / "README.md").read_text()
    loaded = from_pretrained_converted(tmp_path / "model", kind.auto)
    assert type(loaded).__name__ == type(model).__name__ and loaded.config.dcmha == model.config.dcmha
    torch.testing.assert_close(logits(loaded.eval(), name=name), expected, rtol=0, atol=0)
    save_compose(model, tmp_path / "compose.safetensors")
    again = load_compose(make(name), tmp_path / "compose.safetensors")
    torch.testing.assert_close(logits(again, name=name), expected, rtol=0, atol=0)
    assert set(load_file(tmp_path / "compose.safetensors")) == set(again.state_dict()) - set(make(name).state_dict())


@pytest.mark.parametrize("name", KINDS)
def test_chunked_is_eager(name):
    model = converted(name)
    expected = logits(model, name=name)
    model.set_attn_implementation("dcmha_chunked")
    if name in ("swin", "beit", "t5"):
        with torch.no_grad():  # a bias of the scores that is not trained is any other mask
            for path, parameter in model.named_parameters():
                parameter.requires_grad_("relative" not in path)
    torch.testing.assert_close(logits(model, name=name), expected, rtol=0, atol=1e-5)  # float32, scores of size 10


# --- what may happen to a model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "siglip", "llama"])
def test_copies(name):
    """A copy has its own composition, and saves itself."""
    model = converted(name)
    expected = logits(model, name=name)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(logits(made, name=name), expected, rtol=0, atol=0)
        stir(made)
        assert not torch.allclose(logits(made, name=name), expected)
        assert made.save_pretrained.args == (made,)
    torch.testing.assert_close(logits(model, name=name), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["bert", "siglip"])
def test_threads(name):
    """One model in four threads, on inputs of their own: the weights of none are used by another."""
    model, found = converted(name), {}
    inputs = [KINDS[name].inputs() for _ in range(4)]
    for seed, one in enumerate(inputs):
        one["input_ids"] = ids(seed=seed)
    barrier = threading.Barrier(4)

    def run(place):
        with torch.no_grad():
            for _ in range(10):
                barrier.wait()
                found[place] = logits(model, inputs[place])

    expected = [logits(model, one) for one in inputs]
    threads = [threading.Thread(target=run, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, one in enumerate(expected):
        torch.testing.assert_close(found[place], one, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["vit", "bert", "siglip"])
def test_gradient_checkpointing_changes_nothing(name):
    model, grads = converted(name).train(), []
    for is_on in (False, True):
        if is_on:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        logits(model, name=name).square().sum().backward()
        grads.append({path: p.grad for path, p in model.named_parameters() if p.grad is not None})
    assert set(grads[0]) == set(grads[1]) and any(".compose.qkw" in path for path in grads[0])
    for path, grad in grads[0].items():
        torch.testing.assert_close(grads[1][path], grad, rtol=0, atol=0, msg=path)


@pytest.mark.parametrize("name", ["vit", "bert", "siglip, vision"])
def test_compiles(name):
    """In one graph, forward and backward."""
    model, inputs = converted(name, layers=1), KINDS[name].inputs()
    expected = logits(model, inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, inputs), expected, rtol=0, atol=TOLERANCE)
    logits(compiled, inputs).square().sum().backward()
    assert all(p.grad.any() for module in generators(model).values() for p in module.parameters())


def test_beside_lora(tmp_path):
    """PEFT trains and saves its adapters and, named in `modules_to_save`, the composition."""
    peft = pytest.importorskip("peft", reason='peft is not installed: pip install "dcformer[train]"')
    options = {"target_modules": ["query", "value"], "modules_to_save": ["compose"], "init_lora_weights": False}
    model = peft.get_peft_model(convert_attention(make("bert")), peft.LoraConfig(**options))
    trained = {path for path, p in model.named_parameters() if p.requires_grad}
    assert {"compose" in path for path in trained} == {True, False}
    assert all("lora_" in path or "modules_to_save" in path for path in trained)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.03)
    for _ in range(3):
        loss = logits(model, text()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(p.grad.any() for path, p in model.named_parameters() if path in trained)
    expected = logits(model.eval(), text())
    with pytest.raises(DCFormerError, match="is PEFT's to save"):
        save_compose(model, tmp_path / "compose.safetensors")
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(convert_attention(make("bert")), tmp_path)
    torch.testing.assert_close(logits(loaded.eval(), text()), expected, rtol=0, atol=0)


def test_adapters_may_come_first(tmp_path):
    peft = pytest.importorskip("peft", reason='peft is not installed: pip install "dcformer[train]"')
    model = peft.get_peft_model(make("bert"), peft.LoraConfig(target_modules=["query", "value"]))
    expected = logits(model, text())
    torch.testing.assert_close(logits(convert_attention(model), text()), expected, rtol=0, atol=TOLERANCE)
    logits(stir(model), text()).square().sum().backward()
    trained = [path for path, p in model.named_parameters() if p.grad is not None]
    assert any("lora_B" in path for path in trained) and any("compose" in path for path in trained)
    with pytest.warns(UserWarning, match="the adapters alone, and not the composition: save_compose"):
        model.save_pretrained(tmp_path / "adapter")
    save_compose(model, tmp_path / "compose.safetensors")
    plain = load_compose(make("bert"), tmp_path / "compose.safetensors")
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(loaded, text()), logits(model.eval(), text()), rtol=0, atol=1e-6)


def test_the_composition_of_a_compiled_model_is_that_of_the_model(tmp_path):
    model = converted("bert")
    save_compose(torch.compile(model, backend="eager"), tmp_path / "compose.safetensors")
    loaded = load_compose(make("bert"), tmp_path / "compose.safetensors")
    torch.testing.assert_close(logits(loaded, text()), logits(model, text()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("wrap", [nn.Sequential, lambda model: torch.compile(model, backend="eager")])
def test_a_model_is_converted_inside_what_holds_it(wrap):
    model = make("bert")
    with pytest.raises(DCFormerError, match=r"takes a model of Transformers, not (Sequential|OptimizedModule)"):
        convert_attention(wrap(model))
    assert not any("compose" in name for name, _ in model.named_modules())
    convert_attention(model)


def test_trainer(tmp_path):
    """The library's trainer, original weights frozen; its checkpoint is a folder that loads."""
    pytest.importorskip("accelerate", reason='accelerate is not installed: pip install "dcformer[train]"')
    model = make("bert")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    convert_attention(model)
    row = {"input_ids": ids()[0], "labels": ids(seed=1)[0]}
    arguments = t.TrainingArguments(
        str(tmp_path), max_steps=10, learning_rate=0.05, report_to="none", use_cpu=True, logging_steps=1,
        lr_scheduler_type="constant", disable_tqdm=True, per_device_train_batch_size=2,
    )  # fmt: skip
    trainer = t.Trainer(model, arguments, train_dataset=[row] * 20)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    trainer.save_model(str(tmp_path / "last"))
    loaded = from_pretrained_converted(tmp_path / "last", t.AutoModelForMaskedLM)
    torch.testing.assert_close(logits(loaded.eval(), text()), logits(model.eval(), text()), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if "attention_mask" in kind.inputs()])
def test_rows_that_see_nothing(name):
    """One whole sequence is padding: its weights are zeros, and every gradient is finite, in both implementations."""
    model, inputs = converted(name), KINDS[name].inputs()
    inputs["attention_mask"][1] = 0
    output = model(**inputs, output_attentions=True)
    fields = ("attentions", "encoder_attentions", *["cross_attentions"] * (name in ("bart", "t5")))
    maps = [one for field in fields for one in output.get(field) or ()]
    assert maps or name in ("clip", "siglip")  # these return those of their parts
    assert all(not one[1].any() and one[0].any() for one in maps)
    for implementation in IMPLEMENTATIONS:
        if implementation == "dcmha_chunked" and name == "t5":  # trains a bias of the scores
            continue
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(**inputs)[0].square().sum().backward()
        found = {path: p.grad for path, p in model.named_parameters() if p.grad is not None}
        assert all(grad.isfinite().all() for grad in found.values())
        assert all(found[path].any() for path in found if path.endswith("qkw"))


def test_low_precision():
    """The generators take a model's dtype; autocast and bfloat16 are within bfloat16's rounding of float32."""
    model = converted("bert")
    exact = logits(model, text())
    error = (logits(make("bert").bfloat16(), text()) - logits(make("bert"), text())).abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        assert (logits(model, text()) - exact).abs().max() <= 2 * error
    low = model.bfloat16()
    assert {p.dtype for module in generators(low).values() for p in module.parameters()} == {torch.bfloat16}
    assert (logits(low, text()) - exact).abs().max() <= 2 * error


def test_attentions_are_the_composed_weights():
    model = converted("bert")
    maps = model(**text(), output_attentions=True).attentions
    assert len(maps) == 2 and maps[0].shape == (2, 2, 9, 9) and (maps[0].sum(-1) - 1).abs().max() > 1e-3
    model.set_attn_implementation("dcmha_chunked")
    with pytest.raises(ValueError, match=r"output_attentions=True.*'dcmha_chunked' never holds.*\('dcmha'\)"):
        model(**text(), output_attentions=True)


# --- generation -------------------------------------------------------------------------------------------------------


def greedy(model, **options):
    return model.generate(
        max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0, **({"input_ids": ids()} | options)
    )


def test_generation_with_a_cache():
    """Without key-wise weights a cached step is like any other; with them it is refused."""
    model = converted("llama", compose_key=False)
    for inputs in ({}, {"attention_mask": torch.cat([torch.zeros(2, 3), torch.ones(2, 6)], 1).long()}):
        expected = greedy(model, use_cache=False, **inputs)
        assert torch.equal(greedy(model, **inputs), expected)
        assert len(expected[0].unique()) > 3
    model = converted("llama")
    assert greedy(model, use_cache=False).shape == (2, 21)
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn: composition weights of 1 tokens, but .* over 10.*False"
    ):
        greedy(model)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_generation_of_encoder_decoders(name):
    """Key-wise weights of the encoder's states are computed once for a generation, and anew for the next."""
    model = converted(name, compose_key="uncached")
    cross = [module for path, module in generators(model).items() if path.endswith("compose_key")]
    selves = [module for path, module in generators(model).items() if "decoder" in path and path.endswith("compose")]
    assert len(cross) == 1 and selves and all(("pre", "key") not in module.generators for module in selves)
    calls = []
    cross[0].register_forward_hook(lambda *_: calls.append(1))
    for options in ({}, {"num_beams": 3}, {"input_ids": ids(seed=7)}):
        calls.clear()
        expected = greedy(model, use_cache=False, **options)
        assert len(calls) == 12
        calls.clear()
        assert torch.equal(greedy(model, **options), expected)
        assert len(calls) == 1


@torch.no_grad()
def test_a_cache_begun_anew_has_weights_of_the_new_states():
    model = converted("bart", compose_key="uncached")
    decoder, cache = model.model.decoder, t.EncoderDecoderCache(t.DynamicCache(), t.DynamicCache())
    inputs = {"input_ids": ids(), "encoder_hidden_states": noise(2, 4, 16)}
    decoder(**inputs, past_key_values=cache)
    inputs["encoder_hidden_states"] = noise(2, 8, 16)[:, 4:]
    expected = decoder(**inputs, use_cache=False)[0]
    cache.self_attention_cache, cache.cross_attention_cache, cache.is_updated = t.DynamicCache(), t.DynamicCache(), {}
    torch.testing.assert_close(decoder(**inputs, past_key_values=cache)[0], expected)


@torch.no_grad()
def test_encoder_states_are_not_kept_by_a_cache():
    """They are freed when the model's caller leaves them, and key-wise weights when the cache is left or reset."""
    model = converted("bart", compose_key="uncached")
    made = []
    (generator,) = [module for path, module in generators(model).items() if path.endswith("compose_key")]
    generator.register_forward_hook(lambda *call: made.extend(weakref.ref(w.packed) for w in call[-1][0].values()))

    def alive(references):
        gc.collect()
        return [reference() is not None for reference in references]

    def fill(model):
        cache = t.EncoderDecoderCache(t.DynamicCache(), t.DynamicCache())
        states = noise(2, 4, 16)
        model.model.decoder(input_ids=ids(), encoder_hidden_states=states, past_key_values=cache)
        return cache, weakref.ref(states)

    cache, states = fill(model)
    assert states() is None and alive(made) == [True, True]  # of pre and post
    cache.reset()
    assert alive(made) == [False, False]
    fresh = noise(2, 4, 16)
    expected = model.model.decoder(input_ids=ids(), encoder_hidden_states=fresh, use_cache=False)[0]
    found = model.model.decoder(input_ids=ids(), encoder_hidden_states=fresh, past_key_values=cache)[0]
    torch.testing.assert_close(found, expected)
    assert alive(made) == [False, False, False, False, True, True]
    del cache
    assert not any(alive(made))


CHANGES = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "copy": lambda cache: None,
    "pickle": lambda cache: None,
}
ROWS = {"reorder": [1, 0], "repeat": [0, 0, 1, 1], "select": [1]}


def changed(cache, change):
    CHANGES[change](cache)
    if change == "pickle":
        return pickle.loads(pickle.dumps(cache))
    return copy.deepcopy(cache) if change == "copy" else cache


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_key_wise_weights_follow_the_keys_of_a_cache(change):
    """Mllama gives its cross-attention no states behind the prefill; BART gives them, and takes the keys it has."""
    rows, tokens = ROWS.get(change, [0, 1]), ids(6)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    fields = TEXT | {"num_key_value_heads": 2, "cross_attention_layers": [1], "pad_token_id": 0}
    mllama = t.MllamaForCausalLM(MllamaTextConfig(**fields, rope_parameters=rope)).eval()
    stir(convert_attention(mllama, compose_key="uncached"))
    mllama.model.layers[1].cross_attn_attn_gate.fill_(1.0)
    states = {"cross_attention_states": noise(2, 5, 16)}
    expected = mllama(tokens, **states, use_cache=False).logits[rows, -1]
    cache = t.DynamicCache(config=mllama.config)
    mllama(tokens[:, :5], **states, **{CACHE_NAME: cache})
    cache = changed(cache, change)
    torch.testing.assert_close(mllama(tokens[rows, 5:], **{CACHE_NAME: cache}).logits[:, -1], expected)

    decoder, states = converted("bart", compose_key="uncached").model.decoder, noise(2, 5, 16)
    expected = decoder(tokens, encoder_hidden_states=states, use_cache=False)[0][rows, -1]
    cache = t.EncoderDecoderCache(t.DynamicCache(), t.DynamicCache())
    decoder(tokens[:, :5], encoder_hidden_states=states, **{CACHE_NAME: cache})
    cache, unused = changed(cache, change), torch.zeros(len(rows), 5, 16)
    found = decoder(tokens[rows, 5:], encoder_hidden_states=unused, **{CACHE_NAME: cache})[0][:, -1]
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_a_static_cache_that_is_reset_has_weights_of_what_fills_it_then():
    """Also where the new encoder states are written into the old ones' memory."""
    model = converted("bart", compose_key="uncached")
    decoder, states = model.model.decoder, noise(2, 5, 16)
    caches = (t.StaticCache(config=model.config, max_cache_len=length) for length in (8, 5))
    cache = t.EncoderDecoderCache(*caches)
    inputs = {"input_ids": ids(6), "encoder_hidden_states": states}
    decoder(**inputs, **{CACHE_NAME: cache})
    cache.reset()
    states.neg_()
    expected = decoder(**inputs, use_cache=False)[0]
    torch.testing.assert_close(decoder(**inputs, **{CACHE_NAME: cache})[0], expected)
    cache.reorder_cache(torch.tensor([1, 0]))
    following = inputs | {"input_ids": torch.cat([ids(6), ids(1, 2)], 1)}
    expected = decoder(**following, use_cache=False)[0][[1, 0], -1:]
    inputs["input_ids"] = ids(1, 2).flip(0)
    torch.testing.assert_close(decoder(**inputs, **{CACHE_NAME: cache})[0], expected)


@torch.no_grad()
def test_a_call_that_fails_leaves_no_weights_to_the_next():
    """As one that is interrupted before keys are made."""
    module = next(m for m in converted("encoder-decoder").modules() if isinstance(m, BertCrossAttention))
    cache, states = t.EncoderDecoderCache(t.DynamicCache(), t.DynamicCache()), noise(2, 3, 16)
    interface.compose_hook(module, (states,), {"encoder_hidden_states": -noise(2, 5, 16), CACHE_NAME: cache})
    inputs = {"hidden_states": states, "encoder_hidden_states": noise(2, 5, 16)}
    expected = module(**inputs)[0]
    torch.testing.assert_close(module(**inputs, **{CACHE_NAME: cache})[0], expected)


@torch.no_grad()
def test_layers_of_a_cache_that_cannot_hold_key_wise_weights():
    """With states, weights are made of them in each step; without, nothing is guessed."""
    model = converted("encoder-decoder")
    module = next(m for m in model.modules() if isinstance(m, BertCrossAttention))
    layer = t.DynamicCache(config=t.MistralConfig(num_hidden_layers=1, sliding_window=9))
    cache, states, keys = t.EncoderDecoderCache(t.DynamicCache(), layer), noise(2, 3, 16), noise(2, 5, 16)
    module(states, encoder_hidden_states=keys, **{CACHE_NAME: cache})
    expected = module(states, encoder_hidden_states=keys)[0]
    found = module(states, encoder_hidden_states=keys, **{CACHE_NAME: cache})[0]
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=r"no cache that has met them: .* or a dynamic or static cache"):
        module(states, **{CACHE_NAME: cache})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masks_beside_a_position_bias(implementation):
    """A boolean mask hides what an additive one with -inf hides."""
    query, key, value, bias = noise(2, 3, 5, 8), noise(2, 3, 6, 8), noise(2, 3, 6, 8), noise(1, 3, 5, 6)
    visible = noise(2, 1, 5, 6) > -0.5
    additive = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
    attend, module = IMPLEMENTATIONS[implementation], nn.Identity()
    one, other = (attend(module, query, key, value, mask, position_bias=bias)[0] for mask in (visible, additive))
    torch.testing.assert_close(one, other)
    without = attend(module, query, key, value, visible)[0]
    assert not torch.allclose(one, without, atol=1e-3)


# --- refusals ---------------------------------------------------------------------------------------------------------


def gpt_oss():
    return t.GptOssForCausalLM(t.GptOssConfig(**TEXT, num_key_value_heads=1, head_dim=8, num_local_experts=2))


def gemma2(softcap):
    return t.Gemma2ForCausalLM(
        t.Gemma2Config(**TEXT, num_key_value_heads=1, head_dim=8, attn_logit_softcapping=softcap, pad_token_id=0)
    )


def qwen2_vl():
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    return Qwen2VisionTransformerPretrainedModel(
        Qwen2VLVisionConfig(depth=1, embed_dim=16, hidden_size=16, num_heads=2)
    )


def deberta():
    return t.DebertaV2Model(t.DebertaV2Config(**TEXT))


def sam():
    return t.SamModel(t.SamConfig(
        vision_config={"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 32,
                       "output_channels": 16, "window_size": 2, "global_attn_indexes": [0]},
        mask_decoder_config={"hidden_size": 16, "num_attention_heads": 2, "mlp_dim": 16, "iou_head_hidden_dim": 16},
        prompt_encoder_config={"hidden_size": 16},
    ))  # fmt: skip


def long_t5(kind):
    sizes = {"vocab_size": 31, "d_model": 16, "d_kv": 8, "num_heads": 2, "num_layers": 2, "d_ff": 24}
    return t.LongT5Model(t.LongT5Config(**sizes, local_radius=4, encoder_attention_type=kind)).eval()


def git():
    return t.GitModel(t.GitConfig(**TEXT, vision_config=IMAGE))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: long_t5("local"),
            r"encoder\.block\.0\S+ \(LongT5LocalAttention\) and 1 more: attention that does",
        ),
        (
            lambda: long_t5("transient-global"),
            r"\(LongT5TransientGlobalAttention\) and 1 more: attention",
        ),
        (lambda: t.PegasusXModel(t.PegasusXConfig(**SEQ2SEQ)), r"encoder\.layers\.0\.self_attn \(PegasusXGlobalLocalA"),
        (lambda: t.BigBirdPegasusModel(t.BigBirdPegasusConfig(**SEQ2SEQ)), r"\.self \(BigBirdPegasusBlockSparseAttent"),
        (git, r"encoder\.layer\.0\.attention\.self \(GitSelfAttention\) and 1 more: .*leave it as it is with allow_pa"),
        (
            lambda: make("siglip, vision"),
            r"head\.attention \(MultiheadAttention\): .*convert a part of the model",
        ),
        (deberta, r"DebertaV2Model has no attention that goes through Transformers' attention interface"),
        (gpt_oss, r"layers\.0\.self_attn \(GptOssAttention\): uses attention sinks \(s_aux\), which is not supported"),
        (lambda: gemma2(50.0), r"layers\.0\.self_attn \(Gemma2Attention\): uses soft-capped scores \(softcap\)"),
        (qwen2_vl, r"blocks\.0\.attn \(VisionAttention\): uses packed sequences \(cu_seq_lens_q\)"),
        (sam, r"\(SamAttention\): its forward has no argument 'hidden_states'"),
        (lambda: dcformer.DCFormerModel(tiny_config()), r"has a submodule for composition of its own"),
    ],
    ids=[
        *("longt5, local", "longt5, global", "pegasus_x", "bigbird_pegasus", "git", "siglip"),
        *("deberta", "gpt_oss", "gemma2", "qwen2_vl", "sam", "dcformer"),
    ],
)
def test_models_that_cannot_be_converted(model, message):
    made = model()
    tensors, implementation = list(made.state_dict()), made.config._attn_implementation
    with pytest.raises(DCFormerError, match=message):
        convert_attention(made)
    assert list(made.state_dict()) == tensors and made.config._attn_implementation == implementation
    assert not hasattr(made.config, "dcmha")


@pytest.mark.parametrize("convert_it", [lambda m: convert_attention(m, allow_partial=True),
                                        lambda m: convert_attention(m.decoder)], ids=["partial", "part"])  # fmt: skip
def test_a_part_of_a_model_is_converted_when_asked(convert_it, tmp_path):
    """Both ways that the refusal names, and a file of what they made."""
    inputs = {"input_ids": ids(20), "decoder_input_ids": ids(7)}
    model, other = long_t5("local"), long_t5("local")
    other.load_state_dict(model.state_dict())
    expected = logits(model, inputs)
    part = convert_it(model)
    assert [path.split(".")[0] for path in generators(model)] == ["decoder"] * 6
    torch.testing.assert_close(logits(model, inputs), expected, rtol=0, atol=TOLERANCE)
    composed = logits(stir(model), inputs)
    assert (composed - expected).abs().max() > 1e-4
    save_compose(part, tmp_path / "compose.safetensors")
    load_compose(other if part is model else other.decoder, tmp_path / "compose.safetensors")
    torch.testing.assert_close(logits(other, inputs), composed, rtol=0, atol=0)


def test_a_folder_of_a_model_with_a_converted_part_says_so(tmp_path):
    """Where the part has a configuration of its own, and where it shares that of the whole."""
    whole = t.CLIPModel(t.CLIPConfig(text_config=TEXT, vision_config=IMAGE))
    convert_attention(whole.vision_model)
    whole.save_pretrained(tmp_path / "clip")
    with pytest.raises(
        DCFormerError, match=r"only a part .* \(vision_config\)\. Load .* load_compose\(model\.PART, FILE"
    ):
        from_pretrained_converted(tmp_path / "clip", t.CLIPModel)
    bart = make("bart")
    convert_attention(bart.get_decoder())
    bart.save_pretrained(tmp_path / "bart")
    with pytest.raises(DCFormerError, match=r"such as model\.encoder\..* If a part of the model was converted: load"):
        from_pretrained_converted(tmp_path / "bart", type(bart))
    config = t.ColPaliConfig()
    config.vlm_config.text_config.dcmha = {"compose_rank": 2}
    config.save_pretrained(tmp_path / "deep")
    with pytest.raises(DCFormerError, match=r"only a part .* \(vlm_config\.text_config\)\. Load"):
        from_pretrained_any(tmp_path / "deep", t.ColPaliForRetrieval)


@torch.no_grad()
def test_cross_attention_by_any_name():
    sizes = {"hidden_size": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 31}
    model = t.Pix2StructTextModel(t.Pix2StructTextConfig(**sizes, initializer_range=0.02)).eval()
    states = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids(7), "encoder_hidden_states": states, "use_cache": False}
    expected = model(**inputs).logits
    found = convert_attention(model)(**inputs).logits
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)  # they are up to 4


@pytest.mark.parametrize(
    ("name", "is_cross"),
    [("x_attn", True), ("encoder_decoder_attention.attention", True), ("flex_attn", False), ("self_attn", False)],
)
def test_cross_attention_by_name(name, is_cross):
    assert _is_cross(nn.Identity(), f"decoder.layers.0.{name}") == is_cross


@torch.no_grad()
def test_queries_that_are_fewer_than_the_states():
    """SAM 2's vision tower pools them."""

    def hiera():
        sizes = {"image_size": [32, 32], "hidden_size": 16, "num_attention_heads": 1, "blocks_per_stage": [1, 1]}
        stages = {"embed_dim_per_stage": [16, 32], "num_attention_heads_per_stage": [1, 2], "num_query_pool_stages": 1}
        windows = {"window_size_per_stage": [4, 2], "window_positional_embedding_background_size": [2, 2]}
        config = t.Sam2HieraDetConfig(**sizes, **stages, **windows, global_attention_blocks=[])
        return t.Sam2HieraDetModel(config).eval()

    pixels = torch.randn(1, 3, 32, 32)
    with pytest.raises(DCFormerError, match=r"of \d+ queries: convert with compose_query=False"):
        convert_attention(hiera(), example={"pixel_values": pixels})
    model = hiera()
    expected = model(pixels).last_hidden_state
    found = convert_attention(model, compose_query=False)(pixels).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_linear_attention_stays():
    """It takes no softmax, and has no weights that could be composed."""
    config = t.MiniMaxConfig(**TEXT, num_key_value_heads=1, num_local_experts=2, head_dim=8)
    model = convert_attention(t.MiniMaxModel(config))
    assert list(generators(model)) == ["layers.0.self_attn.compose"] and config.layer_types[1] == "linear_attention"


class Sparse(nn.Module):
    """Attention to chosen blocks, written as the library writes it."""

    def __init__(self, config):
        super().__init__()
        self.config, self.q_proj = config, nn.Linear(16, 16)

    def forward(self, hidden_states, block_indices=None, **kwargs):
        attention_interface = t.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface("eager", None)
        return attention_interface(self, hidden_states, block_indices=block_indices, **kwargs)


def test_chosen_keys_are_refused():
    model = make("bert")
    model.bert.sparse = Sparse(model.config)
    with pytest.raises(DCFormerError, match=r"bert\.sparse \(Sparse\): uses attention to chosen blocks of keys"):
        convert_attention(model)


def test_what_is_off_is_no_obstacle():
    model = gemma2(None).eval()
    model.set_attn_implementation("eager")
    expected = logits(model, text())
    torch.testing.assert_close(logits(convert_attention(model), text()), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"compose_groups": 3},
            r"attention\.self \(BertSelfAttention\): compose_groups=3 does not divide num_attention_heads=2",
        ),
        ({"compose_pre": False, "compose_post": False}, "turn one of them on"),
        ({"rank": 2}, "rank unknown: expected some of compose_rank"),
        ({"compose_key": "never"}, "compose_key='never' is unknown"),
        ({"compose_rank": "2"}, r"\(BertSelfAttention\): compose_rank='2' must be a whole number"),
        ({"compose_pre": "yes"}, r"\(BertSelfAttention\): compose_pre='yes': expected True or False"),
        ({"compose_key": 1}, r"\(BertSelfAttention\): compose_key=1: expected True or False"),
        ({"example": ids()}, r"example is of type Tensor: expected the model's arguments by name, as in example={"),
        ({"device": "meta"}, r"device='meta' of the generators, and its projections are on cpu: leave device out"),
        ({"dtype": torch.bfloat16}, r"dtype=torch\.bfloat16 of the generators, and its projections are torch\.float32"),
        ({"dtype": "bfloat16"}, r"dtype=torch\.bfloat16 of the generators, and its projections are torch\.float32"),
        ({"dtype": "float3"}, r"dtype='float3' of the generators: expected one of torch\.float16, .*torch\.float64"),
        ({"dtype": torch.int8}, r"dtype=torch\.int8 of the generators: expected one of"),
        ({"device": "tpu9"}, r"device='tpu9' of the generators cannot be used \(Invalid device string"),
        ({"device": 0.5}, r"device=0\.5 of the generators cannot be used"),
        ({"zero_init": "False"}, "zero_init='False': expected True or False"),
        ({"allow_partial": 1}, "allow_partial=1: expected True or False"),
        ({"example": {"input_ids": ids(50)}}, "BertForMaskedLM does not run on the example"),
    ],
)
def test_conversions_that_fail_leave_the_model_as_it_was(options, message):
    model = make("bert")
    expected, tensors = logits(model, text()), list(model.state_dict())
    with pytest.raises(DCFormerError, match=message):
        convert_attention(model, **options)
    assert list(model.state_dict()) == tensors and model.config._attn_implementation == "eager"
    assert not hasattr(model.config, "dcmha") and "save_pretrained" not in vars(model)
    torch.testing.assert_close(logits(model, text()), expected, rtol=0, atol=0)
    convert_attention(model)


@pytest.mark.parametrize("name", ["float32", "torch.float32"])
def test_a_dtype_by_its_name(name):
    """As `from_pretrained` takes it."""
    model = convert_attention(make("bert"), dtype=name)
    assert {p.dtype for module in generators(model).values() for p in module.parameters()} == {torch.float32}


def test_a_conversion_that_fails_leaves_the_settings_of_a_plain_load(tmp_path):
    converted("bert", compose_rank=3).save_pretrained(tmp_path)
    model = t.AutoModelForMaskedLM.from_pretrained(tmp_path)
    before = model.config.dcmha
    with pytest.raises(DCFormerError, match="does not run on the example"):
        convert_attention(model, example={"input_ids": ids(50)})
    assert model.config.dcmha == before and before["compose_rank"] == 3


def test_a_conversion_that_fails_leaves_every_part_as_it_was():
    """Attention modules may hold a copy of a configuration, which the model does not set with its own."""
    model = make("encoder-decoder")
    attentions = [module for module in model.modules() if isinstance(module, BertSelfAttention | BertCrossAttention)]
    before = [module.config._attn_implementation for module in attentions]
    with pytest.raises(DCFormerError, match="EncoderDecoderModel does not run on the example"):
        convert_attention(model, example={"input_ids": ids(50)})
    assert [module.config._attn_implementation for module in attentions] == before
    convert_attention(model)
    assert {module.config._attn_implementation for module in attentions} == {"dcmha"}


def test_an_example_uses_every_attention():
    inputs = text()
    with pytest.raises(DCFormerError, match=r"crossattention\.self, .* converted, but not used on the example"):
        convert_attention(make("bert, cross"), example=inputs)
    model = make("bert, cross").train()
    convert_attention(model, example=KINDS["bert, cross"].inputs())
    assert model.training and len(generators(model)) == 6


def test_a_second_conversion_is_refused():
    model = convert_attention(make("vit"))
    with pytest.raises(DCFormerError, match="converted already"):
        convert_attention(model)
    assert len(generators(model)) == 2


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "paged|eager"])
def test_other_implementations_do_not_silently_lose_the_composition(implementation):
    model = convert_attention(make("llama"))
    model.set_attn_implementation(implementation)
    with pytest.raises(ValueError, match=r"would leave the composition out: call model\.set_attn_implementation"):
        model(**text())
    model.set_attn_implementation("dcmha_chunked")
    model(**text())


def test_offloaded_and_quantized_projections():
    model = make("bert")
    query = model.bert.encoder.layer[1].attention.self.query
    query.weight = nn.Parameter(query.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(
        DCFormerError, match=r"layer\.1\.attention\.self: its projections are quantized \(torch\.int8\)"
    ):
        convert_attention(model)
    with pytest.raises(DCFormerError, match=r"are offloaded: pass device and dtype"):
        convert_attention(make("bert").to("meta"))
    convert_attention(model, device="cpu", dtype=torch.bfloat16)
    assert {p.dtype for module in generators(model).values() for p in module.parameters()} == {torch.bfloat16}


@torch.no_grad()
@pytest.mark.parametrize("members", [{}, {"weight": lambda self: self.qweight}], ids=["none", "a method"])
def test_projections_without_a_weight_are_quantized_ones(members):
    """As those of GPTQ and AWQ; torch's dynamic quantization has a method of that name."""

    class Packed(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.register_buffer("qweight", linear.weight)

        def forward(self, x):
            return nn.functional.linear(x, self.qweight)

    kind, model = type("Quantized", (Packed,), members), make("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj = kind(layer.self_attn.q_proj)
    with pytest.raises(DCFormerError, match=r"projections are quantized \(their weight is not a tensor\): pass device"):
        convert_attention(model)
    before = logits(model, name="llama")
    convert_attention(model, device="cpu", dtype=torch.float32)
    torch.testing.assert_close(logits(model, name="llama"), before, atol=TOLERANCE, rtol=0)


def test_hooks_behind_that_of_composition_are_warned_of():
    model = converted("bert")
    attention = model.bert.encoder.layer[0].attention.self

    def halved(module, args, kwargs):
        return (args[0] / 2, *args[1:]), kwargs

    hook = attention.register_forward_pre_hook(halved, with_kwargs=True, prepend=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = logits(model, text())
    hook.remove()
    attention.register_forward_pre_hook(halved, with_kwargs=True)
    with pytest.warns(UserWarning, match=r"a forward pre-hook .* with prepend=True"):
        assert not torch.allclose(logits(model, text()), before, atol=1e-4)


def test_hooks_behind_that_of_composition_are_warned_of_once():
    """As many as there are layers and passes: most hooks only read."""
    model = converted("bert")
    layers = [module for module in model.modules() if hasattr(module, "compose_call")]
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(2):
            logits(model, text())
    assert len(layers) > 1 and len(said) == 1


@pytest.mark.parametrize("name", ["siglip", "bert"])
def test_calls_past_the_hooks(name):
    model = converted(name)
    attention = next(module for module in model.modules() if hasattr(module, "compose_call"))
    with pytest.raises(ValueError, match="called past its hooks"):
        attention.forward(noise(2, 5, 16))


def test_weights_of_one_call_serve_no_other(monkeypatch):
    """Where weights are handed over beside the call: neither a second call has them, nor another after a failure."""
    model = converted("siglip")
    first, second, *_ = (module for module in model.modules() if hasattr(module, "compose_call"))
    assert not first.compose_call.passes_kwargs
    states = noise(2, 5, 16)
    first(states)
    with pytest.raises(ValueError, match="called past its hooks"):
        first.forward(states)

    def fails(*_):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(first.q_proj, "forward", fails)
        first(states)
    with pytest.raises(ValueError, match="called past its hooks"):
        second.forward(states)


def test_attention_that_is_called_otherwise_than_it_was_converted():
    model = converted("bart")
    layer = model.model.decoder.layers[0]
    with pytest.raises(ValueError, match=r"encoder_attn: converted as cross-attention, but called with no states"):
        layer.encoder_attn(noise(2, 5, 16))
    with pytest.raises(ValueError, match=r"self_attn: converted as self-attention, but called with encoder states"):
        layer.self_attn(noise(2, 5, 16), key_value_states=noise(2, 4, 16))
    with pytest.raises(ValueError, match="softcap asks for soft-capped scores"):
        layer.self_attn(noise(2, 5, 16), softcap=3.0)


def test_a_trained_bias_needs_maps():
    model = converted("t5")
    model.set_attn_implementation("dcmha_chunked")
    refused = "a position bias that requires gradients needs attn_implementation='dcmha'"
    with pytest.raises(ValueError, match=refused):
        logits(model, name="t5")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".compose" in name)
    logits(model, name="t5").sum().backward()
    model.train().gradient_checkpointing_enable({"use_reentrant": False})  # has the library's zeros require gradients
    with pytest.raises(ValueError, match=rf"{refused}.* without gradient checkpointing"):
        logits(model, name="t5")


def test_folders_that_cannot_be_loaded(tmp_path):
    make("bert").save_pretrained(tmp_path / "plain")
    with pytest.raises(DCFormerError, match=r"plain is not a converted model: its configuration has no 'dcmha'"):
        from_pretrained_converted(tmp_path / "plain", t.AutoModelForMaskedLM)
    converted("bert").save_pretrained(tmp_path / "model")
    with pytest.raises(DCFormerError, match="'sdpa' cannot compose heads: use one of"):
        from_pretrained_converted(tmp_path / "model", t.AutoModelForMaskedLM, attn_implementation="sdpa")
    with pytest.raises(
        DCFormerError, match=r"is of a bert model \(BertConfig\), but ViTModel takes a ViTConfig: give the"
    ):
        from_pretrained_converted(tmp_path / "model", t.ViTModel)
    with pytest.raises(DCFormerError, match="'AutoModelForMaskedLM' is not a class of models: expected an Auto"):
        from_pretrained_converted(tmp_path / "model", "AutoModelForMaskedLM")
    file, settings = tmp_path / "model" / "model.safetensors", tmp_path / "model" / "config.json"
    written = settings.read_text()
    for value, message in ((7, r"model has dcmha=7: expected settings of comp"), ({"rank": 2}, r"model: rank unknown")):
        settings.write_text(json.dumps(json.loads(written) | {"dcmha": value}))
        with pytest.raises(DCFormerError, match=message):
            from_pretrained_converted(tmp_path / "model", t.AutoModelForMaskedLM)
    settings.write_text(written)
    options = {"num_attention_heads": 8, "ignore_mismatched_sizes": True}  # which would leave memory as it was
    with pytest.raises(DCFormerError, match=r"model has bert.*compose\.\w.* \[\d+, \d+\], and the model \[\d+, \d+\]"):
        from_pretrained_converted(tmp_path / "model", t.AutoModelForMaskedLM, **options)
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("qkw")}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(DCFormerError, match=r"lacks 2 tensors of the composition, such as bert.*compose\.qkw"):
        from_pretrained_converted(tmp_path / "model", t.AutoModelForMaskedLM)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DCFormerError, match=r"model/model\.safetensors is damaged or truncated .*header"):
        from_pretrained_converted(tmp_path / "model", t.AutoModelForMaskedLM)
    file.unlink()
    with pytest.raises(OSError, match="no file named"):
        from_pretrained_converted(tmp_path / "model", t.AutoModelForMaskedLM)
    file.with_name("pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DCFormerError, match=r"model/pytorch_model\.bin is damaged"):
        from_pretrained_converted(tmp_path / "model", t.AutoModelForMaskedLM)


def test_a_plain_load_drops_the_composition(tmp_path):
    """What docs/modules.md and the folder's README warn of; what the library warns of are its unexpected keys."""
    model = converted("bert")
    model.save_pretrained(tmp_path)
    plain, info = t.AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert {".".join(key.split(".")[-3:-1]) for key in info["unexpected_keys"]} >= {"self.compose"}
    torch.testing.assert_close(logits(plain.eval(), text()), logits(make("bert"), text()), rtol=0, atol=TOLERANCE)
    assert not torch.allclose(logits(model, text()), logits(plain, text()), atol=1e-3)


@pytest.mark.parametrize("implementation", ["dcmha", "dcmha_chunked"])
def test_a_plain_load_that_names_our_attention_is_refused(implementation, tmp_path):
    """As trainers load a model of reference: by the name and the implementation of the one that they train."""
    model = converted("bert")
    model.save_pretrained(tmp_path)
    plain = t.AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation=implementation)
    with pytest.raises(ValueError, match=r"was loaded without it, by a plain from_pretrained: .*_converted"):
        plain(**text())
    for copy_of in (copy.deepcopy(model), from_pretrained_converted(tmp_path, t.BertForMaskedLM)):
        torch.testing.assert_close(logits(copy_of.eval(), text()), logits(model, text()), rtol=0, atol=TOLERANCE)
    torch.save({"config": model.config.to_dict()}, tmp_path / "config.pt")
    assert torch.load(tmp_path / "config.pt")["config"]["dcmha"] == model.config.dcmha
    for dump in (yaml.safe_dump, yaml.dump):
        assert yaml.safe_load(dump(model.config.to_dict()["dcmha"])) == model.config.dcmha
    convert_attention(plain)  # it has what it names then
    assert logits(plain, text()).isfinite().all()


def test_loading_gives_what_is_asked(tmp_path):
    converted("bert").save_pretrained(tmp_path)
    model, info = from_pretrained_converted(
        tmp_path, t.BertForMaskedLM, dtype=torch.bfloat16, attn_implementation="dcmha_chunked", output_loading_info=True
    )
    assert type(model) is t.BertForMaskedLM and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "dcmha_chunked" and not info["missing_keys"]
    assert not info["unexpected_keys"] and dcformer.from_pretrained_converted is from_pretrained_converted


def test_programs_load_any_model(tmp_path):
    """What was converted with its composition, by the implementation that is named or the usual one; others as ever."""
    converted("llama").save_pretrained(tmp_path / "converted")
    make("llama").save_pretrained(tmp_path / "plain")
    saved, auto = logits(converted("llama"), name="llama"), t.AutoModelForCausalLM
    for options, name in (({}, "dcmha"), ({"attn_implementation": "dcmha_chunked"}, "dcmha_chunked")):
        loaded = from_pretrained_any(tmp_path / "converted", auto, **({"attn_implementation": None} | options))
        assert loaded.config._attn_implementation == name
        torch.testing.assert_close(logits(loaded.eval(), name="llama"), saved, rtol=0, atol=TOLERANCE)
    plain = from_pretrained_any(tmp_path / "plain", auto, attn_implementation="eager")
    assert type(plain) is t.LlamaForCausalLM and not generators(plain)
    with pytest.raises(DCFormerError, match="'sdpa' cannot compose heads"):
        from_pretrained_any(tmp_path / "converted", auto, attn_implementation="sdpa")


@pytest.mark.parametrize(("name", "layers"), [("bert", "bert.encoder"), ("llama", "model.layers")])
def test_device_maps_may_offload(name, layers, tmp_path):
    """Generators are read from disk when they run, static projections among them."""
    pytest.importorskip("accelerate", reason='accelerate is not installed: pip install "dcformer[train]"')
    model = converted(name, compose_static=True)
    model.save_pretrained(tmp_path)
    parent = layers.partition(".")[0]
    parts = [part for part, _ in model.named_children() if part != parent]
    parts += [f"{parent}.{part}" for part, _ in model.get_submodule(parent).named_children()]
    device_map = {part: "disk" if part == layers else "cpu" for part in parts}
    options = {"device_map": device_map, "offload_folder": tmp_path / "offloaded"}
    loaded = from_pretrained_converted(tmp_path, KINDS[name].auto, **options)
    assert all(p.is_meta for module in generators(loaded).values() for p in module.parameters())
    torch.testing.assert_close(logits(loaded.eval(), name=name), logits(model, name=name), rtol=0, atol=0)


@pytest.mark.parametrize("auto", [t.AutoModelForSequenceClassification, t.BertForSequenceClassification])
def test_loading_takes_fields_of_the_configuration(tmp_path, auto):
    """As `from_pretrained` does: a new head of another size, on the composed body."""
    saved = converted("bert")
    saved.save_pretrained(tmp_path)
    model, info = from_pretrained_converted(tmp_path, auto, num_labels=5, output_loading_info=True, dtype="auto")
    assert model.classifier.out_features == model.config.num_labels == 5 and model.dtype == torch.float32
    assert all(key.startswith(("classifier.", "bert.pooler.")) for key in info["missing_keys"])
    composed = ({path: p for path, p in m.named_parameters() if ".compose." in path} for m in (model, saved))
    for (path, one), (other_path, other) in zip(*(found.items() for found in composed), strict=True):
        assert path == other_path and torch.equal(one, other)


def test_a_readme_that_is_there_is_kept(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    converted("bert").save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_compositions_that_do_not_fit(tmp_path):
    file = tmp_path / "compose.safetensors"
    with pytest.raises(DCFormerError, match="BertForMaskedLM is not converted: call convert_attention first"):
        save_compose(make("bert"), file)
    with pytest.raises(DCFormerError, match="cannot be read"):
        load_compose(make("bert"), file)
    part = make("clip")
    convert_attention(part.vision_model)
    with pytest.raises(DCFormerError, match="If a part of it is, give that one"):
        save_compose(part, file)
    with pytest.raises(DCFormerError, match=r"bert\..*compose\.qkw is offloaded"):
        save_compose(convert_attention(make("bert").to("meta"), device="meta", dtype=torch.float32), file)
    save_compose(converted("bert"), file)
    assert [path.name for path in tmp_path.iterdir()] == ["compose.safetensors"]
    with pytest.raises(DCFormerError, match="saved with other settings than the model's: compose_rank differ"):
        load_compose(converted("bert", compose_rank=1), file)
    with pytest.raises(DCFormerError, match=r"settings than the model's: compose_act, .*compose_static differ"):
        load_compose(part, file)
    for other, message in (("vit", "is of another model: .* is in only one"), ("roberta", "is of another model")):
        model = make(other)
        with pytest.raises(DCFormerError, match=message):
            load_compose(model, file)
        assert not generators(model)
    wide = t.BertForMaskedLM(t.BertConfig(**TEXT | {"hidden_size": 32}))
    with pytest.raises(DCFormerError, match=r"of another size: .* is \(32, 16\) in it and \(32, 32\) in the model"):
        load_compose(wide, file)
    model = convert_attention(make("bert").to("meta"), device="meta", dtype=torch.float32)
    with pytest.raises(DCFormerError, match=r"bert\..*compose\.\S+ is offloaded: load the model without offloading"):
        load_compose(model, file)
    with pytest.raises(DCFormerError, match="offloaded: pass device and dtype of the generators to convert_attention"):
        load_compose(make("bert").to("meta"), file)
    for call in (load_compose, save_compose):
        with pytest.raises(DCFormerError, match="model is of type int: expected a model of Transformers"):
            call(3, file)


def test_files_that_are_no_composition(tmp_path):
    model, file = converted("bert"), tmp_path / "compose.safetensors"
    save_compose(model, file)
    tensors = load_file(file)
    settings = json.dumps(model.config.dcmha)
    whole = {name: tensor.long() for name, tensor in tensors.items()}
    for content, metadata, message in (
        ({"x": torch.zeros(1)}, {}, "is not a composition: save_compose writes one"),
        (tensors, {"dcmha": "{rank"}, "has settings of composition .* that are not JSON: Expecting"),
        (tensors, {"dcmha": "[2]"}, r"has dcmha=\[2\]: expected settings of composition by name"),
        (tensors, {"dcmha": '{"rank": 2}'}, "safetensors: rank unknown: expected some of"),
        (whole, {"dcmha": settings}, r"is damaged: bert\..* is torch\.int64 in it, expected floating point"),
    ):
        save_file(content, file, metadata)
        for into in (make("bert"), convert_attention(make("bert"))):
            before = copy.deepcopy(into.state_dict())
            with pytest.raises(DCFormerError, match=message):
                load_compose(into, file)
            assert before.keys() == into.state_dict().keys()
            assert all(torch.equal(tensor, before[name]) for name, tensor in into.state_dict().items())


def test_pruned_compositions_are_not_written(tmp_path):
    model = converted("bert")
    attention = next(module for module in model.modules() if hasattr(module, "compose_call"))
    prune.identity(attention.compose, "qkw")
    with pytest.raises(DCFormerError, match=r"compose\.qkw_orig: the composition is pruned or parametrized"):
        save_compose(model, tmp_path / "compose.safetensors")
    prune.remove(attention.compose, "qkw")
    save_compose(model, tmp_path / "compose.safetensors")


@pytest.mark.parametrize(("place", "message"), [("no/c", "in a folder that does not exist"), ("", "is a folder: give")])
def test_places_where_no_composition_can_be_written(tmp_path, place, message):
    with pytest.raises(DCFormerError, match=message):
        save_compose(converted("bert"), tmp_path / place)
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_a_conversion_that_fails_half_way_is_undone(monkeypatch):
    model, calls = make("bert"), []

    def second_fails(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return make_generators(*arguments)

    monkeypatch.setattr(convert, "make_generators", second_fails)
    with pytest.raises(torch.OutOfMemoryError):
        convert_attention(model)
    monkeypatch.undo()
    assert not any("compose" in name for name, _ in model.named_modules())
    convert_attention(model)


@torch.no_grad()
def test_models_that_see_both_ways_and_cache():
    """Their own keys are cached, so that "uncached" leaves key-wise weights out."""
    fields = {name: value for name, value in TEXT.items()} | {"head_dim": 8, "use_bidirectional_attention": True}
    model = t.GemmaForCausalLM(t.GemmaConfig(**fields, num_key_value_heads=2)).eval()
    stir(convert_attention(model, compose_key="uncached"))
    assert model.generate(ids(5), max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 8)


@torch.no_grad()
def test_attention_that_takes_a_cache_and_does_not_say_that_it_is_causal():
    """Doge's self-attention is a decoder's; Mllama's cross-attention, whose keys do not grow, stays as it is."""
    model = t.DogeForCausalLM(t.DogeConfig(**TEXT, num_key_value_heads=1)).eval()
    expected = logits(model, text())
    convert_attention(model, compose_key="uncached")
    torch.testing.assert_close(logits(model, text()), expected, rtol=0, atol=TOLERANCE)
    expected = greedy(stir(model), use_cache=False)
    assert torch.equal(greedy(model), expected) and len(expected[0].unique()) > 3
    rope = {"rope_type": "default", "rope_theta": 1e4}
    fields = TEXT | {"num_key_value_heads": 2, "cross_attention_layers": [1], "pad_token_id": 0}
    mllama = t.MllamaForCausalLM(MllamaTextConfig(**fields, rope_parameters=rope))
    convert_attention(mllama, compose_key="uncached")
    sides = {path.split("layers.")[1]: module.generators for path, module in generators(mllama).items()}
    assert sides == {
        "0.self_attn.compose": (("pre", "query"), ("post", "query")),
        "1.cross_attn.compose_query": (("pre", "query"), ("post", "query")),
        "1.cross_attn.compose_key": (("pre", "key"), ("post", "key")),
    }
    fields = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower = t.Llama4VisionModel(t.Llama4VisionConfig(**fields, image_size=8, patch_size=4, vision_output_dim=16))
    convert_attention(tower, compose_key="uncached")  # its attention takes a cache and does nothing with it
    assert all(len(module.generators) == 4 for module in generators(tower).values())


@torch.no_grad()
def test_cross_attention_that_is_called_with_its_keys_in_the_cache_alone():
    """As Mllama's is behind the prefill: key-wise weights are those of the states that the cache has met."""
    model = converted("encoder-decoder")
    module = next(m for m in model.modules() if isinstance(m, BertCrossAttention))
    hook, call = interface.compose_hook, module.compose_call
    cache, states, keys = t.EncoderDecoderCache(t.DynamicCache(), t.DynamicCache()), noise(2, 3, 16), noise(2, 5, 16)
    names = {"encoder_hidden_states": keys, CACHE_NAME: cache}
    assert set(names) <= set(call.positions)
    _, first = hook(module, (states,), dict(names))
    _, second = hook(module, (states,), {CACHE_NAME: cache})
    weights = [given["compose_weights"] if call.passes_kwargs else None for given in (first, second)]
    if weights[0] is not None:
        assert torch.equal(weights[0][0].key.packed, weights[1][0].key.packed)
    with pytest.raises(ValueError, match="no cache that has met them: pass use_cache=False"):
        hook(module, (states,), {})


def test_layers_with_other_heads_than_the_configuration_says():
    """DETR's decoder, beside an encoder of which `num_attention_heads` is."""
    backbone = t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"])
    config = t.DetrConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=2,
        encoder_ffn_dim=40, decoder_ffn_dim=40, num_queries=5, backbone_config=backbone, use_timm_backbone=False,
    )  # fmt: skip
    model, inputs = t.DetrModel(config).eval(), {"pixel_values": torch.randn(1, 3, 32, 32)}
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        convert_attention(model)
        torch.testing.assert_close(model(**inputs).last_hidden_state, expected, atol=TOLERANCE, rtol=0)
    calls = [module.compose_call for module in model.modules() if hasattr(module, "compose_call")]
    assert {(call.path.partition(".")[0], call.heads) for call in calls} == {("encoder", 4), ("decoder", 2)}


def test_settings_without_composition_are_refused():
    off = {f"compose_{name}": False for name in ("pre", "post", "query", "key")}
    model = make("bert")
    with pytest.raises(DCFormerError, match="switch all composition off"):
        convert_attention(model, **off)
    assert not generators(model) and not hasattr(model.config, "dcmha")
