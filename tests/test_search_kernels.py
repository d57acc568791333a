"""Links, the InfoNCE loss and the search cross-entropy against formulas, reference numbers and solvable models."""

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from simcse_weince.search import (
    CosineRows,
    DiscreteModel,
    HeavyTailWarning,
    NestedLink,
    SmallPoolWarning,
    SoftmaxLink,
    VonMisesFisherModel,
    WeibullLink,
    as_link,
    bias_curve,
    infonce_loss,
    kernels as kernels_module,
    relevance_cross_entropy,
    risk_curve,
    search_cross_entropy,
    shortfall_tail_index,
)
from simcse_weince.search.kernels import Link, Pairs, pool_sums

pytestmark = pytest.mark.filterwarnings("ignore::simcse_weince.search.SmallPoolWarning")

LINKS = {
    "softmax_tau0.5": SoftmaxLink(0.5),
    "softmax_tau0.1": SoftmaxLink(0.1),
    "weibull_beta1.0_eps0.001": WeibullLink(1.0, 1e-3),
}


@pytest.fixture(scope="module")
def estimators(shared: Path) -> dict:
    return json.loads((shared / "reference" / "search_reference.json").read_text())["estimators"]


@pytest.mark.parametrize("name", LINKS)
def test_estimators_equal_the_reference_numbers(estimators: dict, name: str) -> None:
    pos, neg, link = np.array(estimators["pos"]), np.array(estimators["neg"]), LINKS[name]
    expected = {key: np.array(value) for key, value in estimators["cases"][name].items()}
    ce, sums = search_cross_entropy(pos, neg, link=link), pool_sums(Pairs(pos, neg), link)
    complete = risk_curve(pos, neg, range(1, 8), link=link, estimator="complete", offset="none")
    relevance = relevance_cross_entropy(neg, estimators["relevance"], link=link)
    loss = infonce_loss(torch.tensor(pos), torch.tensor(neg), link=link, reduction="none")
    found = {
        "loss_all_negatives": loss.numpy(),
        "complete_ustat_k1_to_7": complete.per_anchor.T,
        "vstat_bias_logk_k1_2_3_5": bias_curve(pos, neg, [1, 2, 3, 5], link=link, offset="log_k").per_anchor.T,
        "logZ_hat": ce.log_Z,
        "chi2_hat_ddof1": ce.chi2,
        "r_pos": ce.r_pos,
        "ce_debiased": ce.per_anchor,
        "ce_upper_crossfit_cols_0to2_3to6": sums.crossfit.numpy() - sums.positive[:, 0].numpy(),
        "hubness_g": sums.hubness.numpy(),
        "cA_hat": ce.r_pos.mean() - ce.chi2.mean() / 2,
        "search_ce_relevance": relevance.ce,
        "search_entropy": relevance.entropy,
        "search_kl": relevance.kl,
    }
    for key, value in found.items():
        np.testing.assert_allclose(value, expected[key], rtol=0, atol=1e-10, err_msg=key)
    assert ce.plugin == ce.lower == pytest.approx(expected["ce_plugin"].mean(), abs=1e-12)
    assert ce.upper == pytest.approx(expected["ce_upper_crossfit_cols_0to2_3to6"].mean(), abs=1e-10)
    assert ce.ess_median == pytest.approx(np.median(expected["ess"]), abs=1e-10)
    assert relevance.empty_rows.tolist() == [False, False, False, True]
    np.testing.assert_allclose(relevance.ce_minus_logN, relevance.ce - math.log(7))
    blocks = risk_curve(pos, neg, [7], link=link, offset="none").per_anchor[0]
    np.testing.assert_allclose(blocks, expected["loss_all_negatives"], atol=1e-12)


def test_links_agree_on_their_family_and_their_range() -> None:
    s = torch.linspace(-1, 1, 9, dtype=torch.float64)
    torch.testing.assert_close(NestedLink(5.0, 0.0).logit(s), SoftmaxLink(0.2).logit(s))
    torch.testing.assert_close(NestedLink(0.0, 1.5).logit(s), WeibullLink(1.5).logit(s))
    both = NestedLink(5.0, 1.5, 1e-3).logit(s)
    torch.testing.assert_close(both, SoftmaxLink(0.2).logit(s) + WeibullLink(1.5, 1e-3).logit(s))
    for link in (SoftmaxLink(0.2), WeibullLink(1.5, 1e-3), NestedLink(5.0, 1.5, 1e-3)):
        logits = link.logit(s)
        assert float(logits[-1] - logits[0]) == pytest.approx(link.range)


@pytest.mark.parametrize("tau", [0.0, -1.0, math.inf, math.nan, True])
def test_bad_temperature_is_refused(tau: float) -> None:
    with pytest.raises(ValueError, match="tau"):
        SoftmaxLink(tau)


def test_links_refuse_what_has_no_meaning() -> None:
    for make in (lambda: WeibullLink(0.0), lambda: WeibullLink(1.0, 2.0), lambda: NestedLink(0.0, 0.0)):
        with pytest.raises(ValueError, match="beta|eps|theta"):
            make()
    with pytest.raises(ValueError, match="negative"):
        NestedLink(-1.0, 2.0)
    for wrong in ({}, {"tau": 1.0, "link": SoftmaxLink(1.0)}):
        with pytest.raises(ValueError, match="exactly one"):
            as_link(**wrong)


def test_loss_is_the_cross_entropy_of_the_positive_column() -> None:
    torch.manual_seed(0)
    pos, neg = torch.rand(5) * 2 - 1, torch.rand(5, 9) * 2 - 1
    logits = torch.cat([pos[:, None], neg], 1) / 0.07
    wanted = torch.nn.functional.cross_entropy(logits, torch.zeros(5, dtype=torch.long))
    torch.testing.assert_close(infonce_loss(pos, neg, tau=0.07), wanted)
    torch.testing.assert_close(infonce_loss(pos, neg, tau=0.07, offset="log_k1"), wanted - math.log(10))
    decoupled = infonce_loss(pos, neg, tau=0.07, positive_in_denominator=False, offset="log_k")
    torch.testing.assert_close(decoupled, (logits[:, 1:].logsumexp(1) - logits[:, 0]).mean() - math.log(9))
    several = infonce_loss(torch.stack([pos, -pos], 1), neg, tau=0.07)
    torch.testing.assert_close(several, (wanted + infonce_loss(-pos, neg, tau=0.07)) / 2)


def test_loss_with_a_mask_equals_the_loss_of_the_columns_left() -> None:
    torch.manual_seed(1)
    pos, neg = torch.rand(2, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, True, True], [False, True, False, False]])
    rows = infonce_loss(pos, neg, tau=0.2, mask=mask, offset="log_k1", reduction="none")
    for row in range(2):
        alone = infonce_loss(pos[row : row + 1], neg[row : row + 1, mask[row]], tau=0.2, offset="log_k1")
        torch.testing.assert_close(rows[row], alone)
    rows.sum().backward()
    assert neg.grad is not None and bool((neg.grad[~mask] == 0).all()) and bool(neg.grad.isfinite().all())
    with pytest.raises(ValueError, match="without a negative"):
        infonce_loss(pos, neg, tau=0.2, mask=torch.zeros(2, 4, dtype=torch.bool))


@pytest.mark.parametrize("link", [SoftmaxLink(0.3), WeibullLink(1.5, 1e-3), NestedLink(2.0, 0.5)])
def test_loss_has_the_right_gradient(link: Link) -> None:
    torch.manual_seed(2)
    pos = (torch.rand(3, dtype=torch.float64) - 0.5).requires_grad_()
    neg = (torch.rand(3, 4, dtype=torch.float64) - 0.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: infonce_loss(a, b, link=link), (pos, neg))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_loss_is_finite_at_tau_001_in_every_dtype(dtype: torch.dtype) -> None:
    pos, neg = torch.tensor([1.0, -1.0], dtype=dtype), torch.tensor([[-1.0, 1.0], [1.0, 1.0]], dtype=dtype)
    loss = infonce_loss(pos, neg.requires_grad_(), tau=0.01, reduction="none")
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss.double(), torch.tensor([math.log(2), 200 + math.log(2)], dtype=torch.float64))
    loss.sum().backward()
    assert bool(neg.grad.isfinite().all())  # type: ignore[union-attr]


def test_cross_entropy_is_finite_down_to_tau_001() -> None:
    rng = np.random.default_rng(0)
    pos, neg = rng.uniform(-1, 1, 40), rng.uniform(-1, 0.99, (40, 60))
    result = search_cross_entropy(pos, neg, tau=0.01)
    assert all(np.isfinite(v).all() for v in result.to_dict().values())
    brute = np.log(np.exp(np.longdouble(neg) / 0.01).mean(1)) - pos / 0.01
    assert result.plugin == pytest.approx(float(brute.mean()), abs=1e-9)
    assert np.isfinite(bias_curve(pos, neg, [1, 1000], tau=0.01).bias).all()


def test_types_and_shapes_of_similarities_are_checked() -> None:
    good = np.zeros((2, 3))
    for pos, neg, error, words in (
        (np.zeros(3), good, ValueError, "pos must be"),
        (np.zeros(2), np.zeros((2, 0)), ValueError, "empty"),
        (np.zeros(2, dtype=int), good, TypeError, "floating"),
        (np.zeros(2), np.zeros((2, 3), dtype=int), TypeError, "floating"),
        ([0.0, 0.0], good, TypeError, "numpy array or a torch tensor"),
        (np.zeros(2), good + np.nan, ValueError, "not finite"),
        (np.zeros(2), good + 1.01, ValueError, "unbounded=True"),
    ):
        with pytest.raises(error, match=words):
            search_cross_entropy(pos, neg, tau=0.5)
    assert search_cross_entropy(np.zeros(2), good + 3, tau=0.5, unbounded=True).value == pytest.approx(6)
    rounded = np.full((2, 3), 0.5, dtype=np.float32)
    assert search_cross_entropy(np.full(2, 1.0005), rounded, tau=0.5).value == pytest.approx(-1)
    with pytest.raises(ValueError, match="rel"):
        relevance_cross_entropy(good, -np.ones((2, 3)), tau=0.5)


def test_one_anchor_and_one_negative_give_a_value_without_an_error() -> None:
    found = search_cross_entropy(np.array([0.5]), np.array([[0.1]]), tau=0.5)
    assert found.value == found.plugin == pytest.approx(-0.8) and math.isnan(found.se) and found.upper == math.inf


def test_low_precision_tensors_memory_maps_and_cosine_rows_give_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    anchors, pool = rng.normal(size=(30, 8)), rng.normal(size=(50, 8))
    rows = CosineRows(anchors, pool)
    neg, pos = rows[:].numpy(), rng.uniform(0, 1, 30)
    np.save(tmp_path / "neg.npy", neg)
    wanted = search_cross_entropy(pos, neg, tau=0.2)
    for same in (rows, torch.from_numpy(neg), np.load(tmp_path / "neg.npy", mmap_mode="r")):
        np.testing.assert_allclose(search_cross_entropy(pos, same, tau=0.2).per_anchor, wanted.per_anchor, atol=1e-12)
    half = search_cross_entropy(pos, torch.from_numpy(neg).bfloat16(), tau=0.2)
    assert half.value == pytest.approx(wanted.value, abs=0.02)


def test_embeddings_in_half_precision_are_multiplied_in_single() -> None:
    rows = torch.randn(4, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    cosines = CosineRows(rows, rows)[slice(None)]
    expected = torch.nn.functional.cosine_similarity(rows.double()[:, None], rows.double()[None], dim=2)
    assert torch.allclose(cosines.double(), expected, atol=1e-6)


def test_results_do_not_depend_on_the_size_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pos, neg = VonMisesFisherModel(8, 5, SoftmaxLink(0.2)).sample(33, 70, 0)
    whole = [search_cross_entropy(pos, neg, tau=0.2), bias_curve(pos, neg, [1, 9], tau=0.2)]
    monkeypatch.setattr(kernels_module, "READ", 7 * 70)
    monkeypatch.setattr(kernels_module, "BLOCK", 2 * 70)
    parts = [search_cross_entropy(pos, neg, tau=0.2), bias_curve(pos, neg, [1, 9], tau=0.2)]
    for one, other in zip(whole, parts, strict=True):
        for key, value in one.to_dict().items():
            if value is not None:
                np.testing.assert_allclose(other.to_dict()[key], value, atol=1e-9, err_msg=key)


def test_section54_bracket_holds_in_expectation() -> None:
    model = VonMisesFisherModel(6, 6, SoftmaxLink(0.15))
    ends = []
    for seed in range(150):
        pos, neg = model.sample(60, 20, seed)
        result = search_cross_entropy(pos, neg, tau=0.15)
        ends.append((result.lower, result.upper))
    (low, high), (low_se, high_se) = np.mean(ends, 0), np.std(ends, 0) / math.sqrt(150)
    assert low + 2 * low_se < model.ce < high - 2 * high_se


def test_section53_correction_removes_most_of_the_bias() -> None:
    model = VonMisesFisherModel(6, 4, SoftmaxLink(0.25))
    results = [search_cross_entropy(*model.sample(100, 40, seed), tau=0.25) for seed in range(200)]
    plugin = np.mean([r.plugin for r in results]) - model.ce
    corrected = np.mean([r.value for r in results]) - model.ce
    assert plugin < 0 and abs(corrected) < abs(plugin) / 3


def test_p59_tail_index_of_uniform_points() -> None:
    found = [shortfall_tail_index(1 - 2 * np.random.default_rng(s).beta(3.5, 3.5, (1, 20000))) for s in range(20)]
    assert np.mean([alpha for alpha, _ in found]) == pytest.approx(3.37, abs=0.15)
    assert found[0][1] == pytest.approx(found[0][0] / math.sqrt(200))
    with pytest.raises(ValueError, match="tail index needs"):
        shortfall_tail_index(np.zeros((1, 10)))


def test_steep_shortfall_link_warns_and_a_flat_one_does_not() -> None:
    pos, neg = VonMisesFisherModel(8, 5, SoftmaxLink(0.2)).sample(50, 200, 0)
    with pytest.warns(HeavyTailWarning, match="1/k law fails"):
        search_cross_entropy(pos, neg, link=WeibullLink(2.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search_cross_entropy(pos, neg, link=WeibullLink(0.3))


def test_small_pool_warns() -> None:
    pos, neg = VonMisesFisherModel(8, 5, SoftmaxLink(0.2)).sample(20, 50, 0)
    with pytest.warns(SmallPoolWarning, match="effective sample size"):
        search_cross_entropy(pos, neg, tau=0.05)


@pytest.mark.filterwarnings("ignore::simcse_weince.search.SelfMatchWarning")
def test_several_positives_are_averaged_and_own_pools_have_no_hubs() -> None:
    model = DiscreteModel(np.full(3, 1 / 3), np.full((3, 3), 1 / 3), emb=np.eye(3), link=SoftmaxLink(0.5))
    pos, neg = model.sample(40, 200, 0, shared_pool=False)
    both = search_cross_entropy(np.stack([pos, 1 - pos], 1), neg, tau=0.5, shared_pool=False)
    one, other = (search_cross_entropy(p, neg, tau=0.5, shared_pool=False) for p in (pos, 1 - pos))
    np.testing.assert_allclose(both.per_anchor, (one.per_anchor + other.per_anchor) / 2)
    np.testing.assert_allclose(both.r_pos, (one.r_pos + other.r_pos) / 2)
    assert math.isnan(both.hubness_chi2)
    assert one.se == pytest.approx(one.per_anchor.std(ddof=1) / math.sqrt(40))
    json.dumps(one.to_dict())
