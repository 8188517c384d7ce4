"""Caches of folded models: their bytes, and every way of decoding with them against one forward pass."""

import pytest
import torch
from tiny_sources import VOCABULARY, make, tokens
from transformers import DynamicCache

from dcformer import dha

NAMES = ("llama", "mistral-window", "qwen3-qk-norm", "neox-partial-rotary", "dcformer-composed-gqa")
NEW = 10


@pytest.fixture(scope="module", params=NAMES)
def folded(request):
    """From a plan edited so that keys and values differ in every layer."""
    model = make(request.param)
    plan = dha.search(model, 0.5, progress=False)
    n = plan.source.key_heads[0]
    other = dha.search(model, 1 / n, progress=False)
    uneven = dha.HeadPlan(plan.source, plan.key_groups, other.value_groups, 0.5)
    folded = dha.from_plan(model, uneven)
    assert all(k != v for k, v in zip(folded.config.num_key_heads, folded.config.num_value_heads, strict=True))
    return folded


def by_forward(model, ids):
    """Greedy tokens from whole forward passes, without a cache."""
    for _ in range(NEW):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


def generate(model, ids, **options):
    """All tokens of a mask count, also those that are the padding's."""
    options = {"attention_mask": torch.ones_like(ids)} | options
    return model.generate(
        ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None, **options
    )  # fmt: skip


WAYS = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "offloaded": {"cache_implementation": "offloaded"},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "chunked prefill": {"prefill_chunk_size": 5},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_decoding_gives_the_tokens_of_forward_passes(folded, way):
    if way == "offloaded" and not torch.cuda.is_available():
        pytest.skip("the library offloads from an accelerator, and there is none")
    ids = tokens(1, 12)
    assert torch.equal(generate(folded, ids, **WAYS[way]), by_forward(folded, ids))


def test_a_left_padded_batch_gives_the_tokens_of_its_rows(folded):
    long, short = tokens(1, 12, 1), tokens(1, 7, 2)
    batch = torch.cat([long, torch.cat([torch.zeros(1, 5, dtype=torch.long), short], 1)])
    mask = torch.ones_like(batch)
    mask[1, :5] = 0
    found = generate(folded, batch, attention_mask=mask)[:, 12:]
    for row, ids in zip(found, (long, short), strict=True):
        assert torch.equal(row[None], by_forward(folded, ids)[:, -NEW:])


def test_beams_and_an_assistant(folded):
    ids = tokens(1, 12, 3)
    cached, uncached = (generate(folded, ids, num_beams=3, use_cache=cached) for cached in (True, False))
    assert torch.equal(cached, uncached)
    assert torch.equal(generate(folded, ids, assistant_model=folded), by_forward(folded, ids))


@pytest.mark.parametrize("name", ["llama", "neox-partial-rotary"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_a_cache(name, dtype):
    """Bytes of a number · S · D · Σ(G_K + G_V), exactly; of the source, with 2·n in each layer."""
    model = make(name, dtype)
    plan = dha.search(model, 0.375, allocation="displacement", progress=False)
    folded, length = dha.from_plan(model, plan), 23
    cache = DynamicCache()
    with torch.no_grad():
        folded(tokens(1, length), past_key_values=cache)
    heads = sum(plan.num_key_heads) + sum(plan.num_value_heads)
    held = sum(keys.nbytes + values.nbytes for keys, values, *_ in cache)
    assert held == dtype.itemsize * length * folded.config.head_dim * heads
    assert held == dha.report(folded, context=length, dtype=dtype).cache_bytes
    assert folded.config.vocab_size == VOCABULARY
