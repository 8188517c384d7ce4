"""The model with "dcformer_triton" against "eager": prefill, decoding, generation, padding, packed rows, training."""

import pytest
import torch
from helpers import randomise, tiny_config
from transformers import DynamicCache

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'dcformer[kernels]'")
INTERPRETED = triton.knobs.runtime.interpret
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 for Triton's interpreter", allow_module_level=True)

from dcformer import DCFormerForCausalLM  # noqa: E402  # after the skips

DEVICE = "cpu" if INTERPRETED else "cuda"
CLOSE = {"rtol": 1e-4, "atol": 2e-5}  # float32, two layers: sums in another order
CONFIGS = {
    "grouped-query, window": {},
    "static, groups": {"compose_static": True, "compose_groups": 2, "num_key_value_heads": 4},
}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    return randomise(DCFormerForCausalLM(tiny_config(**CONFIGS[request.param]))).to(DEVICE)


def tokens(batch=1, length=21):
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(5)).to(DEVICE)


def both(model, call):
    """What `call` returns with eager and with the kernels."""
    out = []
    for implementation in ("eager", "dcformer_triton"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out.append(call())
    return out


@torch.no_grad()
def test_prefill_with_left_padding(model):
    ids = tokens(batch=2, length=18)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    expected, found = both(model, lambda: model(ids, attention_mask=mask).logits)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], **CLOSE)


@torch.no_grad()
def test_token_by_token(model):
    ids = tokens(length=11)

    def decode():
        cache, logits = DynamicCache(config=model.config), []
        for part in (ids[:, :9], *ids[:, 9:].split(1, dim=1)):
            logits.append(model(part, past_key_values=cache, use_cache=True).logits)
        return torch.cat(logits, dim=1)

    expected, found = both(model, decode)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(found, model(ids).logits, **CLOSE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(model, cache):
    ids = tokens(batch=2, length=10)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    options |= {"cache_implementation": cache, "disable_compile": True}
    expected, found = both(model, lambda: model.generate(ids, **options))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_training_step(model, packed):
    ids = tokens(length=19)
    options, labels = {"use_cache": False}, ids.clone()
    if packed:
        options["position_ids"] = torch.cat([torch.arange(8), torch.arange(11)])[None].to(DEVICE)
    else:
        options["attention_mask"] = torch.ones_like(ids)
        options["attention_mask"][0, :5] = 0
        labels[0, :5] = -100

    def step():
        loss = model(ids, labels=labels, **options).loss
        loss.backward()
        return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}

    expected, found = both(model, step)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **CLOSE | {"atol": 1e-5 * max(1, value.abs().max().item())})


def test_what_the_kernels_do_not_do(model):
    model.set_attn_implementation("dcformer_triton")
    ids = tokens(length=6)
    gaps = torch.ones(1, 1, 6, 6, dtype=torch.bool, device=DEVICE).tril()
    gaps[:, :, 4, 2] = False
    with pytest.raises(ValueError, match="without gaps"):
        model(ids, attention_mask=gaps)
