"""A power law through the values of a scaling study: y = a - b * x**-c, with intervals from a residual bootstrap.

For a given exponent the best a and b are linear least squares, so only the exponent is searched: variable projection
(Golub, Pereyra 1973, SIAM J. Numer. Anal. 10). Residuals are enlarged by sqrt(n / (n - 3)), because three numbers were
fitted to them, and drawn with replacement (Davison, Hinkley 1997, Bootstrap Methods and their Application, 6.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controller.report.comparison import CONFIDENCE

SAMPLES = 2000
EXPONENTS = np.geomspace(0.01, 10, 400)
MIN_LEVELS = 4
"""Values of x that a fit needs: one more than it has numbers."""


@dataclass(frozen=True)
class PowerLaw:
    """A fit. Each pair is the interval of `confidence`; x of `curve` is increasing, with the lowest and highest y."""

    a: float
    b: float
    c: float
    a_interval: tuple[float, float]
    b_interval: tuple[float, float]
    c_interval: tuple[float, float]
    deviation: float
    points: int
    curve: tuple[tuple[float, float, float, float], ...]
    """x, y, low, high."""

    @property
    def is_open(self) -> bool:
        """Whether the interval of the exponent reaches the end of the search: the values do not determine it."""
        return self.c_interval[0] <= EXPONENTS[0] * 1.01 or self.c_interval[1] >= EXPONENTS[-1] * 0.99


def fit_power_law(x: Sequence[float], y: Sequence[float], seed: int = 0, samples: int = SAMPLES) -> PowerLaw:
    """Fit positive x of at least MIN_LEVELS different values."""
    from scipy import optimize, stats

    xs, ys = np.array(x, float), np.array(y, float)
    unit = float(np.exp(np.log(xs).mean()))  # x in this unit keeps b near the size of y while c is searched
    search = _Search(xs / unit)
    start = search.exponents(ys[None])[0]
    bounds = np.log([max(EXPONENTS[0], start / 1.1), min(EXPONENTS[-1], start * 1.1)])
    found = optimize.minimize_scalar(
        lambda log_c: search.residual(ys, float(np.exp(log_c))),
        bounds=bounds,
        method="bounded",
        options={"xatol": 1e-9},
    )
    c = float(np.exp(found.x))
    a, b = search.line(ys[None], np.array([c]))[0]
    fitted = a - b * (xs / unit) ** -c
    free = len(xs) - 3
    residuals = (ys - fitted) * (len(xs) / free) ** 0.5
    draws = np.random.default_rng(seed).choice(residuals - residuals.mean(), (samples, len(xs)))
    exponents = search.exponents(fitted + draws)
    lines = search.line(fitted + draws, exponents)
    widen = float(stats.t.ppf(0.5 + CONFIDENCE / 2, free) / stats.norm.ppf(0.5 + CONFIDENCE / 2))
    at = np.geomspace(xs.min(), xs.max(), 60)
    drawn = lines[:, :1] - lines[:, 1:] * (at / unit) ** -exponents[:, None]
    a_interval, b_interval, c_interval = (
        _interval(values, center, widen)
        for values, center in ((lines[:, 0], a), (lines[:, 1] * unit**exponents, b * unit**c), (exponents, c))
    )
    curve_y = a - b * (at / unit) ** -c
    bands = [_interval(drawn[:, i], curve_y[i], widen) for i in range(len(at))]
    curve = tuple((float(px), float(py), *band) for px, py, band in zip(at, curve_y, bands, strict=True))
    deviation = float(np.sqrt(((ys - fitted) ** 2).sum() / free))
    return PowerLaw(float(a), float(b * unit**c), c, a_interval, b_interval, c_interval, deviation, len(xs), curve)


def _interval(values: np.ndarray, center: float, widen: float) -> tuple[float, float]:
    """Return percentiles; their distance from the fit is enlarged as Student's t is wider than the normal."""
    low, high = np.quantile(values, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return float(center - widen * (center - low)), float(center + widen * (high - center))


class _Search:
    """Least squares over a grid of exponents, for many y at once."""

    def __init__(self, x: np.ndarray) -> None:
        self._x = x
        self._bases = np.stack([np.linalg.qr(self._columns(c))[0] for c in EXPONENTS])

    def _columns(self, c: float) -> np.ndarray:
        return np.stack([np.ones_like(self._x), -(self._x**-c)], axis=1)

    def residual(self, y: np.ndarray, c: float) -> float:
        basis = np.linalg.qr(self._columns(c))[0]
        return float(((y - basis @ (basis.T @ y)) ** 2).sum())

    def exponents(self, y: np.ndarray) -> np.ndarray:
        """Return the best exponent of each row, between the grid's points by a parabola."""
        explained = (np.einsum("cnk,sn->sck", self._bases, y, optimize=True) ** 2).sum(2)
        best = explained.argmax(1)
        middle = np.clip(best, 1, len(EXPONENTS) - 2)
        left, peak, right = (explained[np.arange(len(y)), middle + shift] for shift in (-1, 0, 1))
        bend = left - 2 * peak + right
        inside = (best == middle) & (bend < 0)
        shift = np.where(inside, 0.5 * (left - right) / np.where(inside, bend, 1.0), 0.0)
        logs = np.log(EXPONENTS)
        return np.exp(np.where(inside, logs[middle] + shift * (logs[1] - logs[0]), logs[best]))

    def line(self, y: np.ndarray, exponents: np.ndarray) -> np.ndarray:
        """Return a and b of each row, for its exponent."""
        powers = self._x ** -exponents[:, None]
        centered = powers - powers.mean(1, keepdims=True)
        b = -(centered * y).sum(1) / (centered**2).sum(1)
        return np.stack([y.mean(1) + b * powers.mean(1), b], axis=1)
