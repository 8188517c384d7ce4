"""Held-out loss and accuracy on two processes, with rows that do not divide evenly."""

import json

import pytest
from helpers import REPOSITORY

DATA = "examples/data/text_test.jsonl"


@pytest.mark.distributed
@pytest.mark.parametrize(("rows", "options"), [(5, []), (7, ["--packing", "--max_length", "64"])], ids=["", "packing"])
def test_held_out_rows_count_once(start, tmp_path, monkeypatch, rows, options):
    """As on one process, in the same batches of 2. Of 5 rows the last batches hold 1 and 0, of 7 rows 2 and 1."""
    training = pytest.importorskip("dcformer.training", exc_type=ImportError)
    monkeypatch.chdir(REPOSITORY)
    texts = [json.loads(line)["text"].split() for line in (REPOSITORY / DATA).read_text().splitlines()[:rows]]
    # of different lengths, and packed one to a row: two of them have more than 64 words
    texts = [" ".join(text[: 34 + 4 * i]) for i, text in enumerate(texts)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--model_name_or_path", "checkpoints/dcformer-synthetic", "--data", DATA, "--eval_data", file, *options]
    words += ["--per_device_eval_batch_size", "2", "--max_steps", "1", "--learning_rate", "1e-30", "--use_cpu"]
    words += ["--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "true", "--output_dir"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "examples/finetune.py"]
    start(*launch, *words, tmp_path)
    two = json.loads((tmp_path / "eval_results.json").read_text())
    trainer, _ = training.prepare_finetuning([str(word) for word in (*words, tmp_path / "one")])
    one = trainer.evaluate()
    assert len(trainer.eval_dataset) == rows
    assert two["eval_token_accuracy"] == one["eval_token_accuracy"] > 0
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)  # sums of float32 in another order
