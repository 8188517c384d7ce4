"""The figure in the README is the one that the committed runs give."""

import importlib

import pytest
from helpers import REPOSITORY


def test_the_committed_figure_is_drawn_from_the_committed_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    figure = importlib.import_module("readme_figure")
    assert figure.FIGURE.read_text(encoding="utf-8") == figure.draw()
    labels = [label for label, _, _ in figure.rows()]
    assert len(labels) == 5 and labels[0].startswith("the paper")
    gains = [gain for _, _, gains in figure.rows()[1:] for gain in gains]
    assert min(gains) < 0, "the figure shows the seeds that plain attention wins, too"
    for _, _, gains in figure.rows():
        assert figure.LEFT + min(gains) * figure.SCALE > 300, "dots lie on the labels"
    assert figure.rows()[0][2] == [pytest.approx(0.0756, abs=5e-5)]  # docs/reproduction.md says so
