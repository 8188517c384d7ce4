"""The roofline's arithmetic, against cases that a hand can compute."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'dcformer[kernels]'")

from dcformer.kernels import roofline
from dcformer.kernels.roofline import Shape, Training, Work
from dcformer.kernels.tuning import KERNELS, Tile

# a second for 1 GFLOP, 2 G instructions, 4 G exponentials, 8 GB from L2, 16 GB of memory
GPU = roofline.Device("toy", tensor=1e9, issue=2e9, exp=4e9, l2=8e9, hbm=16e9, memory=32e9)
SMALL = Shape("small", heads=2, dim=16, width=32, inner=64, layers=3)


def test_the_slowest_resource_is_the_bound():
    work = Work("x", flops=1e9, instructions=1e9, exps=1e9, l2=1e9, hbm=1e9)
    assert work.times(GPU) == {"tensor": 1.0, "issue": 0.5, "exp": 0.25, "L2": 0.125, "HBM": 0.0625}
    assert work.bound(GPU) == ("tensor", 1.0)
    assert Work("y", hbm=32e9).bound(GPU) == ("HBM", 2.0)
    assert roofline.seconds([work, Work("y", hbm=32e9)], GPU) == 3.0


@pytest.mark.parametrize("length, window", [(1, None), (5, None), (5, 2), (5, 9), (40, 7)])
def test_pairs_are_those_of_the_mask(length, window):
    reach = window or length
    assert roofline.pairs(length, window) == sum(t - reach < s <= t for t in range(length) for s in range(length))


@pytest.mark.parametrize("window", [None, 1, 7, 16, 30])
@pytest.mark.parametrize("tile", [Tile(16, 32, 4, 2), Tile(32, 16, 4, 2)])
def test_visited_tiles_are_those_with_a_visible_pair(window, tile):
    length = 70
    chunks = roofline.plan_chunks(SMALL, length, window, 4, GPU)
    reach, count = window or length, 0
    for chunk in chunks:
        for t_0 in range(chunk.t_0, chunk.t_0 + chunk.n_t, tile.b_t):
            for s_0 in range(chunk.s_0, chunk.s_0 + chunk.n_s, tile.b_s):
                rows = range(t_0, min(t_0 + tile.b_t, chunk.t_0 + chunk.n_t))
                count += any(t - reach < s <= t for t in rows for s in range(s_0, s_0 + tile.b_s))
    assert roofline.visited(chunks, tile, window) == count


def test_what_a_goal_needs():
    layer = Training(linear=8.0, flash=1.0, generator=0.5, attention=1.0)
    assert layer.throughput() == pytest.approx(9 / 9.5)
    assert layer.needed(0.9) == pytest.approx(1 / 1.5)
    assert layer.throughput(layer.needed(0.9)) == pytest.approx(0.9)
    assert layer.needed(9 / 8.5) == float("inf")
    assert roofline.verdict(0.5) == "50% of bounds"
    assert roofline.verdict(2.0) == "200% of bounds: out of reach of this design"


def test_every_kernel_is_counted():
    assert set(roofline.ISSUED) == set(roofline._KINDS) == set(KERNELS)
    forward, backward = roofline.attention_work(SMALL, 64, None, GPU, roofline.stored)
    assert [w.name for w in forward[:-1]] == list(roofline.FORWARD)
    assert [w.name for w in backward[:-2]] == list(roofline.BACKWARD)
    assert {*roofline.FORWARD, *roofline.BACKWARD} == set(KERNELS)


def test_windows_and_fewer_keys_are_faster():
    gpu = roofline.device()
    shape = roofline.SHAPES["6.9B"]
    times = [sum(roofline.seconds(w, gpu) for w in roofline.attention_work(shape, 2048, window, gpu, roofline.stored))
             for window in (128, 256, None)]  # fmt: skip
    assert times == sorted(times)
    assert roofline.decoding_throughput(shape, 1152, 0.75, gpu) > roofline.decoding_throughput(shape, 1152, 0.5, gpu)


def test_it_prints_that_it_is_an_estimate(capsys):
    assert roofline.main(["--sizes", "405M", "--length", "256"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("ESTIMATE, not a measurement")
    assert "| back_1 |" in printed and "out of reach" in printed and "Attention alone" in printed
    with pytest.raises(SystemExit):
        roofline.main(["--arch", "80"])
    assert "--compile" in capsys.readouterr().err
