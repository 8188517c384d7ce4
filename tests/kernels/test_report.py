"""The report on compiled kernels: it reads machine code rightly and ranks tiles; some kernels do not spill."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'dcformer[kernels]'")

from dcformer.kernels import report
from dcformer.kernels.report import Usage
from dcformer.kernels.tuning import CANDIDATES, Tile

# An outer loop that loads, holding an inner loop that loads; then a loop that loads nothing, and a jump forward.
CODE = """
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/                   LDG.E R1, desc[UR4][R2.64] ;
        /*0020*/                   IADD3 R3, R3, 0x1, RZ ;
.L_x_1:
        /*0030*/                   LDGSTS.E [R4], desc[UR4][R6.64] ;
        /*0040*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0050*/              @P0  BRA `(.L_x_1) ;
        /*0060*/              @P1  BRA `(.L_x_0) ;
        /*0070*/              @P2  BRA `(.L_x_3) ;
.L_x_2:
        /*0080*/                   FADD R1, R1, R2 ;
        /*0090*/              @P3  BRA `(.L_x_2) ;
.L_x_3:
        /*00a0*/                   EXIT ;
.L_x_4:
        /*00b0*/                   BRA `(.L_x_4);
"""


def test_instructions_of_innermost_loops_that_read_memory():
    assert report._instructions_in_loops(CODE) == 3  # LDGSTS, HMMA, BRA
    assert report._instructions_in_loops(CODE.replace("LDGSTS", "LDS")) == 6  # of those that read memory, the outer one
    assert report._instructions_in_loops(CODE.replace("FADD R1, R1, R2", "LDG.E R1, [R2.64]")) == 3 + 2
    assert report._instructions_in_loops("") == 0


def fake_compile(usages, monkeypatch):
    """`compile_usage` that knows the usage of some tiles, and fails for others."""

    def compile_usage(spec, arch):
        tile = Tile(spec["constexprs"]["B_T"], spec["constexprs"]["B_S"], spec["num_warps"], spec["num_stages"])
        return usages[tile]

    monkeypatch.setattr(report, "compile_usage", compile_usage)


def test_issued_instructions_are_those_of_all_warps_per_element():
    assert report.issued(Usage(255, 0, 100.0, 512), Tile(64, 64, 8, 2)) == 1.0


def test_the_best_tile_issues_the_fewest_instructions_without_spills(monkeypatch):
    few, many, spills, large = Tile(64, 64, 8, 3), Tile(64, 32, 4, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)
    usages = {
        few: Usage(255, 0, 100.0, 512),  # 1 per element
        many: Usage(255, 0, 50.0, 1024),  # 2
        spills: Usage(255, 8, 100.0, 512),  # 0.5, but on the stack
        large: Usage(255, 0, 300.0, 512),  # 0.5, but does not fit
    }
    assert usages.keys() <= set(CANDIDATES)
    fake_compile(usages, monkeypatch)
    assert report.best_tile("composed", 128, 90) == (few, usages[few])
    fake_compile({spills: usages[spills]}, monkeypatch)
    assert report.best_tile("composed", 128, 90) is None


def test_of_equal_tiles_the_one_that_leaves_room_for_more_warps_is_best(monkeypatch):
    crowded, roomy = Tile(64, 64, 8, 3), Tile(64, 64, 8, 2)
    usages = {crowded: Usage(255, 0, 150.0, 512), roomy: Usage(128, 0, 100.0, 515)}
    fake_compile(usages, monkeypatch)
    assert report.best_tile("lse", 128, 90) == (roomy, usages[roomy])
    usages[roomy] = Usage(128, 0, 100.0, 600)  # more than 2 % slower
    assert report.best_tile("lse", 128, 90) == (crowded, usages[crowded])


def test_a_pipeline_is_wanted_where_one_fits(monkeypatch):
    with_pipeline, without = Tile(64, 32, 8, 2), Tile(64, 64, 8, 1)
    fake_compile({with_pipeline: Usage(255, 0, 50.0, 600), without: Usage(255, 0, 50.0, 600)}, monkeypatch)
    assert report.best_tile("maps_0", 64, 80)[0] == with_pipeline


def test_every_kernel_is_in_the_report():
    labels = {spec["label"] for spec in report.all_specs(90)}
    names = {label.split()[0] for label in labels}
    assert names == {*report.LAUNCHES, "join", "decode", "generator"}
    assert len(labels) == len(report.all_specs(90))


@pytest.mark.slow
def test_every_kernel_compiles_without_spills():
    """In a process of its own, as Triton decides on import whether it interprets."""
    command = [sys.executable, "-m", "dcformer.kernels.report", "--arch", "80", "90", "--jobs", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    rows = [line.split("|")[1:-1] for line in run.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(report.all_specs(80)) + len(report.all_specs(90))
    for label, arch, _, _, _, registers, stack, shared, _ in rows:
        assert int(stack) <= (64 if label.endswith("odd ") else 0), label  # odd lengths cost a few registers
        assert 0 < int(registers) <= 255, label
        assert float(shared.strip(" !")) <= report.SHARED_LIMIT[int(arch)], label
