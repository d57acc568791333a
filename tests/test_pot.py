"""Peaks over threshold: known shapes, the likelihood against a grid, and refusals in place of nonsense."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import trapezoid
from scipy.stats import genpareto

from simcse_weince import fit_pot
from simcse_weince.extremes.pot import _Profile, mean_residual_life, threshold_stability


def excesses(case_inputs: Path, name: str) -> np.ndarray:
    return np.load(case_inputs / f"tail_{name}.npy", allow_pickle=False)


def log_likelihood(y: np.ndarray, shape: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Of the GPD, for a grid of parameters, written from the density; -inf where an excess is beyond the endpoint."""
    inside = 1 + (shape / scale)[..., None] * y
    log = np.log(np.where(inside > 0, inside, np.nan)).sum(-1)
    return np.nan_to_num(-len(y) * np.log(scale) - (1 / shape + 1) * log, nan=-np.inf)


@pytest.mark.parametrize(
    ("name", "low", "high", "truth"), [("gpd_neg07", -0.9, -0.5, -0.7), ("gpd_neg03", -0.45, -0.2, -0.3)]
)
def test_dg01_free_location_sign(case_inputs: Path, name: str, low: float, high: float, truth: float) -> None:
    y = excesses(case_inputs, name)
    fit = fit_pot(y, threshold=0, bootstrap=30)
    assert fit.estimable and fit.shape is not None and low < fit.shape < high
    assert fit.shape_interval[0] < truth < fit.shape_interval[1] < 0
    assert fit.domain == "weibull" and y.max() < fit.endpoint < 1 and fit.p_value < 1e-6
    assert fit.endpoint_interval[0] < -0.05 / truth < fit.endpoint_interval[1]
    assert fit.intervals == "profile likelihood, as if independent" and fit.goodness_p > 0.05


def test_dg01_likelihood_is_the_largest_of_a_grid(case_inputs: Path) -> None:
    y = excesses(case_inputs, "gpd_neg03")
    fit = fit_pot(y, threshold=0, bootstrap=0)
    best = genpareto.logpdf(y, fit.shape, scale=fit.scale).sum()
    grid = log_likelihood(y, np.linspace(-0.99, 0.99, 66)[:, None], np.linspace(0.02, 0.15, 66))
    assert best >= grid.max() > best - 1
    assert genpareto.fit(y, -0.2, floc=0, scale=0.04)[::2] == pytest.approx((fit.shape, fit.scale), rel=1e-3)
    assert 2 * (best - genpareto.logpdf(y, 0, scale=y.mean()).sum()) == pytest.approx(fit.likelihood_ratio, rel=1e-6)


@pytest.mark.parametrize("xi", [-0.8, -0.3, 1e-7, 0.4])
def test_profiles_are_maxima_over_the_other_parameter(xi: float) -> None:
    y = genpareto.rvs(xi, size=80, random_state=1)
    y /= y.max()
    profile = _Profile(y)
    for t in (-3.0, -0.5, 0.5, 2.0):
        shape, a = profile.shape(t), profile.inverse(t)
        scales = shape / a * np.exp(np.linspace(-0.01, 0.01, 3))
        along = [genpareto.logpdf(y, shape, scale=s).mean() for s in scales]
        assert np.argmax(along) == 1 and along[1] == pytest.approx(profile.by_shape(t), abs=1e-9)
        shapes = np.mean(np.log1p(a * y)) * np.exp(np.linspace(-0.01, 0.01, 3))
        if abs(shapes[1]) < 1:
            along = [genpareto.logpdf(y, c, scale=c / a).mean() for c in shapes]
            assert np.argmax(along) == 1 and along[1] == pytest.approx(profile.by_end(t), abs=1e-9)


def test_adjusted_profile_integrates_the_scale_out() -> None:
    y = genpareto.rvs(-0.3, size=200, random_state=2)
    profile = _Profile(y / y.max())
    scales = np.exp(np.linspace(-4, 4, 2001))
    adjusted, exact = [], []
    for t in (-1.5, -1.0, -0.5):
        exact.append(np.logaddexp.reduce(log_likelihood(profile.y, np.full(2001, profile.shape(t)), scales)))
        adjusted.append(200 * profile.by_shape(t, adjusted=True))
    np.testing.assert_allclose(np.diff(adjusted), np.diff(exact), atol=0.05)


@pytest.mark.parametrize("xi", [-0.7, -0.39, -0.1, 0.0, 0.3])
def test_intervals_hold_the_truth(xi: float) -> None:
    rng = np.random.default_rng(0)
    fits = [fit_pot(0.05 * genpareto.rvs(xi, size=500, random_state=rng), threshold=0, bootstrap=0) for _ in range(60)]
    hits = sum(low <= xi <= high for low, high in (fit.shape_interval for fit in fits))
    assert hits >= 52  # 57 expected; less than 0.5 % of the time below


@pytest.mark.parametrize("dimensions", [4, 9])
def test_points_on_the_sphere_have_their_tail_index(dimensions: int) -> None:
    rng = np.random.default_rng(dimensions)
    # a cosine of uniform points: the first coordinate, whose square is a Beta variable
    cosines = np.sqrt(rng.beta(0.5, (dimensions - 1) / 2, 400_000)) * rng.choice([-1, 1], 400_000)
    rows = threshold_stability(cosines, (0.8, 0.95, 0.995), cap=1.0)
    error = [abs(row["shape"] + 2 / (dimensions - 1)) for row in rows]
    assert error[0] > error[1] and error[2] < 0.05
    assert rows[2]["low"] < -2 / (dimensions - 1) < rows[2]["high"]
    assert -1 / rows[2]["shape"] == pytest.approx((dimensions - 1) / 2, rel=0.15)
    assert fit_pot(cosines, quantile=0.995, bootstrap=0).endpoint == pytest.approx(1, abs=0.02)


def test_dg02_likelihood_unbounded_below_minus_one(case_inputs: Path) -> None:
    samples = {
        "fewer than 50": genpareto.rvs(-0.5, size=20, random_state=0) * 0.1,
        "constant": excesses(case_inputs, "constant"),
        "beyond -1": genpareto.rvs(-2.0, size=300, random_state=0) * 0.1,
        "at the cap": np.r_[genpareto.rvs(-0.5, size=300, random_state=0) * 0.1, np.full(60, 1 + 2e-7)],
        "infinite mean": genpareto.rvs(1.5, size=300, random_state=0),
    }
    for name, sample in samples.items():
        fit = fit_pot(sample, threshold=0)
        assert not fit.estimable and fit.reason.endswith(".") and fit.domain is None, name
        numbers = fit.to_json()
        for key in (
            "shape",
            "shape_interval",
            "scale",
            "endpoint",
            "endpoint_interval",
            "exponential_scale",
            "p_value",
        ):
            assert numbers[key] is None, (name, key)
        with pytest.raises(ValueError, match="no fit"):
            fit.density(np.array([0.1]))
    assert "runs to -1" in fit_pot(samples["beyond -1"], threshold=0).reason
    assert "60 of 360" in fit_pot(samples["at the cap"], threshold=0).reason


def test_dg03_threshold_too_high() -> None:
    rng = np.random.default_rng(0)
    scores = rng.random(500)
    fit = fit_pot(scores, quantile=0.9999)
    assert not fit.estimable and fit.threshold is not None
    assert "1 of 500" in fit.reason and "needs 50" in fit.reason and "at most 0.9 " in fit.reason
    rows = threshold_stability(rng.beta(2, 4, 500), (0.5, 0.8, 0.99))
    assert [row["quantile"] for row in rows] == [0.5, 0.8, 0.99]
    assert rows[0]["low"] < rows[0]["shape"] < rows[0]["high"] and not rows[0]["reason"]
    assert rows[2]["shape"] is None and "5 of 500" in rows[2]["reason"]
    assert "0 of 0" in fit_pot(np.array([np.nan])).reason


def test_quantile_and_remedy_are_those_of_all_scores_where_only_the_largest_are_given() -> None:
    scores = np.sort(np.random.default_rng(9).beta(2, 4, 2000))
    some = fit_pot(scores[-200:], quantile=0.95, total=2000, bootstrap=0)
    every = fit_pot(scores, quantile=0.95, bootstrap=0)
    assert some.excesses == every.excesses and some.shape == pytest.approx(every.shape, abs=0.01)
    refused = fit_pot(scores[-200:], total=2000)
    assert "20 of 2000" in refused.reason and "at most 0.975 " in refused.reason
    assert fit_pot(scores[-200:], quantile=0.975, total=2000, bootstrap=0).estimable
    row = threshold_stability(scores[-200:], (0.95,), total=2000)[0]
    assert (row["quantile"], row["shape"]) == (0.95, some.shape)
    with pytest.raises(ValueError, match="total"):
        fit_pot(scores, total=1999)


@pytest.mark.parametrize("given", [0, 1, 50])
def test_few_scores_are_called_few_and_not_equal(given: int) -> None:
    reason = fit_pot(np.linspace(0.5, 0.6, given), quantile=0.9, total=500).reason
    assert "of 500 scores are above" in reason and "too few rows" in reason and "equal" not in reason


def test_dg05_exponential_is_fitted_on_its_own(case_inputs: Path) -> None:
    y = excesses(case_inputs, "exponential")
    fit = fit_pot(y, threshold=0, bootstrap=0)
    assert fit.shape == pytest.approx(0, abs=0.1) and fit.domain == "gumbel"
    assert fit.exponential_scale == pytest.approx(0.04984, abs=5e-6) == y.mean()
    assert fit.likelihood_ratio < 4 and fit.p_value > 0.05  # AIC of the exponential is at most 2 above
    assert math.isinf(fit.endpoint_interval[1]) and fit.to_json()["endpoint_interval"][1] is None
    np.testing.assert_allclose(fit.density(y, "exponential"), np.exp(-y / y.mean()) / y.mean())
    assert fit.quantiles(np.array([0.5]), "exponential") == pytest.approx(y.mean() * math.log(2))
    json.dumps(fit.to_json(), allow_nan=False)


def test_dg06_non_finite_and_constant(case_inputs: Path) -> None:
    y = excesses(case_inputs, "nonfinite")
    fit = fit_pot(y, threshold=0, bootstrap=0)
    assert (fit.n, fit.non_finite, fit.excesses) == (200, 3, 200)
    assert fit.shape == pytest.approx(-0.30, abs=0.01)
    assert fit == fit_pot(np.r_[y, np.full(9, -np.inf)][:-9], threshold=0, bootstrap=0)
    assert "equal" in fit_pot(excesses(case_inputs, "constant"), threshold=0).reason


def test_density_and_quantiles_are_those_of_the_fit() -> None:
    scores = np.random.default_rng(3).beta(5, 3, 20_000)
    fit = fit_pot(scores, quantile=0.95, bootstrap=0)
    y = np.linspace(0, fit.endpoint - fit.threshold, 20_001)
    assert trapezoid(fit.density(y), y) == pytest.approx(1, abs=1e-3)
    assert fit.density(np.array([-0.1, y[-1] + 0.1])).tolist() == [0, 0]
    p = np.array([0.1, 0.5, 0.9])
    shown = np.quantile(scores[scores > fit.threshold], p) - fit.threshold
    np.testing.assert_allclose(fit.quantiles(p), shown, rtol=0.15, atol=0.002)


def test_ties_and_scores_at_the_cap_are_counted() -> None:
    y = np.r_[genpareto.rvs(-0.4, size=400, random_state=0) * 0.1, 0.05, 0.05, 1.0]
    fit = fit_pot(y, threshold=0, bootstrap=0)
    assert (fit.ties, fit.at_cap) == (1, 1)


def test_scores_that_pile_up_at_the_threshold_are_named_instead_of_a_quantile() -> None:
    rest = np.random.default_rng(0).beta(5, 3, 9800)
    at_cap = fit_pot(np.r_[rest, np.ones(200)])
    assert at_cap.at_cap == 200 and at_cap.reason.startswith("200 of 10000 scores are at the cap, which no continuous")
    below = fit_pot(np.r_[rest * 0.9, np.full(200, 0.95)])
    assert below.at_cap == 0 and below.reason.startswith("200 of 10000 scores equal the threshold")


def test_goodness_of_fit_refuses_what_is_no_pareto() -> None:
    rng = np.random.default_rng(4)
    humped = rng.gamma(5, size=800)
    assert fit_pot(humped, threshold=0, cap=None, bootstrap=40).goodness_p < 0.05


def test_bootstrap_over_anchors_widens_the_interval_of_dependent_scores() -> None:
    rng = np.random.default_rng(5)
    anchors = np.repeat(np.arange(100), 10)
    scores = genpareto.ppf(np.repeat(rng.random(100), 10) * 0.9 + 0.1 * rng.random(1000), -0.3) * 0.1
    alone = fit_pot(scores, threshold=0, bootstrap=0)
    grouped = fit_pot(scores, threshold=0, bootstrap=100, groups=anchors)
    assert grouped.intervals == "bootstrap over anchors" and grouped.shape == alone.shape
    assert grouped.shape_interval[0] < grouped.shape < grouped.shape_interval[1]
    assert np.ptp(grouped.shape_interval) > 1.5 * np.ptp(alone.shape_interval)
    each = fit_pot(scores, threshold=0, bootstrap=100, groups=np.arange(1000))
    assert np.ptp(each.shape_interval) == pytest.approx(np.ptp(alone.shape_interval), rel=0.35)


def test_bootstrap_over_both_members_holds_the_truth_where_pairs_share_points() -> None:
    """Over samples of points on the sphere, whose cosines share points; the truth is the mean estimate."""
    i, j = np.triu_indices(100, 1)
    both = {"over the first, each pair twice": (np.r_[i, j], 2), "over both": (np.column_stack([i, j]), 1)}
    shapes, intervals = [], {name: [] for name in both}
    for seed in range(40):
        points = np.random.default_rng(seed).normal(size=(100, 8))
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        cosines = (points @ points.T)[i, j]
        for name, (groups, times) in both.items():
            fit = fit_pot(np.tile(cosines, times), quantile=0.97, bootstrap=25, groups=groups, seed=seed)
            intervals[name].append(fit.shape_interval)
        shapes.append(fit.shape)
    assert fit.intervals == "bootstrap over both members of the pairs"
    old, new = (np.mean([low <= np.mean(shapes) <= high for low, high in found]) for found in intervals.values())
    assert old < 0.75 and new >= 0.9


def test_a_sample_without_any_pair_is_drawn_again() -> None:
    """Where one point is in every pair, each third sample lacks it."""
    y = genpareto.rvs(-0.3, size=60, random_state=8)
    pairs = np.column_stack([np.zeros(60, int), np.arange(1, 61)])
    fit = fit_pot(y, threshold=0, cap=None, bootstrap=20, groups=pairs)
    assert fit.shape_interval[0] < fit.shape < fit.shape_interval[1]


def test_same_seed_same_answer_and_units_do_not_matter() -> None:
    y = genpareto.rvs(-0.3, size=300, random_state=6)
    first, second = (fit_pot(y, threshold=0, cap=None, bootstrap=20, seed=1) for _ in range(2))
    assert first == second
    small = fit_pot(7 + 1e-3 * y, threshold=7, cap=None, bootstrap=20, seed=1)
    assert small.shape == pytest.approx(first.shape, abs=1e-5)
    assert small.endpoint_interval == pytest.approx([7 + 1e-3 * e for e in first.endpoint_interval], abs=1e-6)


def test_mean_residual_life_falls_towards_an_endpoint() -> None:
    rng = np.random.default_rng(7)
    bounded = mean_residual_life(np.r_[rng.random(50_000), np.nan])
    assert bounded[0]["excesses"] == 5000 and bounded[-1]["mean"] < 0.1 * bounded[0]["mean"]
    level = mean_residual_life(rng.exponential(size=50_000), (0.5, 0.9, 0.99))
    assert all(abs(row["mean"] - 1) < row["high"] - row["low"] for row in level)
    assert mean_residual_life(np.arange(20.0)) == [] == mean_residual_life(np.array([]))


@pytest.mark.parametrize(
    "options", [{"quantile": 1.0}, {"confidence": 0}, {"groups": [1, 2]}, {"groups": [[1, 2, 3]] * 100}]
)
def test_wrong_arguments_are_named(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        fit_pot(np.arange(100.0), **options)
