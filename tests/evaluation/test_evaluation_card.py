"""Model cards from the results that ``dcformer-eval`` writes: scores of a part of the items are not published."""

import pytest
from helpers import REPOSITORY, tiny_config

from dcformer import evaluation
from dcformer.publish import model_card, read_results

CHOICES = "dcformer_synthetic_heldout_choices"
PAPER = ["dcformer_synthetic", *(f"dcformer_synthetic_{num_shots}shot" for num_shots in range(2, 8))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "published", "rows"),
    [
        (4, [], [(CHOICES, "4 (not all)"), (PAPER[1], "4 (not all)"), (PAPER[0], "24 (not all)")]),
        (13, PAPER, [(CHOICES, "13 (not all)"), (PAPER[1], "13"), (PAPER[0], "78")]),  # the file has 13 of each
    ],
)
def test_scores_of_a_part_of_the_items(lm_eval, paper_file, tmp_path, limit, published, rows):
    """A group counts as its tasks do."""
    folder = str(REPOSITORY / "checkpoints" / "dcformer-synthetic")
    model = ["--model", "hf", "--model_args", f"pretrained={folder}"]
    tasks = ["--tasks", f"{PAPER[0]},{CHOICES}", "--metadata", f"dcformer_synthetic_file={paper_file}"]
    how = ["--limit", str(limit), "--batch_size", "16", "--output_path", str(tmp_path)]
    assert evaluation.main([*model, *tasks, *how]) == 0
    (path,) = tmp_path.rglob("results_*.json")
    card = model_card(tiny_config(), "user/tiny", read_results(path, [folder]))
    assert {result.dataset_type for result in card.data.eval_results or []} == set(published)
    accuracies = [line.strip("| ").split(" | ") for line in card.text.splitlines() if " | acc ↑ | " in line]
    items = {cells[0]: cells[-1] for cells in accuracies}
    assert items.keys() == {CHOICES, *PAPER}
    assert [(task, items[task]) for task, _ in rows] == rows
