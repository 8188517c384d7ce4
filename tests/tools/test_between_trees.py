"""Two source trees in turn: each is the one that was asked for."""

import sys

import pytest
from helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import between_trees


@pytest.mark.slow
def test_trees_are_called_in_turn(tmp_path, capfd):
    """A package that tells the shape of a query and computes nothing stands in for the other tree."""
    other = tmp_path / "dcformer"
    other.mkdir()
    (other / "__init__.py").write_text("class DCFormerConfig:\n    def __init__(self, **sizes):\n        pass\n")
    (other / "compose_dcformer.py").write_text(
        "import torch\nfrom types import SimpleNamespace as S\n\n"
        "class DCFormerCompose:\n    def __init__(self, config):\n        self.qkw = torch.ones(1)\n"
        "    def __call__(self, hidden):\n        return hidden\n\n"
        "def stages(*_):\n    return [S(query=S(packed=torch.ones(1))) for _ in range(2)]\n"
    )
    (other / "chunked_dcformer.py").write_text(
        "import sys\n\ndef chunked_attention(module, query, *_, **__):\n"
        "    print('stand-in', query.shape[2], file=sys.stderr)\n    return query * 1, None\n"
    )
    between_trees.main([str(tmp_path), str(REPOSITORY / "src"), "--tokens=32", "--repeats=2", "--threads=1"])
    printed = capfd.readouterr()
    assert [line.split(" (")[0] for line in printed.out.splitlines()] == list(between_trees.KINDS)
    assert all("; new / old " in line for line in printed.out.splitlines())
    whole = ["stand-in 32"] * 6
    assert printed.err.splitlines() == [*whole, *["stand-in 1"] * 3, *whole]


def test_other_folders_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        between_trees.main([str(tmp_path), str(REPOSITORY / "src")])
    assert "expected two folders that hold `dcformer`" in capsys.readouterr().err
