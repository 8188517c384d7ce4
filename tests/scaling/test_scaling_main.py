"""`python -m dcformer.scaling`: the paper's table 4, and what the command refuses."""

import json
import math
import re
from pathlib import Path

import pytest
from helpers import PLAIN, REPOSITORY, tiny_config

from dcformer.analysis import num_parameters, training_flops
from dcformer.scaling.__main__ import main

TABLE_4 = REPOSITORY / "docs" / "scaling" / "table4.csv"
PYTHIA = [str(TABLE_4), "--baseline", "pythia", "--variant", "dcpythia", "--perplexity"]


def test_table_4_of_the_paper(capsys, tmp_path):
    """Compute factors of DCPythia, the intervals of three points, and what they cannot say."""
    main([*PYTHIA, "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")])
    out = capsys.readouterr().out
    rows = re.findall(r"^\| (?:2.8|6.9)e\+09 \| 1 .*$", out, re.MULTILINE)
    assert "| 1.93 | 0.44-8.38 | 1.71-2.16 | within the baseline's range | 1.97 | 2.04 |" in rows[0]
    assert "| 2.13 | 0.35-12.9 | 1.84-2.45 | extrapolated | 2.17 |  |" in rows[1]
    for note in (
        "Extrapolated:",
        "Warning: the law rests on 3 sizes",
        "three points cannot say more",
        "cannot be charged",
    ):
        assert note in out
    factors = json.loads((tmp_path / "out.json").read_text())["measures"]["6nd"]["factors"]
    assert [factor["factor"] for factor in factors] == pytest.approx([1.93, 2.13], abs=0.005)
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_draws_are_not_needed(capsys):
    main(PYTHIA)
    without = capsys.readouterr().out
    main([*PYTHIA, "--bootstrap", "500"])
    assert (
        capsys.readouterr().out
        == f"{without.rstrip()}\n--bootstrap 500 has no effect: intervals are computed without draws.\n"
    )


def test_counted_operations_come_first(tmp_path, capsys):
    rows = "".join(
        f"{family},{n},{20 * n},{8 - 0.1 * i - gain},{120 * n * n},0\n"
        for family, gain in (("b", 0), ("v", 0.05))
        for i, n in enumerate((1e6, 2e6, 4e6))
    )
    file = tmp_path / "runs.csv"
    file.write_text("family,parameters,tokens,loss,flops,seed\n" + rows)
    main([str(file), "--baseline", "b", "--variant", "v"])
    out = capsys.readouterr().out
    assert "C (flops)" in out and "paying for them" in out and "One slope for both families" in out
    assert "| 2.00 |" in out  # 0.05 nats, where 0.1 are 4 times the compute


def test_a_folder_of_short_rows_gives_the_factor_of_its_table(tmp_path, capsys):
    """Rows of 32 tokens in a context of 2048, at which composition would count 64 times too much. Without the speeds
    that tell how long rows were, the folder says that it counts no operations."""
    rows = []
    for family, composition, gain in (("b", PLAIN, 0.0), ("v", {}, 0.04)):
        for width in (32, 48, 64, 96):
            config = tiny_config(hidden_size=width, max_position_embeddings=2048, **composition)
            tokens, loss = 1000 * width**2, 9 - 0.5 * math.log(width) - gain
            history = [
                {"step": 100, "eval_loss": loss},
                {"step": 100, "train_samples_per_second": tokens / 32 / 50, "train_steps_per_second": 2.0},
            ]
            run = tmp_path / "runs" / family / str(width)
            config.save_pretrained(run)
            state = {"global_step": 100, "num_input_tokens_seen": tokens, "log_history": history}
            (run / "trainer_state.json").write_text(json.dumps(state))
            rows.append(f"{family},{num_parameters(config)},{tokens},{loss},{training_flops(config, 32) * tokens}\n")
    file = tmp_path / "runs.csv"
    file.write_text("family,parameters,tokens,loss,flops\n" + "".join(rows))
    names = ["--baseline", "b", "--variant", "v"]
    factors = []
    for source in (file, file.with_suffix("")):
        main([str(source), *names])
        factors.append(re.search("One slope.*", capsys.readouterr().out)[0])
    assert factors[0] == factors[1]

    for run in (tmp_path / "runs").glob("*/*/trainer_state.json"):
        state = json.loads(run.read_text())
        del state["log_history"][1]
        run.write_text(json.dumps(state))
    main([str(tmp_path / "runs"), *names])
    assert "C (6nd) leaves out what composition computes; without flops" in capsys.readouterr().out


def table(tmp_path, losses, loss_of_variant, head=""):
    """Six sizes of a family b, and of a family v."""
    rows = "".join(
        f"{family},{n},{20 * n},{loss},{120 * n * n}\n"
        for family, found in (("b", losses), ("v", loss_of_variant))
        for n, loss in zip((1e6, 2e6, 4e6, 8e6, 1.6e7, 3.2e7), found, strict=False)
    )
    file = tmp_path / "runs.csv"
    file.write_text(head + "family,parameters,tokens,loss,flops\n" + rows, encoding="utf-8")
    return [str(file), "--baseline", "b", "--variant", "v"]


def test_curves_that_cross_are_told(tmp_path, capsys):
    main(table(tmp_path, (3.5, 3.3, 3.1, 2.95), (3.8, 3.4, 2.9, 2.4)))
    assert "Warning: the slopes differ" in capsys.readouterr().out
    for level in ((), ("--level", "0.5")):  # of intervals, and of nothing else
        main([*table(tmp_path, (3.5, 3.3, 3.1, 2.95), (3.4, 3.2, 3.0, 2.86)), *level])
        assert "the slopes differ" not in capsys.readouterr().out


def test_losses_that_may_be_perplexities(capsys):
    main(PYTHIA)
    assert "if they are perplexities" not in capsys.readouterr().out
    main(PYTHIA[:-1])
    assert "nats a token: if they are perplexities, give --perplexity" in capsys.readouterr().out


def test_the_ends_of_the_range_are_within_it(tmp_path, capsys):
    """As far as rounding goes: the variant has the baseline's losses, at a little more compute."""
    losses = [4 - 0.1 * i for i in range(6)]
    file = Path(table(tmp_path, losses, losses)[0])
    head, *rows = file.read_text().splitlines()
    rows = [
        row.rpartition(",")[0] + f",{1.05 * float(row.rpartition(',')[2])!r}" if row[0] == "v" else row for row in rows
    ]
    file.write_text("\n".join([head, *rows]) + "\n")
    main([str(file), "--baseline", "b", "--variant", "v"])
    assert "extrapolated" not in capsys.readouterr().out


def test_factors_that_are_no_numbers(tmp_path, capsys):
    """Below a floor there is none; a line has no floor, and its factor is too large to print. JSON has neither."""
    arguments = table(tmp_path, (5, 3, 2.9, 2.89, 2.889, 2.8889), (3.4, 3.2, 3, 2.86, 2.7, 2.6))
    main([*arguments, "--form", "power+floor", "--json", str(tmp_path / "out.json")])
    out = capsys.readouterr().out
    assert "none: below the floor" in out and "beyond" not in out

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    found = json.loads((tmp_path / "out.json").read_text(), parse_constant=refuse)
    assert found["measures"]["flops"]["factors"][-1]["factor"] is None
    main(table(tmp_path, (3.0, 3.001, 2.999, 2.9995), (3.4, 3.2, 3.0, 2.5)))
    out = capsys.readouterr().out
    assert "beyond 1e300" in out and "floor" not in out


def test_a_heading_with_a_byte_order_mark(tmp_path, capsys):
    main(table(tmp_path, (3.5, 3.3, 3.1), (3.4, 3.2, 3.0), head="\ufeff"))
    assert "One slope" in capsys.readouterr().out


def test_a_variant_that_gets_worse(tmp_path):
    with pytest.raises(
        SystemExit,
        match=r"error: column loss: that of family 'v' \(the first: .*row .*\) does not fall with compute",
    ):
        main(table(tmp_path, (3.5, 3.3, 3.1), (3.0, 3.2)))


def test_seeds_are_no_sizes(tmp_path, capsys):
    file = tmp_path / "runs.csv"
    rows = "".join(
        f"{family},{n},{20 * n},{8 - 0.1 * i - gain + 0.01 * seed + 0.02 * (i == 1)},{seed}\n"
        for family, gain in (("b", 0), ("v", 0.05))
        for i, n in enumerate((1e6, 2e6, 4e6))
        for seed in range(3)
    )
    file.write_text("family,parameters,tokens,loss,seed\n" + rows)
    main([str(file), "--baseline", "b", "--variant", "v"])
    out = capsys.readouterr().out
    assert "3 sizes, 9 runs" in out and "three points cannot say more" in out and "The unit is the size" in out


def test_a_measure_that_was_not_asked_for_refuses_nothing(tmp_path, capsys):
    """Runs of one 6 N D, which differ in operations."""
    file = tmp_path / "runs.csv"
    rows = "".join(
        f"{family},{n},{4e13 / n},{loss - gain},{flops}\n"
        for family, gain in (("b", 0), ("v", 0.05))
        for n, loss, flops in ((1e6, 3.5, 1e14), (2e6, 3.4, 2e14), (4e6, 3.3, 4e14))
    )
    file.write_text("family,parameters,tokens,loss,flops\n" + rows)
    main([str(file), "--baseline", "b", "--variant", "v"])
    out = capsys.readouterr().out
    assert "factor (flops)" in out and "factor (6nd)" not in out
    with pytest.raises(SystemExit, match=r"columns parameters and tokens: all runs of family 'v' .*the same compute"):
        main([str(file), "--baseline", "b", "--variant", "v", "--compute", "6nd"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PYTHIA[:4], "other", "--perplexity"], "column family: no run is of family 'other': found dcpythia, pythia"),
        ([*PYTHIA, "--compute", "flops"], r"error: .*row \d: no flops"),
        (
            [*PYTHIA, "--form", "power+floor"],
            r"error: column parameters: family 'pythia' .*table4.csv, row 2\) has 3 sizes",
        ),
        (["missing.csv", *PYTHIA[1:]], "error: missing.csv cannot be read"),
        ([*PYTHIA, "--variant", "pythia"], "error: --baseline and --variant are both 'pythia': name two families"),
        (["missing.csv", *PYTHIA[1:], "--json", "/"], "error: --json / is a folder: name a file in it"),
        ([*PYTHIA, "--plot", "out.xyz"], r"error: --plot out.xyz: expected a name that ends in one of .*\.png"),
        ([*PYTHIA, "--plot", "missing/out.png"], "error: --plot missing/out.png: there is no folder missing"),
        ([*PYTHIA, "--json", "missing/out.json"], "error: --json missing/out.json: there is no folder missing"),
    ],
)
def test_refused_in_one_line(arguments, message):
    with pytest.raises(SystemExit, match=message) as error:
        main(arguments)
    assert "\n" not in str(error.value)
