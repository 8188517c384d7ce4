"""Laws of loss and compute, and how much compute a variant is worth.

With L(C) fitted to a baseline's runs, a variant's run (C_v, L_v) is worth C* of the baseline's compute, L(C*) = L_v:
its factor is C*/C_v (arXiv 2405.08553, section 4.1 and figures 3 and 4). Below, x is ln C and y what a form makes
of the loss.

The unit is the size. A law is fitted to the means of sizes, each with the same weight, and its errors come from how
far these lie from it. What a law misses at a size, all seeds of that size share: more seeds make the means better, but
say nothing of the law, so they add no degrees of freedom. All sizes share one scatter: where noise falls with size, the
intervals of the smallest are too short.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real

import numpy as np

from ..errors import DCFormerError, require_extra
from .points import COLUMNS, MEASURES, Point

FORMS = ("log", "power", "power+floor")
_FLOOR_SIZES = 5  # sizes that a law of three numbers needs at least
_JOINT_SIZES = 3  # sizes of each family, for a slope that both share
_FARTHEST = 100.0  # of an interval's end from a factor, in ln k
_FLAT = 1e-9  # a fall over all sizes, as a share of the loss, that rounding may make
_ROUNDING = 1e-9  # of ln C: a run at the end of the range is within it

Interval = tuple[float, float]


@dataclass(frozen=True)
class Law:
    """L(C) of a family.

    Attributes:
        form: "log" (L = a + b ln C, the paper's), "power" (ln L = a + b ln C) or "power+floor" (L = floor + A C^b).
        intercept, slope: a (for "power+floor" ln A) and b; b < 0.
        floor: L∞, 0 but for "power+floor".
        sizes, runs: how many the law was fitted to.
        deviation: s, the standard deviation of a size's mean about the law, in y (with a floor in L); 0 where there are
            no more sizes than numbers.
        range: smallest and largest ln C.
    """

    form: str
    intercept: float
    slope: float
    floor: float
    sizes: int
    runs: int
    deviation: float
    range: Interval

    @property
    def freedom(self) -> int:
        """Degrees of freedom: sizes less the law's numbers."""
        return self.sizes - (3 if self.form == "power+floor" else 2)

    def loss(self, compute: float) -> float:
        """L(C), in nats."""
        y = self.intercept + self.slope * math.log(compute)
        return y if self.form == "log" else self.floor + math.exp(y)

    def log_compute(self, loss: float) -> float:
        """ln C* at which the law has a loss; infinite where it never gets so low."""
        if loss <= self.floor and self.form != "log":
            return math.inf
        return ((loss if self.form == "log" else math.log(loss - self.floor)) - self.intercept) / self.slope


@dataclass(frozen=True)
class Factor:
    """What one size of a variant is worth.

    Attributes:
        parameters: N of the size.
        compute: C_v.
        loss: mean over seeds, in nats.
        seeds: how many.
        factor: C*/C_v; infinite below the baseline's floor.
        interval: at the level asked for; None where nothing says how far the law is off. An end may be infinite.
        standard: the factor at one standard error to either side; None likewise.
        extrapolated: C* lies outside the baseline's compute.
        interpolated: the factor by straight lines of loss against ln C from one size of the baseline to the next,
            without a law; None where the loss is outside theirs, or they do not fall.
    """

    parameters: float
    compute: float
    loss: float
    seeds: int
    factor: float
    interval: Interval | None
    standard: Interval | None
    extrapolated: bool
    interpolated: float | None


@dataclass(frozen=True)
class JointFactor:
    """One factor for a whole variant: both families on laws of the same slope (and floor).

    Attributes:
        factor, interval, standard: as of `Factor`.
        slope: b of both.
        freedom: degrees of freedom.
        slopes: b of the baseline and of the variant alone; None under "power+floor".
        p: of these two being one slope, by a t-test; None likewise. Where it is small, the factor depends on size, and
            one for all sizes says little.
    """

    factor: float
    interval: Interval | None
    standard: Interval | None
    slope: float
    freedom: int
    slopes: tuple[float, float] | None
    p: float | None


# --- sizes and their noise --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    """Means of a family's sizes, from the smallest on.

    Attributes:
        parameters, x, y, losses, seeds: of each; `losses` are mean losses.
        squares, spare: of seeds about their size's mean, the sum of squares in y and its degrees of freedom.
    """

    parameters: np.ndarray
    x: np.ndarray
    y: np.ndarray
    losses: np.ndarray
    seeds: np.ndarray
    squares: float
    spare: int

    def __len__(self) -> int:
        return len(self.x)


def _sizes(points: Sequence[Point], form: str, measure: str) -> _Sizes:
    if form not in FORMS:
        raise DCFormerError(f"form {form!r}: expected one of {', '.join(FORMS)}")
    if measure not in MEASURES:
        raise DCFormerError(f"measure {measure!r}: expected one of {', '.join(MEASURES)}")
    if not points:
        raise DCFormerError("no runs: expected those of a family")
    for point in points:
        numbers = {"parameters": point.parameters, "tokens": point.tokens, "loss": point.loss}
        for name, value in (numbers | {f"compute ({measure})": point.compute(measure)}).items():
            if not isinstance(value, Real) or not 0 < value < math.inf:
                raise DCFormerError(f"{_named([point])}: {name} is {value}: expected a finite number above 0")
    groups: dict[tuple[float, float], list[Point]] = {}
    for point in sorted(points, key=lambda p: (p.parameters, p.tokens, p.seed)):
        groups.setdefault((point.parameters, point.tokens), []).append(point)
    losses = [np.array([point.loss for point in group]) for group in groups.values()]
    y = [np.log(of_size) for of_size in losses] if form == "power" else losses  # averaged over seeds, and fitted
    return _Sizes(
        parameters=np.array([parameters for parameters, _ in groups]),
        x=np.array([np.log([point.compute(measure) for point in group]).mean() for group in groups.values()]),
        y=np.array([values.mean() for values in y]),
        losses=np.array([of_size.mean() for of_size in losses]),
        seeds=np.array([len(group) for group in groups.values()]),
        squares=float(sum(((values - values.mean()) ** 2).sum() for values in y)),
        spare=len(points) - len(groups),
    )


@dataclass(frozen=True)
class _Noise:
    """By how much the mean of a size is off.

    Attributes:
        scatter: s², of the means that a law was fitted to, about it; `freedom`: its degrees of freedom.
        inverse: the mean of 1/seeds of these sizes.
        single: σ², of seeds about their size's mean; `spare`: its degrees of freedom.
    """

    scatter: float
    freedom: int
    inverse: float
    single: float
    spare: int

    @classmethod
    def of(cls, scatter: float, freedom: int, fitted: np.ndarray, *families: _Sizes) -> "_Noise":
        """Of a fit to sizes with `fitted` seeds; what seeds vary by is pooled over families."""
        spare = sum(family.spare for family in families)
        single = sum(family.squares for family in families) / spare if spare else 0.0
        return cls(scatter, freedom, float((1 / fitted).mean()), single, spare)

    def variances(self, seeds: np.ndarray) -> np.ndarray:
        """Of means of so many seeds: s², and what fewer or more seeds than those of the fit add or take."""
        return np.maximum(
            self.scatter + self.single * (1 / seeds - self.inverse), np.minimum(self.scatter, self.single / seeds)
        )

    def error(self, shares: np.ndarray, seeds: np.ndarray, level: float) -> tuple[float, float]:
        """Standard error of Σ shares · means, and how many of it an interval of a level goes to either side.

        What seeds add to s² is known with their own degrees of freedom: quantiles of both parts are added in
        squares, as s² may be small by chance.
        """
        variance = float(shares**2 @ self.variances(seeds))
        scatter = self.scatter * float(shares @ shares)
        rest, quantile = variance - scatter, _quantile(level, self.freedom)
        if self.spare and rest > 1e-12 * scatter:
            squares = quantile**2 * scatter + min(quantile, _quantile(level, self.spare)) ** 2 * rest
            quantile = math.sqrt(squares / variance)
        return math.sqrt(variance), quantile


def _check_level(level: float) -> None:
    if not isinstance(level, Real) or not 0 < level < 1:
        raise DCFormerError(f"level {level!r}: expected a share between 0 and 1, such as 0.95")


def _quantile(level: float, freedom: float) -> float:
    """Of Student's t: how many standard errors an interval of a level goes to either side."""
    require_extra("analysis", "an interval", "scipy")
    from scipy.stats import t

    return float(t.ppf((1 + level) / 2, freedom))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _around(center: float, half: float) -> Interval:
    return _exp(center - half), _exp(center + half)


# --- straight lines ---------------------------------------------------------------------------------------------------


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope and intercept of least squares; x is centered, as it is a large number."""
    centered = x - x.mean()
    slope = float(centered @ y / (centered @ centered))
    return slope, float(y.mean() - slope * x.mean())


def _falling_line(families: str, measure: str, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """As `_line`, of losses that fall with compute; others are refused."""
    if np.ptp(x) < 1e-9:
        raise DCFormerError(
            f"{COLUMNS[measure]}: all runs of {families} have the same compute, {math.exp(x[0]):.4g} ({measure})"
        )
    slope, intercept = _line(x, y)
    if slope * np.ptp(x) > -_FLAT * np.abs(y).max():
        raise DCFormerError(
            f"column loss: that of {families} does not fall with compute (slope {slope:+.4g}): there is no factor; "
            "compare runs of sizes that are far enough apart"
        )
    return slope, intercept


def _named(points: Sequence[Point]) -> str:
    first = f" (the first: {points[0].source})" if points[0].source else ""
    return f"family {points[0].family!r}{first}"


def fit_law(points: Sequence[Point], form: str = "log", measure: str = "flops") -> Law:
    """Fits the means of a family's sizes by least squares.

    Args:
        points: runs of one family.
        form: one of `FORMS`.
        measure: of compute, see `Point.compute`.

    Returns:
        the law; through two sizes it is exact.

    Raises:
        DCFormerError: with fewer than two sizes (five for "power+floor"), numbers that are not finite and above 0,
            equal computes, or losses that do not fall with compute.
    """
    sizes, least = _sizes(points, form, measure), _FLOOR_SIZES if form == "power+floor" else 2
    if len(sizes) < least:
        number = "1 size" if len(sizes) == 1 else f"{len(sizes)} sizes"
        what = "a law" if least == 2 else f"the form {form}"
        raise DCFormerError(f"column parameters: {_named(points)} has {number}: {what} needs {least} or more")
    x, y = sizes.x, sizes.y
    slope, intercept = _falling_line(_named(points), measure, x, y)
    floor, numbers, residuals = 0.0, 2, y - intercept - slope * x
    if form == "power+floor":
        found = _fit_floor([x - x.mean()], [y])
        floor, numbers, slope = found.floor, 3, -found.alpha
        intercept = math.log(found.scales[0]) - slope * float(x.min())
        residuals = y - floor - np.exp(intercept + slope * x)
    scatter = float(residuals @ residuals) / max(1, len(sizes) - numbers)
    return Law(
        form=form, intercept=intercept, slope=slope, floor=floor, sizes=len(sizes), runs=len(points),
        deviation=math.sqrt(scatter) if len(sizes) > numbers else 0.0, range=(float(x.min()), float(x.max())),
    )  # fmt: skip


# --- laws with a floor ------------------------------------------------------------------------------------------------
#
# L = L∞ + A e^(-αx), of one family or of two with L∞ and α in common. At a given α least squares are linear: what is
# proportional to e^(-αx) is taken out of each family's losses and of a column of ones, and L∞ >= 0 is the regression of
# what is left of the losses on what is left of the ones. So one number is searched, α.


@dataclass(frozen=True)
class _FloorFit:
    """Least squares with a floor.

    Attributes:
        squares: weighted sum of squares.
        alpha, floor: α and L∞.
        scales: of each family, A e^(-αx) at its smallest x.
    """

    squares: float
    alpha: float
    floor: float
    scales: tuple[float, ...]


Groups = Sequence[np.ndarray]  # something of each family's sizes


def _at_alpha(alpha: np.ndarray, x: Groups, y: Groups, weights: Groups) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sums of squares, L∞ [tries] and scales [tries, families] at each α [tries]."""
    shares, rests, parts = [], [], []
    for xs, ys, w in zip(x, y, weights, strict=True):
        decay = np.exp(-alpha[:, None] * (xs - xs.min()))  # of 1 at most
        share = w * decay / (w * decay * decay).sum(-1, keepdims=True)
        shares.append(share)
        rests.append(1 - share.sum(-1, keepdims=True) * decay)
        parts.append(ys - (share @ ys)[:, None] * decay)

    def solve() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        w, rest, part = np.concatenate(weights), np.concatenate(rests, -1), np.concatenate(parts, -1)
        floor = np.maximum((w * rest * part).sum(-1) / np.maximum((w * rest * rest).sum(-1), 1e-300), 0.0)
        squares = (w * (part - floor[:, None] * rest) ** 2).sum(-1)
        scales = [(share * (ys - floor[:, None])).sum(-1) for share, ys in zip(shares, y, strict=True)]
        return squares, floor, np.stack(scales, -1)

    squares, floor, scales = solve()
    if (scales[:, 1:] < 0).any():  # a variant below the floor: at best it is on it
        for i in range(1, len(x)):
            below = scales[:, i, None] < 0
            rests[i], parts[i] = np.where(below, 1.0, rests[i]), np.where(below, y[i], parts[i])
        squares, floor, _ = solve()
    return squares, floor, scales


def _fit_floor(x: Groups, y: Groups, weights: Groups | None = None, rounds: int = 20) -> _FloorFit:
    """Least squares over α: a grid, then a finer one about the best, `rounds` times.

    Args:
        x, y, weights: of each family's sizes; x is small numbers.
    """
    weights = [np.ones_like(xs) for xs in x] if weights is None else weights
    places, losses = np.unique(np.concatenate(x)), np.concatenate(y)
    steps = np.diff(places)
    fall = math.log(max(losses.max() / losses.min(), 1.001))
    slowest, fastest = 0.05 * fall / np.ptp(places), 30 / steps[steps > 1e-3 * np.ptp(places)].min()
    tries = np.geomspace(slowest, fastest, 80)
    best = int(_at_alpha(tries, x, y, weights)[0].argmin())
    for _ in range(rounds):
        tries = np.linspace(tries[max(best - 1, 0)], tries[min(best + 1, len(tries) - 1)], 11)
        squares, floor, scales = _at_alpha(tries, x, y, weights)
        best = int(squares.argmin())
    return _FloorFit(float(squares[best]), float(tries[best]), float(floor[best]), tuple(map(float, scales[best])))


def _log_factor(fit: _FloorFit, x: Groups) -> float:
    """ln k of the variant, the second family: B = A k^-α."""
    a, b = fit.scales
    return (math.log(a) - math.log(b)) / fit.alpha + float(x[0].min() - x[1].min()) if b > 0 else math.inf


def _floor_interval(x: Groups, y: Groups, seeds: Groups, noise: _Noise, level: float) -> tuple[Interval, Interval]:
    """Interval and one standard error of a factor k under "power+floor", by the profile of the sum of squares: every k
    with which the sum grows by no more than t² times the noise. An end is infinite where it never grows so much."""
    from scipy.optimize import brentq

    all_seeds = np.concatenate(seeds)
    weights = [noise.scatter / noise.variances(s) if noise.scatter else np.ones(len(s)) for s in seeds]
    best = _fit_floor(x, y, weights, rounds=12)
    found = _log_factor(best, x)
    if noise.scatter < 1e-24 * float(y[0].max()) ** 2:
        return (_exp(found),) * 2, (_exp(found),) * 2
    shifted = np.concatenate([x[0], x[1] + found])
    fall = best.scales[0] * np.exp(-best.alpha * (shifted - x[0].min()))
    is_variant = np.repeat([0.0, 1.0], [len(xs) for xs in x])
    columns = [np.ones_like(fall), fall, -shifted * fall, -best.alpha * is_variant * fall]  # by L∞, ln A, α and ln k
    shares = np.linalg.pinv(np.stack(columns[int(best.floor <= 0) :], 1))[-1]
    error, quantile = noise.error(shares, all_seeds, level)
    losses, common_weights = np.concatenate(y), np.concatenate(weights)

    def end(sign: int, errors: float) -> float:
        def excess(away: float) -> float:
            places = np.concatenate([x[0], x[1] + found + sign * away])
            squares = _fit_floor([places], [losses], [common_weights], rounds=9).squares
            return (squares - best.squares) / noise.scatter - errors**2

        near, far = 0.0, error * errors
        while excess(far) < 0:
            near, far = far, 2 * far
            if far > _FARTHEST:
                return sign * math.inf
        return found + sign * brentq(excess, near, far, xtol=1e-7)

    interval, standard = ((end(-1, errors), end(1, errors)) for errors in (quantile, 1.0))
    return (_exp(interval[0]), _exp(interval[1])), (_exp(standard[0]), _exp(standard[1]))


# --- factors ----------------------------------------------------------------------------------------------------------


def compute_factors(
    baseline: Sequence[Point],
    variant: Sequence[Point],
    form: str = "log",
    measure: str = "flops",
    level: float = 0.95,
) -> list[Factor]:
    """What each size of a variant is worth in the baseline's compute.

    Args:
        baseline, variant: runs of two families.
        form, measure: as for `fit_law`.
        level: of the intervals. For "log" and "power" they are those of inverse prediction: x0 = (y0 - a)/b has the
            standard error s/|b| · sqrt(1 + 1/n + (x0 - x̄)²/Σ(x - x̄)²), with n sizes of the baseline, each the mean of
            as many seeds as the variant's, and n - 2 degrees of freedom. A variant of fewer seeds adds what seeds vary
            by, one of more takes it away. For "power+floor", with n - 3, they are of the profile likelihood, and may
            have an infinite end.

    Returns:
        one `Factor` per size, from the smallest on. A baseline with no more sizes than its law has numbers gives no
        intervals: two sizes are interpolated.

    Raises:
        DCFormerError: as `fit_law`, and on a level that is not a share.
    """
    _check_level(level)
    law, fitted, sizes = fit_law(baseline, form, measure), *(_sizes(p, form, measure) for p in (baseline, variant))
    noise = _Noise.of(law.deviation**2, law.freedom, fitted.seeds, fitted, sizes)
    middle, found = float(fitted.x.mean()), []
    for i, (x, y, seeds) in enumerate(zip(sizes.x, sizes.y, sizes.seeds, strict=True)):
        at = law.log_compute(math.exp(y) if form == "power" else float(y))
        log_factor, interval, standard = at - float(x), None, None
        if law.freedom > 0 and math.isfinite(at):
            if form == "power+floor":
                interval, standard = _floor_interval(
                    [fitted.x - middle, np.array([x - middle])], [fitted.y, np.array([y])],
                    [fitted.seeds, np.array([seeds])], noise, level,
                )  # fmt: skip
            else:
                away = fitted.x - middle
                shares = np.append(1 / len(fitted) + (at - middle) * away / float(away @ away), 1.0) / law.slope
                error, quantile = noise.error(shares, np.append(fitted.seeds, seeds), level)
                interval = _around(log_factor, quantile * error)
                standard = _around(log_factor, error)
        loss, compute = float(sizes.losses[i]), math.exp(x)
        found.append(
            Factor(
                parameters=float(sizes.parameters[i]),
                compute=compute,
                loss=loss,
                seeds=int(seeds),
                factor=_exp(log_factor),
                interval=interval,
                standard=standard,
                extrapolated=not law.range[0] - _ROUNDING <= at <= law.range[1] + _ROUNDING,
                interpolated=_interpolated(fitted, compute, loss),
            )
        )
    return found


def _interpolated(sizes: _Sizes, compute: float, loss: float) -> float | None:
    points = sorted(zip(np.exp(sizes.x), sizes.losses, strict=True))
    if any(above <= below for (_, above), (_, below) in pairwise(points)):
        return None
    factor, is_between = factor_between([(float(c), float(at)) for c, at in points], compute, loss)
    return factor if is_between else None


def factor_between(points: Sequence[tuple[float, float]], compute: float, loss: float) -> tuple[float, bool]:
    """The compute factor by the lines from one of a baseline's points to the next, and whether a line reaches there.

    Args:
        points: compute and mean loss of the baseline's sizes, at least two; a greater compute has a lower loss.
        compute, loss: of a run of the variant.
    """
    points = sorted(points)
    pairs = list(pairwise(points))
    (first, above), (last, below) = next((pair for pair in pairs if loss >= pair[1][1]), pairs[-1])
    at = math.log(first) + (above - loss) / (above - below) * math.log(last / first)
    return _exp(at - math.log(compute)), points[-1][1] <= loss <= points[0][1]


def joint_factor(
    baseline: Sequence[Point],
    variant: Sequence[Point],
    form: str = "log",
    measure: str = "flops",
    level: float = 0.95,
) -> JointFactor | None:
    """One factor for all sizes: laws of both families with a common slope, L_v(C) = L_b(factor · C).

    This is the one to quote, as long as the slopes are one. Its interval is of the delta method ("power+floor": as for
    `compute_factors`). Baseline and variant exchanged give the reciprocal.

    Args:
        baseline, variant, form, measure, level: as for `compute_factors`.

    Returns:
        the factor; None where one of the two has fewer than three sizes ("power+floor": five).

    Raises:
        DCFormerError: when losses of one of them do not fall with compute.
    """
    _check_level(level)
    families = [_sizes(points, form, measure) for points in (baseline, variant)]
    least = max(_JOINT_SIZES, _FLOOR_SIZES if form == "power+floor" else 0)
    if min(len(sizes) for sizes in families) < least:
        return None
    for points, sizes in zip((baseline, variant), families, strict=True):
        _falling_line(_named(points), measure, sizes.x, sizes.y)
    x, y, seeds = (np.concatenate([getattr(sizes, name) for sizes in families]) for name in ("x", "y", "seeds"))
    count, middle = len(families[0]), float(x.mean())
    if form == "power+floor":
        places, losses = [sizes.x - middle for sizes in families], [sizes.y for sizes in families]
        best = _fit_floor(places, losses)
        freedom = len(x) - 4
        noise = _Noise.of(best.squares / freedom, freedom, seeds, *families)
        parts = [sizes.seeds for sizes in families]
        interval, standard = _floor_interval(places, losses, parts, noise, level)
        factor = _exp(_log_factor(best, places))
        return JointFactor(factor, interval, standard, -best.alpha, freedom, None, None)
    is_variant = np.repeat([0.0, 1.0], [count, len(x) - count])
    design = np.stack([np.ones_like(x), x - middle, is_variant], 1)
    solve = np.linalg.pinv(design)
    found = solve @ y
    slope, log_factor, freedom = float(found[1]), float(found[2] / found[1]), len(x) - 3
    residuals = y - design @ found
    noise = _Noise.of(float(residuals @ residuals) / freedom, freedom, seeds, *families)
    error, quantile = noise.error(np.array([0.0, -log_factor, 1.0]) / slope @ solve, seeds, level)
    return JointFactor(
        _exp(log_factor), _around(log_factor, quantile * error), _around(log_factor, error), slope,
        freedom, *_own_slopes(*families),
    )  # fmt: skip


def _own_slopes(*families: _Sizes) -> tuple[tuple[float, float], float]:
    """Slopes of two families, and the p of a t-test that they differ."""
    from scipy.stats import t

    slopes, squares, spreads = [], 0.0, 0.0
    for sizes in families:
        slope, intercept = _line(sizes.x, sizes.y)
        slopes.append(slope)
        squares += float(((sizes.y - intercept - slope * sizes.x) ** 2).sum())
        spreads += 1 / float(((sizes.x - sizes.x.mean()) ** 2).sum())
    freedom = sum(len(sizes) for sizes in families) - 4
    error = max(math.sqrt(squares / freedom * spreads), 1e-12 * abs(slopes[0]))
    return (slopes[0], slopes[1]), float(2 * t.sf(abs(slopes[0] - slopes[1]) / error, freedom))


__all__ = [
    "FORMS",
    "Factor",
    "JointFactor",
    "Law",
    "compute_factors",
    "factor_between",
    "fit_law",
    "joint_factor",
]
