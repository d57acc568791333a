"""The links as functions of scores: limits, bounds and derivatives."""

import pytest
import torch

from simcse_weince.links import blended_link_and_slope, power_link, shortfall, shortfall_link, softmax_link

COSINE = torch.tensor([-1.0, -0.3, 0.0, 0.5, 0.99, 1 - 1e-6, 1.0, 1.0000002])


def test_links_follow_their_formulas():
    score = torch.tensor([0.5, 2.0])
    assert softmax_link(score, 0.05).tolist() == pytest.approx([10, 40])
    assert power_link(score, 3.0).tolist() == pytest.approx([-2.0794415, 2.0794415])
    assert power_link(torch.tensor([-1.0, 0.0]), 3.0).tolist() == [-torch.inf, -torch.inf]
    assert shortfall_link(torch.tensor([0.0, 0.9999]), 2.0, 1e-4).tolist() == pytest.approx([-2e-4, 17.034], abs=2e-3)


@pytest.mark.parametrize(
    ("blend", "link"), [(0.0, lambda s: softmax_link(s, 0.05)), (1.0, lambda s: shortfall_link(s, 3.0))]
)
def test_blend_ends_are_the_links_to_the_last_bit(blend, link):
    for given in (blend, torch.full((len(COSINE),), blend)):
        assert torch.equal(blended_link_and_slope(COSINE, given, 3.0, 0.05)[0], link(COSINE))


def test_ln05_shortfall_is_never_negative():
    unit = torch.nn.functional.normalize(torch.randn(2000, 768, generator=torch.Generator().manual_seed(0)))
    distance = shortfall((unit * unit).sum(1))
    assert ((unit * unit).sum(1) > 1).any()
    assert distance.min() >= 0
    assert shortfall_link(1 - distance, 1.0).isfinite().all()


@pytest.mark.parametrize("floor", [1e-6, 1e-4, 1e-2])
def test_slope_with_respect_to_a_unit_vector_is_bounded(floor):
    shape = 4.0
    angle = torch.logspace(-9, 0.49, 400, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(shortfall_link(angle.cos(), shape, floor).sum(), angle)
    bound = shape / (2 * floor) ** 0.5
    assert slope.abs().max() <= bound
    assert slope.abs().max() > 0.9 * bound


def test_blended_link_is_monotone_up_to_the_cap():
    cosine = torch.linspace(-1, 1, 5001, dtype=torch.float64)
    assert blended_link_and_slope(cosine, 0.7, 5.0, 0.05)[0].diff().min() > 0


def test_blended_slope_is_the_limit_of_differences():
    cosine, step = torch.linspace(-0.9, 0.9, 12, dtype=torch.float64).view(3, 4), 1e-6
    blend, shape = torch.tensor([[0.0], [0.4], [1.0]]).double(), torch.tensor([[1.0], [2.0], [5.0]]).double()
    below, above = (blended_link_and_slope(cosine + move, blend, shape, 0.05)[0] for move in (-step, step))
    slope = blended_link_and_slope(cosine, blend, shape, 0.05)[1]
    torch.testing.assert_close((above - below) / (2 * step), slope, rtol=1e-6, atol=0)


@pytest.mark.parametrize("blend", [0.0, 0.4, 1.0])
def test_blended_slope_is_the_derivative_also_beyond_the_cap(blend):
    cosine = COSINE.clone().requires_grad_()
    plain = (1 - blend) * softmax_link(cosine, 0.05) + blend * shortfall_link(cosine, 3.0)
    (slope,) = torch.autograd.grad(plain.sum(), cosine)
    for given in (blend, torch.full((len(COSINE),), blend)):
        link, derivative = blended_link_and_slope(COSINE, given, 3.0, 0.05)
        torch.testing.assert_close(link, plain.detach())
        torch.testing.assert_close(derivative, slope)
    assert slope[-1] == (1 - blend) / 0.05 and slope[-2] == pytest.approx((1 - blend) / 0.05 + blend * 3 / 1e-4)
