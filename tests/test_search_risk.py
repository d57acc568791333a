"""Risk and bias curves, recommendations and comparisons against models whose answers are known."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from simcse_weince.search import (
    CosineRows,
    DiscreteModel,
    HeavyTailWarning,
    NestedLink,
    SelfMatchWarning,
    SmallPoolWarning,
    SoftmaxLink,
    VonMisesFisherModel,
    WeibullLink,
    bias_bounds,
    bias_bounds_data,
    bias_curve,
    compare_links,
    extrapolate_risk,
    gap_curve,
    generalization_bound,
    infonce_loss,
    optimal_temperature,
    recommend_k,
    relevance_cross_entropy,
    risk_curve,
    search_cross_entropy,
    temperature_sweep,
)
from simcse_weince.search.kernels import BLOCK, READ, Pairs

pytestmark = pytest.mark.filterwarnings("ignore::simcse_weince.search.SmallPoolWarning")
MODEL = VonMisesFisherModel(8, 6, SoftmaxLink(0.2))


@pytest.fixture(scope="module")
def draw() -> tuple[np.ndarray, np.ndarray]:
    return MODEL.sample(400, 600, seed=1)


def hub_model() -> DiscreteModel:
    """Every anchor searches its way to item 0, a fifth of the corpus; the samples are logits."""
    pi = np.array([0.2, 0.4, 0.4])
    return DiscreteModel(pi, np.tile(pi, (3, 1)), logits=np.tile([1.5, 0.0, 0.0], (3, 1)))


def test_complete_u_statistic_equals_all_subsets() -> None:
    rng = np.random.default_rng(0)
    pos, neg = rng.uniform(-1, 1, (3, 2)), rng.uniform(-1, 1, (3, 6))
    found = risk_curve(pos, neg, [1, 3, 6], tau=0.2, estimator="complete", offset="none").per_anchor
    for row, k in enumerate((1, 3, 6)):
        for anchor in range(3):
            losses = [
                logsumexp(np.r_[own, neg[anchor, list(subset)]] / 0.2) - own / 0.2
                for own in pos[anchor]
                for subset in itertools.combinations(range(6), k)
            ]
            assert found[row, anchor] == pytest.approx(np.mean(losses), abs=1e-10)


def test_blocks_tend_to_the_complete_u_statistic(draw: tuple) -> None:
    pos, neg = draw[0][:10], draw[1][:10, :24]
    complete = risk_curve(pos, neg, [1, 4, 24], tau=0.2, estimator="complete")
    blocks = risk_curve(pos, neg, [1, 4, 24], tau=0.2, n_perm=2000)
    np.testing.assert_allclose(blocks.per_anchor, complete.per_anchor, atol=0.03)
    np.testing.assert_allclose(blocks.per_anchor[[0, 2]], complete.per_anchor[[0, 2]], atol=1e-10)
    again = risk_curve(pos, neg, [1, 4, 24], tau=0.2, n_perm=2000)
    assert np.array_equal(again.value, blocks.value)


def test_risk_curve_covers_the_exact_risk_and_is_finite_at_tau_001(draw: tuple) -> None:
    curve = risk_curve(*draw, [1, 8, 64, 256], tau=0.2, offset="none", level=0.999)
    exact = np.array([MODEL.risk(int(k)) for k in curve.k])
    assert ((curve.lo < exact) & (exact < curve.hi)).all()
    cold = risk_curve(*draw, [1, 64], tau=0.01)
    assert np.isfinite(cold.value).all() and np.isfinite(cold.per_anchor).all()
    assert json.loads(json.dumps(curve.to_dict()))["k"] == [1, 8, 64, 256]


def test_risk_curve_refuses_what_it_cannot_estimate(draw: tuple) -> None:
    for ks, words in (
        ([601], "pool size"),
        ([0], "at least 1"),
        ([True], "at least 1"),
        ([], "empty"),
        ([2.0], "integer"),
        ([1, 2**70], "at most 2\\^53"),
    ):
        with pytest.raises(ValueError, match=words):
            risk_curve(*draw, ks, tau=0.2)
    with pytest.raises(ValueError, match="estimator"):
        risk_curve(*draw, [1], tau=0.2, estimator="exact")
    with pytest.raises(ValueError, match="too slow"):
        risk_curve(np.zeros(20_000), np.zeros((20_000, 1000)), [900], tau=1.0, estimator="complete")
    with pytest.raises(ValueError, match="level"):
        risk_curve(*draw, [1], tau=0.2, level=1.0)


def test_bias_curve_covers_the_exact_bias_and_constants(draw: tuple) -> None:
    curve = bias_curve(*draw, [1, 4, 16, 64, 256, 1024, 4096], tau=0.2, level=0.999)
    exact = np.array([MODEL.bias(int(k)) for k in curve.k])
    assert ((curve.lo < exact) & (exact < curve.hi)).all()
    assert abs(curve.cA - MODEL.cA) < 3.5 * curve.cA_se and curve.cB == pytest.approx(curve.cA - 1)
    assert curve.fit[0] == pytest.approx(curve.cB, rel=0.05)
    assert curve.loglog_slope == pytest.approx(-1, abs=0.06) and curve.slope_range == (16, 4096)


def test_a_temperature_too_cold_for_float64_is_named() -> None:
    pos, neg = np.ones(20), -np.ones((20, 9))
    with pytest.raises(ValueError, match="temperature above 0.0034"):
        bias_curve(pos, neg, [1], tau=0.002)
    with pytest.raises(ValueError, match="temperature above 0.0034"):
        recommend_k(pos, neg, 0.01, tau=0.002)
    assert search_cross_entropy(pos, neg, tau=0.002).value == pytest.approx(-1000)
    assert bias_curve(pos, neg, [1], tau=0.01).bias[0] == pytest.approx(200 - math.log(2))
    assert math.log(recommend_k(pos, neg, 0.01, tau=0.01).k_safe_upper) == pytest.approx(200 + math.log(100), abs=6)
    assert recommend_k(-pos, neg, 0.01, tau=0.002).k_worst_case is None
    assert math.log(recommend_k(pos, neg, 1e-12, tau=0.0034).k_worst_case) == pytest.approx(2 / 0.0034 + 27.6, abs=1)


def test_pairing_makes_the_bias_far_more_exact_than_the_risk(draw: tuple) -> None:
    bias, risk = bias_curve(*draw, [256], tau=0.2), risk_curve(*draw, [256], tau=0.2)
    assert bias.se[0] < risk.se[0] / 5


def test_o_1_over_k_estimated_bias_times_k_becomes_constant_far_below_the_naive_rate(draw: tuple) -> None:
    ks = np.array([256, 1024, 4096])
    curve = bias_curve(*draw, ks.tolist(), tau=0.2)
    scaled = ks * curve.bias
    np.testing.assert_allclose(scaled[1:], scaled[:-1], rtol=0.03)
    naive = (math.exp(10) - 1) / (2 * np.sqrt(ks)) + math.exp(10) / ks
    assert (np.abs(curve.bias) < naive / 1000).all()


def test_section55_richardson_extrapolates_to_the_cross_entropy() -> None:
    exact = [MODEL.bias(k) for k in (64, 128)]
    assert abs(2 * exact[1] - exact[0]) < abs(exact[1]) / 3
    pos, neg = MODEL.sample(3000, 512, 3)
    curve = risk_curve(pos, neg, [32, 64, 128], tau=0.2, offset="none", n_perm=2)
    for order in (1, 2):
        value, se = extrapolate_risk(curve, order)
        assert abs(value - MODEL.ce) < 3.5 * se + 0.01
    pair = extrapolate_risk(risk_curve(pos, neg, [64, 128], tau=0.2, n_perm=2), 1)[0]
    shifted = curve.value[1:] - np.log1p([64, 128])
    assert pair == pytest.approx(2 * shifted[1] - shifted[0], abs=1e-9)
    with pytest.raises(ValueError, match="3 different k"):
        extrapolate_risk(risk_curve(pos[:5], neg[:5], [1, 2], tau=0.2), 2)


def test_of_one_anchor_no_number_is_recommended_as_the_error_is_unknown() -> None:
    advice = recommend_k(np.array([0.5]), np.linspace(-0.5, 0.4, 50)[None], 0.01, tau=0.1)
    assert advice.k_plug is None and "for no k up to" in advice.note


def test_recommendations_are_ordered_and_near_the_truth() -> None:
    pos, neg = MODEL.sample(1500, 1500, 5)
    found, tol = recommend_k(pos, neg, 0.05, tau=0.2), 0.05
    exact = next(k for k in range(1, 10_000) if abs(MODEL.bias(k)) <= tol)
    assert exact * 0.8 < found.k_asymptotic < exact * 1.35
    assert found.k_asymptotic * 0.7 < found.k_plug < exact * 1.6
    assert found.k_safe_upper <= math.ceil((found.Er - 1) / tol)
    assert max(map(abs, bias_bounds(found.k_worst_case, 0.2))) <= tol
    assert max(map(abs, bias_bounds(found.k_worst_case - 1, 0.2))) > tol
    for number in (found.k_plug, found.k_asymptotic, found.k_safe_upper):
        assert str(number) in found.note
    with pytest.raises(ValueError, match="tol"):
        recommend_k(pos, neg, 0.0, tau=0.2)
    with pytest.raises(ValueError, match="tol must be at least 1e-12"):
        recommend_k(pos, neg, 1e-300, tau=0.2)


def test_the_safe_number_holds_from_there_on_where_few_positives_are_near() -> None:
    rng = np.random.default_rng(0)
    neg = rng.normal(0, 0.125, (300, 400)).clip(-1, 1)  # as of unit vectors in 64 dimensions
    for near, far, tol in ((0.9, -0.4, 0.01), (0.9, -0.4, 0.2), (0.9, -0.4, 5.0), (-0.4, -0.4, 0.01), (0.6, 0.2, 0.01)):
        pos = np.where(np.arange(300) < 30, near, far)
        found, excess = recommend_k(pos, neg, tol, tau=0.2), search_cross_entropy(pos, neg, tau=0.2).r_pos - 1
        ks = np.arange(1, max(2, math.ceil(excess.mean() / tol)))  # above, it holds by log1p(x) <= x
        above = np.flatnonzero(np.log1p(excess / (ks[:, None] + 1)).mean(1) > tol)
        assert found.k_safe_upper == (above[-1] + 2 if len(above) else 1), (near, far, tol)
    pos = np.where(np.arange(300) < 30, 0.9, -0.4)
    assert bias_curve(pos, neg, [10], tau=0.2).bias[0] > 0.1  # and yet the bound is below 0 at k = 1
    assert recommend_k(pos, neg, 0.01, tau=0.2).k_plug is not None


def test_p24_optimal_temperature_solves_the_moment_equation(draw: tuple) -> None:
    pos, neg = draw
    fit = optimal_temperature(pos, neg)
    weights = np.exp((neg - 1) / fit.tau)
    assert float(((weights / weights.sum(1, keepdims=True)) * neg).sum(1).mean()) == pytest.approx(pos.mean(), abs=1e-8)
    assert fit.tau == pytest.approx(1 / 6, rel=0.15) and not fit.at_bound
    near = [search_cross_entropy(pos, neg, tau=fit.tau * f).plugin for f in (0.97, 1.0, 1.03)]
    assert near[1] < min(near[0], near[2])
    assert optimal_temperature(-np.ones(400), neg).at_bound
    assert optimal_temperature(np.ones(400), neg, bounds=(0.05, 2.0)).tau == 0.05


def test_p24_risk_and_cross_entropy_are_convex_in_inverse_temperature() -> None:
    models = [VonMisesFisherModel(8, 6, SoftmaxLink(1 / v)) for v in np.linspace(1, 15, 15)]
    for values in ([m.ce for m in models], [m.risk(7) for m in models]):
        assert (np.diff(values, 2) > 0).all()


def test_temperature_sweep_is_between_its_bounds(draw: tuple) -> None:
    sweep = temperature_sweep(*draw, [0.05, 0.2, 0.8], ks=[4, 64])
    for column in (sweep.KL_Q_pi, sweep.KL_pi_Q):
        assert (column <= sweep.kl_bound).all() and (np.diff(column) < 0).all()
    assert (sweep.lower < sweep.ce).all() and (sweep.ce < sweep.upper).all() and (np.diff(sweep.ess) > 0).all()
    assert (-sweep.ce <= sweep.capacity + 1e-9).all()
    np.testing.assert_allclose(sweep.bias_k[1], bias_curve(*draw, [4, 64], tau=0.2).bias)
    assert sweep.ce[1] == pytest.approx(search_cross_entropy(*draw, tau=0.2).value)
    assert temperature_sweep(*draw, [0.2]).bias_k.shape == (1, 0)
    with pytest.raises(ValueError, match="taus"):
        temperature_sweep(*draw, [])


def test_section56_links_are_compared_on_held_out_anchors() -> None:
    pos, neg = VonMisesFisherModel(16, 10, SoftmaxLink(0.1)).sample(800, 800, 2)
    with pytest.warns(HeavyTailWarning, match="half the tail index"):
        found = compare_links(pos, neg, [SoftmaxLink(1.0), WeibullLink(1.0), NestedLink(5.0, 0.5)])
    assert found.warnings[0] == "" != found.warnings[1]
    assert found.params[0]["tau"] == pytest.approx(0.1, rel=0.1)
    assert found.diff_to_first[1] > 3 * found.diff_se[1]  # the softmax link is the true one
    assert abs(found.diff_to_first[2]) < 0.02 and found.diff_to_first[0] == found.diff_se[0] == 0
    assert (found.diff_se[1:] < found.se[1:]).all()
    assert found.alpha_hat == pytest.approx(7.5, rel=0.25)
    given = compare_links(pos, neg, [SoftmaxLink(0.1), SoftmaxLink(0.3)], calibrate=False)
    direct = [search_cross_entropy(pos, neg, tau=tau).value for tau in (0.1, 0.3)]
    np.testing.assert_allclose(given.ce, direct)
    json.dumps(found.to_dict())


def test_section56_links_that_a_pool_cannot_tell_apart_say_so() -> None:
    found = compare_links(np.full(40, 0.9), MODEL.sample(40, 30, 0)[1].clip(max=0.8), [SoftmaxLink(0.1)])
    assert found.params[0]["tau"] == pytest.approx(1e-3) and "outscore this pool" in found.warnings[0]


def test_gap_curve_is_zero_within_error_for_the_same_law() -> None:
    train, test = (MODEL.sample(300, 200, seed) for seed in (0, 1))
    gap = gap_curve(train, test, [1, 16], tau=0.2)
    assert (np.abs(gap.gap) < 3.5 * gap.se).all()
    np.testing.assert_allclose(gap.gap, gap.test - gap.train)


def test_t3_risk_gap_is_within_the_bound_of_independent_tuples() -> None:
    errors = []
    for seed in range(20):
        pos, neg = MODEL.sample(500, 8, seed, shared_pool=False)
        errors.append(risk_curve(pos, neg, [8], tau=0.2, offset="none", shared_pool=False).value[0] - MODEL.risk(8))
    assert np.abs(errors).max() < generalization_bound(500, 1, 1e-9, 0.2, 8)["variability"]


def test_pitfall01_offsets_differ_by_log_2_at_one_negative_and_the_decoupled_bias_is_negative(draw: tuple) -> None:
    one, other = (risk_curve(*draw, [1], tau=0.2, offset=o).value[0] for o in ("log_k", "log_k1"))
    assert one - other == pytest.approx(math.log(2))
    one, other = (bias_curve(*draw, [1], tau=0.2, offset=o).bias[0] for o in ("log_k", "log_k1"))
    assert one - other == pytest.approx(math.log(2))
    pos, neg = map(torch.from_numpy, draw)
    ce = search_cross_entropy(*draw, tau=0.2)
    decoupled = infonce_loss(pos, neg[:, :4], tau=0.2, positive_in_denominator=False, offset="log_k")
    assert float(decoupled) < ce.plugin and MODEL.decoupled_bias(4) < 0 < MODEL.bias(4, "log_k")


@pytest.mark.filterwarnings("ignore::simcse_weince.search.SelfMatchWarning")
def test_pitfall02_other_anchors_positives_and_masks_change_the_limit() -> None:
    pi, rng = np.array([0.5, 0.1, 0.1, 0.1, 0.1, 0.1]), np.random.default_rng(0)
    model = DiscreteModel(pi, np.full((6, 6), 1 / 6), emb=np.eye(6), link=SoftmaxLink(0.4))
    anchors, positives = rng.choice(6, 2000, p=pi), rng.choice(6, 2000)
    corpus, batch = rng.choice(6, 1000, p=pi), positives[:1000]
    s = np.eye(6)
    pos, neg = s[anchors, positives], s[anchors][:, corpus]
    right = search_cross_entropy(pos, neg, tau=0.4)
    in_batch = search_cross_entropy(pos, s[anchors][:, batch], tau=0.4)
    assert abs(right.value - model.ce) < 4 * right.se < abs(in_batch.value - model.ce)
    mask = torch.from_numpy(corpus != anchors[:, None])
    masked = infonce_loss(torch.from_numpy(pos), torch.from_numpy(neg), tau=0.4, offset="log_k1", mask=mask)
    assert abs(float(masked) - model.ce) > 4 * right.se


def test_pitfall03_anchor_in_its_own_pool_warns_and_spoils_the_shortfall_link(draw: tuple) -> None:
    pos, neg = draw[0][:100], draw[1][:100].copy()
    clean = search_cross_entropy(pos, neg, link=WeibullLink(1.5, 1e-6)).value
    neg[:, 0] = 1.0
    with pytest.warns(SelfMatchWarning, match="remove it"), pytest.warns(HeavyTailWarning):
        dirty = search_cross_entropy(pos, neg, link=WeibullLink(2.0, 1e-6)).value
    assert dirty > clean + 5
    with pytest.warns(SelfMatchWarning):
        assert (
            search_cross_entropy(pos, neg, tau=0.05).value > search_cross_entropy(pos, neg[:, 1:], tau=0.05).value + 1
        )


def test_pitfall04_shared_pool_needs_the_error_of_its_hubs() -> None:
    model, inside = hub_model(), {True: 0, False: 0}
    for seed in range(150):
        pos, neg = model.sample(400, 80, seed)
        for shared_pool in inside:
            found = search_cross_entropy(pos, neg, tau=1.0, shared_pool=shared_pool, unbounded=True)
            inside[shared_pool] += found.lo < model.ce < found.hi
    assert inside[True] / 150 > 0.9 and inside[False] / 150 < 0.6


def test_pitfall05_worst_case_is_meaningless_when_cold_and_the_data_bound_is_not(draw: tuple) -> None:
    model = VonMisesFisherModel(8, 10, SoftmaxLink(0.1))
    result = search_cross_entropy(*model.sample(400, 3000, 0), tau=0.1)
    worst = bias_bounds(1024, 0.1)
    low, high = bias_bounds_data(result.r_pos, result.chi2, 1024, delta=20.0, ce=result.value)
    assert worst[1] > 13 and 0 < high < 0.05 and worst[0] < low < 0
    assert low < model.bias(1024) < high * 1.2


def test_pitfall06_slope_is_only_fitted_where_the_1_over_k_law_holds() -> None:
    model = VonMisesFisherModel(16, 20, SoftmaxLink(0.1))
    pos, neg = model.sample(200, 1500, 0)
    early = bias_curve(pos, neg, [1, 2, 4, 8], tau=0.1, max_anchors=64)
    assert math.isnan(early.loglog_slope) and early.slope_range is None and math.isnan(early.fit[0])
    late = bias_curve(pos, neg, [1, 8, 2**10, 2**12, 2**14], tau=0.1, max_anchors=64)
    assert late.slope_range == (2**10, 2**14) and late.loglog_slope == pytest.approx(-1, abs=0.05)
    assert late.asymptotic_from > 30


def test_pitfall07_float32_input_keeps_the_1_over_k_signal(draw: tuple) -> None:
    pos, neg = (a[:40].astype(np.float32) for a in draw)
    k = 10**6
    curve, single = bias_curve(pos, neg, [k], tau=0.2), bias_curve(*(a[:40] for a in draw), [k], tau=0.2)
    assert k * curve.bias[0] == pytest.approx(curve.cB, rel=1e-3)
    assert curve.bias[0] == pytest.approx(single.bias[0], rel=1e-3)


def test_pitfall08_saturation_at_log_k1_means_too_few_negatives() -> None:
    model = VonMisesFisherModel(32, 80, SoftmaxLink(1 / 80))
    for k in (4, 64):
        information = math.log(k + 1) - model.risk(k)
        assert information <= min(model.kl_m_pi, math.log(k + 1))
        assert information == pytest.approx(math.log(k + 1), abs=0.01) and model.kl_m_pi > 2 * math.log(k + 1)


def test_pitfall09_plug_in_is_optimistic_when_cold_and_the_bracket_shows_it() -> None:
    model = VonMisesFisherModel(8, 6, SoftmaxLink(0.04))
    pos, neg = model.sample(2000, 100, 0)
    with pytest.warns(SmallPoolWarning):
        found = search_cross_entropy(pos, neg, tau=0.04)
    assert found.plugin == found.lower < model.ce - 0.1 and found.upper > model.ce
    assert found.ess_median < 30 < search_cross_entropy(pos, neg, tau=0.4).ess_median


def test_pitfall10_dependent_tuples_vary_more_than_the_bound_of_independent_ones_allows() -> None:
    model, values = hub_model(), {True: [], False: []}
    for seed in range(60):
        for shared_pool, risks in values.items():
            pos, neg = model.sample(800, 8, seed, shared_pool)
            risks.append(float(infonce_loss(torch.from_numpy(pos), torch.from_numpy(neg), tau=1.0)))
    assert np.std(values[True]) > 3 * np.std(values[False])


def test_a_large_lazy_pool_is_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, read = np.random.default_rng(0), []
    rows = CosineRows(rng.normal(size=(200, 4)), rng.normal(size=(40_000, 4)))
    plain = CosineRows.__getitem__
    monkeypatch.setattr(CosineRows, "__getitem__", lambda self, index: read.append(plain(self, index)) or read[-1])
    risk_curve(np.full(200, 0.5), rows, [1, 1000], tau=0.2, n_perm=1)
    assert max(block.numel() for block in read) <= READ
    assert max(pool.numel() for _, _, pool in Pairs(np.full(200, 0.5), rows)) <= BLOCK


def test_section58_relevance_cross_entropy_splits_into_entropy_and_divergence() -> None:
    rng = np.random.default_rng(1)
    sim, rel = rng.uniform(-1, 1, (4, 6)), rng.integers(0, 3, (4, 6)) + np.eye(4, 6)
    found = relevance_cross_entropy(sim, rel, tau=0.3)
    q, m = np.exp(sim / 0.3), rel / rel.sum(1, keepdims=True)
    q /= q.sum(1, keepdims=True)
    np.testing.assert_allclose(found.ce, -(m * np.log(q)).sum(1))
    np.testing.assert_allclose(found.entropy + found.kl, found.ce)
