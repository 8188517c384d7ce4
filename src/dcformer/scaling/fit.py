"""Laws of loss and compute, and how much compute a variant is worth.

With L(C) fitted to a baseline's runs, a variant's run (C_v, L_v) is worth C* of the baseline's compute, L(C*) = L_v:
its factor is C*/C_v (arXiv 2405.08553, section 4.1 and figures 3 and 4). Below, x is ln C and y what a form makes
of the loss; one run is one equation, so that seeds weigh as they come.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DCFormerError, require_extra
from .points import Point

FORMS = ("log", "power", "power+floor")
_FLOOR_SIZES = 5  # sizes that a law of three numbers needs at least
_DRAWN_SIZES = 4  # the same of runs drawn anew: of six sizes three draws in four have as many
_JOINT_SIZES = 3  # sizes of each family, for a slope that both share
_RESAMPLED_SIZES = 6  # from here on the bootstrap draws sizes too

Interval = tuple[float, float]


@dataclass(frozen=True)
class Law:
    """L(C) of a family.

    Attributes:
        form: "log" (L = a + b ln C, the paper's), "power" (ln L = a + b ln C) or "power+floor" (L = floor + A C^b).
        intercept, slope: a (for "power+floor" ln A) and b; b < 0.
        floor: L∞, 0 but for "power+floor".
        sizes, runs: how many the law was fitted to.
        deviation: s, the standard deviation of a run about the law, in y (with a floor in L): of residuals or, where it
            is larger, of seeds about their size's mean.
        range: smallest and largest ln C.
        mean, spread: of ln C: x̄ and Σ(x - x̄)², for the errors of inverse prediction.
    """

    form: str
    intercept: float
    slope: float
    floor: float
    sizes: int
    runs: int
    deviation: float
    range: Interval
    mean: float
    spread: float

    @property
    def freedom(self) -> int:
        """Degrees of freedom of a line through the runs."""
        return self.runs - 2

    def loss(self, compute: float) -> float:
        """L(C), in nats."""
        y = self.intercept + self.slope * math.log(compute)
        return y if self.form == "log" else self.floor + math.exp(y)

    def log_compute(self, y: float) -> float:
        """ln C* at which the law has y, see `_transformed`."""
        return (y - self.intercept) / self.slope


@dataclass(frozen=True)
class Factor:
    """What one size of a variant is worth.

    Attributes:
        parameters: N of the size.
        compute: C_v.
        loss: mean over seeds, in nats.
        seeds: how many.
        factor: C*/C_v; infinite below the baseline's floor.
        interval: at the level asked for; None where nothing says how much runs vary.
        standard: the factor at one standard error to either side; None likewise.
        extrapolated: C* lies outside the baseline's compute.
    """

    parameters: float
    compute: float
    loss: float
    seeds: int
    factor: float
    interval: Interval | None
    standard: Interval | None
    extrapolated: bool


@dataclass(frozen=True)
class JointFactor:
    """One factor for a whole variant: both families on laws of the same slope (and floor).

    Attributes:
        factor, interval, standard: as of `Factor`.
        slope: b of both.
        freedom: degrees of freedom.
    """

    factor: float
    interval: Interval | None
    standard: Interval | None
    slope: float
    freedom: int


# --- fits -------------------------------------------------------------------------------------------------------------


def _transformed(form: str, losses: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """y, in which a law is a line: L itself, or ln(L - floor)."""
    return losses if form == "log" else np.log(losses - floor)


def _arrays(points: Sequence[Point], measure: str) -> tuple[np.ndarray, np.ndarray]:
    """ln C and L of runs."""
    return np.log([point.compute(measure) for point in points]), np.array([point.loss for point in points])


def _sizes(points: Sequence[Point]) -> dict[tuple[float, float], list[int]]:
    """Runs by size, (parameters, tokens) -> their places, from the smallest on."""
    found: dict[tuple[float, float], list[int]] = {}
    for i, point in sorted(enumerate(points), key=lambda pair: (pair[1].parameters, pair[1].tokens, pair[1].seed)):
        found.setdefault((point.parameters, point.tokens), []).append(i)
    return found


def _seed_squares(groups: Sequence[list[int]], y: np.ndarray) -> tuple[float, int]:
    """Sum of squares of runs about their size's mean, and its degrees of freedom."""
    return (
        float(sum(((y[group] - y[group].mean()) ** 2).sum() for group in groups)),
        sum(len(group) - 1 for group in groups),
    )


def _deviation(residuals: np.ndarray, freedom: int, groups: Sequence[list[int]], y: np.ndarray) -> float:
    """s: of residuals or of seeds, whichever is larger."""
    squares, seeds = _seed_squares(groups, y)
    found = [float((residuals**2).sum()) / freedom] if freedom > 0 else []
    found += [squares / seeds] if seeds else []
    return math.sqrt(max(found, default=0.0))


def fit_law(points: Sequence[Point], form: str = "log", measure: str = "flops") -> Law:
    """Fits a family's runs by least squares.

    Args:
        points: runs of one family.
        form: one of `FORMS`.
        measure: of compute, see `Point.compute`.

    Returns:
        the law; through two sizes it is exact, and its deviation says nothing but what seeds say.

    Raises:
        DCFormerError: with fewer than two sizes (five for "power+floor"), equal computes, or losses that do not fall
            with compute.
    """
    if form not in FORMS:
        raise DCFormerError(f"form {form!r}: expected one of {', '.join(FORMS)}")
    return _fit(points, form, measure, _FLOOR_SIZES if form == "power+floor" else 2)


def _fit(points: Sequence[Point], form: str, measure: str, least: int) -> Law:
    """`fit_law`, from `least` sizes on."""
    family, sizes = points[0].family, _sizes(points)
    if len(sizes) < least:
        raise DCFormerError(f"family {family!r} has {len(sizes)} sizes: the form {form} needs {least} or more")
    x, losses = _arrays(points, measure)
    if np.ptp(x) < 1e-9:
        raise DCFormerError(f"all runs of family {family!r} have the same compute, {math.exp(x[0]):.4g} ({measure})")
    floor = 0.0
    if form == "power+floor":
        floor, scale, alpha, _ = _solve_floor(x, losses, np.zeros(len(x)))
        slope, intercept = -alpha, scale + alpha * float(x.mean())
        y, free = losses, 3
        residuals = losses - floor - np.exp(intercept + slope * x)
    else:
        y, free = _transformed(form, losses), 2
        slope, intercept = _line(x, y)
        residuals = y - intercept - slope * x
    if slope >= 0:
        raise DCFormerError(
            f"the loss of family {family!r} does not fall with compute (slope {slope:+.4g}): there is no factor"
        )
    return Law(
        form=form, intercept=intercept, slope=slope, floor=floor, sizes=len(sizes), runs=len(points),
        deviation=_deviation(residuals, len(points) - free, list(sizes.values()), y),
        range=(float(x.min()), float(x.max())), mean=float(x.mean()), spread=float(((x - x.mean()) ** 2).sum()),
    )  # fmt: skip


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope and intercept of least squares; x is centred, as it is a large number."""
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    return slope, float(y.mean() - slope * x.mean())


def _solve_floor(x: np.ndarray, losses: np.ndarray, is_variant: np.ndarray) -> tuple[float, float, float, float]:
    """(L∞, ln A, -b, ln k) of L = L∞ + A (k^v C)^b, least squares in L, for runs of a baseline (v = 0) and a variant
    (v = 1). C is relative to its geometric mean here, and so is A. L∞ >= 0; without a variant ln k is 0.
    """
    require_extra("analysis", "the form power+floor", "scipy")
    from scipy.optimize import least_squares

    centred, has_variant = x - x.mean(), bool(is_variant.any())

    def unpacked(p: np.ndarray, has_floor: bool) -> tuple[float, float, float, float]:
        floor, *rest = p if has_floor else (0.0, *p)
        return (float(floor), *map(float, rest), *([] if has_variant else [0.0]))  # type: ignore[return-value]

    def solve(floor: float, has_floor: bool) -> Any:
        def residuals(p: np.ndarray) -> np.ndarray:
            l_inf, scale, alpha, shift = unpacked(p, has_floor)
            return l_inf + np.exp(np.minimum(scale - alpha * (centred + shift * is_variant), 300.0)) - losses

        slope, intercept = _line(centred, np.log(losses - floor))
        start = [floor] * has_floor + [intercept, -slope] + [0.0] * has_variant
        return least_squares(residuals, start, method="lm", xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=500)

    # from several floors: the surface has flat valleys
    best = min((solve(share * losses.min(), True) for share in (0.2, 0.7)), key=lambda found: found.cost)
    if best.x[0] < 0:
        return unpacked(solve(0.0, False).x, False)
    return unpacked(best.x, True)


# --- factors ----------------------------------------------------------------------------------------------------------


def _quantile(level: float, freedom: int) -> float:
    """Of Student's t: how many standard errors an interval of a level goes to either side."""
    require_extra("analysis", "an interval", "scipy")
    from scipy.stats import t

    return float(t.ppf((1 + level) / 2, freedom))


def compute_factors(
    baseline: Sequence[Point],
    variant: Sequence[Point],
    form: str = "log",
    measure: str = "flops",
    level: float = 0.95,
    bootstrap: int = 2000,
    seed: int = 0,
) -> list[Factor]:
    """What each size of a variant is worth in the baseline's compute.

    Args:
        baseline, variant: runs of two families.
        form, measure: as for `fit_law`.
        level: of the intervals. For "log" and "power" they are those of inverse prediction: x0 = (y0 - a)/b has the
            standard error s/|b| · sqrt(1/m + 1/n + (x0 - x̄)²/Σ(x - x̄)²), with m seeds of the variant, n runs of the
            baseline and n - 2 degrees of freedom. For "power+floor" runs are drawn anew.
        bootstrap: how often.
        seed: of the draws.

    Returns:
        one `Factor` per size, from the smallest on. Two sizes of a baseline are interpolated, without an interval.

    Raises:
        DCFormerError: as `fit_law`.
    """
    law = fit_law(baseline, form, measure)
    x, losses = _arrays(variant, measure)
    found = []
    for (parameters, _), places in _sizes(variant).items():
        here, mean_loss = float(x[places].mean()), float(losses[places].mean())
        target = _target(law, losses[places])
        log_factor = math.inf if target is None else law.log_compute(target) - here
        interval = standard = None
        if law.sizes > 2 and target is not None:
            if form == "power+floor":
                interval, standard = _resampled(baseline, variant, places, measure, level, bootstrap, seed)
            elif law.freedom > 0:
                error = _inverse_error(law, target, len(places), _joint_deviation(law, variant, form))
                interval = _around(log_factor, _quantile(level, law.freedom) * error)
                standard = _around(log_factor, error)
        is_outside = target is None or not law.range[0] <= law.log_compute(target) <= law.range[1]
        found.append(
            Factor(parameters, math.exp(here), mean_loss, len(places), _exp(log_factor), interval, standard, is_outside)
        )
    return found


def _target(law: Law, losses: np.ndarray) -> float | None:
    """Mean y of runs; None where the law never gets so low."""
    if law.form == "power+floor":  # the mean of losses: single ones may be below the floor
        mean = float(losses.mean())
        return math.log(mean - law.floor) if mean > law.floor else None
    return float(_transformed(law.form, losses).mean())


def _joint_deviation(law: Law, variant: Sequence[Point], form: str) -> float:
    """s: the law's, or that of the variant's seeds where it is larger."""
    y = _transformed(form, np.array([point.loss for point in variant]))
    squares, freedom = _seed_squares(list(_sizes(variant).values()), y)
    return max(law.deviation, math.sqrt(squares / freedom) if freedom else 0.0)


def _inverse_error(law: Law, target: float, seeds: int, deviation: float) -> float:
    """Standard error of ln C*."""
    away = (law.log_compute(target) - law.mean) ** 2 / law.spread
    return deviation / abs(law.slope) * math.sqrt(1 / seeds + 1 / law.runs + away)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _around(center: float, half: float) -> Interval:
    return _exp(center - half), _exp(center + half)


def _resampled(
    baseline: Sequence[Point], variant: Sequence[Point], places: list[int], measure: str, level: float, draws: int,
    seed: int,
) -> tuple[Interval | None, Interval | None]:  # fmt: skip
    """Intervals of a factor under "power+floor", from runs drawn anew: seeds within sizes, and of six or more sizes
    which of them; None where there is nothing to draw."""
    groups = list(_sizes(baseline).values())
    if len(groups) < _RESAMPLED_SIZES and all(len(group) == 1 for group in groups):
        return None, None
    generator = np.random.default_rng(seed)
    x, losses = _arrays(variant, measure)
    logs = []
    for _ in range(draws):
        chosen = groups
        if len(groups) >= _RESAMPLED_SIZES:
            chosen = [groups[i] for i in generator.integers(len(groups), size=len(groups))]
        sample = [baseline[i] for group in chosen for i in generator.choice(group, size=len(group))]
        own = generator.choice(places, size=len(places))
        try:
            law = _fit(sample, "power+floor", measure, _DRAWN_SIZES)
        except DCFormerError:  # too few sizes, or none that fall
            continue
        target = _target(law, losses[own])
        logs.append(math.inf if target is None else law.log_compute(target) - float(x[own].mean()))
    if len(logs) < draws / 2:
        return None, None

    def between(share: float) -> Interval:
        low, high = np.quantile(logs, [(1 - share) / 2, (1 + share) / 2], method="nearest")
        return _exp(float(low)), _exp(float(high))

    return between(level), between(math.erf(1 / math.sqrt(2)))


def joint_factor(
    baseline: Sequence[Point],
    variant: Sequence[Point],
    form: str = "log",
    measure: str = "flops",
    level: float = 0.95,
) -> JointFactor | None:
    """One factor for all sizes: laws of both families with a common slope, L_v(C) = L_b(factor · C).

    This is the one to quote. Its interval is of the delta method. Baseline and variant exchanged give the reciprocal.

    Args:
        baseline, variant, form, measure, level: as for `compute_factors`.

    Returns:
        the factor; None where one of the two has fewer than three sizes.

    Raises:
        DCFormerError: when losses do not fall with compute.
    """
    least = max(_JOINT_SIZES, _FLOOR_SIZES if form == "power+floor" else 0)
    if min(len(_sizes(baseline)), len(_sizes(variant))) < least:
        return None
    points = [*baseline, *variant]
    x, losses = _arrays(points, measure)
    is_variant = np.array([0.0] * len(baseline) + [1.0] * len(variant))
    centred = x - x.mean()
    if form == "power+floor":
        floor, log_scale, alpha, log_factor = _solve_floor(x, losses, is_variant)
        slope = -alpha
        falling = np.exp(log_scale - alpha * (centred + log_factor * is_variant))
        residuals = losses - floor - falling
        # derivatives by floor, ln A, -b and ln k
        shifted = centred + log_factor * is_variant
        columns = [np.ones_like(x), falling, -shifted * falling, -alpha * is_variant * falling]
        if floor <= 0:  # at its bound it is not a free number
            columns = columns[1:]
        y = losses
    else:
        y = _transformed(form, losses)
        columns = [np.ones_like(x), centred, is_variant]
        found, *_ = np.linalg.lstsq(np.stack(columns, 1), y, rcond=None)
        slope, log_factor = float(found[1]), float(found[2] / found[1])
        residuals = y - np.stack(columns, 1) @ found
    if slope >= 0:
        raise DCFormerError(
            f"the losses of {baseline[0].family!r} and {variant[0].family!r} together do not fall with compute "
            f"(slope {slope:+.4g}): there is no factor"
        )
    design = np.stack(columns, 1)
    freedom = len(points) - design.shape[1]
    groups = list(_sizes(baseline).values())
    groups += [[i + len(baseline) for i in group] for group in _sizes(variant).values()]
    deviation = _deviation(residuals, freedom, groups, y)
    interval = standard = None
    if freedom > 0:
        covariance = np.linalg.pinv(design.T @ design) * deviation**2
        # ln k is the last number of "power+floor", offset / slope of the lines
        gradient = np.zeros(design.shape[1])
        if form == "power+floor":
            gradient[-1] = 1.0
        else:
            gradient[1:] = -log_factor / slope, 1 / slope
        error = math.sqrt(float(gradient @ covariance @ gradient))
        interval = _around(float(log_factor), _quantile(level, freedom) * error)
        standard = _around(float(log_factor), error)
    return JointFactor(_exp(float(log_factor)), interval, standard, slope, freedom)


__all__ = ["FORMS", "Factor", "JointFactor", "Law", "compute_factors", "fit_law", "joint_factor"]
