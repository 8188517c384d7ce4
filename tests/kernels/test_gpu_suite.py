"""benchmarks/gpu_suite.py without a GPU: its arithmetic, one whole run on tiny shapes, and that its checks can fail."""

import json

import pytest
import torch
from kernel_device import INTERPRETED, load_gpu_suite

if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1: the suite's smoke run is on the CPU", allow_module_level=True)
suite = load_gpu_suite()


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries, keys", [(1, 1), (7, 7), (5, 20), (1, 9), (64, 64)])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_visible_pairs(queries, keys, window):
    t, s = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)[None]
    seen = (s <= t) & (s > t - (window or keys))
    assert suite.visible_pairs(queries, keys, window) == int(seen.sum())


def test_flops_are_those_of_torch():
    """Counted by torch for whole maps: a forward pass, and its products again beside those of the backward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (torch.randn(2, 3, 8, 16, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        out = (q @ k.mT).softmax(-1) @ v
    forward = counter.get_total_flops()
    assert suite.attention_flops(2 * 8 * 8, 3, 16) == forward
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    again = forward // 2  # q·k, which fused kernels make anew
    assert suite.attention_flops(2 * 8 * 8, 3, 16, backward=True) == counter.get_total_flops() + again


def test_flops_of_composition():
    # per pair and head: 2 stages, 2 sides, R = 2 down and up and a gate, 2 operations each
    assert suite.compose_flops(10, 4, 2) == 10 * 4 * 2 * 2 * (2 + 2 + 1) * 2
    assert suite.compose_flops(10, 4, 1, sides=1, gate=False, backward=True) == 2 * 10 * 4 * 2 * (1 + 1) * 2


def test_bytes_are_those_of_the_tensors():
    bench = suite.Bench(smoke=True)
    config = bench.config("smoke")
    inputs = suite.make_inputs(bench, config, 13, None)
    own = sum(t.nbytes for t in inputs.tensors.values())
    out = suite.ours(inputs)
    lse = 4 * config.num_attention_heads * 13
    sizes = (1, config.num_attention_heads, 13, 13, config.head_dim, 10, 4)
    assert suite.attention_bytes(*sizes) == own + out.nbytes + lse
    assert suite.attention_bytes(*sizes, backward=True) == 2 * (own + out.nbytes + lse)


def test_extrapolation_is_exact_for_what_is_linear():
    assert suite.extrapolate((7.0, 11.0), (4, 8), 32) == {"layer_s": 1.0, "rest_s": 3.0, "full_s": 35.0}


def test_goals_are_judged_by_what_was_measured():
    def speeds(ratio):
        common = {"section": "train", "size": "2.8b", "depth": "few", "status": "ok", "batch": 8, "tokens": 2048}
        values = {suite.PLAIN: 100.0, ("LG", "full"): 100.0 * ratio}
        return {
            str(v): common | {"pattern": v[0], "composition": v[1], "tokens_per_s": speed}
            for v, speed in values.items()
        }

    for ratio, reached in ((0.9, ["yes", "yes"]), (0.8, ["yes", "no"]), (0.7, ["no", "no"])):
        must_and_strive = suite.judge(speeds(ratio))[:2]
        assert [goal["value"] for goal in must_and_strive] == pytest.approx([ratio] * 2)
        assert [goal["reached"] for goal in must_and_strive] == reached
    cells = speeds(0.9)
    cells[str(suite.PLAIN)]["batch"] = 4  # not under equal conditions
    assert suite.judge(cells)[0]["reached"] == "not measured"
    cells = speeds(0.9)
    cells[str(("LG", "full"))]["status"] = "invalid"
    assert suite.judge(cells)[0]["reached"] == "not measured"


def test_decoding_is_judged_by_the_llama_with_one_product():
    named = {"section": "decode", "size": "6.9b", "depth": "few", "status": "ok", "mode": "compiled, CUDA graph"}
    speeds = {suite.PLAIN: 100.0, suite.ONE_PRODUCT: 110.0, ("LG", "full"): 107.0}
    cells = {str(v): named | {"pattern": v[0], "composition": v[1], "tokens_per_s": s} for v, s in speeds.items()}
    judged = [goal for goal in suite.judge(cells) if goal["what"].startswith("decoding") and goal["value"]]
    assert [(goal["value"], goal["reached"]) for goal in judged] == [(pytest.approx(107 / 110), "no")]


@torch.no_grad()
def test_a_llama_with_one_product_is_the_same_llama():
    bench = suite.Bench(smoke=True)
    config = bench.config("smoke", num_key_value_heads=1)
    plain, joined = (suite.build_decoder(bench, config, v[1]) for v in (suite.PLAIN, suite.ONE_PRODUCT))
    ids = suite.make_ids(bench, config, 1, 9)
    assert torch.equal(joined(ids).logits, plain(ids).logits)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    options["cache_implementation"] = "static"
    assert torch.equal(joined.generate(ids, **options), plain.generate(ids, **options))
    assert not any("k_proj" in name for name, _ in joined.named_parameters())
    assert plain.num_parameters() == joined.num_parameters()


def test_a_check_knows_noise_from_a_fault():
    torch.manual_seed(0)
    truth = {"x": torch.randn(1000, dtype=torch.float64)}
    low = {"x": truth["x"].bfloat16()}
    assert suite.compare(low, low, truth, torch.bfloat16)["status"] == "ok"
    for fault in (
        truth["x"] * 1.05,
        truth["x"].roll(1),
        truth["x"] * float("nan"),
        truth["x"].clone().index_fill_(0, torch.tensor([3]), 9.0),
    ):
        assert suite.compare({"x": fault.bfloat16()}, low, truth, torch.bfloat16)["status"] == "failed"
    assert suite.compare({}, low, truth, torch.bfloat16)["status"] == "failed"


def test_flex_attention_has_gates_before_the_softmax(monkeypatch):
    """Against the definition in float64; and what is wrong is noticed."""
    bench = suite.Bench(smoke=True)
    for window in (None, 5):
        assert suite.check_attention(bench, "smoke", window, 17, "gates", "flex")["status"] == "ok"
    right = suite.flex
    monkeypatch.setattr(suite, "flex", lambda bench, tokens, window: right(bench, tokens, 4))
    result = suite.check_attention(bench, "smoke", None, 17, "gates", "flex")
    assert (result["status"], result["worst"]) == ("failed", "output")


# --- the whole script -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_plot(monkeypatch):
    monkeypatch.setattr(suite, "draw", lambda *_: False)


def run(tmp_path, *arguments):
    status = suite.main(["--smoke", "--out", str(tmp_path), *arguments])
    return status, json.loads((tmp_path / "gpu_suite.json").read_text())


@pytest.mark.long
def test_smoke_run(tmp_path, capsys, monkeypatch):
    status, content = run(tmp_path, "--budget-s", "3600")  # a verdict that no load changes
    monkeypatch.setattr(suite, "draw", lambda *_: False)
    cells = {cell["name"]: cell for cell in content["cells"]}
    states = {name: cell["status"] for name, cell in cells.items() if cell["status"] != "ok"}
    assert status == 0 and all(name.startswith("tune") for name in states), states
    assert {cell["section"] for cell in content["cells"]} == set(suite.SECTIONS)
    checks = [cell for cell in content["cells"] if cell["section"] == "check"]
    assert len(checks) >= 5 and all(cell["share_of_allowed"] <= 1 for cell in checks)
    timing = cells["op smoke global 17 ours"]
    assert timing["forward_backward"]["median_s"] > 0 and timing["forward_backward"]["tflops"] > 0
    assert "backward pass" in cells["op smoke window 8 17 flex gates"]["forward_backward"]["status"]
    assert all(cells["kernels rates"][f"{name}_per_s"] > 0 for name in ("memory_bytes", "cache_bytes", "flops"))
    assert cells["kernels smoke chunks"]["faster"] > 0
    for section in ("train", "decode"):
        speeds = [c for c in content["cells"] if c["section"] == section]
        assert len(speeds) == 3  # plain, composed, and with maps that are kept or query-wise alone
        assert (speeds[0]["pattern"], speeds[0]["composition"]) == suite.BASELINES[section]
        assert all(c["tokens_per_s"] and not c["graph_breaks"] for c in speeds)
    assert len(content["goals"]) == len(suite.GOALS)
    assert {"torch", "triton", "transformers", "commit", "device"} <= content["about"].keys()
    printed = capsys.readouterr().out
    assert "| training tokens/s over Transformer++, 2.8b" in printed and "not measured" in printed

    # nothing is measured again, and the time that is not there is said
    status, again = run(tmp_path, "--resume", "--budget-s", "0")
    assert status == 0 and [c["name"] for c in again["cells"]] == [c["name"] for c in content["cells"]]
    (tmp_path / "gpu_suite.json").unlink()
    status, skipped = run(tmp_path, "--sections", "op", "--budget-s", "0")
    assert status == 0 and {c["status"] for c in skipped["cells"]} == {"skipped"}
    assert "Skipped: op smoke global 17 ours" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.tmp"))


def test_a_run_of_another_setup_is_not_gone_on_with(tmp_path, capsys, no_plot):
    run(tmp_path, "--sections", "op", "--budget-s", "0")
    path = tmp_path / "gpu_suite.json"
    content = json.loads(path.read_text())
    for part, name in (("about", "device"), ("about", "sources"), ("options", "batch")):
        other = content | {part: content[part] | {name: "another"}}
        path.write_text(json.dumps(other))
        assert suite.main(["--smoke", "--out", str(tmp_path), "--resume", "--budget-s", "0"]) == 2
        assert f"it was measured with another setup: {name} another, now " in capsys.readouterr().err
        assert json.loads(path.read_text()) == other
    for broken in ('{"cells": [', "[]", '{"cells": [], "about": null, "options": {}}'):
        path.write_text(broken)
        assert suite.main(["--smoke", "--out", str(tmp_path), "--resume", "--budget-s", "0"]) == 2
        assert f"--resume {path}: " in capsys.readouterr().err and path.read_text() == broken


def test_a_wrong_result_is_reported(tmp_path, monkeypatch, capsys, no_plot):
    right = suite.ours
    monkeypatch.setattr(suite, "ours", lambda inputs, **options: right(inputs, **options) * 1.001)
    monkeypatch.setattr(suite, "IMPLEMENTATIONS", ("ours", "eager"))
    status, content = run(tmp_path, "--sections", "op")
    states = {cell["name"]: cell["status"] for cell in content["cells"]}
    assert status == 1
    assert states["check attention smoke global 17 full"] == "failed"
    assert states["op smoke global 17 ours"] == "invalid" and states["op smoke global 17 eager"] == "ok"
    assert "invalid" in capsys.readouterr().out


def test_errors_and_lack_of_memory_are_results(tmp_path, monkeypatch, no_plot):
    def fail(inputs):
        raise {None: torch.OutOfMemoryError("CUDA out of memory"), 8: RuntimeError("no such luck")}[inputs.window]

    monkeypatch.setattr(suite, "chunked", fail)
    monkeypatch.setattr(suite, "IMPLEMENTATIONS", ("chunked", "flash"))
    status, content = run(tmp_path, "--sections", "op")
    states = {cell["name"]: (cell["status"], cell.get("detail", "")) for cell in content["cells"]}
    assert status == 1
    assert states["op smoke global 17 chunked"] == ("out of memory", "OutOfMemoryError: CUDA out of memory")
    assert states["op smoke window 8 17 chunked"] == ("error", "RuntimeError: no such luck")
    assert states["op smoke global 17 flash"][0] == "ok"


def test_decoding_loop_is_greedy_decoding():
    """The static cache, changed in place step by step, gives the tokens of a pass over all of them without a cache."""
    bench = suite.Bench(smoke=True, prompt=9, new_tokens=3)
    for plain in (True, False):
        config = bench.config("smoke")
        model = suite.build_model(bench, config, plain).eval()
        if not plain:
            model.set_attn_implementation("eager")
        step, rewind = suite.decoding_step(bench, model, config, forward=model)
        for _ in range(2):
            ids, tokens = suite.make_ids(bench, config, 1, bench.prompt), [step.token.clone()]
            for _ in range(bench.new_tokens):
                step()
                tokens.append(step.token.clone())
            with torch.no_grad():
                logits = model(torch.cat([ids, *tokens[:-1]], dim=1)).logits[:, bench.prompt - 1 :]
            assert torch.equal(torch.cat(tokens, dim=1), logits.argmax(-1))
            for layer in step.cache.layers:  # as new: `rewind` alone leaves the windows' keys as they are
                layer.reset()
            with torch.no_grad():
                model(ids, past_key_values=step.cache, use_cache=True)
            rewind()


@pytest.mark.parametrize("option", ["--plot", "--markdown", "--out", "--budget-s=-1", "--repeats=0", "--lengths=0"])
def test_options_without_sense_are_refused(option, tmp_path, capsys):
    """Before anything is measured or written."""
    path = tmp_path / "file"
    path.write_text("[]")
    with pytest.raises(SystemExit):
        suite.main([option] if "=" in option else [option, str(path)])
    assert f"error: {option.split('=')[0]}" in capsys.readouterr().err
    assert path.read_text() == "[]"
