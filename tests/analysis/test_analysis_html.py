"""The head view: it parses, needs nothing from outside, and its numbers are the trace's."""

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from analysis_models import random_model
from helpers import PLAIN

from dcformer.analysis import breakdown, trace
from dcformer.analysis.html import head_view
from dcformer.errors import DCFormerError

VOID = {"meta", "input", "br", "img", "link"}


class Page(HTMLParser):
    """Elements that are opened and closed in order, and the data of the page."""

    def __init__(self, text):
        super().__init__()
        self.open, self.data, self.ids = [], "", set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.ids |= {value for name, value in attrs if name == "id"}
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][1].get("id") == "data":
            self.data += data


def parsed(text):
    page = Page(text)
    assert not page.open
    return json.loads(page.data), page


def floats(text, *shape):
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").copy()).view(*shape)


def bits(text, *shape):
    numbers = np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), bitorder="little")
    return torch.from_numpy(numbers[: int(np.prod(shape))].astype(bool)).view(*shape)


@pytest.mark.parametrize(
    "fields", [{}, {"compose_static": True, "compose_groups": 2}, PLAIN], ids=("full", "all", "plain")
)
def test_numbers_are_those_of_the_trace(fields):
    """Those embedded are equal; what the page composes of them by its formula is, up to rounding."""
    model, ids = random_model(**fields), torch.randint(97, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    run = trace(model, {"input_ids": ids, "attention_mask": mask})
    data, _ = parsed(head_view(run, batch=1, positions=[11, 4]))
    assert data["positions"] == [11, 4] and data["tokens"] == [str(n) for n in range(12)]
    for found, (number, layer) in zip(data["layers"], run.layers.items(), strict=True):
        assert found["number"] == number and found["heads"] == 4
        visible = bits(found["visible"], 2, 12)
        assert torch.equal(visible, layer.visible[1, 0, [11, 4]] & mask[1].bool())
        for stage in ("pre", "post"):
            before, after = (maps[1][:, [11, 4]] for maps in layer.maps(stage))
            one = found[stage]
            embedded = floats(one["before"], 4, -1)
            assert torch.equal(embedded, before[:, visible])
            composed = torch.zeros_like(before)
            composed[:, visible] = embedded
            composed = page_composes(composed, one)
            assert torch.allclose(composed[:, visible], after[:, visible], atol=1e-5, rtol=1e-5)


def page_composes(before, stage):
    """The page's formula: sums over source heads of a group."""
    groups = stage.get("groups", 1)
    out, size = before.clone(), 4 // groups
    sides = {}
    for name, tokens in (("query", 2), ("key", 12)):
        if name in stage:
            sides[name] = floats(stage[name]["packed"], 4, stage[name]["channels"], tokens), stage[name]["rank"]
    for j in range(4):
        for m in range(j // size * size, (j // size + 1) * size):
            factor = torch.zeros(2, 12)
            if "static" in stage:
                factor += floats(stage["static"], groups, size, size)[j // size, j % size, m % size]
            for name, (packed, rank) in sides.items():
                one = sum(packed[j, r] * packed[m, rank + r] for r in range(rank))
                one = one + (packed[m, 2 * rank] if j == m and packed.shape[1] > 2 * rank else 0)
                factor += one[:, None] if name == "query" else one
            out[m] += before[j] * factor
    return out


def test_the_page_stands_alone(bundled):
    """One file below 1 MB at 4 layers, 8 heads and 64 tokens, without links, and with its controls."""
    model, tokenizer = bundled
    words = "\n< Peter owns the desk. Boris owns the tuna. Olga owns the banana. >. Boris owns a kind of fish" * 3
    inputs = {name: values[:, :64] for name, values in tokenizer(words, return_tensors="pt").items()}
    page = head_view(trace(model, inputs, tokenizer=tokenizer))
    assert len(page.encode()) < 1_000_000
    data, parser = parsed(page)
    assert len(data["tokens"]) == 64 and data["tokens"][0] == "\n"
    assert not re.search(r"https?:|//[a-z]+\.|@import|<link|url\(", page.replace(json.dumps(data), ""))
    assert {"layer", "map", "heads", "theme", "queries", "keys", "panel"} <= parser.ids


def test_tokens_cannot_break_out():
    run = trace(random_model(), torch.randint(97, (1, 3)))
    evil = ["</script><script>alert(1)</script>", "<!--", "&amp;"]
    data, _ = parsed(head_view(run, tokens=evil, title="<b>&"))
    assert data["tokens"] == evil and data["title"] == "<b>&"


def test_long_texts_need_positions():
    model = random_model(hidden_size=8, head_dim=2, intermediate_size=8, max_position_embeddings=400)
    ids = torch.randint(97, (1, 257))
    run = trace(model, ids)
    with pytest.raises(DCFormerError, match=r"257 queries: the page shows at most 256\. Name some with positions="):
        head_view(run)
    assert parsed(head_view(run, positions=[5, -1]))[0]["positions"] == [5, 256]
    assert parsed(head_view(trace(model, ids, positions=[7])))[0]["positions"] == [7]
    for call, message in (
        (lambda: head_view(run, tokens=["a"]), "1 tokens for a trace of 257"),
        (lambda: head_view(run, positions=[257]), "position 257 is out of range"),
        (lambda: head_view(run, positions=[1], batch=1), "batch index 1 is out of range"),
    ):
        with pytest.raises(DCFormerError, match=message):
            call()


SCRIPT = """
const composed = layer => ["pre", "post"].map(stage => Array.from(values(layer, stage, "after")));
const seen = { values: data.layers.map(composed) };
const press = key => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const state_now = () => [state.query, state.key, document.querySelectorAll("#lines path").length > 0];
byId("queries").children[0].focus();
seen.steps = ["ArrowDown", "ArrowRight", "ArrowDown", "ArrowLeft", "Escape"].map(key => (press(key), state_now()));
byId("queries").children[3].click();
byId("keys").children[2].click();
seen.clicked = state_now();
seen.table = [...document.querySelectorAll("#panel tr")].slice(1).map(row => [...row.children].map(x => x.textContent));
byId("map").value = "pre after";
byId("map").dispatchEvent(new Event("change"));
seen.legend = byId("legend").textContent;
byId("theme").click();
seen.dark = document.documentElement.classList.contains("dark");
document.body.append(make("pre", JSON.stringify(seen), { id: "seen" }));
"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_composes_and_obeys_keys_and_mouse(tmp_path):
    """The page's own script gives the trace's numbers; arrows, Escape and clicks choose the entry shown."""
    run = trace(random_model(compose_static=True, compose_groups=2), torch.randint(97, (1, 5)))
    page = tmp_path / "page.html"
    page.write_text(head_view(run).replace("</body>", f"<script>{SCRIPT}</script></body>"), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [*command, "--dump-dom", f"{page.as_uri()}#light"], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    seen = json.loads(re.search(r'<pre id="seen">(.*?)</pre>', shown, re.DOTALL)[1])
    for number, found in enumerate(seen["values"]):
        visible = run.visible(number)
        for stage, values in zip(("pre", "post"), found, strict=True):
            expected = run.layers[number].maps(stage)[1][0, :, visible]  # [H, entries]
            assert torch.allclose(torch.tensor(values).view_as(expected), expected, atol=1e-5)
    assert seen["steps"] == [[1, None, True], [1, 0, True], [1, 1, True], [1, 1, True], [None, None, True]]
    assert seen["clicked"] == [3, 2, True] and seen["dark"] and seen["legend"].startswith("composed scores, layer 1")
    entry = breakdown(run, 1, "post", 3, 2)
    for head, row in enumerate(seen["table"]):
        numbers = [float(cell) for cell in row[1:8]]
        expected = [*(part[head].item() for part in entry.terms.values()), entry.after[head].item()]
        assert numbers == pytest.approx(expected, abs=1e-3)
        assert row[8] == f"head {entry.largest(head)[1]}"
