"""Tensor parallelism on two processes: numbers of one process, and no more communication than a Llama has."""

import re
import shlex
from collections import Counter

import pytest
import torch
from helpers import PLAIN, REPOSITORY, randomize, tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config

from dcformer import DCPythiaConfig, DHAConfig, HeadSystemsConfig
from dcformer.planning import Setup, collectives

pytestmark = pytest.mark.distributed
WORKER = REPOSITORY / "tests" / "distributed" / "tensor_parallel_worker.py"
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def dcformer(**fields):
    return tiny_config(**({"vocab_size": 96, "compose_groups": 2} | fields))


def system(name, fields=None, **options):
    fields = {"num_hidden_layers": 2, "compose_groups": 2, "sliding_window": 8, "tie_word_embeddings": False} | (
        fields or {}
    )
    return HeadSystemsConfig(**(SIZES | fields), head_system=name, head_system_options=options)


EQUAL = {
    "grouped_queries": dcformer(),
    "four_groups": dcformer(compose_groups=4, num_key_value_heads=4, compose_rank=1),
    "static": dcformer(compose_static=True),
    "query_wise": dcformer(compose_key=False, compose_gate=False),
    "talking_heads": dcformer(compose_query=False, compose_key=False, compose_static=True),
    "multi_gate": dcformer(mlp_gates=4),
    "eager": dcformer(),
    "tied": dcformer(tie_word_embeddings=True),
    "pythia": DCPythiaConfig(
        **(SIZES | {"num_key_value_heads": 4}), num_hidden_layers=2, compose_groups=2, sliding_window=8
    ),
    "tp_plan": dcformer(),
    "head_maps": dcformer(
        num_key_value_heads=4,
        key_head_map=[[0, 0, 1, 1], [1, 0, 3, 2]],  # the layers' blocks of two
        value_head_map=[[1, 0, 3, 2], [0, 0, 1, 1]],
    ),
    "dha": DHAConfig(
        **(SIZES | {"num_key_value_heads": 4}),
        num_hidden_layers=2,
        attention_bias=True,
        key_head_map=[[0, 0, 1, 1], [1, 0, 3, 2]],
        value_head_map=[[1, 0, 3, 2], [0, 0, 1, 1]],
    ),
    "mhe_add": dcformer(head_embeddings="add", num_key_value_heads=None),
    "mhe_mul": dcformer(head_embeddings="mul", num_key_value_heads=None, attention_bias=True),
    "mhe_plain": dcformer(head_embeddings="mul", num_key_value_heads=None, **PLAIN),
    "gated_heads": system("output_gate", {"compose_gate": False}, output_gate_bias=True),
    "gated_channels": system("output_gate", PLAIN, output_gate="elementwise"),
    "talking_head_system": system(
        "talking_heads", {"compose_query": False, "compose_key": False, "compose_static": True}
    ),
    "plain_head_system": system("plain", {"attention_bias": True}),
}
REFUSED = {
    "one_group": (dcformer(compose_groups=1), r"compose_groups=1 is not a multiple of the tensor-parallel size 2"),
    "one_group_static": (
        dcformer(compose_groups=1, compose_query=False, compose_key=False, compose_static=True),
        r"compose_groups=1 is not a multiple",
    ),
    "crossing_map": (
        dcformer(num_key_value_heads=4, value_head_map=[[0, 0, 1, 1], [0, 1, 0, 1]]),
        r"value_head_map\[1\] cannot be cut for the tensor-parallel size 2",
    ),
    "shared_channels": (
        system("collaborative"),
        r"head_system='collaborative' has no tensor parallelism: its heads share",
    ),
    "neighbors": (
        system("overlapped", {"num_key_value_heads": 4}),
        r"head_system='overlapped' has no tensor parallel",
    ),
    "chosen_heads": (system("mixture_of_heads"), r"head_system='mixture_of_heads' has no tensor parallelism"),
    "one_kv_head": (dcformer(num_key_value_heads=1), r"num_key_value_heads=1 is not a multiple of the tensor-parallel"),
}
COUNTED = {
    "llama": lambda layers: LlamaConfig(**SIZES, num_hidden_layers=layers),
    "qwen3": lambda layers: Qwen3Config(**SIZES, num_hidden_layers=layers),  # Llama's plan and QK-norm
    "composed": lambda layers: dcformer(num_hidden_layers=layers, qk_norm=False),
    "composed_norm": lambda layers: dcformer(num_hidden_layers=layers),
    "mhe_norm": lambda layers: dcformer(num_hidden_layers=layers, head_embeddings="mul", num_key_value_heads=None),
    "mhe_bias": lambda layers: dcformer(
        num_hidden_layers=layers, head_embeddings="add", num_key_value_heads=None, qk_norm=False, attention_bias=True
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory, start):
    """Name -> what two processes computed of that checkpoint; all in one start."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    configs = EQUAL | {name: config for name, (config, _) in REFUSED.items()}
    configs |= {f"{kind}_{layers}": make(layers) for kind, make in COUNTED.items() for layers in (1, 3)}
    for name, config in configs.items():
        torch.manual_seed(0)
        randomize(AutoModelForCausalLM.from_config(config)).double().save_pretrained(folder / name)
    start("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", WORKER, folder)
    return folder, {name: torch.load(folder / f"{name}.pt", weights_only=False) for name in configs}


@pytest.mark.parametrize("name", EQUAL)
def test_logits_and_gradients_are_those_of_one_process(found, name):
    folder, results = found
    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
    ids = torch.arange(26).view(2, 13)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    result = results[name]
    assert "error" not in result, result
    with torch.no_grad():
        torch.testing.assert_close(result["logits"], model(ids, use_cache=False).logits, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(result["loss"], loss.detach(), rtol=1e-12, atol=1e-12)
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert gradients.keys() == result["grads"].keys()
    for key, gradient in gradients.items():
        assert gradient.abs().max() > 0, key
        torch.testing.assert_close(
            result["grads"][key], gradient, rtol=1e-8, atol=1e-11, msg=lambda m, k=key: f"{k}: {m}"
        )
    tokens = model.generate(ids[:, :5], max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(result["generated"], tokens)
    assert result["compose_share"] == (
        0.5 if model.config.composes else 0
    )  # each process holds its own groups' parameters, all of them
    why = r"q_proj is more than a torch\.nn\.Linear .*remove .*tensor parallelism"
    if isinstance(model.config, HeadSystemsConfig):  # of any kind
        why = "fuse_projections fuses the projections of plain attention"
    assert re.search(why, result["fusing"])


@pytest.mark.parametrize("name", REFUSED)
def test_groups_that_do_not_divide_are_refused(found, name):
    assert re.match(REFUSED[name][1], found[1][name]["error"])


def per_layer(results, kind, phase):
    """Collectives of a layer: a third and a second layer's, halved."""
    one, three = (results[f"{kind}_{layers}"]["counts"][phase] for layers in (1, 3))
    more = Counter(three)
    more.subtract(one)
    return {what: count / 2 for what, count in more.items() if count}


@pytest.mark.parametrize(("ours", "plain"), [("composed", "llama"), ("composed_norm", "qwen3")])
def test_collectives_of_a_layer(found, ours, plain):
    """Forward exactly those of the plain plan: composition stays on its device. Backward fewer.

    In Transformers' plans every column-wise linear layer sums the gradient of its input: q, k, v, gate and up. Here
    those that read the same input, the generators' two among them, share one sum.
    """
    results, hidden = found[1], ("all_reduce", (2, 13, 32))
    for phase in ("inference", "forward"):
        assert per_layer(results, ours, phase) == per_layer(results, plain, phase) == {hidden: 2}
    expected = per_layer(results, plain, "backward")
    assert expected.pop(hidden) == 5
    assert per_layer(results, ours, "backward") == expected | {hidden: 2}


@pytest.mark.parametrize("name", ["composed_norm", "mhe_norm", "mhe_bias"])
def test_the_plan_counts_the_same(found, name):
    """`dcformer-plan` against a pass of two processes."""
    counts = found[1][f"{name}_3"]["counts"]
    total = counts["forward"] + counts["backward"]
    config = COUNTED[name](3)
    setup = Setup(
        config, gpus=2, tensor_parallel=2, batch=2, length=13, dtype=torch.float64, attention="dcformer_chunked"
    )
    planned = {(c.kind.replace("-", "_"), c.group): c for c in collectives(setup)}
    expected = {("all_reduce", "tensor parallel"): total.pop(("all_reduce", (2, 13, 32)))}
    small, seeds = total.pop(("all_reduce", (8,)), 0), total.pop(("all_reduce", (8, 32)), 0)
    if config.head_embeddings:  # the seeds, and their biases or the norms' scales, which have as many numbers
        biases = small if config.attention_bias else 0
        expected["all_reduce", "seeds"] = seeds + biases
        assert planned["all_reduce", "seeds"].sent == (seeds * 8 * 32 + biases * 8) * 4
    if config.qk_norm:
        expected["all_reduce", "QK-norm"] = small
    expected["all_gather", "tensor parallel"] = sum(total.values())
    assert {key: collective.count for key, collective in planned.items()} == expected


# --- the example ------------------------------------------------------------------------------------------------------


def test_command_of_the_page(tmp_path, start):
    """The example's text is that of one process, printed once."""
    page = (REPOSITORY / "docs" / "scale_out.md").read_text(encoding="utf-8")
    _, *words = shlex.split(re.search(r"^torchrun .*", page, re.MULTILINE)[0])
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "checkpoints" / "dcformer-synthetic")
    model = randomize(AutoModelForCausalLM.from_config(dcformer(vocab_size=len(tokenizer))).double())
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path)
    prompt = "Boris owns the tuna."
    words[words.index("--model") + 1], words[words.index("--prompt") + 1] = str(tmp_path), prompt
    printed = start("-m", "torch.distributed.run", "--standalone", *words, "--max_new_tokens", "6")

    batch = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**batch, max_new_tokens=6, do_sample=False)[0, batch["input_ids"].shape[1] :]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert len(set(text.split())) > 1 and printed.splitlines().count(text) == 1


def test_example_without_torchrun(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    import tensor_parallel

    assert tensor_parallel.main(["--model", "absent", "--prompt", "Boris"]) == 1
    assert "error: one process splits nothing" in capsys.readouterr().err
