"""`python -m dcformer.scaling`: the paper's table 4, and what the command refuses."""

import json
import re

import pytest
from helpers import REPOSITORY

from dcformer.scaling.__main__ import main

TABLE_4 = REPOSITORY / "docs" / "scaling" / "table4.csv"
PYTHIA = [str(TABLE_4), "--baseline", "pythia", "--variant", "dcpythia", "--perplexity"]


def test_table_4_of_the_paper(capsys, tmp_path):
    """Compute factors of DCPythia, the intervals of three points, and what they cannot say."""
    main([*PYTHIA, "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")])
    out = capsys.readouterr().out
    rows = re.findall(r"^\| (?:2.8|6.9)e\+09 \| 1 .*$", out, re.MULTILINE)
    assert "| 1.93 | 0.44-8.38 | 1.71-2.16 | within the baseline's range | 1.97 |" in rows[0]
    assert "| 2.13 | 0.35-12.9 | 1.84-2.45 | extrapolated | 2.17 |" in rows[1]
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PYTHIA[:4], "other", "--perplexity"], "error: no run is of family 'other': found dcpythia, pythia"),
        ([*PYTHIA, "--compute", "flops"], "error: .*row 2: no flops"),
        ([*PYTHIA, "--form", "power+floor"], "error: family 'pythia' has 3 sizes"),
        (["missing.csv", *PYTHIA[1:]], "error: missing.csv cannot be read"),
    ],
)
def test_refused_in_one_line(arguments, message):
    with pytest.raises(SystemExit, match=message) as error:
        main(arguments)
    assert "\n" not in str(error.value)
