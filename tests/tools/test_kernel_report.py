"""The report on compiled kernels: it reads machine code rightly; the kernels are within their counts."""

import importlib
import inspect
import json
import random
import re
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY, run_source
from packaging.version import Version

pytest.importorskip("triton", reason="Triton is not installed: pip install 'dcformer[kernels]'")

import triton

from dcformer.kernels.launch import LAUNCHES
from dcformer.kernels.layout import Layout, Part
from dcformer.kernels.overflow import NOTHING, Beyond
from dcformer.kernels.tuning import Tile

# Since 3.9 Triton takes a few registers more: `output` of decoding spills some, and of attention what has odd lengths;
# `compose` takes 1.021 instructions with scores in two parts, and `weights` 1.222 with 40 heads.
IS_LATER = Version(triton.__version__) >= Version("3.9")


@pytest.fixture(scope="module")
def report():
    """tools/kernel_report.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "tools"))
        yield importlib.import_module("kernel_report")


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


def test_instructions_of_innermost_loops_that_read_memory(report):
    assert report._loops(CODE) == (3,)  # LDGSTS, HMMA, BRA
    assert report._loops(CODE.replace("LDGSTS", "LDS")) == (6,)  # of those that read memory, the outer one
    assert report._loops(CODE.replace("FADD R1, R1, R2", "LDG.E R1, [R2.64]")) == (3, 2)
    assert report._loops(CODE, r"\b\w*MMA\b") == (3,) and report._loops(CODE.replace("HMMA", "FFMA"), "HMMA") == ()
    assert report._loops("") == ()
    code = CODE.replace("FADD R1, R1, R2", "STL [R1], R2")
    assert report._loops(code, r"\b(LDL|STL)\b") == () == report._loops(CODE, r"\b(LDL|STL)\b")  # behind the loop
    assert report._loops(CODE.replace("HMMA", "LDL"), r"\b(LDL|STL)\b") == (3,)


def test_instructions_are_those_of_all_warps_per_query_key_and_head(report):
    def issued(name, tile, loops, heads=32, **constants):
        spec = {"name": name, "tile": tile, "heads": heads, "constexprs": constants}
        return report.issued(spec, report.Usage(255, 0, 100.0, loops))

    assert issued("lse", Tile(64, 2, 4, 3), (1024,), M=32) == 1.0
    spec = {"name": "lse", "tile": Tile(64, 2, 4, 3), "heads": 32, "constexprs": {"M": 32}}
    of_loops = report.Usage(255, 0, 100.0, (2048, 1024), (2048, 1024))  # with a mask and without
    assert report.issued(spec, of_loops) == 1.0 and report.issued(spec, of_loops, is_masked=True) == 2.0
    assert issued("back_1", Tile(64, 1, 4, 3), (1000,), heads=20, M=20) == 1000 * 4 / (64 * 20)  # those that exist
    assert issued("scores", Tile(128, 64, 8, 3), (1024,), D=80, B_D=128) == 1.0
    spec = {"name": "grad_weights", "tile": Tile(128, 64, 8, 3), "constexprs": {"D": 80, "B_D": 128}}
    assert report.issued(spec, report.Usage(255, 0, 100.0, (1024,), (1024,))) == 1.0
    assert issued("values", Tile(64, 64, 8, 3), (900, 512, 900), D=80, B_D=128) == 1.0  # where all is visible
    spec = {"name": "grad_key", "tile": Tile(64, 64, 8, 3), "heads": 32, "constexprs": {"D": 80, "B_D": 128}}
    assert report.issued(spec, report.Usage(255, 0, 100.0, (44, 900, 512), (900, 512))) == 1.0  # not that over norms
    assert issued("project", None, (10,)) is None


def test_kernels_are_those_that_are_launched(report):
    specs = report.attention_specs(32, 128, 90)
    others = {"expand", "join", "project", "states", "states_backward", "scale", *report.SCALED}
    assert specs.keys() == set(LAUNCHES) | others
    assert report.attention_specs(40, 128, 90).keys() == set(LAUNCHES) | others  # two blocks of heads
    compose, weights, back = (specs[name] for name in ("compose", "weights", "back_1"))
    assert compose["kernel"] is weights["kernel"]
    assert (compose["constexprs"]["KEEP"], weights["constexprs"]["KEEP"]) == (False, True)
    assert weights["signature"]["p_weights"] == "*fp16" and weights["signature"]["p_out"] == "*fp16"
    assert back["signature"]["p_weights"] == back["signature"]["p_grads"] == "*fp16"
    assert back["signature"]["stride_s"] == "i64" and back["constexprs"]["M"] == 32
    number = back["kernel"].arg_names.index("T")
    odd = report.attention_specs(32, 128, 90, is_odd=True)["back_1"]
    assert (number,) in back["attrs"] and (number,) not in odd["attrs"]
    full = report.attention_specs(32, 128, 90, torch.float32)["back_1"]
    assert full["signature"]["p_weights"] == full["signature"]["p_grads"] == "*fp32"
    large = report.attention_specs(32, 128, 90, beyond=Beyond.PRECISION)
    dtypes = {name: large["weights"]["signature"][name] for name in ("p_scores", "p_m0", "p_m1", "p_weights", "p_out")}
    assert dtypes == dict.fromkeys(dtypes, "*fp16") | {"p_scores": "*fp32", "p_m0": "*fp32"}
    assert large["weights"]["constexprs"]["SPLIT"] and not weights["constexprs"]["SPLIT"]


def test_every_kernel_of_the_package_is_in_the_report(report):
    specs = {shape: report.all_specs(90, (shape,)) for shape in report.SHAPES}
    for shape, of_shape in specs.items():
        names = {spec["name"].split()[0] for spec in of_shape}
        others = {"expand", "join", "project", "states", "states_backward", "scale", *report.SCALED}
        assert names == set(LAUNCHES) | others | {"decode", "generator", "prepare"}
        assert {spec["shape"] for spec in of_shape} == {shape}
        for spec in of_shape:
            assert list(spec["signature"]) == list(spec["kernel"].arg_names)
            assert {name for name, kind in spec["signature"].items() if kind == "constexpr"} == set(spec["constexprs"])
    assert len(report.all_specs(90)) == sum(map(len, specs.values()))


def test_a_launch_is_specialised_as_triton_does_it(report):
    (launch,) = report.prepare_launches(32, 128, 1, True)
    spec = report.launch_spec(launch)
    aligned = {launch.kernel.arg_names[i] for (i,) in spec["attrs"]}
    assert spec["constexprs"]["B"] == 1 and spec["signature"]["row"] == "i32"  # 0, which varies
    assert spec["signature"]["p_place"] == "*i64" and spec["signature"]["eps"] == "fp32"
    assert {"H", "p_q", "p_v", "stride_xb"} <= aligned and not {"row", "stride_rn_0", "eps"} & aligned
    maps, _, parts = report.decode_launches(1, 32, 128, 1)
    static, *_ = report.decode_launches(1, 32, 128, 1, is_static=True)
    without, with_static = (report.launch_spec(x) for x in (maps, static))
    assert without["signature"]["p_static"] == "constexpr" and without["constexprs"]["p_static"] is None
    assert with_static["signature"]["p_static"] == "*bf16" and without["signature"]["p_visible"] == "*u8"
    assert without["signature"]["stride_wc"] == "i64"  # as the kernel says
    assert report.launch_spec(parts)["num_stages"]


@pytest.mark.slow
def test_kernels_of_scores_in_two_parts_are_within_their_instructions():
    """Without local memory, but in `back_*`."""
    only = "^(lse|compose|weights|back_0)$"
    run = run_source(
        "tools/kernel_report.py", "--json", "--arch", "90", "--shapes", "6.9b", "--beyond", "precision", "--only", only
    )
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    found = {(row["kernel"], row["odd"]): row["instructions"] for row in json.loads(run.stdout)}
    for is_odd in (False, True):
        for name, most in {"lse": 0.75, "compose": 1.0, "weights": 1.0, "back_0": 1.4}.items():
            assert 0 < found[name, is_odd] <= (1.05 if IS_LATER else 1) * most, name


@pytest.mark.slow
def test_float32_maps_have_the_registers_that_there_are(report):
    """Above 32 heads ptxas would choose 32, and take twice the instructions."""
    for dtype, found in ((torch.float32, NOTHING), (torch.bfloat16, Beyond.SCORES)):
        spec = report.attention_specs(40, 128, 90, dtype, beyond=found)["lse"]
        assert report.compile_usage(spec, 90).registers > 128


@pytest.mark.slow
def test_kernels_are_within_their_instructions():
    """In a process of its own, as Triton decides on import whether it interprets."""
    run = run_source("tools/kernel_report.py", "--json", "--arch", "90", "--shapes", "6.9b")
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    rows = json.loads(run.stdout)
    found = {(row["kernel"], row["odd"]): row for row in rows}
    for is_odd in (False, True):
        for name, most in {"lse": 0.55, "compose": 0.80, "back_1": 1.80, "back_0": 1.55}.items():
            assert 0 < found[name, is_odd]["instructions"] <= most, name
    for row in rows:
        assert row["arch"] == 90 and 0 < row["registers"] <= 255 and row["shared"] <= 227, row
        # in their loop for rare numbers, or the status would not be 0
        spills = row["kernel"].startswith("back_") or row["kernel"] in ("values", "grad_query")
        assert row["stack"] <= (32 if IS_LATER else 0) or spills, row


@pytest.mark.slow
@pytest.mark.parametrize("arch, most", [(100, 0.88), (120, 0.72)])
def test_kernels_fit_gpus_that_came_later(arch, most, report):
    """Many heads and ranks, with scores in two parts: on sm_100 they once asked for more memory of its tensor cores
    than there is. Composition does without it: its small products took up to twice the instructions for it.
    """
    layout = Layout(pre=report.FULL.pre | Part.STATIC, post=report.FULL.post | Part.STATIC, rank=4)
    found = report.attention_specs(40, 256, arch, layout=layout, beyond=Beyond.PRECISION)
    for name in ("scores", "lse", "compose", "values", "back_0", "grad_key"):
        metadata = report.compile_spec(found[name], arch).metadata
        assert metadata.shared <= report.SHARED_LIMIT[arch] * 1024, name
        columns = metadata.tmem_size or 0  # of 512
        assert columns <= (512 if found[name]["kernel"] in report._PRODUCTS else 0), name
    compose = report.attention_specs(32, 128, arch)["compose"]
    usage = report.compile_usage(compose, arch)
    assert usage.stack == 0 and 0 < report.issued(compose, usage) <= most


@pytest.mark.slow
def test_two_blocks_of_heads_are_composed_without_local_memory():
    """But for a few numbers outside of loops, with some versions of Triton."""
    options = "--arch", "90", "--shapes", "13b", "--only", "^(compose|weights)$"
    run = run_source("tools/kernel_report.py", "--json", *options)
    rows = json.loads(run.stdout)
    assert [row["kernel"] for row in rows] == ["compose", "weights"] * 2, run.stderr[-2000:]
    for row in rows:
        assert row["stack"] <= 32 and 0 < row["instructions"] < (1.25 if IS_LATER else 1.15), row


def test_lengths_take_few_compilations(report, monkeypatch):
    """A kernel is compiled for lengths that are multiples of 16 and for others, not for each number that follows from
    them. Some have several uses, or more constants."""
    found, lengths = {}, random.Random(0)
    for _ in range(40):
        monkeypatch.setattr(report, "_LENGTH", lengths.randint(17, 4096))
        for spec in report.attention_specs(32, 128, 90).values():
            code = [sorted(spec[what].items()) for what in ("signature", "constexprs", "attrs")]
            found.setdefault(spec["kernel"].__name__, set()).add(repr((code, spec["num_stages"])))
    assert {name: len(kinds) for name, kinds in found.items() if len(kinds) > 2} == {
        "states_kernel": 4, "scores_kernel": 4, "compose_kernel": 4, "values_kernel": 4, "keys_kernel": 4,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dim", [128, 192, 256])
def test_products_do_not_wait_for_each_other(report, dim, tmp_path):
    """The assembler says so where it lets products of matrices wait, which no count of instructions shows."""
    specs = report.attention_specs(16, dim, 90)
    for name in ("scores", "values", "keys", "grad_query", "grad_key"):
        (tmp_path / "kernel.ptx").write_text(report.compile_spec(specs[name], 90).asm["ptx"])
        tool = "ptxas-blackwell" if IS_LATER else "ptxas"  # the former for all GPUs
        ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
        command = [ptxas, "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        said = run.stdout + run.stderr
        assert "registers" in said and "serialized" not in said, (name, said)


@pytest.mark.slow
def test_generators_spill_no_registers():
    options = "--arch", "80", "90", "--shapes", "6.9b", "13b", "--only", "N=4096 (packed|gradients)"
    run = run_source("tools/kernel_report.py", "--json", *options)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    rows = json.loads(run.stdout)
    assert len(rows) == 8
    for row in rows:
        assert row["stack"] == 0 and row["shared"] <= {80: 163, 90: 227}[row["arch"]], row


@pytest.mark.slow
@pytest.mark.parametrize("is_ring, queries", [(False, 1), (False, 8), (True, 1)], ids=["1", "8", "ring"])
@pytest.mark.parametrize("is_static", [False, True], ids=["", "static"])
@pytest.mark.parametrize("number", [0, 1], ids=["scores", "output"])
def test_barriers_of_decoding_are_in_the_machine_code(number, is_static, is_ring, queries, report):
    """Where maps change hands through memory there is a barrier of the whole block in PTX, and no read past the caches.

    `bar.sync` makes what a thread wrote before it visible to all threads of the block behind it: to plain loads, and to
    `cp.async`, which reads for the thread that issues it, as that does. `ld.global.nc` might not see it, nor might
    `cp.async.bulk`, which has a proxy of its own.
    """
    launch = report.decode_launches(1, 32, 128, queries, is_static=is_static, is_ring=is_ring)[number]
    spec = report.launch_spec(launch)
    ptx = report.compile_spec(spec, 90).asm["ptx"]
    lines, start = inspect.getsourcelines(spec["kernel"].fn)
    of_static = [i for i, line in enumerate(lines) if "if STATIC & FLAGS" in line]
    expected = {
        start + i
        for i, line in enumerate(lines)
        if "tl.debug_barrier()" in line and (is_static or not any(i - 4 < first < i for first in of_static))
    }
    file = re.search(r'^\s*\.file\s+(\d+)\s+".*decode\.py"', ptx, re.MULTILINE)[1]
    found, place = set(), (None, 0)
    for line in ptx.splitlines():
        if location := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            place = (location[1], int(location[2]))
        elif re.match(r"\s*bar\.sync\s+0;", line) and place[0] == file:
            found.add(place[1])
    assert len(expected) == (4 if is_static and number else 2) and expected <= found
    reads = set(re.findall(r"\b(?:ld|cp)[\w.:]*\.global[\w.:]*", ptx))
    kinds = {re.sub(r"(\.v\d)?\.b\d+$", "", read) for read in reads}
    assert kinds <= {"ld.global", "cp.async.ca.shared.global", "cp.async.cg.shared.global"}
    assert number == 0 or "cp.async.ca.shared.global" in reads  # maps are among what it reads


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--only=[", "not a regular expression"),
        ("--only=nothing", "no kernel has such a name"),
        ("--jobs=0", "at least 1"),
    ],
)
def test_options_that_fit_nothing_are_refused(option, message, report, capsys):
    with pytest.raises(SystemExit):
        report.main([option, "--arch", "90", "--shapes", "405m"])
    assert message in capsys.readouterr().err
