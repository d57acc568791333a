"""Bounds against the reference numbers, and the statements on temperature and continuity against brute force."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit, hyp0f1, softmax

from simcse_weince.search import (
    averaged_sensitivity,
    bias_bounds,
    bias_bounds_data,
    capacity_uniform,
    chi2_bound,
    continuity_bound,
    density_bounds,
    generalization_bound,
    kl_bound,
    loss_range,
    tv_bound,
)
from simcse_weince.search.bounds import log_uniform_normaliser, specht


@pytest.fixture(scope="module")
def numbers(shared: Path) -> dict:
    return json.loads((shared / "reference" / "search_reference.json").read_text())["theory_numbers"]


def test_bounds_per_temperature_equal_the_reference_numbers(numbers: dict) -> None:
    for text, expected in numbers["per_tau"].items():
        tau = float(text)
        found = {
            "density_max": density_bounds(tau)[1],
            "kl_bound_J": kl_bound(tau),
            "chi2_bound": chi2_bound(tau),
            "tv_bound": tv_bound(tau),
            "bias_bounds_logk_k1024": bias_bounds(1024, tau, offset="log_k"),
            "bias_bounds_logk1_k1024": bias_bounds(1024, tau),
            "loss_range_k1024": loss_range(1024, tau),
        }
        for key, value in found.items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-8, err_msg=f"{key} at {tau}")
        assert kl_bound(tau) <= min(expected["kl_bound_hoeffding"], 2 / tau)
        for offset in ("logk", "logk1"):
            assert max(map(abs, expected[f"bias_bounds_{offset}_k1024"])) <= expected[f"bias_bound_{offset}_k1024"]


def test_expectiles_equal_the_reference_numbers(numbers: dict) -> None:
    for case in numbers["expectile"]:
        assert averaged_sensitivity(np.array(case["values"]), case["tau"]) == pytest.approx(case["value"], abs=1e-9)


def test_t3_generalisation_bound_equals_the_reference_numbers(numbers: dict) -> None:
    for case in numbers["generalization"]:
        found = generalization_bound(*(case[key] for key in ("n", "p", "LB", "tau", "k", "delta")))
        for key, name in {"bias": "bias_worst_case"}.items() | {(k, k) for k in found if k != "bias"}:
            assert found[key] == pytest.approx(case[name], rel=1e-9), key
    assert generalization_bound(100, 4, 1.0, 0.5, 9, bias=0.25)["bias"] == 0.25


def test_p21_bounds_are_attained_by_two_similarities() -> None:
    for tau in (0.2, 0.5, 1.0):
        share = expit(np.linspace(-25, 25, 100_001))
        high, low = 1 / (share + (1 - share) * math.exp(-2 / tau)), 1 / (share * math.exp(2 / tau) + 1 - share)
        reverse = -(share * np.log(high) + (1 - share) * np.log(low))
        forward = share * high * np.log(high) + (1 - share) * low * np.log(low)
        chi2 = share * (high - 1) ** 2 + (1 - share) * (low - 1) ** 2
        assert reverse.max() == pytest.approx(kl_bound(tau), rel=1e-5)
        assert forward.max() == pytest.approx(kl_bound(tau), rel=1e-5)
        assert chi2.max() == pytest.approx(chi2_bound(tau), rel=1e-5)
        assert (share * (high - 1)).max() == pytest.approx(tv_bound(tau), rel=1e-5)


def test_p21_p23_hold_for_random_laws_and_fall_with_temperature() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        s, law = rng.uniform(-1, 1, 6), rng.dirichlet(np.full(6, 0.5))
        previous = (math.inf, math.inf)
        for tau in (0.1, 0.3, 1.0, 5.0):
            weights = law * np.exp((s - s.max()) / tau)
            r = weights / weights.sum() / law
            forward, reverse = float((law * r * np.log(r)).sum()), float(-(law * np.log(r)).sum())
            least, most = density_bounds(tau)
            assert least <= r.min() and r.max() <= most and max(forward, reverse) <= kl_bound(tau)
            assert law @ (r - 1) ** 2 <= chi2_bound(tau) and law @ np.abs(r - 1) / 2 <= tv_bound(tau)
            assert forward <= previous[0] + 1e-12 and reverse <= previous[1] + 1e-12
            previous = forward, reverse


def test_specht_is_smooth_across_its_branches_and_finite_at_both_ends() -> None:
    assert specht(0.0099999) == pytest.approx(specht(0.0100001), rel=1e-4)
    exact = math.log(math.expm1(3.0) / 3.0) - 1 + 3 / math.expm1(3.0)
    assert specht(3.0) == pytest.approx(exact, rel=1e-13)
    assert specht(2000.0) == pytest.approx(2000 - math.log(2000) - 1)
    assert all(
        map(math.isfinite, (*bias_bounds(10, 0.001), *bias_bounds(10, 0.001, offset="log_k"), loss_range(10, 0.001)))
    )


def test_bounds_vanish_at_any_temperature_however_hot() -> None:
    for tau in (1e9, 1e17, 1e300):
        assert bias_bounds(10, tau) == pytest.approx((0, 0), abs=2 / tau)
    assert bias_bounds(10, 1e300, offset="log_k") == pytest.approx((0, math.log(1.1)))


def test_p25_capacity_of_uniform_embeddings() -> None:
    for (d, tau), nats in {(128, 0.07): 13.49, (768, 0.05): 19.74, (64, 0.5): 1.97}.items():
        assert capacity_uniform(d, tau) == pytest.approx(nats, abs=0.005)
    for d, kappa in ((2, 5.0), (3, 1.0), (40, 12.0)):
        assert log_uniform_normaliser(d, kappa) == pytest.approx(math.log(hyp0f1(d / 2, kappa**2 / 4)), abs=1e-11)


def test_bias_bounds_check_their_arguments() -> None:
    for arguments in ({"k": 0, "tau": 1.0}, {"k": True, "tau": 1.0}, {"k": 3}, {"k": 3, "tau": 1.0, "delta": 1.0}):
        with pytest.raises(ValueError, match="k must|exactly one"):
            bias_bounds(**arguments)
    with pytest.raises(ValueError, match="offset"):
        bias_bounds(3, 1.0, offset="none")
    with pytest.raises(ValueError, match="a or delta"):
        bias_bounds_data(np.ones(2), np.ones(2), 3)
    low, high = bias_bounds_data(np.array([3.0]), np.array([2.0]), 1000, delta=20.0)
    assert -1 < low < 0 and high == pytest.approx(math.log1p(2 / 1001))  # no 1/a: not e^20 / k


def pairs_of_embeddings(seed: int, k: int = 30, move: float = 0.4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    first = rng.normal(size=(k + 2, 5))
    second = first + move * rng.normal(size=first.shape)
    return tuple(e / np.linalg.norm(e, axis=1, keepdims=True) for e in (first, second))


def loss(emb: np.ndarray, tau: float) -> float:
    s = emb[1:] @ emb[0] / tau
    return float(np.logaddexp.reduce(s) - s[0])


@pytest.mark.parametrize("tau", [0.1, 0.5, 2.0])
def test_p31_p32_p33_bound_the_change_of_the_loss(tau: float) -> None:
    for seed in range(40):
        a, b = pairs_of_embeddings(seed, k=1 + seed, move=0.05 + 0.02 * seed)
        change = abs(loss(b, tau) - loss(a, tau))
        bounds = {kind: continuity_bound(a, b, tau, kind) for kind in ("softmax", "expectile", "max")}
        assert change <= bounds["softmax"] <= bounds["expectile"] * (1 + 1e-12) <= bounds["max"] * (1 + 1e-12)
        for beta in (0.0, 0.5 / tau, 1 / tau, 2 / tau):
            assert change <= continuity_bound(a, b, tau, "tempered", beta)
    with pytest.raises(ValueError, match="beta"):
        continuity_bound(a, b, tau, "tempered")


def test_p30_gateaux_derivative_along_a_path() -> None:
    (a, b), tau, t, step = pairs_of_embeddings(1), 0.3, 0.4, 1e-5
    middle, change = a + t * (b - a), b - a
    slope = middle[1:] @ change[0] + change[1:] @ middle[0]
    p = softmax(middle[1:] @ middle[0] / tau)
    wanted = p @ (slope - slope[0]) / tau
    assert (loss(middle + step * change, tau) - loss(middle - step * change, tau)) / (2 * step) == pytest.approx(wanted)


def test_p33_expectile_is_the_root_and_obeys_its_bounds() -> None:
    rng = np.random.default_rng(2)
    for tau in (0.2, 0.5, 1.0, 4.0):
        rho = math.exp(2 / tau)
        for _ in range(20):
            a = np.concatenate([[0.0], rng.exponential(size=7)])
            v = float(averaged_sensitivity(a, tau))
            assert rho * np.maximum(a - v, 0).sum() == pytest.approx(np.maximum(v - a, 0).sum(), rel=1e-6)
            mean, sd = a.mean(), a.std()
            assert (
                mean
                <= v
                <= min(
                    a.max(),
                    rho / (rho + 7) * a.sum(),
                    math.cosh(1 / tau) * math.sqrt((a**2).mean()),
                    mean + math.sinh(1 / tau) * sd,
                    mean + math.tanh(0.5 / tau) * np.ptp(a),
                )
                * (1 + 1e-12)
            )
    outlier = np.r_[2.0, np.full(9, 0.5)]
    assert averaged_sensitivity(outlier, 0.5) == pytest.approx((math.exp(4) * 2 + 4.5) / (math.exp(4) + 9))


def test_p34_entropic_average_is_an_upper_bound() -> None:
    a = np.random.default_rng(3).exponential(size=20)
    for tau in (0.2, 1.0, 5.0):
        entropic = min(
            (kl_bound(tau) + math.log(np.exp(beta * a).mean())) / beta for beta in np.geomspace(0.01, 100, 80)
        )
        assert averaged_sensitivity(a, tau) <= entropic


def test_p35_weights_of_negatives_of_large_norm() -> None:
    rng, tau = np.random.default_rng(4), 0.5
    for _ in range(20):
        a, b = rng.normal(size=(2, 12, 4)) * rng.uniform(0.3, 1, (1, 12, 1))
        norms, moved = np.maximum(*(np.linalg.norm(e, axis=1) for e in (a, b))), np.linalg.norm(b - a, axis=1)
        change = moved[0] * (norms[2:] + norms[1]) + norms[0] * (moved[2:] + moved[1])
        values, c = np.r_[0.0, change], norms[0] * norms[1:] / tau
        grid = np.linspace(0, values.max(), 100_001)[:, None]
        balance = (np.exp(c) * np.maximum(values - grid, 0) - np.exp(-c) * np.maximum(grid - values, 0)).sum(1)
        root = float(grid[np.flatnonzero(balance >= 0)[-1], 0]) + 1e-4
        assert abs(loss(b, tau) - loss(a, tau)) <= root / tau


def test_section_31_embedding_form() -> None:
    for seed in range(20):
        (a, b), tau = pairs_of_embeddings(seed), 0.5
        moved = np.linalg.norm(b - a, axis=1)
        bound = (2 * moved[0] + moved[1] + averaged_sensitivity(moved[2:], tau)) / tau
        assert continuity_bound(a, b, tau, "expectile") <= bound * (1 + 1e-12)


def test_loss_range_is_the_exact_range() -> None:
    for k, tau in ((1, 0.5), (9, 0.2)):
        worst, best = math.log1p(k * math.exp(2 / tau)), math.log1p(k * math.exp(-2 / tau))
        assert loss_range(k, tau) == pytest.approx(worst - best)
        assert 2 / tau - 1e-12 <= loss_range(k, tau) <= 4 / tau
