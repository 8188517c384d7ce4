"""Scores of the shipped tasks against direct computations with the model."""

import json
import math
import sys

import pytest
import torch
from helpers import REPOSITORY
from transformers import AutoModelForCausalLM, AutoTokenizer

from dcformer.evaluation import TASKS_FOLDER, heldout_contexts, heldout_items, paper_items

sys.path.insert(0, str(REPOSITORY / "examples"))
import demo

CHECKPOINT = str(REPOSITORY / "checkpoints" / "dcformer-synthetic")

# Log-likelihoods are float32: sums of some ten of size 1, each off by about 1e-6 between two orders of summation.
RELATIVE = 1e-5

HELDOUT = [f"dcformer_synthetic_heldout{suffix}" for suffix in ("", "_answers", "_choices", "_text")]


@pytest.fixture(scope="module")
def evaluate(lm_eval):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    def run(tasks, limit=None, metadata=None, gen_kwargs=None, batch_size=32, **model_args):
        manager = TaskManager(include_path=str(TASKS_FOLDER), include_defaults=False, metadata=metadata)
        lm = HFLM(CHECKPOINT, backend="causal", device="cpu", batch_size=batch_size, **model_args)
        assert type(lm.model).__module__ == "dcformer.modeling_dcformer"
        done = lm_eval.simple_evaluate(
            lm, tasks=tasks, task_manager=manager, limit=limit, bootstrap_iters=0, gen_kwargs=gen_kwargs
        )
        return done

    return run


@pytest.fixture(scope="module")
def direct():
    """Log-likelihood of a text given what precedes it, of that as much as the model takes: eager, no cache."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, attn_implementation="eager")

    def score(prompt, continuation):
        """Log-likelihood of the continuation's tokens, and whether each is the most likely one."""
        context = tokenizer(prompt)["input_ids"] if prompt else [tokenizer.bos_token_id]
        target = torch.tensor(tokenizer(continuation)["input_ids"])
        ids = [*context, *target.tolist()][-model.config.max_position_embeddings - 1 :]
        with torch.no_grad():
            predicted = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0].log_softmax(-1)
        predicted = predicted[-len(target) :]
        return predicted.gather(-1, target[:, None]).sum().item(), bool((predicted.argmax(-1) == target).all())

    return score


@pytest.fixture(scope="module")
def heldout(evaluate):
    return evaluate(HELDOUT)


@pytest.mark.slow
def test_heldout_accuracy_is_the_demonstrations(heldout, capsys):
    accuracy = demo.main(["--show", "0"])
    capsys.readouterr()
    results = heldout["results"]
    assert results["dcformer_synthetic_heldout"]["exact_match,first_word"] == accuracy
    assert results["dcformer_synthetic_heldout_answers"]["acc,none"] == accuracy
    assert heldout["n-samples"]["dcformer_synthetic_heldout"] == {"original": 296, "effective": 296}
    assert 0.1 < accuracy < 1  # a comparison of two zeros or ones would say nothing


@pytest.mark.slow
def test_heldout_scores_are_the_direct_ones(heldout, direct):
    items = heldout_items()["test"]
    scores = [direct(item["prompt"], item["target"]) for item in items]
    results = heldout["results"]["dcformer_synthetic_heldout_answers"]
    assert results["acc,none"] == sum(greedy for _, greedy in scores) / 296
    expected = math.exp(-sum(value for value, _ in scores) / 296)
    assert results["perplexity,none"] == pytest.approx(expected, rel=RELATIVE)

    samples = heldout["samples"]["dcformer_synthetic_heldout_choices"]
    for item, sample in zip(items.select(range(74)), samples, strict=False):
        values = [direct(item["prompt"], f" {choice}")[0] for choice in item["choices"]]
        assert [value for value, _ in sample["filtered_resps"]] == pytest.approx(values, rel=RELATIVE, abs=RELATIVE)
        assert sample["acc"] == (values.index(max(values)) == item["gold"])
    mean = sum(sample["acc"] for sample in samples) / len(samples)
    assert heldout["results"]["dcformer_synthetic_heldout_choices"]["acc,none"] == pytest.approx(mean)

    texts = heldout_contexts()["test"]["text"]
    total = sum(direct("", text)[0] for text in texts)
    results = heldout["results"]["dcformer_synthetic_heldout_text"]
    num_bytes = sum(len(text.encode()) for text in texts)
    assert results["byte_perplexity,none"] == pytest.approx(math.exp(-total / num_bytes), rel=RELATIVE)
    assert results["bits_per_byte,none"] == pytest.approx(-total / num_bytes / math.log(2), rel=RELATIVE)


@pytest.mark.parametrize("whose", ["ours", "the authors'"])
def test_paper_scores_are_the_direct_ones(evaluate, direct, request, whose):
    """On a file of ours; and on the start of the authors', most of whose words the bundled tokenizer spells."""
    path = request.getfixturevalue("paper_file" if whose == "ours" else "authors_file")
    limit = 13 if whose == "ours" else 5
    done = evaluate(["dcformer_synthetic"], limit, metadata={"dcformer_synthetic_file": str(path)})
    accuracies, perplexities = [], []
    for num_shots in range(2, 8):
        items = paper_items(num_shots, path)["test"].select(range(limit))
        scores = [direct(item["prompt"], item["target"]) for item in items]
        accuracies.append(sum(greedy for _, greedy in scores) / len(items))
        perplexities.append(math.exp(-sum(value for value, _ in scores) / len(items)))
        results = done["results"][f"dcformer_synthetic_{num_shots}shot"]
        assert results["acc,none"] == accuracies[-1]
        assert results["perplexity,none"] == pytest.approx(perplexities[-1], rel=RELATIVE)
    assert sum(accuracies) > 0 or whose != "ours"
    assert done["groups"]["dcformer_synthetic"]["acc,none"] == pytest.approx(sum(accuracies) / 6)
    mean = sum(perplexities) / 6
    assert done["groups"]["dcformer_synthetic"]["perplexity,none"] == pytest.approx(mean, rel=RELATIVE)


def test_answers_of_several_tokens(evaluate, direct, tmp_path):
    """An answer counts only if each of its tokens is the most likely one; its likelihood is that of all of them."""
    words = ["bird", "fish . Anna", "fish"]
    texts = "\n" + "".join(f"< Anna owns the tuna. >. Anna owns a kind of [ {words[i % 3]} ]\n" for i in range(8))
    path = tmp_path / "several.jsonl"
    path.write_text(json.dumps({"task_id": "task0", "texts": texts}) + "\n")
    done = evaluate(["dcformer_synthetic_4shot"], metadata={"dcformer_synthetic_file": str(path)}, batch_size=1)
    item = paper_items(4, path)["test"][0]
    assert item["answer"] == "fish . Anna"
    value, greedy = direct(item["prompt"], item["target"])
    results = done["results"]["dcformer_synthetic_4shot"]
    assert results["acc,none"] == greedy
    assert results["perplexity,none"] == pytest.approx(math.exp(-value), rel=RELATIVE)


@pytest.mark.parametrize(
    "gen_kwargs", [{"cache_implementation": "static"}, {"num_beams": 2}], ids=lambda g: next(iter(g))
)
def test_generation_options(evaluate, gen_kwargs):
    """A static cache generates the same texts; an option that changes them reaches generate."""
    texts = [
        [sample["resps"] for sample in evaluate(["dcformer_synthetic_heldout"], 37, gen_kwargs=options)["samples"]
         ["dcformer_synthetic_heldout"]]
        for options in (None, gen_kwargs)
    ]  # fmt: skip
    assert len({str(text) for text in texts[0]}) > 5
    assert (texts[0] == texts[1]) == ("cache_implementation" in gen_kwargs)


@pytest.mark.long
def test_automatic_batch_size(evaluate, heldout):
    """lm-eval tries batches of texts as long as the model takes: shortened here."""
    done = evaluate(HELDOUT, 40, batch_size="auto", max_batch_size=8, max_length=128)
    fixed = evaluate(HELDOUT, 40)
    for task in HELDOUT:
        for metric, value in fixed["results"][task].items():
            if isinstance(value, float):
                assert done["results"][task][metric] == pytest.approx(value, rel=RELATIVE), (task, metric)


def test_every_request_type_is_covered(lm_eval):
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(TASKS_FOLDER), include_defaults=False).load(HELDOUT)["tasks"]
    types = {task.OUTPUT_TYPE for task in tasks.values()}
    assert types == {"generate_until", "loglikelihood", "multiple_choice", "loglikelihood_rolling"}
    assert all(task.config.num_fewshot == 0 for task in tasks.values())  # --num_fewshot leaves them alone


@pytest.mark.parametrize(("group", "num_fewshot"), [("", None), ("_0shot", 0), ("_5shot", 5)])
def test_table_4(lm_eval, monkeypatch, group, num_fewshot):
    """The group is made of lm-eval's tasks, and its shots reach them; their data is on the Hub."""
    from lm_eval.tasks import TaskManager, _factory

    made = {}

    class Recorder(lm_eval.api.task.ConfigurableTask):
        def __init__(self, config):
            self.made = made.setdefault(config["task"], config)

        @property
        def task_name(self):
            return self.made["task"]

    monkeypatch.setattr(_factory, "ConfigurableTask", Recorder)
    name = f"dcformer_paper{group}"
    loaded = TaskManager(include_path=str(TASKS_FOLDER)).load(name)
    names = "lambada_openai piqa winogrande arc_easy arc_challenge sciq logiqa boolq hellaswag race"
    assert loaded["group_map"] == {name: names.split()} and list(made) == names.split()
    for config in made.values():
        assert config.get("num_fewshot") == num_fewshot  # None: as --num_fewshot says
        assert "acc" in [metric["metric"] for metric in config["metric_list"]]
