"""Intervals, permutation p, Holm and seeds needed, against scipy and brute force."""

import itertools

import numpy as np
import pytest
from scipy import stats

from simcse_weince.study.statistics import fewest_seeds, holm, paired_difference, seeds_needed, spread

FIRST = [78.56, 78.14, 78.11, 78.90, 77.75]
SECOND = [78.35, 77.93, 77.73, 78.20, 77.90]


def test_spread_is_the_student_interval_of_scipy():
    result = spread(FIRST)
    assert result["n"] == 5 and result["mean"] == pytest.approx(np.mean(FIRST))
    assert result["sd"] == pytest.approx(np.std(FIRST, ddof=1))
    expected = stats.t.interval(0.95, 4, loc=np.mean(FIRST), scale=stats.sem(FIRST))
    assert (result["low"], result["high"]) == pytest.approx(expected)


def test_one_seed_has_no_interval_and_equal_seeds_an_empty_one():
    assert spread([80.0]) == {"n": 1, "mean": 80.0, "sd": None, "low": None, "high": None}
    assert spread([80.0, 80.0]) == {"n": 2, "mean": 80.0, "sd": 0.0, "low": 80.0, "high": 80.0}
    with pytest.raises(ValueError, match="values"):
        spread([])


def test_paired_difference_is_the_paired_t_interval_of_scipy():
    result = paired_difference(FIRST, SECOND)
    expected = stats.ttest_rel(FIRST, SECOND).confidence_interval(0.95)
    assert (result["low"], result["high"]) == pytest.approx(tuple(expected))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_p_counts_every_flip_of_signs(count):
    differences = np.subtract(FIRST, SECOND)[:count]
    flips = [abs(np.mean(differences * signs)) for signs in itertools.product((1, -1), repeat=count)]
    expected = np.mean([flip >= abs(differences.mean()) - 1e-12 for flip in flips])
    assert paired_difference(FIRST[:count], SECOND[:count])["p"] == pytest.approx(expected)


def test_p_of_twelve_seeds_is_exact_and_of_twenty_is_drawn_alike_each_time():
    generator = np.random.default_rng(0)
    difference = generator.normal(0.3, 0.5, 20)
    exact = stats.permutation_test((difference[:12],), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert paired_difference(difference[:12], np.zeros(12))["p"] == pytest.approx(exact.pvalue)
    many = [paired_difference(difference, np.zeros(20))["p"] for _ in range(2)]
    assert many[0] == many[1] == pytest.approx(stats.ttest_1samp(difference, 0).pvalue, abs=0.01)


def test_five_seeds_cannot_reach_five_per_cent():
    assert paired_difference([90] * 5, [10] * 5)["p"] == pytest.approx(2 / 2**5)


@pytest.mark.parametrize("comparisons", [1, 3, 10])
def test_fewest_seeds_are_the_first_that_can_show_one_difference_among_several(comparisons):
    def best(n):
        return holm([paired_difference([90] * n, [10] * n)["p"], *[1.0] * (comparisons - 1)])[0]

    n = fewest_seeds(comparisons)
    assert best(n) <= 0.05 < best(n - 1)


def test_arms_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="equal lengths"):
        paired_difference([1, 2, 3], [1, 2])


def test_one_seed_shows_nothing():
    one = paired_difference([1.0], [0.0])
    assert one["p"] == 1.0 and one["mean"] == 1.0 and one["sd"] is one["seeds_for_a_point"] is None


def test_holm_steps_down_and_never_decreases():
    # The example of Holm's procedure: 0.005 * 4, 0.01 * 3, 0.03 * 2, then the larger of 0.04 * 1 and the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


@pytest.mark.parametrize("comparisons", [1, 5])
@pytest.mark.parametrize(("sd", "difference"), [(0.84 * 2**0.5, 0.5), (1.12, 1.0), (3.0, 1.0)])
def test_seeds_needed_is_the_smallest_number_with_the_power(sd, difference, comparisons):
    def power(n):
        critical = stats.t.ppf(1 - 0.025 / comparisons, n - 1)
        noncentral = stats.nct(n - 1, difference / sd * n**0.5)
        return noncentral.sf(critical) + noncentral.cdf(-critical)

    n = seeds_needed(sd, difference, comparisons)
    assert power(n) >= 0.8 > power(n - 1)


@pytest.mark.parametrize(("sd", "comparisons"), [(1.0, 1), (0.5, 1), (0.86, 5), (0.6, 5), (0.4, 5), (0.2, 13)])
def test_so_many_seeds_find_the_difference_by_the_p_that_counts(sd, comparisons):
    """By the exact test at the first step of Holm's correction, in which few seeds must all agree."""
    n = seeds_needed(sd, 1.0, comparisons)
    draws = np.random.default_rng(0).normal(1.0, sd, (400, n))
    signs = np.array([*itertools.product((1, -1), repeat=n)][: 2 ** (n - 1)])  # the other half is the same
    p = np.mean(abs(draws @ signs.T) >= abs(draws.sum(1))[:, None] - 1e-9, axis=1)
    assert np.mean(p <= 0.05 / comparisons) > 0.74  # 0.8 less three standard errors


def test_equal_rounded_scores_are_ties():
    """Accuracies of 10,000 images: told apart by the rounding of 100 x score, p would be 0.047."""
    first, second = (4324, 4316, 4318, 4318, 4315, 4313, 4310), (4321, 4310, 4314, 4317, 4311, 4316, 4307)
    flips = [np.dot(np.subtract(first, second), signs) for signs in itertools.product((1, -1), repeat=7)]
    expected = np.mean(np.abs(flips) >= sum(first) - sum(second))
    scores = [[100 * (count / 10_000) for count in counts] for counts in (first, second)]
    assert paired_difference(*scores)["p"] == pytest.approx(expected)
