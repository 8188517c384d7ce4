"""dcformer-dha on folders: every stage, what it writes, that it resumes, and what it refuses; the examples."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY
from tiny_sources import llama, make
from transformers import AutoModelForCausalLM, AutoTokenizer

from dcformer import dha
from dcformer.files import locked_folder
from dcformer_commands.dha import main

pytest.importorskip("trl")
sys.path.insert(0, str(REPOSITORY / "examples"))
import dha_study

TOKENIZER = REPOSITORY / "checkpoints" / "dcformer-synthetic"
TEXTS = REPOSITORY / "examples" / "data" / "text_test.jsonl"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    torch.manual_seed(0)
    model = llama(vocab_size=len(tokenizer), max_position_embeddings=512)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def call(capsys, *words):
    """Status and everything printed."""
    status = main([str(word) for word in words])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


FUSE = ("--data", TEXTS, "--steps", 4, "--closing-steps", 2, "--length", 32, "--batch-size", 2, "--lr", "1e-3")


def test_from_a_folder_to_a_folded_one(source, tmp_path, capsys):
    plan, fused, model = (tmp_path / name for name in ("plan.json", "fused", "model"))
    search = ("search", "--model", source, "--output", plan, "--kv-ratio", 0.25)
    status, printed = call(capsys, *search)
    assert status == 0 and "[2, 2] key heads, [2, 2] value heads; 75.0% of 32 heads saved" in printed
    assert dha.HeadPlan.load(plan) == dha.search(source, 0.25, progress=False)
    fuse = ("fuse", "--model", source, "--plan", plan, "--output", fused, *FUSE)
    status, printed = call(capsys, *fuse)
    assert status == 0 and "of the source" in printed and "before folding" in printed
    record = json.loads((fused / "fusion.json").read_text())
    assert record["summary"]["small_at"] is None and f"fusion loss {record['losses'][-1]['fusion']:.2g}" in printed
    assert "below 0.001 never" in printed
    status, printed = call(capsys, "fold", "--model", fused, "--output", model)
    assert status == 0 and "[2, 2] key heads" in printed
    folded = AutoModelForCausalLM.from_pretrained(model).eval()
    soft = dha.FusedModel.load(fused).model.eval()
    ids = AutoTokenizer.from_pretrained(model)("\n< Peter owns the desk", return_tensors="pt").input_ids
    assert (folded(ids).logits - soft(ids).logits).abs().max() <= 1e-5
    card = (model / "README.md").read_text()
    assert "trained all parameters" in card and "75.0% of the cache saved" in card
    assert json.loads((model / "dha.json").read_text())["fusion"]["steps"] == 4
    assert json.loads((fused / "dha.json").read_text())["given"]["lr"] == 1e-3
    status, printed = call(capsys, "report", "--model", model, "--context", 256)
    assert status == 0 and "75.0% of 32 saved" in printed and "cache of 256 tokens" in printed
    status, printed = call(capsys, "expand", "--model", model, "--output", tmp_path / "mha")
    assert status == 0 and "LlamaForCausalLM with 8" in printed
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "mha").eval()
    assert (folded(ids).logits - plain(ids).logits).abs().max() <= 1e-5

    slash = [f"{word}/" if word == source else word for word in fuse]  # as a shell completes it
    for stage in (search, fuse, slash, ("fold", "--model", fused, "--output", model)):  # again: nothing to do
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        status, printed = call(capsys, *stage)
        assert status == 0 and "exists already" in printed
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    status, printed = call(capsys, *fuse[:-1], "2e-3")
    assert status == 1 and "other arguments (lr)" in printed
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".run")]


def test_a_tied_plan_is_exported(source, tmp_path, capsys):
    plan, model = tmp_path / "plan.json", tmp_path / "model"
    assert call(capsys, "search", "--model", source, "--output", plan, "--kv-ratio", 0.5, "--tie")[0] == 0
    assert call(capsys, "fold", "--model", source, "--plan", plan, "--output", model)[0] == 0
    assert "without training" in (model / "README.md").read_text()
    status, printed = call(capsys, "expand", "--model", model, "--output", tmp_path / "gqa", "--to", "gqa")
    assert status == 0 and "LlamaForCausalLM with 4" in printed
    untied = ("search", "--model", source, "--output", tmp_path / "other.json", "--kv-ratio", 0.5)
    call(capsys, *untied)
    call(capsys, "fold", "--model", source, "--plan", tmp_path / "other.json", "--output", tmp_path / "other")
    status, printed = call(capsys, "expand", "--model", tmp_path / "other", "--output", tmp_path / "no", "--to", "gqa")
    assert status == 1 and "tie=True" in printed and not (tmp_path / "no").exists()


def test_a_folded_neox_is_expanded(source, tmp_path, capsys):
    """Its configuration has no number of key and value heads."""
    make("neox-partial-rotary").save_pretrained(tmp_path / "neox")
    call(capsys, "search", "--model", tmp_path / "neox", "--output", tmp_path / "plan.json")
    folder = ("--model", tmp_path / "neox", "--plan", tmp_path / "plan.json", "--output", tmp_path / "folded")
    assert call(capsys, "fold", *folder)[0] == 0
    status, printed = call(capsys, "expand", "--model", tmp_path / "folded", "--output", tmp_path / "mha")
    assert status == 0 and "GPTNeoXForCausalLM with 8 key and value heads" in printed


def test_an_interrupted_fusion_continues(source, tmp_path, capsys, monkeypatch):
    plan = tmp_path / "plan.json"
    call(capsys, "search", "--model", source, "--output", plan)
    straight = ("fuse", "--model", source, "--plan", plan, *FUSE, "--save-steps", 2)
    assert call(capsys, *straight, "--output", tmp_path / "straight")[0] == 0
    from dcformer.dha import fusion

    original = fusion.ascend
    steps = []

    def ascend(*arguments):
        steps.append(arguments)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(fusion, "ascend", ascend)
    status, printed = call(capsys, *straight, "--output", tmp_path / "fused")
    assert status == 130 and "continue" in printed and not (tmp_path / "fused").exists()
    status, printed = call(capsys, *straight, "--output", tmp_path / "fused")
    assert status == 0 and "continues after step 2 of 4" in printed
    for file in ("model.safetensors", "operators.safetensors", "fusion.json"):
        assert (tmp_path / "fused" / file).read_bytes() == (tmp_path / "straight" / file).read_bytes()


def test_an_interrupted_run_is_not_continued_with_other_arguments(source, tmp_path, capsys, monkeypatch):
    """Other data or rows would otherwise go on unnoticed: the state of training does not know them."""
    plan, output = tmp_path / "plan.json", tmp_path / "fused"
    call(capsys, "search", "--model", source, "--output", plan)
    from dcformer.dha import fusion

    save = fusion._State.save

    def saved_and_stopped(*arguments):
        save(*arguments)
        raise KeyboardInterrupt

    trained = ("search", "--model", source, "--output", tmp_path / "trained.json", "--score", "function")
    for words, folder in ((("fuse", "--model", source, "--plan", plan, "--output", output), ".fused.run"),
                          (trained, ".trained.json.run")):  # fmt: skip
        words = (*words, *FUSE) if words[0] == "fuse" else (*words, *FUSE[:4], *FUSE[6:])
        with monkeypatch.context() as patch:
            patch.setattr(fusion._State, "save", saved_and_stopped)
            assert call(capsys, *words, "--save-steps", 1)[0] == 130
        assert (tmp_path / folder).is_dir()
        status, printed = call(capsys, *words, "--length", 16)
        assert status == 1 and "unfinished run with other arguments (length)" in printed
        status, printed = call(capsys, *words, "--save-steps", 2)
        assert status == 0 and not (tmp_path / folder).exists()


def test_a_refused_command_does_not_lock_its_output(source, tmp_path, capsys, monkeypatch):
    """Nor does a run that ended before its first state was saved."""
    from dcformer.dha import fusion

    plan, trained = tmp_path / "plan.json", tmp_path / "trained.json"
    call(capsys, "search", "--model", source, "--output", plan)
    fuse = ("fuse", "--model", source, "--plan", plan, "--output", tmp_path / "fused", *FUSE)
    search = ("search", "--model", source, "--output", trained, "--score", "function", *FUSE[:4], *FUSE[6:])
    for words, message in (
        ((*fuse, "--stop-at-loss", 1), "give closing_steps=0"),
        ((*fuse, "--steps", 0), "steps=0"),
        ((*search, "--steps", 0), "steps=0"),
        ((*search, "--lr", -1), "lr=-1.0"),
    ):
        status, printed = call(capsys, *words)
        assert status == 1 and message in printed
        assert sorted(path.name for path in tmp_path.iterdir()) == [".plan.json.given", "plan.json"]

    def killed(*arguments):  # it leaves its record
        monkeypatch.setattr("dcformer.dha.cli._remove_without_state", lambda folder: None)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fusion._State, "load", killed)
        assert call(capsys, *fuse, "--length", 16)[0] == 130
    assert (tmp_path / ".fused.run" / "dha.json").exists()
    monkeypatch.undo()
    assert call(capsys, *fuse)[0] == 0 and call(capsys, *search)[0] == 0


def test_one_process_trains_for_an_output(source, tmp_path, capsys, monkeypatch):
    """Another is refused at any time, and disturbs neither the run nor its state."""
    from dcformer.dha import fusion

    plan, trained = tmp_path / "plan.json", tmp_path / "trained.json"
    call(capsys, "search", "--model", source, "--output", plan)
    fuse = ("fuse", "--model", source, "--plan", plan, "--output", tmp_path / "fused", *FUSE)
    search = ("search", "--model", source, "--output", trained, "--score", "function", *FUSE[:4], *FUSE[6:])
    refused = []

    def also(original):
        """Meets the same command, with other arguments, before it goes on."""

        def met(*arguments):
            status, printed = call(capsys, *words, "--length", 16)
            refused.append(status == 1 and f"{output} is being written by another process: wait" in printed)
            return original(*arguments)

        return met

    monkeypatch.setattr(fusion._State, "load", also(fusion._State.load))
    monkeypatch.setattr(dha.HeadPlan, "save", also(dha.HeadPlan.save))  # of either command's output
    for words, output in ((fuse, tmp_path / "fused"), (search, trained)):
        status, _ = call(capsys, *words, "--save-steps", 1)
        assert status == 0 and output.exists() and refused == [True, True]
        refused.clear()
    assert not list(tmp_path.glob(".*.run"))


def test_figures_say_what_they_are_measured_on(source, tmp_path, capsys):
    """With fewer than 20 rows nothing is held out, and held-out texts of less than a row are refused."""
    plan, few, short = (tmp_path / name for name in ("plan.json", "few.jsonl", "short.jsonl"))
    few.write_text("".join(TEXTS.read_text(encoding="utf-8").splitlines(True)[:2]), encoding="utf-8")
    short.write_text('{"text": "two words"}\n', encoding="utf-8")
    call(capsys, "search", "--model", source, "--output", plan)
    fuse = ("fuse", "--model", source, "--plan", plan, *FUSE)
    for name, options, measured_on in (
        ("all", (), "held-out batches"),
        ("given", ("--eval-data", TEXTS), "held-out batches"),
        ("few", ("--data", few), "a training batch"),
    ):
        fused, model = tmp_path / f"{name}-fused", tmp_path / name
        status, printed = call(capsys, *fuse, *options, "--output", fused)
        assert status == 0 and f"loss on {measured_on} " in printed
        assert call(capsys, "fold", "--model", fused, "--output", model)[0] == 0
        assert f"Loss per token on {measured_on}: " in (model / "README.md").read_text()
    status, printed = call(capsys, *fuse, "--eval-data", short, "--output", tmp_path / "none")
    assert status == 1 and "--eval-data" in printed and "short.jsonl has less than one row of 32 tokens" in printed
    assert not (tmp_path / "none").exists() and not (tmp_path / ".none.run").exists()
    record = json.loads((fused / "fusion.json").read_text())
    record["summary"].pop("soft_loss")
    (fused / "fusion.json").write_text(json.dumps(record))
    status, printed = call(capsys, "fold", "--model", fused, "--output", tmp_path / "none")
    assert status == 1 and "fusion.json lacks soft_loss" in printed and not (tmp_path / "none").exists()


def test_rows_are_no_longer_than_the_models_context(tmp_path, capsys):
    """By default, too; the length that was settled is that of the record."""
    source, plan, fused = (tmp_path / name for name in ("source", "plan.json", "fused"))
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    llama(vocab_size=len(tokenizer), max_position_embeddings=24).save_pretrained(source)
    tokenizer.save_pretrained(source)
    assert call(capsys, "search", "--model", source, "--output", plan, "--length", 25)[0] == 0  # it reads no rows
    given = ("--data", TEXTS, "--steps", 1, "--closing-steps", 1, "--batch-size", 2)
    fuse = ("fuse", "--model", source, "--plan", plan, *given)
    search = ("search", "--model", source, "--score", "function", *given[:4], *given[6:])
    for words in ((*fuse, "--output", tmp_path / "no"), (*search, "--output", tmp_path / "no")):
        status, printed = call(capsys, *words, "--length", 25)
        assert status == 1 and "--length 25: expected" in printed and "to 24, the model's max_pos" in printed
        assert not (tmp_path / "no").exists()
    assert call(capsys, *fuse, "--output", fused)[0] == 0
    assert json.loads((fused / "dha.json").read_text())["given"]["length"] == 24
    assert "exists already" in call(capsys, *fuse, "--output", fused, "--length", 24)[1]


def test_a_search_that_is_killed_while_it_writes(source, tmp_path, capsys, monkeypatch):
    """At any time: no plan passes for that of other arguments, and none without a record is in the way."""
    plan, replace = tmp_path / "plan.json", os.replace
    quarter, half = (("search", "--model", source, "--output", plan, "--kv-ratio", ratio) for ratio in (0.25, 0.5))
    plans = [dha.search(source, ratio, progress=False) for ratio in (0.25, 0.5)]
    monkeypatch.setattr("dcformer.dha.cli._remove_without_state", lambda folder: None)  # a killed one does not
    states = set()
    for before in range(1, 7):  # each file gets its name in that way
        for overwritten in (False, True):
            assert not overwritten or call(capsys, *quarter, "--overwrite")[0] == 0
            calls = iter(range(1, 7))

            def killed(*paths, before=before, calls=calls):
                if next(calls) == before:
                    raise KeyboardInterrupt
                replace(*paths)

            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", killed)
                status, _ = call(capsys, *half, *["--overwrite"] * overwritten)
            assert status == (130 if before < 6 else 0)
            states.add((plan.exists(), (tmp_path / ".plan.json.given").exists()))
            if overwritten:  # the former plan, until the new one takes its place
                found = [dha.HeadPlan.load(plan) == each for each in plans]
                assert any(found) and (before < 6 or found[1])
                for words, is_there in ((quarter, found[0]), (half, found[1])):
                    status, printed = call(capsys, *words)
                    assert "exists already" in printed if status == 0 else "other arguments (" in printed
                    assert is_there or status == 1
                assert call(capsys, *half, "--overwrite")[0] == 0
            assert call(capsys, *half)[0] == 0 and dha.HeadPlan.load(plan) == plans[1]
            assert sorted(path.name for path in tmp_path.iterdir()) == [".plan.json.given", "plan.json"]
            plan.unlink()
            (tmp_path / ".plan.json.given").unlink()
    assert states >= {(True, True), (False, True)}  # the latter for a first search


def test_a_plan_that_cannot_be_replaced_stays(source, tmp_path, capsys, monkeypatch):
    """And a plan that is replaced hands its permissions on."""
    plan = tmp_path / "plan.json"
    search = ("search", "--model", source, "--output", plan)
    assert call(capsys, *search, "--kv-ratio", 0.25)[0] == 0
    plan.chmod(0o640)
    former, replace = plan.read_bytes(), os.replace

    def refused(file, place):
        if Path(place).parent == tmp_path:
            raise OSError(30, os.strerror(30), str(place))
        replace(file, place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refused)
        status, printed = call(capsys, *search, "--kv-ratio", 0.5, "--overwrite")
    assert status == 1 and "cannot be written: Read-only file system" in printed and plan.read_bytes() == former
    assert "exists already" in call(capsys, *search, "--kv-ratio", 0.25)[1]
    assert call(capsys, *search, "--kv-ratio", 0.5, "--overwrite")[0] == 0 and plan.read_bytes() != former
    assert plan.stat().st_mode & 0o777 == 0o640


def test_the_state_of_a_stage_that_was_killed_behind_its_result(source, tmp_path, capsys, monkeypatch):
    """It is removed by the next call; that of another run, or of one that still runs, is not."""
    from dcformer.dha import fusion

    plan, trained, rmtree = tmp_path / "plan.json", tmp_path / "trained.json", shutil.rmtree
    call(capsys, "search", "--model", source, "--output", plan)
    fuse = ("fuse", "--model", source, "--plan", plan, "--output", tmp_path / "fused", *FUSE)
    search = ("search", "--model", source, "--output", trained, "--score", "function", *FUSE[:4], *FUSE[6:])

    def killed(path, *arguments, **options):
        if Path(path).name.endswith(".run"):
            raise KeyboardInterrupt
        rmtree(path, *arguments, **options)

    def saved_and_stopped(*arguments, save=fusion._State.save):
        save(*arguments)
        raise KeyboardInterrupt

    for words, state in ((fuse, tmp_path / ".fused.run"), (search, tmp_path / ".trained.json.run")):
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", killed)
            assert call(capsys, *words)[0] == 130
        assert state.is_dir() and not list(state.glob("step-*/run.json"))
        with locked_folder(state):
            assert "exists already" in call(capsys, *words)[1] and state.is_dir()
        assert "exists already" in call(capsys, *words)[1] and not state.exists()
        with monkeypatch.context() as patch:
            patch.setattr(fusion._State, "save", saved_and_stopped)
            assert call(capsys, *words, "--length", 16, "--overwrite")[0] == 130
        if words == fuse:  # a search replaces its plan only at its end, too
            assert "exists already" in call(capsys, *words)[1] and list(state.glob("step-*/run.json"))
        assert call(capsys, *words, "--length", 16, "--overwrite")[0] == 0 and not state.exists()


def test_an_interrupted_fold_continues(source, tmp_path, capsys, monkeypatch):
    from dcformer.dha import folding

    plan, output = tmp_path / "plan.json", tmp_path / "model"
    call(capsys, "search", "--model", source, "--output", plan)
    fold = ("fold", "--model", source, "--plan", plan, "--output", output)
    write = folding.SafetensorsWriter.write

    def interrupted(self, name, tensor):
        write(self, name, tensor)
        if "layers.1." in name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folding.SafetensorsWriter, "write", interrupted)
        status, printed = call(capsys, *fold)
    assert status == 130 and "call it in the same way to continue" in printed and not output.exists()
    status, printed = call(capsys, *fold)
    assert status == 0 and "folding continues" in printed and "key heads" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == [".plan.json.given", "model", "plan.json"]


def test_a_result_of_an_edited_plan_is_another(source, tmp_path, capsys):
    """Same words, other content: the existing result is not what was asked for."""
    plan, output = tmp_path / "plan.json", tmp_path / "model"
    call(capsys, "search", "--model", source, "--output", plan)
    fold = ("fold", "--model", source, "--plan", plan, "--output", output)
    assert call(capsys, *fold)[0] == 0
    content = json.loads(plan.read_text())
    content["layers"][0]["key"] = {"heads": 8, "groups": [[head] for head in range(8)]}
    plan.write_text(json.dumps(content))
    status, printed = call(capsys, *fold)
    assert status == 1 and "other arguments (content of plan.json)" in printed
    status, printed = call(capsys, *fold, "--overwrite")
    assert status == 0 and "[8, 2] key heads" in printed


def test_a_gap_is_refused_with_its_price(source, tmp_path, capsys):
    plan, fused = tmp_path / "plan.json", tmp_path / "fused"
    call(capsys, "search", "--model", source, "--output", plan)
    fuse = ("fuse", "--model", source, "--plan", plan, "--output", fused, *FUSE, "--closing-steps", 0)
    assert call(capsys, *fuse, "--train", "attention")[0] == 0
    status, printed = call(capsys, "fold", "--model", fused, "--output", tmp_path / "model")
    assert status == 1 and "not closed" in printed and "folding changed the loss" in printed
    assert not (tmp_path / "model").exists()
    assert call(capsys, "fold", "--model", fused, "--output", tmp_path / "model", "--accept-gap")[0] == 0
    assert "the parameters of attention only" in (tmp_path / "model" / "README.md").read_text()
    for words in (
        ("fold", "--model", fused, "--plan", plan, "--output", tmp_path / "other"),
        ("search", "--model", fused, "--output", tmp_path / "other"),
        ("expand", "--model", fused, "--output", tmp_path / "other"),
    ):  # what was trained would be left out
        status, printed = call(capsys, *words)
        assert status == 1 and "dcformer-dha fold without --plan" in printed and not (tmp_path / "other").exists()


def test_wrong_input_is_one_line(source, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    call(capsys, "search", "--model", source, "--output", plan)
    shutil.copytree(source, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"model_type": "olmo2"}))
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    (tmp_path / "short.txt").write_text("Peter\n")
    (tmp_path / "bad.jsonl").write_text("{nope\n")
    fuse = ("fuse", "--model", source, "--plan", plan, "--output", tmp_path / "out")
    for words, message in (
        (("search", "--model", tmp_path / "none", "--output", tmp_path / "p.json"), "no config.json"),
        (("search", "--model", source, "--output", tmp_path / "p.json", "--kv-ratio", 1.5), "kv_ratio=1.5"),
        (("search", "--model", source, "--output", tmp_path / "p.json", "--score", "function"), "give --data"),
        (("search", "--model", tmp_path / "other", "--output", tmp_path / "p.json"), "QK-norm is over all heads"),
        (("search", "--model", source, "--output", plan, "--kv-ratio", 0.5), "other arguments (kv_ratio)"),
        ((*fuse, "--data", tmp_path / "none.jsonl"), "no file"),
        ((*fuse, "--data", tmp_path / "talk.jsonl"), "has conversations, in column 'messages': expected texts; make"),
        ((*fuse, "--data", tmp_path / "talk.jsonl", "--column", "messages"), "has conversations, in column 'messages'"),
        ((*fuse, "--data", tmp_path / "pairs.jsonl"), "has columns 'prompt' and 'completion': expected texts in one"),
        ((*fuse, "--data", tmp_path / "pairs.jsonl", "--column", "prompt"), "less than one row of 512 tokens"),
        ((*fuse, "--data", tmp_path / "short.txt"), "less than one row of 512 tokens"),
        ((*fuse, "--data", tmp_path / "bad.jsonl"), "bad.jsonl cannot be read"),
        ((*fuse, *FUSE, "--length", 0), "--length 0: expected 2 tokens, of which one is predicted, to 512"),
        ((*fuse, *FUSE, "--length", -4), "--length -4: expected"),
        ((*fuse, *FUSE, "--length", 513), "--length 513: expected 2 tokens, of which one is predicted, to 512, the mo"),
        ((*fuse, *FUSE, "--batch-size", 0), "--batch-size 0: expected"),
        ((*fuse, *FUSE, "--seed", -1), "seed=-1"),
        (
            ("search", "--model", source, "--output", tmp_path / "short.txt" / "q.json"),
            "short.txt is a file, not a folder",
        ),
        (
            ("search", "--model", source, "--output", tmp_path / "short.txt" / "a" / "q"),
            "short.txt is a file, not a folder",
        ),
        (("search", "--model", source, "--output", "/proc/q.json"), "/proc/q.json cannot be written: No such file"),
        (("fuse", "--model", source, "--plan", source / "config.json", *fuse[5:], *FUSE), "not a plan"),
        (("fold", "--model", source, "--output", tmp_path / "out"), "no plan.json"),
        (("expand", "--model", source, "--output", tmp_path / "out"), "not a language model of this package"),
        (("report", "--model", source), "no head maps"),
    ):
        status, printed = call(capsys, *words)
        lines = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert status == 1 and len(lines) == 1 and message in lines[0], (words, printed)
        assert not (tmp_path / "out").exists() and not (tmp_path / "p.json").exists()


# --- the examples -----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.usefixtures("few_tasks")
def test_the_story_runs(tmp_path, capsys):
    pytest.importorskip("lm_eval")
    import fewer_heads

    fewer_heads.main(["--output", str(tmp_path), "--steps", "4", "--fusion-steps", "6", "--limit", "4"])
    printed = capsys.readouterr().out
    assert "75.0% of 64 saved" in printed and printed.count("exact_match") == 2
    assert printed.splitlines()[-1].startswith("< Peter owns the desk.")


@pytest.mark.long
def test_the_study_resumes(tmp_path, capsys, monkeypatch):
    few = dha_study.held_out_batches()[0][:4]  # what is held out is measured after every step of so few
    monkeypatch.setattr(dha_study, "held_out_batches", lambda: [few])
    arguments = ["--output", str(tmp_path), "--seeds", "0", "--steps", "10", "--base-steps", "2"]
    dha_study.main(arguments)
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert len(runs) == len(dha_study.wanted_runs([0], 10, 2)) and (tmp_path / "study.png").stat().st_size > 10_000
    capsys.readouterr()
    dha_study.main(arguments)
    assert f"{len(runs)} of {len(runs)} runs are in" in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == runs


COMMITTED = Path(dha_study.OUTPUT / "results.json")


@pytest.mark.skipif(not COMMITTED.exists(), reason="the study has not been run")
def test_the_committed_table_is_that_of_its_results():
    runs = json.loads(COMMITTED.read_text())["runs"]
    table = (dha_study.OUTPUT / "table.md").read_text(encoding="utf-8")
    assert table == "<!-- written by examples/dha_study.py -->\n" + dha_study.table(runs)
    for run in runs:
        assert run["curve"][-1][1] == run["loss"] or run["arm"] == "open"
        if "soft_at_start" in run:  # the soft model starts as its source
            assert run["soft_at_start"] == pytest.approx(run["source_loss"], abs=1e-6)
        if run["arm"] in dha_study.FUSED and run["arm"] != "open":  # and is what is folded
            assert run["folded_difference"] <= 1e-4 and run["gap"] <= 1e-6


def test_a_result_of_weights_or_texts_that_have_changed_is_another(source, tmp_path, capsys):
    model, texts, plan = tmp_path / "source", tmp_path / "texts.jsonl", tmp_path / "plan.json"
    shutil.copytree(source, model)
    shutil.copyfile(FUSE[1], texts)
    search = ("search", "--model", model, "--output", plan)
    fold = ("fold", "--model", model, "--plan", plan, "--output", tmp_path / "folded")
    fuse = ("fuse", "--model", model, "--plan", plan, "--output", tmp_path / "fused", "--data", texts, *FUSE[2:])
    for command in (search, fold, fuse):
        assert call(capsys, *command)[0] == 0
    texts.write_text(texts.read_text(encoding="utf-8") + '{"text": "One more."}\n', encoding="utf-8")
    status, printed = call(capsys, *fuse)
    assert status == 1 and "other arguments (files of data)" in printed
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    os.utime(weights, ns=(1, 1))
    for command in (search, fold, fuse):
        status, printed = call(capsys, *command)
        assert status == 1 and "files of weights" in printed
