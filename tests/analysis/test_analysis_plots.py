"""Figures: every function returns one, draws what it is given, and leaves matplotlib as it was."""

import inspect

import numpy as np
import pytest
import torch
from analysis_models import random_model
from helpers import PLAIN, randomize

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
    vision = randomize(
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

    def luminance(color):
        rgb = np.array(matplotlib.colors.to_rgb(color))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", plots.THEMES.values(), ids=plots.THEMES)
def test_colors_can_be_told_apart(theme):
    assert contrast(theme.ink, theme.ground) > 7
    for color in (theme.positive, theme.negative):
        assert contrast(color, theme.ground) > 4.5
    for color in theme.series:
        assert contrast(color, theme.ground) > 3


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_numbers_can_be_read(drawn, theme):
    """Each number stands out from the color of its cell."""
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
    assert image.get_clim() == (-data["scores"].abs().max(), data["scores"].abs().max())  # centered at 0
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


def test_sign_is_shown_by_more_than_color(drawn):
    """Every clearly negative cell bears a minus."""
    figures, data = drawn
    figure = figures["mean_maps"]("light")
    for one in data["summary"]:
        (axes,) = (a for a in figure.axes if a.get_title() == f"layer {one.layer}, {one.stage}")
        marked = {
            (round(t.get_position()[1]), round(t.get_position()[0])) for t in axes.texts if t.get_text() == plots.MINUS
        }
        limit = one.mean_map.abs().max()
        assert marked == {tuple(at) for at in (one.mean_map < -0.04 * limit).nonzero().tolist()}


def test_numbers_are_not_below_the_legend():
    """Terms of equal shares fill their axes: the legend is outside."""
    summary = composition_summary(trace(random_model(num_hidden_layers=6), torch.randint(97, (1, 6))))
    figure = plots.term_shares(summary)
    figure.canvas.draw()
    (legend,) = figure.legends
    assert not figure.axes[0].get_window_extent().overlaps(legend.get_window_extent())
    assert figure.axes[0].get_legend() is None


def test_dollar_signs_are_no_mathematics(drawn):
    """In tokens, targets and names: they are drawn as they are, and none is an error."""
    data, odd = drawn[1], "$\\frac$ \\$"
    pair, tokens = (
        (head_diversity(random_model(), "qk"), head_diversity(random_model(), "ov")),
        [odd] * data["run"].length,
    )
    for figure in (
        plots.breakdown_strip(data["entry"], tokens),
        plots.attention_rows(data["run"], 3, "post", -1, tokens=tokens),
        plots.attribution_heatmap(data["scores"], odd),
        plots.diversity_curves({odd: pair}),
        plots.accuracy_bars({odd: 0.5}, title=odd),
    ):
        figure.canvas.draw()
        with_dollars = [text for text in figure.findobj(matplotlib.text.Text) if "$" in text.get_text()]
        assert with_dollars and not any(text.get_parse_math() for text in with_dollars)


def test_rows_have_the_labels_of_their_sequence(bundled):
    model, tokenizer = bundled
    run = trace(model, tokenizer(["Peter owns", "Boris owns"], return_tensors="pt"), tokenizer=tokenizer)
    assert "Boris" in texts(plots.attention_rows(run, -1, "post", 1, batch=1))
    assert any(text.startswith("Layer 3, query 'owns'") for text in texts(plots.attention_rows(run, -1, "post", 1)))


def test_rows_show_the_keys_that_are_seen():
    """All keys that the query sees are drawn, and none that it does not see."""
    ids, ahead = torch.randint(97, (1, 7)), random_model(is_causal=False, sliding_window=None)
    for model, t, keys in (
        (ahead, 2, slice(0, 7)),
        (random_model(sliding_window=None), 2, slice(0, 3)),
        (random_model(sliding_window=2), -1, slice(5, 7)),  # the first layer is local
    ):
        run = trace(model, ids)
        figure = plots.attention_rows(run, 0, "post", t, component=("key", 1, "up"))
        shown = [axes.get_images()[0].get_array() for axes in figure.axes if axes.get_label() != "<colorbar>"]
        assert np.allclose(shown[0], run.layers[0].weights[0, :, t, keys].numpy())
        assert np.allclose(shown[1], run.layers[0].composed_weights[0, :, t, keys].numpy())
        assert np.allclose(shown[2], run.layers[0].post.key.up[0, :, keys, 1].numpy())


def test_signs_are_seen_beside_the_patch(drawn):
    """What marks the query's patch is a frame around its cell, and covers no sign in it."""
    figure = drawn[0]["attention_over_image"]("light")
    frames = [patch for axes in figure.axes for patch in axes.patches]
    assert len(frames) == 1 + 2 * 4 and not any(frame.get_fill() for frame in frames)
    assert not any(axes.lines for axes in figure.axes if axes.get_label() != "<colorbar>")


def test_plain_models_and_bad_input(drawn):
    run = trace(random_model(**PLAIN), torch.randint(97, (1, 5)))
    plots.term_shares(composition_summary(run))
    seen, model = drawn[1]["seen"], random_model()
    stack, sums = (tuple(head_diversity(model, circuit, form) for circuit in ("qk", "ov")) for form in ("stack", "sum"))
    plots.breakdown_strip(breakdown(run, 0, "pre", 3, 1))
    for call, message in (
        (lambda: plots.mean_maps(composition_summary(run), theme="sepia"), "theme='sepia' is unknown"),
        (lambda: plots.attention_rows(run, 0, "post", 1, tokens=["a"]), "1 tokens for a trace of 5"),
        (lambda: plots.attention_rows(run, 0, "post", 1, batch=1), "batch index 1 is out of range"),
        (lambda: plots.mean_maps([]), "the summary is empty"),
        (lambda: plots.term_shares([]), "the summary is empty"),
        (lambda: plots.breakdown_strip(breakdown(run, 0, "pre", 3, 1), tokens=["a"]), "position 3 is out of range"),
        (lambda: plots.diversity_curves({}), "expected one at least"),
        (lambda: plots.diversity_curves({"a": (stack[0], sums[1])}), r"forms \['stack', 'sum'\]"),
        (lambda: plots.diversity_curves({"a": stack, "b": sums}), r"2 models .* forms \['stack', 'sum'\]"),
        (lambda: plots.diversity_curves({"a": stack[::-1]}), r"circuits \(QK, OV\)"),
        (lambda: plots.attention_over_image(seen, torch.rand(3, 16, 16), 0, 1), r"\(3, 16, 16\): .* channels last"),
        (lambda: plots.attention_over_image(seen, torch.rand(16, 16), 0, 1, batch=2), "batch index 2 is out of range"),
        (lambda: plots.attribution_heatmap(torch.zeros(2, 3, 4)), r"scores of shape \(2, 3, 4\)"),
        (lambda: plots.attention_over_image(run, None, 0, 1), "needs a trace of a model of images"),
    ):
        with pytest.raises(DCFormerError, match=message):
            call()
