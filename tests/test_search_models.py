"""Solvable models against the reference numbers, and the statements about the risk that they can check exactly."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from simcse_weince.search import (
    DiscreteModel,
    SoftmaxLink,
    VonMisesFisherModel,
    WeibullLink,
    bias_bounds,
    bias_bounds_data,
    infonce_loss,
)

DISCRETE = ["D1_circle_tau0.5", "D2_sphere_tau0.2", "D3_wellspecified_tau0.25", "D5_sharp_tau0.07"]
VMF = ["V1_d3_kappa2_tau0.5", "V2_d16_kappa20_tau0.1", "V4_d8_kappa10_weibull1"]


@pytest.fixture(scope="module")
def reference(shared: Path) -> dict:
    return json.loads((shared / "reference" / "search_reference.json").read_text())


def random_model(seed: int, tau: float, m: int = 5) -> DiscreteModel:
    rng = np.random.default_rng(seed)
    emb = rng.normal(size=(m, 3))
    emb /= np.linalg.norm(emb, axis=1, keepdims=True)
    return DiscreteModel(rng.dirichlet(np.ones(m) * 3), rng.dirichlet(np.ones(m), m), emb=emb, link=SoftmaxLink(tau))


def discrete(case: dict) -> DiscreteModel:
    emb = case.get("emb") or np.stack([np.cos(case["angles"]), np.sin(case["angles"])], 1)
    return DiscreteModel(case["pi"], case["M_resolved"], emb=emb, link=SoftmaxLink(case["tau"]))


def vmf(case: dict) -> VonMisesFisherModel:
    link = SoftmaxLink(case["tau"]) if case["link"] == "softmax" else WeibullLink(case["beta"], case["eps"])
    return VonMisesFisherModel(case["d"], case["kappa"], link)


def tuples(model: DiscreteModel, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probability, density at the positive and at the negatives of every tuple of a small model."""
    m = len(model.corpus)
    index = np.array(list(itertools.product(range(m), repeat=k + 2)))
    pi, match, r = model.corpus.numpy(), model.positive.numpy(), model.density.numpy()
    chance = pi[index[:, 0]] * match[index[:, 0], index[:, 1]] * pi[index[:, 2:]].prod(1)
    return chance, r[index[:, 0], index[:, 1]], r[index[:, :1], index[:, 2:]]


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_models_equal_the_reference_numbers(reference: dict, name: str) -> None:
    case = reference["discrete"][name]
    model, expected = discrete(case), case["expected"]
    attributes = {"CE": "ce", "KL_M_pi": "kl_m_pi", "chi2_M": "chi2_m"} | {
        n: n for n in ("Er", "Ev", "cA", "cB", "c2A", "cE")
    }
    for key, attribute in attributes.items():
        assert getattr(model, attribute) == pytest.approx(expected[key], abs=1e-9), key
    for key, compute in (
        ("R", model.risk),
        ("R_decoupled_minus_logk", lambda k: model.decoupled_bias(k) + model.ce),
    ):
        np.testing.assert_allclose([compute(k) for k in expected["ks"]], expected[key], rtol=0, atol=1e-9, err_msg=key)
    found = [model.expected_search_ce(k) for k in expected["ks_EC"]]
    np.testing.assert_allclose(found, expected["EC"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(
        [model.risk(int(k)) for k in expected["R_mp"]], list(expected["R_mp"].values()), atol=1e-9
    )
    by_logits = DiscreteModel(case["pi"], case["M_resolved"], logits=case["logits"])
    assert by_logits.risk(4) == pytest.approx(model.risk(4), abs=1e-12)
    for k, (mean, se) in expected["R_mc"].items():
        assert abs(model.risk(int(k)) - mean) < 4.5 * se


@pytest.mark.parametrize("name", VMF)
def test_von_mises_fisher_models_equal_the_reference_numbers(reference: dict, name: str) -> None:
    case = reference["vmf"][name]
    model, expected = vmf(case), case["expected"]
    for key, attribute in {"CE": "ce", "KL_M_pi": "kl_m_pi", "Er": "Er", "Ev": "Ev", "cA": "cA", "cB": "cB"}.items():
        assert getattr(model, attribute) == pytest.approx(expected[key], abs=1e-9), key
    np.testing.assert_allclose([model.risk(k) for k in expected["ks"]], expected["R"], rtol=0, atol=1e-9)
    for k, (mean, se) in expected["R_mc"].items():
        assert abs(model.risk(int(k)) - mean) < 4.5 * se


@pytest.mark.parametrize("shared_pool", [True, False])
def test_samples_have_the_exact_risk(reference: dict, shared_pool: bool) -> None:
    models = [discrete(reference["discrete"]["D1_circle_tau0.5"]), vmf(reference["vmf"]["V1_d3_kappa2_tau0.5"])]
    for model in models:
        draws = [model.sample(200, 4, seed, shared_pool) for seed in range(100)]
        means = [float(infonce_loss(*map(torch.from_numpy, draw), tau=0.5)) for draw in draws]
        assert abs(np.mean(means) - model.risk(4)) < 4.5 * np.std(means) / 10


def test_models_refuse_what_is_no_law() -> None:
    laws, emb = np.full(2, 0.5), np.eye(2)
    for pi, match in (([0.5, 0.6], np.full((2, 2), 0.5)), (laws, np.ones((2, 2))), ([1.0, 0.0], np.full((2, 2), 0.5))):
        with pytest.raises(ValueError, match="pi"):
            DiscreteModel(np.array(pi), match, emb=emb, link=SoftmaxLink(1.0))
    with pytest.raises(ValueError, match="either logits"):
        DiscreteModel(laws, np.full((2, 2), 0.5), emb=emb)
    with pytest.raises(ValueError, match="no finite normaliser"):
        VonMisesFisherModel(8, 10, WeibullLink(3.5))
    assert VonMisesFisherModel(8, 10, WeibullLink(1.8, 1e-300)).Ev == math.inf


@pytest.mark.parametrize("tau", [0.2, 0.5, 2.0])
def test_t1_bias_is_between_its_bounds_for_every_law(tau: float) -> None:
    for seed in range(4):
        model = random_model(seed, tau)
        for k in (1, 2, 7, 60, 1000):
            for offset in ("log_k", "log_k1"):
                low, high = bias_bounds(k, tau, offset=offset)
                assert low - 1e-12 <= model.bias(k, offset) <= high + 1e-12
            assert abs(model.bias(k, "log_k")) <= math.exp(2 / tau) / k
            assert abs(model.bias(k, "log_k1")) <= math.expm1(2 / tau) / (k + 1)


def test_p12_p13_p14_bounds_of_the_data_hold_and_are_tighter() -> None:
    for seed in range(4):
        model = random_model(seed, 0.3)
        anchors, items = np.meshgrid(range(5), range(5), indexing="ij")
        # Exact weights as repetitions would need rational laws: one anchor at a time, positives from one law.
        r, v, a = model.density.numpy(), model._moment(2).numpy(), model.density.numpy().min(1)
        weights = (model.corpus[:, None] * model.positive).numpy()
        for k in (1, 5, 50, 2000):
            upper = sum(
                weights[x, y] * bias_bounds_data(r[x, y], v[x], k, a[x], offset="log_k")[1]
                for x, y in zip(anchors.flat, items.flat, strict=True)
            )
            lower = sum(
                model.corpus[x].item() * bias_bounds_data(r[x], v[x : x + 1], k, a[x], offset="log_k")[0]
                for x in range(5)
            )
            assert lower - 1e-12 <= model.decoupled_bias(k) <= 0
            assert lower - 1e-12 <= model.bias(k, "log_k") <= upper + 1e-12
            low_k1 = (-model.ce + k * lower) / (k + 1)
            assert low_k1 - 1e-12 <= model.bias(k, "log_k1")
            assert upper <= bias_bounds(k, 0.3, offset="log_k")[1] + 1e-12
            refined = sum(  # P1.3'
                weights[x, y] * (math.log1p(r[x, y] / k) - v[x] / (2 * k * (1 + r[x, y] / k) * (a[x] + r[x, y] / k)))
                for x, y in zip(anchors.flat, items.flat, strict=True)
            )
            assert refined - 1e-12 <= model.bias(k, "log_k")


def test_p15_fourth_order_sandwich() -> None:
    model, k = random_model(1, 0.5), 40
    r, v, skew = model.density, model._moment(2)[:, None], model._moment(3)[:, None]
    fourth, a = model._moment(4)[:, None], model.density.amin(1, keepdim=True)
    third = r / k - (v / k + r**2 / k**2) / 2 + (skew / k**2 + 3 * r * v / k**2 + r**3 / k**3) / 3
    power = fourth / k**3 + 3 * v**2 * (k - 1) / k**3 + 4 * r * skew / k**3 + 6 * r**2 * v / k**3 + r**4 / k**4
    law = model.corpus[:, None] * model.positive
    high, low = float((law * third).sum()), float((law * (third - power / (4 * a))).sum())
    assert low <= model.bias(k, "log_k") <= high


def test_p16_floor_and_cap() -> None:
    for seed in range(5):
        model = random_model(seed, 0.1)
        for k in (1, 3, 30, 1000):
            assert model.risk(k) - math.log(k + 1) >= max(-model.kl_m_pi, -math.log(k + 1)) - 1e-12


def test_p17_p110_monotone_in_k() -> None:
    for model in (random_model(0, 0.15), VonMisesFisherModel(16, 20, SoftmaxLink(0.1))):
        ks = [1, 2, 3, 5, 9, 40, 300]
        assert (np.diff([model.decoupled_bias(k) for k in ks]) > 0).all()
        assert (np.diff([model.risk(k) for k in ks]) > 0).all()


def test_p18_constants_and_the_1_over_k_law() -> None:
    for model in (random_model(2, 0.3), VonMisesFisherModel(3, 2, SoftmaxLink(0.5))):
        k = 20_000
        assert k * model.bias(k, "log_k") == pytest.approx(model.cA, rel=1e-2)
        assert k * (k * model.bias(k, "log_k") - model.cA) == pytest.approx(model.c2A, rel=1e-2)
        assert k * model.bias(k, "log_k1") == pytest.approx(model.cB, rel=1e-2, abs=1e-3)
        assert k * model.decoupled_bias(k) == pytest.approx(-model.Ev / 2, rel=1e-2)
    true = VonMisesFisherModel(3, 2, SoftmaxLink(0.5))
    assert true.ce == pytest.approx(-true.kl_m_pi, abs=1e-12)
    assert true.Er == pytest.approx(1 + true.Ev, abs=1e-12)


def test_p18_uniform_approximation_and_slopes_before_the_1_over_k_law() -> None:
    model = VonMisesFisherModel(16, 20, SoftmaxLink(0.1))
    slopes = [math.log2(model.bias(2 * k, "log_k") / model.bias(k, "log_k")) for k in (1, 4, 16, 64, 256, 1024, 4096)]
    np.testing.assert_allclose(slopes, [-0.25, -0.35, -0.50, -0.69, -0.85, -0.95, -0.99], atol=0.006)
    for k in (1, 16, 256, 65536):
        ratio = model.density / k
        near = float((model.positive * (ratio.log1p() - model.Ev / (2 * k * (1 + ratio) ** 2))).sum())
        assert near == pytest.approx(model.bias(k, "log_k"), rel=0.0215)


def test_p111_weight_of_the_positive() -> None:
    model, rho = random_model(3, 0.4), math.exp(5)
    for k in (1, 2, 3):
        chance, match, rest = tuples(model, k)
        mean = float(chance @ (match / (match + rest.sum(1))))
        assert float(chance @ (match / (match + k))) - 1e-12 <= mean <= rho / (rho + k)


def test_p112_gradients_differ_by_order_1_over_k() -> None:
    base, direction = random_model(4, 0.5), np.random.default_rng(0).normal(size=(5, 5))

    def gap(step: float, k: int) -> float:
        logits = base.logits.numpy() + step * direction
        return DiscreteModel(base.corpus.numpy(), base.positive.numpy(), logits=logits).bias(k, "log_k")

    r, v = base.density, base._moment(2)
    change = torch.from_numpy(direction)
    centred = change - (r * change) @ base.corpus[:, None]
    most, cross = centred.abs().amax(1), ((r**2 * centred) @ base.corpus).abs()
    squares = (base.positive * r**2).sum(1)
    for k in (2, 3):
        chance, match, rest = tuples(base, k)
        index = np.array(list(itertools.product(range(5), repeat=k + 2)))[:, 0]
        own = float((chance * most.numpy()[index]) @ (match / (match + rest.sum(1))))
        bound = float(base.corpus @ ((cross + most * v) / k + most * squares / k**2)) + own
        assert abs(gap(1e-4, k) - gap(-1e-4, k)) / 2e-4 <= bound
    scaled = [k * (gap(1e-3, k) - gap(-1e-3, k)) / 2e-3 for k in (500, 1000, 2000)]
    assert scaled[2] == pytest.approx(scaled[1], rel=0.05)


def test_p113_minimisers_differ_by_order_1_over_k_squared() -> None:
    def model(inverse: float) -> DiscreteModel:
        emb = np.stack([np.cos([0.0, 0.5, 1.8, 3.4]), np.sin([0.0, 0.5, 1.8, 3.4])], 1)
        match = np.array([[0.6, 0.3, 0.1, 0], [0.25, 0.5, 0.2, 0.05], [0.1, 0.1, 0.7, 0.1], [0.05, 0.15, 0.3, 0.5]])
        return DiscreteModel(np.array([0.4, 0.3, 0.2, 0.1]), match, emb=emb, link=SoftmaxLink(1 / inverse))

    def lowest(objective: object) -> float:
        return minimize_scalar(objective, bounds=(0.05, 6), method="bounded", options={"xatol": 1e-10}).x

    best = model(lowest(lambda v: model(v).ce))
    excess = []
    for k in (32, 64, 128):
        found = model(lowest(lambda v, k=k: model(v).risk(k)))
        excess.append(found.ce - best.ce)
        assert 0 <= excess[-1] <= best.bias(k) - found.bias(k) + 1e-9
    assert excess[0] / excess[1] == pytest.approx(4, rel=0.2)
    assert excess[1] / excess[2] == pytest.approx(4, rel=0.2)


def test_t2_risk_is_the_weighted_expected_search_cross_entropy() -> None:
    model = random_model(5, 0.3, m=4)
    pi, w, logits = model.corpus.numpy(), model.weight.numpy(), model.logits.numpy()
    for k in (1, 2, 3):
        total = 0.0
        for index in itertools.product(range(4), repeat=k + 1):
            items = list(index)
            shares = w[:, items] / w[:, items].sum(1, keepdims=True)
            ce = np.log(np.exp(logits[:, items]).sum(1)) - (shares * logits[:, items]).sum(1)
            total += pi[items].prod() * float(pi @ (w[:, items].mean(1) * ce))
        assert total == pytest.approx(model.risk(k), abs=1e-10)


def test_t2a_t2b_t2c_and_p19_second_interpretation() -> None:
    for seed in range(3):
        model = random_model(seed, 0.6)
        rho, delta = math.exp(2 / 0.6), 2 / 0.6
        chi2 = ((model.weight - 1) ** 2) @ model.corpus
        mean = (model.positive * model.logits).sum(1, keepdim=True)
        gamma = ((model.positive * (model.logits - mean) * model.weight).sum(1)).abs()
        tv = ((model.weight - 1).abs() @ model.corpus) / 2
        average = model._mean
        assert bool((gamma <= delta * (chi2 + tv)).all())
        for k in (1, 4, 16, 64):
            first = average((rho - 1) * chi2.sqrt() / 2 + gamma + delta * chi2) / (k + 1)
            assert abs(model.risk(k) - model.expected_search_ce(k + 1)) <= first
            assert abs(model.risk(k) - model.expected_search_ce(k)) <= (rho + average(gamma + delta * chi2)) / k
            third = (math.expm1(delta / 2) ** 2 / 2 + delta * average(2 * chi2 + tv)) / k
            assert abs(model.expected_search_ce(k) - math.log(k) - model.ce) <= third
        size = 20_000
        assert size * (model.expected_search_ce(size) - math.log(size) - model.ce) == pytest.approx(model.cE, abs=0.02)


def test_section57_steep_shortfall_link_has_a_slower_rate() -> None:
    model = VonMisesFisherModel(8, 10, WeibullLink(2.5, 1e-300))
    ks = [2**10, 2**12, 2**14]
    slopes = np.diff(np.log([-model.decoupled_bias(k) for k in ks])) / math.log(4)
    np.testing.assert_allclose(slopes, 1 - 3.5 / 2.5, atol=0.03)


def test_section57_best_links_of_the_vmf_model() -> None:
    def cross_entropy(beta: float) -> float:
        return VonMisesFisherModel(8, 10, WeibullLink(beta, 1e-300)).ce

    best = minimize_scalar(cross_entropy, bounds=(1, 3.2), method="bounded")
    assert best.x == pytest.approx(2.547, abs=1e-3) and best.fun == pytest.approx(-2.163990, abs=1e-6)
    assert VonMisesFisherModel(8, 10, SoftmaxLink(0.1)).ce == pytest.approx(-2.539519, abs=1e-6)
