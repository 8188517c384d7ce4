"""Laws, factors and their intervals, on points whose law is known."""

import dataclasses
import math

import numpy as np
import pytest

from dcformer.errors import DCFormerError
from dcformer.scaling import FORMS, Point, compute_factors, fit_law, joint_factor

FACTOR = 1.7
SIZES = np.geomspace(1e6, 1e9, 6)
LAWS = {
    "log": lambda c: 8.0 - 0.1 * np.log(c),
    "power": lambda c: 40.0 * c**-0.06,
    "power+floor": lambda c: 1.3 + 40.0 * c**-0.08,
}


def runs(family, loss, sizes=SIZES, seeds=1, noise=0.0, generator=None, worth=1.0):
    """Runs of a law, with 20 tokens per parameter; `worth` is the factor that a family really has."""
    points = []
    for n in sizes:
        for seed in range(seeds):
            compute = 6 * n * 20 * n
            error = noise * generator.standard_normal() if noise else 0.0
            points.append(
                Point(family, n, 20 * n, float(loss(worth * compute)) + error, flops=compute, seed=seed, source="test")
            )
    return points


@pytest.mark.parametrize("form", FORMS)
def test_known_laws_are_found_exactly(form):
    baseline, variant = runs("b", LAWS[form]), runs("v", LAWS[form], SIZES[1:5] * 1.1, worth=FACTOR)
    for factor in compute_factors(baseline, variant, form, bootstrap=2):
        assert factor.factor == pytest.approx(FACTOR, rel=1e-9)
        assert not factor.extrapolated
    joint = joint_factor(baseline, variant, form)
    if form == "power+floor":
        assert joint is None  # a variant of four sizes
        joint = joint_factor(baseline, runs("v", LAWS[form], SIZES[:5] * 1.1, worth=FACTOR), form)
    assert joint.factor == pytest.approx(FACTOR, rel=1e-9)


@pytest.mark.parametrize("form", ["log", "power"])
def test_intervals_cover_as_often_as_they_say(form):
    """95 % intervals of 500 draws, with five sizes and three seeds; of a 95 % share 90 to 98 % are within chance."""
    generator = np.random.default_rng(0)
    hits = {"single": 0, "joint": 0}
    draws = 500
    for _ in range(draws):
        baseline = runs("b", LAWS[form], SIZES[:5], 3, 0.02, generator)
        variant = runs("v", LAWS[form], SIZES[:5], 3, 0.02, generator, worth=FACTOR)
        low, high = compute_factors(baseline, variant, form)[2].interval
        hits["single"] += low <= FACTOR <= high
        low, high = joint_factor(baseline, variant, form).interval
        hits["joint"] += low <= FACTOR <= high
    for name, count in hits.items():
        assert 0.90 <= count / draws <= 0.98, (name, count / draws)


def test_intervals_with_a_floor_come_from_seeds():
    generator = np.random.default_rng(1)
    form, hits, draws = "power+floor", 0, 20
    for _ in range(draws):
        baseline = runs("b", LAWS[form], SIZES, 3, 0.002, generator)
        variant = runs("v", LAWS[form], SIZES[2:4], 3, 0.002, generator, worth=FACTOR)
        low, high = compute_factors(baseline, variant, form, bootstrap=40)[0].interval
        assert low < high
        hits += low <= FACTOR <= high
    assert hits / draws > 0.7  # three seeds are few to draw from: intervals of the bootstrap are somewhat short
    alone = compute_factors(runs("b", LAWS[form], SIZES[:5]), runs("v", LAWS[form], SIZES[:2]), form)
    assert alone[0].interval is None  # five sizes of one seed: nothing to draw


def test_order_does_not_matter():
    generator = np.random.default_rng(2)
    baseline, variant = (runs(name, LAWS["log"], SIZES[:4], 3, 0.01, generator) for name in "bv")
    expected = compute_factors(baseline, variant)
    shuffled = [
        list(np.array(points, dtype=object)[generator.permutation(len(points))]) for points in (baseline, variant)
    ]
    for one, other in zip(compute_factors(*shuffled), expected, strict=True):
        assert dataclasses.astuple(one)[:4] == pytest.approx(dataclasses.astuple(other)[:4], rel=1e-12)
        assert one.interval == pytest.approx(other.interval, rel=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_exchanged_families_give_the_reciprocal(form):
    generator = np.random.default_rng(3)
    baseline = runs("b", LAWS[form], SIZES, 2, 0.003, generator)
    variant = runs("v", LAWS[form], SIZES, 2, 0.003, generator, worth=FACTOR)
    one, other = joint_factor(baseline, variant, form), joint_factor(variant, baseline, form)
    rel = (
        1e-5 if form == "power+floor" else 1e-9
    )  # an iteration in four numbers, stopped where the sum of squares is flat
    assert one.factor == pytest.approx(1 / other.factor, rel=rel)
    assert one.interval == pytest.approx([1 / end for end in reversed(other.interval)], rel=rel)


def test_own_operations_are_charged():
    """Equal losses at 5 % more operations: 1/1.05 of the compute."""
    baseline = runs("b", LAWS["log"])
    variant = [dataclasses.replace(point, family="v", flops=1.05 * point.flops) for point in baseline]
    for factor in compute_factors(baseline, variant, "log", "flops"):
        assert factor.factor == pytest.approx(1 / 1.05, rel=1e-9)
    for factor in compute_factors(baseline, variant, "log", "6nd"):
        assert factor.factor == pytest.approx(1.0, rel=1e-9)


def test_two_sizes_are_interpolated():
    baseline, variant = runs("b", LAWS["log"], SIZES[:2]), runs("v", LAWS["log"], SIZES[:2] / FACTOR, worth=FACTOR)
    for factor in compute_factors(baseline, variant):
        assert factor.factor == pytest.approx(FACTOR, rel=1e-9)
        assert factor.interval is None and factor.standard is None
    assert joint_factor(baseline, variant) is None


def test_deviation_is_the_larger_of_residuals_and_seeds():
    line = runs("b", LAWS["log"], SIZES[:4])
    apart = [dataclasses.replace(p, loss=p.loss + shift, seed=s) for p in line for s, shift in enumerate((-0.1, 0.1))]
    assert fit_law(apart).deviation == pytest.approx(math.sqrt(2 * 0.1**2))  # seeds: 8 squares of 0.1 over 4
    bent = [dataclasses.replace(p, loss=p.loss + (0.1 if i in (0, 3) else -0.1)) for i, p in enumerate(line)]
    assert fit_law(bent).deviation == pytest.approx(math.sqrt(4 * 0.1**2 / 2))


def test_a_variant_below_the_floor_has_no_factor():
    baseline = runs("b", LAWS["power+floor"])
    variant = runs("v", lambda c: 1.2 + 0 * c, SIZES[:2])
    assert all(
        factor.factor == math.inf and factor.extrapolated
        for factor in compute_factors(baseline, variant, "power+floor")
    )


REFUSED = {
    r"family 'b' has 1 sizes: the form log needs 2": lambda: fit_law(runs("b", LAWS["log"], SIZES[:1])),
    r"has 4 sizes: the form power\+floor needs 5": lambda: fit_law(runs("b", LAWS["log"], SIZES[:4]), "power+floor"),
    "form 'cubic': expected one of log, power": lambda: fit_law(runs("b", LAWS["log"]), "cubic"),
    "loss of family 'b' does not fall with compute": lambda: fit_law(runs("b", lambda c: np.log(c))),
    "all runs of family 'b' have the same compute": lambda: fit_law(
        [dataclasses.replace(p, flops=1e18) for p in runs("b", LAWS["log"])]
    ),
    "together do not fall": lambda: joint_factor(runs("b", lambda c: np.log(c)), runs("v", lambda c: np.log(c))),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_law_says_so(message):
    with pytest.raises(DCFormerError, match=message):
        REFUSED[message]()
