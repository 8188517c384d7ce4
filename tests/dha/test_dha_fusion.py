"""Fusion: its constraint, closing, resuming, what it refuses; folding of what it leaves."""

import copy
import errno
import itertools
import json
import math
import os
import re
import shutil
import warnings
from functools import partial

import pytest
import torch
from helpers import kept_bytes, randomize
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from tiny_sources import llama, make, tokens
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from dcformer import dha
from dcformer.dha.fusion import ascend, batch_iterator, margin, theta_lr, train_search
from dcformer.dha.mixing import mixers_of
from dcformer.errors import DCFormerError
from dcformer.modules.saving import from_pretrained_any


def batches(count=6, rows=4, length=16):
    return [tokens(rows, length, seed) for seed in range(count)]


def fuse(name="llama", steps=12, **options):
    model = make(name)
    plan = dha.search(model, 0.25, progress=False)
    given = {"closing_steps": min(4, steps), "lr": 1e-3, "margin_steps": 4, "progress": False} | options
    return model, dha.fuse(model, plan, given.pop("data", batches()), steps, **given)


def test_margin():
    assert margin(0) == 1 and margin(100) == pytest.approx(0.45240, abs=5e-6)
    assert margin(200) == margin(300) == 0
    assert all(margin(step) > margin(step + 1) for step in range(199))
    # at the start the fusion loss of groups of four is 0.5: the penalty comes in when the margin passes under it
    assert next(step for step in range(200) if margin(step) < 0.5) == 91


@given(
    losses=st.lists(st.floats(0, 2), min_size=1, max_size=50),
    lr=st.floats(1e-4, 1),
    steps=st.integers(1, 60),
)
def test_the_multiplier_never_falls_and_rests_below_the_margin(losses, lr, steps):
    multiplier = 0.0
    for step, loss in enumerate(losses):
        after = ascend(multiplier, loss, margin(step, steps), lr)
        assert after >= multiplier
        assert (after == multiplier) == (multiplier + lr * max(loss - margin(step, steps), 0) == multiplier)
        multiplier = after


def test_the_multiplier_of_a_run():
    """Zero until the loss exceeds its margin, then rising by what it exceeds it by."""
    _, fused = fuse(margin_steps=8, closing_steps=0)
    before = 0.0
    for record in fused.losses:
        expected = before + 1e-2 * max(record["fusion"] - record["margin"], 0)
        assert record["lambda"] == pytest.approx(expected, abs=1e-12)
        before = record["lambda"]
    rests = [record for record in fused.losses if record["fusion"] <= record["margin"]]
    assert rests and all(record["lambda"] == 0 for record in rests) and before > 0
    assert fused.losses[0]["fusion"] == pytest.approx(0.5, abs=1e-6)  # 2/g of groups of four


def test_learning_rates():
    rates = [theta_lr(step, 100, 1.0) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[55] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert 0.1 < rates[-1] < 0.102 and all(a >= b for a, b in itertools.pairwise(rates[9:]))


@pytest.mark.parametrize("name", ["llama", "qwen3-qk-norm", "neox-partial-rotary", "dcformer-composed-gqa"])
def test_a_closed_model_folds_exactly(name):
    model, fused = fuse(name)
    assert fused.summary["source_loss"] == dha.evaluate_loss(model, fused.batches)  # the source's, at the start
    assert fused.gap <= 1e-6 and fused.losses[-1]["fusion"] < fused.losses[0]["fusion"]
    folded = fused.fold()
    soft, hard = (m.eval()(tokens()).logits for m in (fused.model, folded))
    assert (soft - hard).abs().max() <= 1e-5 * soft.abs().max()
    assert fused.summary["soft_loss"] == pytest.approx(fused.summary["folded_loss"], abs=1e-5)
    assert folded.config.kv_saving == 0.75
    assert not torch.equal(soft, model(tokens()).logits)  # and it was trained


def test_the_source_stays_as_it_was():
    model, fused = fuse()
    assert fused.model is not model and not mixers_of(dha.HeadSource(model))
    again = make("llama")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    other, fused = fuse(copy_model=False)
    assert fused.model is other and mixers_of(dha.HeadSource(other, fused=True))


def test_what_is_not_closed_is_not_folded_in_silence():
    _, fused = fuse(closing_steps=0)
    with pytest.raises(DCFormerError, match=r"not closed.*differ by up to 0\.\d+.*loss from \d+\.\d+ to \d+\.\d+"):
        fused.fold()
    with pytest.warns(UserWarning, match="not closed"):
        folded = fused.fold(accept_gap=True)
    assert folded.config.num_key_heads == [2, 2]
    soft, hard = fused.summary["soft_loss"], fused.summary["folded_loss"]
    assert hard == pytest.approx(dha.evaluate_loss(folded, fused.batches)) and abs(hard - soft) > 1e-4


def test_which_parameters_are_trained():
    for train in ("all", "attention", "none"):
        model, fused = fuse(train=train, steps=3)
        assert fused.summary["train"] == train
        changed = {
            name
            for (name, before), after in zip(model.named_parameters(), of_source(fused.model), strict=True)
            if not torch.equal(before, after)
        }
        attention = {name for name, _ in model.named_parameters() if ".self_attn." in name}
        every = {name for name, _ in model.named_parameters()}
        assert changed == {"all": every, "attention": attention, "none": set()}[train]
        assert all(parameter.requires_grad for parameter in fused.model.parameters())


def of_source(model):
    return [parameter for name, parameter in model.named_parameters() if "_mixer" not in name]


@pytest.mark.parametrize("name", ["llama-gqa-bias-tied", "dcformer-composed"])
def test_an_interrupted_run_continues_bit_for_bit(name, tmp_path, capsys):
    class Interrupted:
        def __iter__(self):
            yield from batches()
            yield batches()[0]
            raise InterruptedError

    _, straight = fuse(name)
    options = {"checkpoint": tmp_path / "run", "save_steps": 5}
    with pytest.raises(InterruptedError):
        fuse(name, data=Interrupted(), **options)
    _, resumed = fuse(name, **options)
    assert "continues after step 5 of 12" in capsys.readouterr().out
    assert resumed.losses == straight.losses
    for a, b in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(DCFormerError, match=r"holds another run of fusion: lr is 0\.001 there and 0\.002 now"):
        fuse(name, lr=2e-3, **options)
    for content in ("{", "[]", '{"setup": {}}'):
        (tmp_path / "run" / "step-12" / "run.json").write_text(content)
        with pytest.raises(DCFormerError, match=r"run\.json is damaged.*to start anew"):
            fuse(name, **options)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            r"No space left on device; \d+\.\d\d GB are free there. Make",
        ),
        (SafetensorError(f"I/O error: x (os error {errno.ENOSPC})"), "No space left on device; .* Make room"),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
            "to its end; .* Make room",
        ),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "Read-only file system. Correct that"),
        (RuntimeError("a bug"), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_state_that_cannot_be_saved_leaves_the_one_before_it(error, reason, tmp_path, monkeypatch, capsys):
    """Nor does half a state take room."""
    from accelerate import Accelerator

    save = Accelerator.save_state

    def failing(self, folder, *arguments, **options):
        save(self, folder, *arguments, **options)
        if folder.endswith("step-4"):
            raise error

    options = {"checkpoint": tmp_path / "run", "save_steps": 2, "steps": 6}
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "save_state", failing)
        with pytest.raises(DCFormerError if reason else RuntimeError) as raised:
            fuse(**options)
    assert error in (raised.value, raised.value.__cause__)
    if reason is not None:
        begin = f"{tmp_path / 'run'}: the state of fusion after step 4 cannot be saved: "
        assert str(raised.value).startswith(begin) and re.search(reason, str(raised.value))
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-2"]
    fuse(**options)
    assert "continues after step 2 of 6" in capsys.readouterr().out


class Stopped(DataLoader):
    """Ends a run with the fourth batch after the first state was saved."""

    def __iter__(self):
        yield from itertools.islice(super().__iter__(), 9)
        raise InterruptedError


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_loader_that_draws_its_order_continues_bit_for_bit(shuffle, tmp_path):
    """Its draws are its own: rows come in the same order again, and dropout is that of the step."""
    rows, seen = list(tokens(48, 16)), []

    def note(batch):
        seen.extend(tuple(row.tolist()) for row in batch)
        return torch.stack(batch)

    def run(kind, **options):
        torch.manual_seed(0)
        model = randomize(llama(attention_dropout=0.1), scale=1.0)
        data = kind(rows, 4, shuffle=shuffle, collate_fn=note)
        plan = dha.search(model, 0.25, progress=False)
        return dha.fuse(model, plan, data, 12, closing_steps=4, lr=1e-3, margin_steps=4, progress=False, **options)

    straight, order = run(DataLoader), list(seen)
    assert len(set(order)) == 48 and (order[:4] != [tuple(row.tolist()) for row in rows[:4]]) == shuffle
    options = {"checkpoint": tmp_path / "run", "save_steps": 5}
    with pytest.raises(InterruptedError):
        run(Stopped, **options)
    seen.clear()
    assert run(DataLoader, **options).losses == straight.losses and seen == order


def test_each_pass_over_a_loader_has_an_order_of_its_own():
    loader = DataLoader(list(tokens(24, 16)), 24, shuffle=True)
    stream = batch_iterator(loader, 1, seed=0)()
    with pytest.warns(UserWarning, match="has ended after 1 batches and is repeated"):
        first, second, third = (next(stream)["input_ids"] for _ in range(3))
    assert not first.equal(second) and not second.equal(third) and first.sum() == second.sum() == third.sum()


def test_an_interrupted_search_continues_bit_for_bit(tmp_path, capsys):
    def interrupted():
        yield from batches(4)
        raise InterruptedError

    class Data:
        def __iter__(self):
            return interrupted()

    model = make("llama")
    arguments = {"kv_ratio": 0.25, "score": "function", "allocation": "root", "steps": 6, "progress": False}
    straight = dha.search(model, batches=batches(), **arguments)
    arguments |= {"checkpoint": tmp_path / "run", "save_steps": 3}
    with pytest.raises(InterruptedError):
        dha.search(model, batches=Data(), **arguments)
    assert not mixers_of(dha.HeadSource(model))
    assert dha.search(model, batches=batches(), **arguments) == straight
    assert "search continues after step 3 of 6" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["llama", "neox-partial-rotary", "dcformer-composed"])
def test_a_search_keeps_less_with_gradient_checkpointing(name):
    """And finds the same: dropout is off, also where layers are computed again."""
    found, kept = [], []
    for checkpointing in (False, True):
        model = make(name)
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        train = partial(train_search, model, batches(), steps=2, lr=1e-2, seed=0, progress=False)
        kept.append(kept_bytes(model, lambda train=train: found.append(train())))
        assert not any(module.training for module in model.modules())
    assert kept[1] < kept[0] / 3
    assert all(torch.equal(found[0][part], operator) for part, operator in found[1].items())


def test_saved_and_loaded(tmp_path):
    for name in ("llama-gqa-bias-tied", "neox-partial-rotary"):
        _, fused = fuse(name, steps=3, closing_steps=0)
        fused.save(tmp_path / name)
        loaded = dha.FusedModel.load(tmp_path / name)
        assert torch.equal(loaded.model.eval()(tokens()).logits, fused.model.eval()(tokens()).logits)
        assert loaded.plan == fused.plan and loaded.losses == json.loads(json.dumps(fused.losses))
        assert loaded.gap == fused.gap
        with pytest.raises(DCFormerError, match="not known, as there are no batches"):
            loaded.fold()
    (tmp_path / name / "operators.safetensors").unlink()
    with pytest.raises(DCFormerError, match=r"has no operators\.safetensors"):
        dha.FusedModel.load(tmp_path / name)


@pytest.fixture(scope="module")
def fused_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    fuse(steps=3)[1].save(folder)
    return folder


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("fusion.json", b'{"summary": {', r"fusion\.json is damaged \(Expecting.*fuse again"),
        ("fusion.json", b"{}", r"fusion\.json is damaged: it has no dict 'summary'"),
        ("fusion.json", b'{"summary": {}}', r"fusion\.json is damaged: it has no list 'losses'"),
        ("fusion.json", b"[]", r"fusion\.json is damaged: it has no dict 'summary'"),
        ("fusion.json", b"\xff", r"fusion\.json is damaged"),
        ("operators.safetensors", b"\x10" * 9, r"operators\.safetensors is damaged"),
        ("plan.json", b"{", r"plan\.json is not a plan"),
    ],
)
def test_a_damaged_fused_folder_is_refused(file, content, message, fused_folder, tmp_path):
    shutil.copytree(fused_folder, tmp_path / "fused")
    (tmp_path / "fused" / file).write_bytes(content)
    with pytest.raises(DCFormerError, match=message):
        dha.FusedModel.load(tmp_path / "fused")


def test_a_fused_model_is_no_source(fused_folder, tmp_path):
    """Its parameters do not show the mixtures, which would be left out: of a folder, and in memory."""
    fused = dha.FusedModel.load(fused_folder)
    for model in (fused_folder, fused.model):
        for call in (
            lambda model: dha.search(model, 0.5, progress=False),
            lambda model: dha.from_plan(model, fused.plan),
            lambda model: dha.fuse(model, fused.plan, batches(), 2, progress=False),
        ):
            with pytest.raises(DCFormerError, match=r"has trained mixtures of heads.*FusedModel\.fold\(\)"):
                call(model)
    with pytest.raises(DCFormerError, match="has trained mixtures of heads"):
        dha.fold_folder(fused_folder, fused.plan, tmp_path / "folded", progress=False)
    assert not [*tmp_path.iterdir()] and mixers_of(dha.HeadSource(fused.model, fused=True))


@pytest.mark.parametrize("place", ["", "below"])
def test_programs_do_not_load_a_fused_folder_without_its_mixtures(place, fused_folder):
    source, options = (fused_folder.parent, {"subfolder": fused_folder.name}) if place else (fused_folder, {})
    with pytest.raises(DCFormerError, match=r"has trained mixtures of heads.*FusedModel\.fold\(\)"):
        from_pretrained_any(source, AutoModelForCausalLM, **options)


def test_the_papers_stop_rule():
    _, fused = fuse(closing_steps=0, stop_at_loss=0.49, margin_steps=1, steps=200, mixer_lr=5e-2)
    assert len(fused.losses) < 200 and fused.losses[-1]["fusion"] < 0.49 <= fused.losses[-2]["fusion"]
    with pytest.raises(DCFormerError, match="closing_steps=0"):
        fuse(stop_at_loss=1e-3)


def test_accumulated_batches_are_one_step():
    """Two batches of a step have the gradient of one of twice the rows."""
    halves = [half for batch in batches(3) for half in batch.split(2)]
    _, one = fuse(steps=3, closing_steps=0)
    _, two = fuse(steps=3, closing_steps=0, data=halves, accumulation=2)
    for a, b in zip(one.losses, two.losses, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5) and a["fusion"] == pytest.approx(b["fusion"], abs=1e-5)


def test_any_data():
    rows = [{"input_ids": row} for row in tokens(10, 8)]
    start = batch_iterator(rows, 4, seed=1)
    first = [next(stream)["input_ids"] for stream in (start(), start())]
    assert torch.equal(*first) and first[0].shape == (4, 8)
    assert not torch.equal(first[0], next(batch_iterator(rows, 4, seed=2)())["input_ids"])
    loader = torch.utils.data.DataLoader(rows, batch_size=5)
    masked = {"input_ids": tokens(2, 6), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])}
    for data in (loader, [tokens(5, 8)], [{"input_ids": tokens(5, 8)}], [masked]):
        batch = next(batch_iterator(data, 1, 0)())
        expected = batch["input_ids"]
        if "attention_mask" in batch:
            expected = expected.masked_fill(batch["attention_mask"] == 0, -100)
        assert torch.equal(batch["labels"], expected)


def test_a_stream_of_rows_is_to_be_batched():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([{"input_ids": row} for row in tokens(6, 8)])

    with pytest.raises(DCFormerError, match=r"of shape \[8\]: expected \[B, T\].*DataLoader"):
        next(batch_iterator(Stream(), 4, 0)())
    loader = torch.utils.data.DataLoader(Stream(), batch_size=3)
    assert next(batch_iterator(loader, 4, 0)())["input_ids"].shape == (3, 8)


def test_losses_are_per_token():
    """A short last batch counts by its tokens; what is masked does not count."""
    model, ids = make("llama"), tokens(5, 9)
    parts = [*ids.split(4)]
    assert dha.evaluate_loss(model, parts) == pytest.approx(dha.evaluate_loss(model, [ids]), rel=1e-6)
    mask = torch.ones_like(ids)
    mask[:2, :6] = 0
    masked = [{"input_ids": ids[a:b], "attention_mask": mask[a:b]} for a, b in ((0, 2), (2, 5))]
    with torch.no_grad():
        logits = [model(**batch).logits[:, :-1] for batch in masked]
    targets = [batch["input_ids"][:, 1:].masked_fill(batch["attention_mask"][:, 1:] == 0, -100) for batch in masked]
    expected = torch.nn.functional.cross_entropy(torch.cat(logits).flatten(0, 1), torch.cat(targets).flatten())
    assert dha.evaluate_loss(model, masked) == pytest.approx(expected.item(), rel=1e-6)


def test_operators_do_not_decay(monkeypatch):
    """Nor does their learning rate warm up; the model's parameters decay, and theirs does."""
    steps = []

    class Recorded(torch.optim.AdamW):
        def step(self, *arguments, **options):
            names = ("lr", "weight_decay", "betas")
            steps.append([tuple(group[name] for name in names) for group in self.param_groups])
            return super().step(*arguments, **options)

    monkeypatch.setattr(torch.optim, "AdamW", Recorded)
    fuse(steps=20, lr=1e-3, mixer_lr=3e-2)
    assert all(mixers == (3e-2, 0.0, (0.9, 0.95)) for mixers, _ in steps)
    assert [theta for _, theta in steps] == [(theta_lr(step, 20, 1e-3), 0.1, (0.9, 0.95)) for step in range(20)]


def test_data_that_ends():
    with pytest.warns(UserWarning, match="ended after 2 batches and is repeated"):
        stream = batch_iterator(batches(2), 1, 0)()
        found = [next(stream)["input_ids"] for _ in range(5)]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(DCFormerError, match="cannot be read again"):
            list(batch_iterator(iter(batches(2)), 1, 0)())
    with pytest.raises(DCFormerError, match="has no batches"):
        next(batch_iterator([], 1, 0)())
    with pytest.raises(DCFormerError, match="expected input_ids"):
        next(batch_iterator([{"ids": tokens()}], 1, 0)())
    with pytest.raises(DCFormerError, match="a batch has rows of 3 to 4 tokens: give rows of one length, or"):
        next(batch_iterator([{"input_ids": [1, 2, 3, 4]}, {"input_ids": [1, 2, 3]}], 2, 0)())


def test_arguments_are_checked():
    for options, message in (
        ({"train": "mlp"}, "train='mlp'.*attention"),
        ({"steps": 0, "closing_steps": 0}, "steps=0"),
        ({"steps": -1, "closing_steps": None}, "steps=-1"),
        ({"accumulation": 0}, "accumulation=0"),
        ({"closing_steps": -1}, "closing_steps=-1"),
        ({"steps": 4, "closing_steps": 9}, "closing_steps=9 are more than steps=4"),
        ({"batch_size": 1.5}, "batch_size=1.5 must be a whole number"),
        ({"batch_size": 0, "data": [{"input_ids": row} for row in tokens(8)]}, "batch_size=0 must be"),
        ({"data": None}, "batches=None: expected batches"),
        ({"data": "text.jsonl"}, "batches='text.jsonl': expected batches"),
        ({"lr": -1}, "lr=-1 must be a finite number of at least 0"),
        ({"lr": float("nan")}, "lr=nan must be"),
        ({"lr": float("inf")}, "lr=inf must be"),
        ({"mixer_lr": -1}, "mixer_lr=-1 must be"),
        *(({"stop_at_loss": value, "closing_steps": 0}, "stop_at_loss=.* must be") for value in ("x", -1.0, math.nan)),
        ({"data": [tokens() + 100]}, "token id 1.*, outside the source's vocabulary of 61 ids"),
        ({"data": [tokens().float()]}, "input_ids of torch.float32: expected token ids"),
        ({"scale": -1}, "scale=-1 must be"),
        *(({"seed": seed}, "seed=.* must be a whole number") for seed in ("a", None, 1.5, True, -1)),
    ):
        with pytest.raises(DCFormerError, match=message):
            fuse(**options)
    with pytest.raises(TypeError, match="closing"):
        fuse(closing=3)
    model = make("llama", torch.float16)
    with pytest.raises(DCFormerError, match="float16, which needs a gradient scaler"):
        dha.fuse(model, dha.uniform_plan(model, 0.5), batches(), steps=1)


def test_a_plan_may_be_a_file_and_a_model_to_train_may_not(tmp_path):
    model = make("llama")
    plan = dha.search(model, 0.25, progress=False)
    plan.save(tmp_path / "plan.json")
    model.save_pretrained(tmp_path / "source")
    options = {"steps": 1, "closing_steps": 1, "progress": False}
    assert dha.fuse(model, tmp_path / "plan.json", batches(), **options).plan == plan
    with pytest.raises(DCFormerError, match="a dict is not a plan"):
        dha.fuse(model, {}, batches(), **options)
    with pytest.raises(DCFormerError, match=r"source is a folder.*load it first"):
        dha.fuse(tmp_path / "source", plan, batches(), **options)


def test_an_iterator_keeps_its_first_batch():
    """It is measured, as of a list, and trained as well; what the figures are measured on is said."""
    _, listed = fuse(steps=6)
    _, once = fuse(steps=6, data=iter(batches(6)))
    assert once.losses == listed.losses and once.summary == listed.summary
    assert listed.summary["measured_on"] == "a training batch"
    assert fuse(steps=1, held_out=batches(1))[1].summary["measured_on"] == "held-out batches"


def test_a_training_that_fails_leaves_no_mixers():
    model = make("llama")
    plan = dha.search(model, 0.25, progress=False)
    data = [*batches(2), tokens(4, 16) + 1000]
    with pytest.raises(DCFormerError, match="token id 10"):
        dha.fuse(model, plan, data, 3, closing_steps=1, copy_model=False, progress=False)
    assert not any("mixer" in name for name, _ in model.named_modules()) and not model.training
    assert dha.search(model, 0.25, progress=False).source == dha.HeadSource(model).sizes


def test_bfloat16_keeps_fine_operators():
    model = make("llama", torch.bfloat16)
    fused = dha.fuse(model, dha.search(model, 0.25, progress=False), batches(), 6, closing_steps=2, progress=False)
    mixers = mixers_of(dha.HeadSource(fused.model, fused=True))
    assert {mixer.weight.dtype for mixer in mixers.values()} == {torch.float32}
    assert fused.fold().dtype == torch.bfloat16 and fused.gap <= 1e-6


def test_a_loss_that_is_not_finite_says_at_which_step():
    model = make("llama")
    plan = dha.search(model, 0.25, progress=False)
    with torch.no_grad():
        model.lm_head.weight[7] = float("inf")
    with pytest.raises(DCFormerError, match=r"fusion: the loss is (nan|inf) at step 0"):
        dha.fuse(model, plan, batches(), 2, progress=False)


def test_groups_of_one_have_nothing_to_fuse():
    """Heads that keep to themselves, in all parts or in some."""
    model = make("llama")
    plan = dha.uniform_plan(model, 1.0)
    fused = dha.fuse(model, plan, batches(), 2, closing_steps=1, train="none", progress=False)
    assert all(record["fusion"] == 0 for record in fused.losses) and fused.gap == 0
    assert copy.deepcopy(fused).fold().config.kv_saving == 0
