"""Tail statistics: known tails, masked candidates, degenerate tails."""

import math

import pytest
import torch

from simcse_weince.tail import (
    FEWEST_NEGATIVES,
    evidence_gate,
    fit_tail,
    nearest_rank,
    share,
    tail_size,
)
from tests import reference

OPTIONS = {"fraction": 0.10, "minimum": 32}


def fit(shortfalls, evidence, **options):
    """Fit rows of shortfalls (A, K), +inf for what is masked."""
    options = {**OPTIONS, **options}
    size = max(1, tail_size(shortfalls.shape[1], options["fraction"], options["minimum"]))
    smallest = shortfalls.topk(size, largest=False).values
    return fit_tail(smallest, shortfalls.isfinite().sum(1), evidence=evidence, **options)


def draw(kind, anchors=200, negatives=511):
    """Shortfalls of the four tails of the specification's table."""
    generator = torch.Generator().manual_seed(7)
    if kind.startswith("sphere"):
        points = torch.randn(anchors, negatives + 1, int(kind[6:]), generator=generator, dtype=torch.float64)
        points = torch.nn.functional.normalize(points, dim=-1)
        return 1 - (points[:, 1:] * points[:, :1]).sum(-1)
    uniform = torch.rand(anchors, negatives, generator=generator, dtype=torch.float64)
    return uniform if kind == "power" else 1 + 0.05 * uniform.log()


@pytest.mark.parametrize(
    ("kind", "regression", "likelihood", "share"),
    [
        ("sphere3", 175.9, 30.9, 1.00),
        ("sphere128", 169.0, 0.64, 0.94),
        ("power", 175.6, 32.3, 1.00),
        ("exponential", 172.4, -0.32, 0.55),
    ],
)
def test_ln11_evidence_reproduces_the_published_table(kind, regression, likelihood, share):
    shortfalls = draw(kind)
    assert fit(shortfalls, "regression").evidence.mean().item() == pytest.approx(regression, abs=5)
    calibrated = fit(shortfalls, "likelihood").evidence
    assert calibrated.mean().item() == pytest.approx(likelihood, abs=0.3 + 0.06 * abs(likelihood))
    assert (calibrated > 0).double().mean().item() == pytest.approx(share, abs=0.08)


def test_ln11_likelihood_gate_closes_without_a_cap_and_opens_with_one():
    blend = {kind: evidence_gate(fit(draw(kind), "likelihood").evidence, 2.0, 1.0) for kind in ("power", "exponential")}
    assert blend["exponential"].mean() < 0.3
    assert (blend["exponential"] > 0.5).double().mean() < 0.05
    assert blend["power"].mean() > 0.7


@pytest.mark.parametrize("shape", [1.0, 4.0])
def test_shape_of_a_power_tail_is_recovered(shape):
    shortfalls = draw("power", 400) ** (1 / shape)
    for evidence in ("regression", "likelihood"):
        assert fit(shortfalls, evidence).shape.median().item() == pytest.approx(shape, rel=0.08)


@pytest.mark.parametrize("evidence", ["regression", "likelihood"])
@pytest.mark.parametrize("negatives", [10, 11, 31, 32, 33, 100, 345])
@pytest.mark.parametrize(("fraction", "minimum"), [(0.1, 32), (0.25, 5), (1.0, 1)])
def test_fit_agrees_with_the_slow_twin(evidence, negatives, fraction, minimum):
    shortfalls = draw("sphere3", 4, negatives)
    found = fit(shortfalls, evidence, fraction=fraction, minimum=minimum)
    for i, row in enumerate(shortfalls.tolist()):
        expected = reference.tail(row, fraction, minimum, evidence) or (0.0, 0.0, 0.0, None)
        assert found.shape[i].item() == pytest.approx(expected[0], rel=1e-9)
        assert found.r_squared[i].item() == pytest.approx(expected[1], rel=1e-9)
        assert found.evidence[i].item() == pytest.approx(expected[2], rel=1e-7, abs=1e-9)
        assert found.hardness[i].item() == pytest.approx(min(row), rel=1e-12)


@pytest.mark.parametrize("evidence", ["regression", "likelihood"])
def test_masked_negatives_might_as_well_not_exist(evidence):
    short = draw("sphere3", 6, 333)
    mixed = torch.full((6, 700), math.inf, dtype=torch.float64)
    columns = torch.randperm(700, generator=torch.Generator().manual_seed(0))[:333]
    mixed[:, columns] = short
    for found, expected in zip(fit(mixed, evidence), fit(short, evidence), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 0.7, 1.0])
def test_share_rounds_as_the_tail_size_of_a_full_row(fraction):
    count = torch.arange(1, 4097)
    assert share(fraction, count).tolist() == [round(fraction * k) for k in count.tolist()]


@pytest.mark.parametrize("evidence", ["regression", "likelihood"])
@pytest.mark.parametrize("level", [0.0, 1e-5, 0.3, 1.0, 2.0])
def test_ln10_equal_shortfalls_with_rounding_noise_say_nothing(evidence, level):
    noise = 1e-6 * torch.rand(5, 200, generator=torch.Generator().manual_seed(1))
    found = fit((level + noise).float(), evidence)
    assert not found.estimable.any()
    assert torch.stack(list(found)[:4]).isfinite().all()
    assert (found.shape == 0).all() and (found.evidence == 0).all()


@pytest.mark.parametrize("negatives", [0, 1, 2, FEWEST_NEGATIVES - 1, FEWEST_NEGATIVES])
def test_ln09_too_few_negatives_are_not_fitted(negatives):
    row = torch.full((1, 40), math.inf)
    row[0, :negatives] = torch.linspace(0.1, 0.9, negatives)
    for evidence in ("regression", "likelihood"):
        found = fit(row, evidence)
        assert found.estimable.item() == (negatives >= FEWEST_NEGATIVES)
        assert all(value.isfinite().all() for value in found)


def test_pivot_is_the_nearest_rank_over_anchors_with_negatives():
    hardness = torch.tensor([0.5, 0.1, 0.4, 0.2, 0.3])
    everyone = torch.full((5,), 20)
    assert [nearest_rank(hardness, everyone, q).item() for q in (0.0, 0.2, 0.5, 1.0)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.5]
    )
    assert all(nearest_rank(hardness, 20, q) == nearest_rank(hardness, everyone, q) for q in (0.0, 0.2, 0.5, 1.0))
    lonely = torch.tensor([20, 0, 20, 20, 20])
    assert nearest_rank(hardness, lonely, 0.0).item() == pytest.approx(0.2)
    assert nearest_rank(hardness, torch.zeros(5, dtype=torch.long), 0.2).isfinite()


@pytest.mark.parametrize("evidence", ["regression", "likelihood"])
@pytest.mark.parametrize("negatives", [1, 9, 10, 33, 345])
def test_one_number_of_negatives_for_all_anchors_changes_nothing(evidence, negatives):
    smallest = draw("sphere3", 4, negatives).sort(1).values[:, : max(1, tail_size(negatives, 0.1, 32))]
    one = fit_tail(smallest, negatives, evidence=evidence, **OPTIONS)
    each = fit_tail(smallest, torch.full((4,), negatives), evidence=evidence, **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(one, each, strict=True))
