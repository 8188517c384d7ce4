"""Figures: every function returns one, draws what it is given, and leaves matplotlib as it was."""

import inspect

import numpy as np
import pytest
import torch
from analysis_models import random_model
from helpers import PLAIN, randomise

from dcformer import DCViTConfig, DCViTForImageClassification
from dcformer.analysis import attribute_heads, breakdown, composition_summary, head_diversity, single_token, trace
from dcformer.errors import DCFormerError

matplotlib = pytest.importorskip("matplotlib")
from dcformer.analysis import plots  # noqa: E402  # what needs matplotlib


@pytest.fixture(scope="module")
def drawn(bundled, prompt):
    """Name of a function -> (the figure for a theme), of the bundled checkpoint."""
    model, tokenizer = bundled
    run = trace(model, prompt, tokenizer=tokenizer)
    summary = composition_summary(run)
    scores = attribute_heads(model, prompt, single_token(tokenizer, "fish"), 16)
    diversities = {"composed": (head_diversity(model, "qk"), head_diversity(model, "ov"))}
    entry = breakdown(run, 3, "post", -1, 20)
    vision = randomise(
        DCViTForImageClassification(
            DCViTConfig(
                image_size=16, patch_size=4, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
                num_attention_heads=4, num_labels=5, pooling="cls", attn_implementation="eager",
            )
        )
    )  # fmt: skip
    pixels = torch.rand(1, 3, 16, 16)
    seen = trace(vision, pixels)
    return {
        "diversity_curves": lambda theme: plots.diversity_curves(diversities, theme=theme),
        "breakdown_strip": lambda theme: plots.breakdown_strip(entry, run.tokens, theme=theme),
        "attention_rows": lambda theme: plots.attention_rows(
            run, 3, "post", -1, component=("key", 0, "down"), theme=theme
        ),
        "mean_maps": lambda theme: plots.mean_maps(summary, theme=theme),
        "term_shares": lambda theme: plots.term_shares(summary, theme=theme),
        "attribution_heatmap": lambda theme: plots.attribution_heatmap(scores, " fish", theme=theme),
        "accuracy_bars": lambda theme: plots.accuracy_bars({"all": 0.97, "without": 0.2}, theme=theme, title="t"),
        "attention_over_image": lambda theme: plots.attention_over_image(
            seen, pixels[0].permute(1, 2, 0), 1, 6, theme=theme
        ),
    }, {"entry": entry, "scores": scores, "run": run, "summary": summary, "seen": seen}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", plots.__all__)
def test_every_function_returns_a_figure(drawn, name, theme, tmp_path):
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    before = pyplot.get_fignums(), dict(matplotlib.rcParams)
    figure = drawn[0][name](theme)
    assert isinstance(figure, Figure) and "theme" in inspect.signature(getattr(plots, name)).parameters
    figure.savefig(tmp_path / "figure.png", dpi=50)
    assert (pyplot.get_fignums(), dict(matplotlib.rcParams)) == before
    sizes = [text.get_fontsize() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]
    assert min(sizes) >= 9
    dark = np.mean(matplotlib.colors.to_rgb(figure.get_facecolor())) < 0.5
    assert dark == (theme == "dark")


def contrast(one, other):
    """WCAG's ratio of luminance."""

    def luminance(colour):
        rgb = np.array(matplotlib.colors.to_rgb(colour))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", plots.THEMES.values(), ids=plots.THEMES)
def test_colours_can_be_told_apart(theme):
    assert contrast(theme.ink, theme.ground) > 7
    for colour in (theme.positive, theme.negative):
        assert contrast(colour, theme.ground) > 4.5
    for colour in theme.series:
        assert contrast(colour, theme.ground) > 3


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_numbers_can_be_read(drawn, theme):
    """Each number stands out from the colour of its cell."""
    axes = drawn[0]["breakdown_strip"](theme).axes[0]
    image = axes.get_images()[0]
    for text in axes.texts:
        column, row = (round(place) for place in text.get_position())
        cell = image.cmap(image.norm(image.get_array()[row, column]))
        assert contrast(matplotlib.colors.to_hex(cell), text.get_color()) > 3.9


def texts(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_numbers_are_those_given(drawn):
    figures, data = drawn
    written = texts(figures["breakdown_strip"]("light"))
    entry = data["entry"]
    for head in range(8):
        for value in (entry.after[head].item(), entry.terms["q_proj"][head].item()):
            assert ("0" if abs(value) < 0.005 else f"{value:.2f}") in written
    assert any("query 'of' (23), key 'owns' (20)" in text for text in written)
    image = figures["attribution_heatmap"]("light").axes[0].get_images()[0]
    assert np.allclose(image.get_array(), data["scores"].numpy())
    assert image.get_clim() == (-data["scores"].abs().max(), data["scores"].abs().max())  # centred at 0
    rows = [axes.get_images()[0] for axes in figures["attention_rows"]("light").axes[:6] if axes.get_images()]
    layer = data["run"].layers[3]
    assert np.allclose(rows[0].get_array(), layer.weights[0, :, -1].numpy())
    assert np.allclose(rows[1].get_array(), layer.composed_weights[0, :, -1].numpy())
    for row in rows:
        low, high = row.get_clim()
        assert low == -high and high == pytest.approx(np.abs(row.get_array()).max())
    over = [axes.get_images()[0].get_array() for axes in figures["attention_over_image"]("light").axes[1:5]]
    weights = data["seen"].layers[1].weights[0, :, 6, 1:].unflatten(-1, (4, 4))
    assert np.allclose(np.stack(over), weights.numpy())


def test_sign_is_shown_by_more_than_colour(drawn):
    """Every clearly negative cell bears a minus."""
    figures, data = drawn
    figure = figures["mean_maps"]("light")
    for one in data["summary"]:
        (axes,) = (a for a in figure.axes if a.get_title() == f"layer {one.layer}, {one.stage}")
        marked = {(round(t.get_position()[1]), round(t.get_position()[0])) for t in axes.texts if t.get_text() == "-"}
        limit = one.mean_map.abs().max()
        assert marked == {tuple(at) for at in (one.mean_map < -0.04 * limit).nonzero().tolist()}


def test_plain_models_and_bad_input(drawn):
    run = trace(random_model(**PLAIN), torch.randint(97, (1, 5)))
    plots.term_shares(composition_summary(run))
    plots.breakdown_strip(breakdown(run, 0, "pre", 3, 1))
    for call, message in (
        (lambda: plots.mean_maps(composition_summary(run), theme="sepia"), "theme='sepia' is unknown"),
        (lambda: plots.attention_rows(run, 0, "post", 1, tokens=["a"]), "1 tokens for a trace of 5"),
        (lambda: plots.attribution_heatmap(torch.zeros(2, 3, 4)), r"scores of shape \(2, 3, 4\)"),
        (lambda: plots.attention_over_image(run, None, 0, 1), "needs a trace of a model of images"),
    ):
        with pytest.raises(DCFormerError, match=message):
            call()
