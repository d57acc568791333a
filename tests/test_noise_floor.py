"""The simulation lies on its closed forms, and each kind of noise calls for its link."""

import json

import numpy as np
import pytest

from simcse_weince.extremes import noise_floor, trichotomy
from simcse_weince.extremes.noise_floor import match_mean


def test_simulation_lies_on_the_closed_forms() -> None:
    floor = noise_floor((1000, 10_000), repeats=2000, seed=1)
    for row in floor.rows:
        for link in ("shortfall", "softmax"):
            assert abs(row[f"{link}_mse"] - row[f"{link}_closed"]) < 4 * row[f"{link}_se"], (row["n"], link)
        # the error of the right link times n is a constant
        assert row["n"] * row["shortfall_mse"] == pytest.approx(floor.fisher_constant, rel=0.15)
    assert floor.rows[1]["softmax_mse"] == pytest.approx(floor.squared_bias, rel=0.1)
    json.dumps(floor.to_json())


def test_closed_forms_against_numbers_worked_out_by_hand() -> None:
    floor = noise_floor((10,), repeats=2)
    weight = np.array([0.85, 0.55, 0.30, 0.10]) ** -0.8
    p, x = weight / weight.sum(), -np.log([0.85, 0.55, 0.30, 0.10])
    assert floor.log_odds == pytest.approx(0.8 * np.log(8.5))
    assert floor.fisher_constant == pytest.approx(np.log(8.5) ** 2 / (p @ (x - p @ x) ** 2))
    s = np.array([0.15, 0.45, 0.70, 0.90])
    slopes = np.linspace(0, 5, 500_001)
    likelihood = p @ s * slopes - np.log(np.exp(slopes[:, None] * s).sum(1))
    assert floor.squared_bias == pytest.approx((0.75 * slopes[likelihood.argmax()] - 0.8 * np.log(8.5)) ** 2, rel=1e-3)


def test_same_seed_same_table() -> None:
    assert noise_floor((100,), repeats=50, seed=3) == noise_floor((100,), repeats=50, seed=3)
    assert noise_floor((100,), repeats=50, seed=3) != noise_floor((100,), repeats=50, seed=4)


def test_each_domain_has_its_link() -> None:
    for row in trichotomy(draws=40_000):
        others = {"softmax", "power", "shortfall"} - {row["link"]}
        # the divergence of a true law is about 3 / (2 draws)
        assert row[row["link"]]["divergence"] < 5e-4 < 1e-2 < min(row[name]["divergence"] for name in others), row
        assert sum(row["shares"]) == pytest.approx(1)
    slopes = {row["domain"]: row[row["link"]]["slope"] for row in trichotomy(draws=40_000)}
    assert slopes == pytest.approx({"gumbel": 1 / 0.3, "frechet": 2, "weibull": 0.8}, rel=0.03)


def test_unbounded_slopes_are_refused() -> None:
    assert match_mean(np.array([0.0, 1.0]), np.array([0.5, 0.9])) == pytest.approx([0, np.log(9)])
    with pytest.raises(ValueError, match="unbounded"):
        match_mean(np.array([0.0, 1.0]), 1.0)
