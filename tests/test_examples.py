"""The demonstration and the training script, at small sizes, and the bundled checkpoint itself."""

import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import REPOSITORY, authors_folder, documented_commands
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainerControl

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
sys.path.insert(0, str(REPOSITORY / "examples"))
import demo
import published_checkpoints
import recipe_runs
import synthetic_rows
import train_synthetic

from dcformer.synthetic import Question, generate_dataset, get_task, split_of, vocabulary, write_dataset

CHECKPOINT = REPOSITORY / "checkpoints" / "dcformer-synthetic"


def test_demo_prints_what_the_model_answers(capsys):
    accuracy = demo.main(["--questions-per-task", "1", "--show", "3"])
    printed = capsys.readouterr().out
    assert printed.count("answer: ") == printed.count("expected: ") == 3
    assert f"= {accuracy:.1%}" in printed and "of 74 held-out questions" in printed
    families = re.findall(r"^[a-z-]+ +(\d+) of (\d+)$", printed, re.MULTILINE)
    assert len(families) == 6 and sum(int(total) for _, total in families) == 74
    assert sum(int(count) for count, _ in families) == round(accuracy * 74)
    assert "a right answer" in printed and printed.count(", composed '") >= 4
    assert "would be right in 37.4%: 56 lead to 3 answers, 18 lead to 2 answers" in printed  # (56 / 3 + 18 / 2) / 74

    # the same questions, one at a time, without pipeline, padding or cache
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    right = 0
    with torch.no_grad():
        for question in demo.held_out_questions(1, seed=2026):
            logits = model(**tokenizer(question["prompt"], return_tensors="pt"), use_cache=False).logits
            right += tokenizer.decode(logits[0, -1].argmax()).strip() == question["answer"]
    assert right == round(accuracy * 74)
    assert accuracy >= 0.9  # what the bundled checkpoint is there to show


def test_demo_prints_what_a_wrong_answer_should_have_been(capsys, monkeypatch):
    asked = demo.held_out_questions(1, seed=2026)
    monkeypatch.setattr(demo, "answer", lambda *_: ["wrong", *(question["answer"] for question in asked[1:])])
    with pytest.raises(SystemExit):
        demo.main(["--show", "-1"])
    assert "--show -1: expected at least 0" in capsys.readouterr().err
    demo.main(["--questions-per-task", "1", "--show", "100"])
    printed = capsys.readouterr().out
    assert printed.count("answer: ") == 74
    assert f"\na wrong answer, 'wrong', expected {asked[0]['answer']!r}, and where " in printed


def test_bundled_checkpoint():
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 8e6
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["model_type"] == "dcformer" and "hidden_size" in config and "auto_map" not in config
    reports = json.loads((CHECKPOINT / "training.json").read_text())
    card = (CHECKPOINT / "README.md").read_text(encoding="utf-8")
    assert card == train_synthetic.card(CHECKPOINT)
    assert "dcformer" in reports and set(reports) <= set(train_synthetic.VARIANTS)
    for report in reports.values():
        assert f"{report['test_accuracy']:.1%}" in card and f"{report['test_loss']:.3f}" in card
        assert report["steps"] == reports["dcformer"]["steps"] and report["seed"] == reports["dcformer"]["seed"]
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert len(tokenizer) == config["vocab_size"]
    assert tokenizer.model_max_length == config["max_position_embeddings"]


def test_the_bundled_model_stops_at_strings_and_at_tokens():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(CHECKPOINT), AutoTokenizer.from_pretrained(CHECKPOINT)
    batch = tokenizer("\n< Peter owns the desk. >. Peter owns a kind of", return_tensors="pt")
    length = batch["input_ids"].shape[1]
    options = {**batch, "max_new_tokens": 4, "do_sample": False}
    first, second, *rest = model.generate(**options)[0, length:].tolist()
    assert first != second and rest
    for stop in (
        {"eos_token_id": [tokenizer.eos_token_id, second]},
        {"stop_strings": ["desk", tokenizer.decode([second])], "tokenizer": tokenizer},
    ):
        assert model.generate(**options, **stop)[0, length:].tolist() == [first, second]


def test_characters_of_the_bundled_checkpoint_are_unknown_words_to_it():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(CHECKPOINT), AutoTokenizer.from_pretrained(CHECKPOINT)
    words = len(train_synthetic.build_tokenizer())
    assert len(tokenizer) == len(train_synthetic.build_tokenizer(spell=True)) > words
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        unknown = layer.weight[tokenizer.unk_token_id]
        assert torch.equal(layer.weight[words:], unknown.expand(len(tokenizer) - words, -1))


def test_bundled_checkpoint_scores_what_its_card_says():
    """A tenth of the held-out contexts, within what so small a sample can deviate."""
    reports = json.loads((CHECKPOINT / "training.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    data = train_synthetic.make_data("test", 1, 3, reports["dcformer"]["seed"], tokenizer)
    right = total = 0
    with torch.no_grad():
        for row in data:
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
            predicted = model(ids).logits[0].argmax(-1)[:-1]
            scored = labels[1:] != -100
            right, total = right + int((predicted == labels[1:])[scored].sum()), total + int(scored.sum())
    expected = reports["dcformer"]["test_accuracy"]
    assert abs(right / total - expected) < 4 * (expected * (1 - expected) / total) ** 0.5


def branch_prompt(row: dict, branch: int) -> list[int]:
    """The tokens of one question's own text."""
    return [token for token, of in zip(row["input_ids"], row["branch"], strict=True) if of in (0, branch)]


def held_out_prompts(row: dict, tokenizer) -> list[str]:
    """The question lines of a row that do not belong to the training split."""
    prompts = []
    for branch in range(1, max(row["branch"]) + 1):
        *examples, last = tokenizer.decode(branch_prompt(row, branch)).strip().split("\n")
        prompts += [last, *(example.rpartition(" ")[0] for example in examples)]
    return [prompt for prompt in prompts if split_of(Question(*prompt.split(" ", 1), answer="")) != "train"]


@pytest.mark.parametrize(("facts", "examples", "tokens"), [(2, 0, 48), (3, 0, 48), (3, 2, 112)])
def test_rows_ask_questions_of_the_training_split_only(facts, examples, tokens, monkeypatch):
    tokenizer = train_synthetic.build_tokenizer()
    rng = random.Random(0)
    rows = [synthetic_rows.make_row(synthetic_rows.Stage(facts), examples, tokens, rng) for _ in range(200)]
    assert not any(held_out_prompts(row, tokenizer) for row in rows)
    assert all(len({len(values) for values in row.values()}) == 1 for row in rows)
    assert max(len(row["input_ids"]) for row in rows) <= tokens
    assert not any(tokenizer.unk_token_id in row["input_ids"] for row in rows)
    # the check sees what it looks for
    monkeypatch.setattr(synthetic_rows, "split_of", lambda question: "train")
    rows = [synthetic_rows.make_row(synthetic_rows.Stage(facts), examples, tokens, rng) for _ in range(200)]
    assert any(held_out_prompts(row, tokenizer) for row in rows)


PATTERNS = ["same-person", "the-other-person", "same-object", "the-other-class", "other-in-set", "different-in-set"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_answers_of_rows_are_the_generators(pattern, monkeypatch):
    """With three names and a dozen countries both meet the same questions often."""

    def key(question: Question) -> tuple:
        return question.query, *sorted(re.split(r"[.,] ", question.statement.strip("<> .").removeprefix("Here are ")))

    for module in (vocabulary, synthetic_rows):
        monkeypatch.setattr(module, "NAMES", vocabulary.NAMES[:3])
    rng = random.Random(0)
    task = get_task(f"{pattern}.city->country.{'item' if pattern.endswith('set') else 'plain'}")
    answers = {key(question): question.answer for question in (task.sample(rng) for _ in range(8000))}
    drawn = [
        q for _ in range(2000) for q in synthetic_rows.statement_and_questions(task, synthetic_rows.Stage(), rng)[1]
    ]
    met = [question for question in drawn if key(question) in answers]
    assert len(met) > 100
    assert all(question.answer == answers[key(question)] for question in met)


def test_a_question_of_a_row_is_read_as_a_text_of_its_own():
    tokenizer = train_synthetic.build_tokenizer(model_max_length=128)
    torch.manual_seed(0)
    model = train_synthetic.make_model(tokenizer, attn_implementation="eager").double().eval()
    for parameter in model.parameters():  # layers' outputs start with zero: nothing would be seen
        torch.nn.init.normal_(parameter, std=0.1)
    rng = random.Random(0)
    rows = [synthetic_rows.make_row(synthetic_rows.Stage(), examples, 112, rng) for examples in (0, 2)]
    batch = synthetic_rows.collate(rows, train_synthetic.WINDOW)
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits
        for index, row in enumerate(rows):
            for branch in range(1, max(row["branch"]) + 1):
                ids = torch.tensor([branch_prompt(row, branch)])
                alone = model(ids, use_cache=False).logits[0, -1]
                end = max(place for place, of in enumerate(row["branch"]) if of == branch)
                assert torch.allclose(logits[index, end], alone, rtol=0, atol=1e-10)
                answer = row["labels"][end + 1]
                assert answer != -100 and tokenizer.decode(answer) not in ("<pad>", "\n")


def log(*losses: float) -> list[dict]:
    """What `Trainer` keeps of a run, one loss each 50 steps."""
    return [{"step": 50 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]


def test_a_stage_begins_when_the_last_is_learned_and_the_decay_when_all_are():
    curriculum = train_synthetic.Curriculum(None, 100, warmup_steps=10)
    stages = len(train_synthetic.CURRICULUM)
    history = log(*[0.1] * (3 * stages - 2), 0.24, 0.21, 0.1)  # the first two of a stage are too early
    curriculum.read(history[:2])
    assert curriculum.begins == [0, 105] and [curriculum.stage_of(step) for step in (0, 104, 105, 900)] == [0, 0, 1, 1]
    curriculum.read(history[:-1])  # the last stage goes on below 0.25
    assert len(curriculum.begins) == stages and curriculum.decay_begins == train_synthetic.MOST_STEPS - 100
    curriculum.read(history)
    begins = history[-1]["step"] + train_synthetic.AHEAD
    assert curriculum.decay_begins == begins
    shares = {0: 0, 5: 0.5, 10: 1, begins: 1, begins + 25: 0.75, begins + 100: 0, begins + 200: 0}
    assert {step: curriculum.rate(step) for step in shares} == pytest.approx(shares)
    for step, stops in ((begins + 99, False), (begins + 100, True)):
        control = TrainerControl()
        curriculum.on_step_end(None, SimpleNamespace(global_step=step), control)
        assert control.should_training_stop == control.should_save == stops
    rows = train_synthetic.Rows(curriculum, batch_size=2, seed=0)
    assert len(rows) == 2 * train_synthetic.MOST_STEPS
    assert len(rows[2 * begins - 1]["input_ids"]) <= train_synthetic.TOKENS < len(rows[2 * begins]["input_ids"])


def test_a_stage_that_takes_long_goes_on_at_lower_rates():
    """The next stage begins at the full rate; the decay goes down from where the last stage was."""
    patience = train_synthetic.PATIENCE
    curriculum = train_synthetic.Curriculum(None, 100)
    shares = {0: 1, patience - 1: 1, patience: 0.5, 2 * patience - 1: 0.5, 2 * patience: 0.25, 3 * patience: 0.125}
    assert {step: curriculum.rate(step) for step in shares} == shares
    stages = len(train_synthetic.CURRICULUM)
    curriculum.read(log(*[0.1] * (3 * (stages - 1)), *[0.22] * 60, 0.1))
    begun, decays = curriculum.begins[-1], curriculum.decay_begins
    assert len(curriculum.begins) == stages and 2 * patience < decays - begun < 3 * patience
    shares = {begun: 1, begun + patience: 0.5, decays - 1: 0.25, decays: 0.25, decays + 50: 0.125, decays + 100: 0}
    assert {step: curriculum.rate(step) for step in shares} == pytest.approx(shares)


def test_a_run_of_so_many_steps_has_one_rate_and_decays_at_their_end():
    curriculum = train_synthetic.Curriculum(5600, 1000)
    assert {curriculum.rate(step) for step in range(0, 4601, 100)} == {1}
    curriculum.read(log(*[0.1] * 40))
    assert curriculum.decay_begins == 4600 and len(curriculum.begins) == len(train_synthetic.CURRICULUM)


def test_the_page_tells_the_runs_of_the_recipe():
    runs = json.loads((REPOSITORY / "benchmarks" / "results" / "synthetic_recipe.json").read_text())["runs"]
    assert recipe_runs.recipe(runs) in (REPOSITORY / "docs" / "training_results.md").read_text(encoding="utf-8")


def test_the_page_has_rows_of_the_runs_that_are_kept(capsys):
    recipe_runs.main([])
    printed = capsys.readouterr().out
    page = (REPOSITORY / "docs" / "training_results.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| \d \| \d\.\d\d \| .+ % \| .+ % \|$", page, re.MULTILINE)
    bundled, twin = printed.split("plain-qk-norm, seed 0")
    assert len(rows) > 8 and all(row in bundled for row in rows) and not all(row in twin for row in rows)
    assert "dcformer, seed 0, rate 0.001, 5,600 steps: 96.6% of 2,220 held-out answers, loss 0.069, 33.4 min" in bundled
    # what the page tells of the forerunner: when the first stage was learned
    cells = [line.strip("| ").split(" | ") for line in twin.split("A forerunner")[1].splitlines()[4:]]
    first = {name: learned.partition(", ")[0] for name, _, _, _, learned, *_ in cells}
    names = ("e1", "dc_s1", "dc_s2", "p1", "pl_s1", "pl_s2", "pl_hi", "base", "G", "c1")
    assert [first[name] for name in names] == ["443", "859", "555", "2,618", "-", "1,537", "1,215", "401", "-", "1,447"]
    for told in ("443, 859 and 555", "2618, not in 2000, and 1537", "seed 0 after 1215", "in 401", "step 1447"):
        assert told in " ".join(page.split())


def script_options(folder, *flags: str) -> list[str]:
    small = ["--batch-size", "4", "--save-steps", "2", "--warmup-steps", "1", "--test-contexts", "1"]
    places = ["--output", str(folder / "runs"), "--checkpoint", str(folder / "checkpoint")]
    return ["--quiet", "--cpu", *small, *flags, *places]


def run_script(folder, *flags: str) -> subprocess.CompletedProcess:
    script = str(REPOSITORY / "examples" / "train_synthetic.py")
    return subprocess.run([sys.executable, script, *script_options(folder, *flags)], capture_output=True, text=True)


@pytest.fixture
def few_contexts(monkeypatch):
    """The training script measures a few contexts: all of them, at every checkpoint, take longer than all its steps."""
    make_data = train_synthetic.make_data
    monkeypatch.setattr(train_synthetic, "make_data", lambda *arguments: make_data(*arguments)[::20])


@pytest.mark.long
@pytest.mark.usefixtures("few_contexts")
def test_training_script_makes_a_checkpoint_and_resumes(tmp_path):
    length = ("--steps", "8", "--decay-steps", "2")
    train_synthetic.main(script_options(tmp_path / "whole", *length))
    report = json.loads((tmp_path / "whole" / "checkpoint" / "training.json").read_text())["dcformer"]
    assert report["steps"] == 8 and [line["step"] for line in report["curve"]] == [2, 4, 6, 8]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole" / "checkpoint")
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    assert len(tokenizer) == model.config.vocab_size and tokenizer.unk_token_id not in tokenizer("spelt")["input_ids"]

    part = tmp_path / "part"
    train_synthetic.main(script_options(part, "--steps", "6", "--decay-steps", "2"))
    done = run_script(part, *length)
    assert done.returncode == 1 and "give --resume to go on" in done.stderr
    for flags, message in (
        ((*length, "--resume"), "steps is 6 there and 8 now"),  # its rate has fallen already
        (("--steps", "6", "--decay-steps", "2", "--seed", "1", "--resume"), "seed is 0 there and 1 now"),
    ):
        with pytest.raises(SystemExit, match=message):
            train_synthetic.main(script_options(part, *flags))
    cut = part / "runs" / "dcformer" / "checkpoint-6" / "trainer_state.json"  # the one before the decay is left
    cut.write_text(cut.read_text()[:100])
    curve = part / "runs" / "dcformer" / "curve.jsonl"
    curve.write_text(curve.read_text().splitlines(keepends=True)[0])  # ended between checkpoint 4 and its line
    torch.manual_seed(1)  # as little is left of the first part as in a new process
    train_synthetic.main(script_options(part, *length, "--resume"))
    again = json.loads((part / "checkpoint" / "training.json").read_text())["dcformer"]
    for was, now in zip(report["curve"], again["curve"], strict=True):
        assert {**was, "processor_seconds": 0} == {**now, "processor_seconds": 0}
    resumed = AutoModelForCausalLM.from_pretrained(tmp_path / "part" / "checkpoint").state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in model.state_dict().items())


@pytest.mark.long
@pytest.mark.usefixtures("few_contexts")
def test_training_script_ends_when_all_is_learned(tmp_path, monkeypatch):
    """Here every loss counts as learned, and so does none of what a run with `--steps` has seen."""
    for name, value in {"LEARNED": 99.0, "ALL_LEARNED": 99.0, "LOG_STEPS": 2, "AHEAD": 1}.items():
        monkeypatch.setattr(train_synthetic, name, value)
    train_synthetic.main(script_options(tmp_path, "--steps", "4", "--decay-steps", "0", "--save-steps", "16"))
    train_synthetic.main(script_options(tmp_path, "--decay-steps", "3", "--resume", "--save-steps", "16"))
    report = json.loads((tmp_path / "checkpoint" / "training.json").read_text())["dcformer"]
    steps = 6 * len(train_synthetic.CURRICULUM) - 1 + 3  # of a stage: the first loss after two logs, and one step more
    assert report["steps"] is None and report["curve"][-1]["step"] == steps
    card = (tmp_path / "checkpoint" / "README.md").read_text()
    assert "`python examples/train_synthetic.py`, seed 0" in card and f"| {report['curve'][-1]['step']} |" in card
    with pytest.raises(SystemExit, match="steps is None there and 99 now"):
        train_synthetic.main(script_options(tmp_path, "--steps", "99", "--decay-steps", "3", "--resume"))


# --- published_checkpoints.py -----------------------------------------------------------------------------------------


@pytest.fixture
def synthetic_file(tmp_path):
    file = tmp_path / "synthetic.jsonl"
    write_dataset(generate_dataset("test", contexts_per_task=1, num_examples=8, seed=0), file)
    return str(file)


@pytest.mark.long
@pytest.mark.usefixtures("few_tasks")
def test_published_checkpoints_are_evaluated_once_a_task(tmp_path, synthetic_file, monkeypatch, capsys):
    """The bundled checkpoint and a folder of the authors' in place of theirs; the tables have both."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'dcformer[eval]'")
    theirs = authors_folder(tmp_path / "DCPythia-6.9B", "pytorch_model.bin")
    words = {word: i for i, word in enumerate(["[UNK]", "<", ">", ".", "has", "a", "does", "not"])}
    split = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    split.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=split, unk_token="[UNK]", eos_token=".").save_pretrained(theirs)
    options = ["--models", str(CHECKPOINT), str(theirs), "--tasks", "--synthetic", synthetic_file]
    options += ["--dtype", "float32", "--batch-size", "8", "--limit", "1", "--output", str(tmp_path / "runs")]
    assert published_checkpoints.main(options) == 0
    table = capsys.readouterr().out
    found = {
        name: json.loads((tmp_path / "runs" / name / "dcformer_synthetic_0shot.json").read_text())
        for name in (CHECKPOINT.name, "DCPythia-6.9B")
    }
    first, second = ((s["perplexity,none"], 100 * s["acc,none"]) for s in found.values())
    assert f"| {CHECKPOINT.name} | {first[0]:.2f}* | - | {first[1]:.1f}* | - |" in table
    assert f"| DCPythia-6.9B | {second[0]:.2f}* | 7.36 | {second[1]:.1f}* | 39.0 |" in table
    content = hashlib.sha256(Path(synthetic_file).read_bytes()).hexdigest()
    assert {scores["data"] for scores in found.values()} == {f"sha256:{content}"}
    assert table.count("* first items only: dcformer_synthetic 0-shot (--limit 1)") == 2
    assert table.count(f"is not the authors' file, but sha256:{content}") == 2

    import lm_eval

    monkeypatch.setattr(lm_eval, "simple_evaluate", None)  # all there is has been run
    assert published_checkpoints.main(options) == 0 and capsys.readouterr().out == table
    with pytest.raises(SystemExit, match="has limit 1, this run 2: give another --output"):
        published_checkpoints.main([*options, "--limit", "2"])
    write_dataset(generate_dataset("test", contexts_per_task=1, num_examples=8, seed=1), synthetic_file)
    with pytest.raises(SystemExit, match=f"has data sha256:{content}, this run sha256:.*give another --output"):
        published_checkpoints.main(options)


def test_published_checkpoints_say_what_was_measured(tmp_path, capsys):
    """Limited results have a star, alone and in a mean; models, dtypes and other data are named."""

    def write(task, shots, **fields):
        file = tmp_path / "DCFormer-2.8B" / f"{task}_{shots}shot.json"
        file.parent.mkdir(exist_ok=True)
        common = {"model": "here/DCFormer-2.8B", "dtype": "float16", "limit": None, "data": "x"}
        file.write_text(json.dumps(common | fields))
        return file

    options = ["--report", "--output", str(tmp_path), "--tasks", "piqa", "boolq", "piqa", "--models", "DCFormer-2.8B"]
    write("piqa", 0, **{"acc,none": 0.5})
    write("boolq", 0, **{"acc,none": 0.75})
    write("piqa", 5, limit=2, **{"acc,none": 0.5})
    write("boolq", 5, **{"acc,none": 1.0})
    scores = {"acc,none": 0.25, "perplexity,none": 9.0}
    write("dcformer_synthetic", 0, data=published_checkpoints.AUTHORS_FILE, **scores)
    published_checkpoints.main(options)
    whole = capsys.readouterr().out
    assert "| 0-shot | piqa | boolq | mean of 2 | paper, mean of 11 |" in whole
    assert "| DCFormer-2.8B | 50.0 | 75.0 | 62.5 | 56.4 |" in whole
    assert "| DCFormer-2.8B | 50.0* | 100.0 | 75.0* |" in whole
    assert "| DCFormer-2.8B | 9.00 | - | 25.0 | - |" in whole
    assert "- DCFormer-2.8B: here/DCFormer-2.8B in float16\n  * first items only: piqa 5-shot (--limit 2)" in whole
    assert "authors' file" not in whole
    write("dcformer_synthetic", 0, data="sha256:0", dtype="bfloat16", **scores)
    published_checkpoints.main(options)
    other = capsys.readouterr().out
    assert "is not the authors' file, but sha256:0" in other
    assert "here/DCFormer-2.8B in bfloat16, here/DCFormer-2.8B in float16" in other
    for content in ("{", "[]", "{}"):
        write("piqa", 0).write_text(content)
        with pytest.raises(SystemExit, match=r"^error: .*piqa_0shot.json .*: delete it to run its task again$"):
            published_checkpoints.main(options)


@pytest.mark.parametrize("name", ["a/model/", "./a/model", "a//model/."])
def test_a_folder_has_its_results_however_it_is_written(name, tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'dcformer[eval]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(published_checkpoints, "check_input", lambda options, todo: None)
    for folder in ("a/model", "runs/model"):
        Path(folder).mkdir(parents=True)
    content = {"model": "a/model", "dtype": "float16", "limit": None, "data": "x", "acc,none": 0.5}
    Path("runs/model/piqa_0shot.json").write_text(json.dumps(content))
    options = ["--output", "runs", "--tasks", "piqa", "--shots", "0"]
    assert published_checkpoints.main([*options, "--models", name]) == 0
    assert "| model | 50.0 | 50.0 |" in capsys.readouterr().out


def test_the_authors_synthetic_file_is_known(authors_file):
    assert published_checkpoints.digest(authors_file) == published_checkpoints.AUTHORS_FILE


@pytest.mark.usefixtures("few_tasks")
def test_published_checkpoints_refuse_before_a_model_is_loaded(tmp_path, synthetic_file, monkeypatch):
    """What the user or the environment lacks is one line; bugs are raised."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'dcformer[eval]'")
    import lm_eval.models.huggingface

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach 'baber/piqa' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", offline)
    monkeypatch.setattr(lm_eval.models.huggingface, "HFLM", lambda **_: pytest.fail("a model was loaded"))
    bare = str(authors_folder(tmp_path / "bare"))
    small = shutil.copytree(CHECKPOINT, tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 7}))
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text("# no JSON\n")
    own, output = ["--models", str(CHECKPOINT)], ["--output", str(tmp_path / "runs")]
    synthetic = ["--tasks", "--synthetic", synthetic_file]
    for words, message in (
        ([*synthetic, "--models", bare], f"the tokenizer of {bare} cannot be read \\(.+\\): run with network"),
        ([*synthetic, "--models", str(small)], f"{small} has a vocabulary of 7, its tokenizer "),
        ([*own, "--tasks", "piqa"], "data of piqa cannot be read \\(.*piqa.*\\): run with network"),
        ([*own, "--tasks", "--synthetic", str(wrong)], f"--synthetic {wrong}: expected a file with one JSON object"),
        ([*own, "--tasks", "--synthetic", "nothing.jsonl"], "--synthetic nothing.jsonl: .*No such file"),
        ([*own, *synthetic, "--output", str(wrong)], f"--output {wrong}: no file can be written there"),
    ):
        with pytest.raises(SystemExit, match=f"^error: {message}") as caught:
            published_checkpoints.main([*output, *words])
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs" / CHECKPOINT.name).exists()

    def bug(file):
        return file.nothing

    monkeypatch.setattr(published_checkpoints, "read_paper_file", bug)
    with pytest.raises(AttributeError):
        published_checkpoints.main([*output, *own, *synthetic])


def test_published_checkpoints_in_memory_and_errors(tmp_path, capsys):
    theirs = authors_folder(tmp_path / "B1", "pytorch_model.bin")
    assert (
        published_checkpoints.main(["--memory", "--models", str(theirs), str(CHECKPOINT), "--dtype", "bfloat16"]) == 0
    )
    sizes = [AutoModelForCausalLM.from_pretrained(folder).num_parameters() for folder in (theirs, CHECKPOINT)]
    assert [f"{size:,}" for size in sizes] == re.findall(r"\| ([\d,]+) \|", capsys.readouterr().out)
    with pytest.raises(SystemExit, match=r"^error: .*nowhere cannot be read \(.*give whole folders to --models$"):
        published_checkpoints.main(["--memory", "--models", str(tmp_path / "nowhere")])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"^error: .* cannot be read \(Unrecognized model .*give whole folders"):
        published_checkpoints.main(["--memory", "--models", str(tmp_path)])
    for words, message in (
        (["--models", "a/x", "b/x"], "must differ"),
        (["--batch-size", "foo"], "argument --batch-size: foo is neither a number of at least 1 nor auto"),
        (["--batch-size", "0"], "argument --batch-size: 0 is neither"),
        (["--limit", "0"], "argument --limit: 0 is not a number of at least 1"),
        (["--device", "foo"], "argument --device: "),
    ):
        with pytest.raises(SystemExit):
            published_checkpoints.main(words)
        assert message in capsys.readouterr().err


def test_documented_commands_of_published_checkpoints(capsys):
    commands = [words for words in documented_commands(REPOSITORY / "docs" / "evaluation.md") if words[0] == "python"]
    options = [words[2:] for words in commands if words[1] == "examples/published_checkpoints.py"]
    assert len(options) == 3
    with pytest.raises(SystemExit):
        published_checkpoints.main(["--help"])
    known = capsys.readouterr().out
    assert all(word in known for words in options for word in words if word.startswith("--"))


def test_the_page_has_the_papers_figures():
    page = (REPOSITORY / "docs" / "evaluation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+-[\d.]+B) \| ([\d.]+) % \| (?:-|([\d.]+), ([\d.]+) %) \|$", page, re.MULTILINE)
    told = {name.lower(): [float(figure) for figure in figures if figure] for name, *figures in rows}
    assert told == {name: list(figures.values()) for name, figures in published_checkpoints.PAPER.items()}
    assert "dcpythia-2.8b" in told


def test_published_checkpoints_ask_for_the_tasks_of_the_group():
    group = (REPOSITORY / "src/dcformer/evaluation/tasks/dcformer_paper.yaml").read_text()
    assert tuple(re.findall(r"^  - (\w+)$", group, re.MULTILINE)) == published_checkpoints.TASKS
