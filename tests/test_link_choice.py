"""Links fitted to winners of known laws, against slow maximum likelihood and the torch definitions."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from simcse_weince import choose_link
from simcse_weince.links import blended_link_and_slope, power_link, shortfall_link, softmax_link


def drawn(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return (logits + rng.gumbel(size=logits.shape)).argmax(1)


def law(name: str, s: np.ndarray) -> np.ndarray:
    score = torch.tensor(s)
    return {
        "softmax": softmax_link(score, 1 / 10),
        "power": power_link(score, 3.0),
        "shortfall": shortfall_link(score, 1.5),
        "nested": blended_link_and_slope(score, 0.5, 2.0, 1 / 16)[0],
    }[name].numpy()


@pytest.fixture(scope="module")
def scores() -> np.ndarray:
    """Cosines that come near 1 and near 0, where the three links differ."""
    return np.random.default_rng(0).beta(2, 1.5, (1200, 24))


@pytest.mark.parametrize(("name", "slope"), [("softmax", 10), ("power", 3), ("shortfall", 1.5)])
def test_winners_of_each_law_choose_their_link(scores: np.ndarray, name: str, slope: float) -> None:
    found = choose_link(scores, drawn(law(name, scores), np.random.default_rng(1)), bootstrap=50)
    assert found.estimable and found.best == name and found.anchors == 1200 and found.held_out_anchors == 360
    assert found.slopes[name] == pytest.approx(slope, rel=0.12)
    assert found.held_out[name] == max(value for key, value in found.held_out.items() if key != "nested")
    low, high = found.blend_interval
    if name == "shortfall":
        assert found.p_value < 1e-6 and low <= found.blend <= high and high > 0.95
    else:
        assert found.p_value > 0.01 and low == 0 and found.blend < 0.1
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["best"] == name


def test_nested_law_lies_between(scores: np.ndarray) -> None:
    found = choose_link(scores, drawn(law("nested", scores), np.random.default_rng(2)))
    # (1 - blend) s / temperature + blend shape g = 8 s + g = theta ((1 - lambda) s + lambda g): theta 9, lambda 1/9
    low, high = found.blend_interval
    assert 0 < low < found.blend < high < 1 and found.blend == pytest.approx(1 / 9, abs=0.07)  # three standard errors
    assert found.p_value < 1e-6 and found.best == "nested" and found.slopes["nested"] == pytest.approx(9, rel=0.2)


def test_fit_is_the_maximum_likelihood_of_the_links(scores: np.ndarray) -> None:
    s, held_out = scores[:300], 0.3
    winner = drawn(law("softmax", s), np.random.default_rng(3))
    found = choose_link(s, winner, held_out=held_out, bootstrap=0)
    test = np.random.default_rng(0).permutation(300) < 90
    rows = np.arange(300)
    for name, link in (("softmax", lambda c, x: softmax_link(x, 1 / c)), ("power", lambda c, x: power_link(x, c))):
        value = lambda c: log_softmax(link(c, torch.tensor(s)).numpy(), axis=1)[rows, winner]  # noqa: B023, E731
        slow = minimize_scalar(lambda c: -value(c)[~test].sum(), bounds=(0.1, 40), method="bounded")  # noqa: B023
        assert found.slopes[name] == pytest.approx(slow.x, rel=1e-3)
        assert found.held_out[name] == pytest.approx(value(found.slopes[name])[test].mean(), rel=1e-9)
    theta, blend = found.slopes["nested"], found.blend
    near = []
    for t in theta * np.array([0.98, 1, 1.02]):
        for b in np.clip(blend + np.array([-0.02, 0, 0.02]), 0, 1):
            logits = blended_link_and_slope(torch.tensor(s), b, t, 1 / t)[0].numpy()
            near.append(log_softmax(logits, axis=1)[rows, winner][~test].sum())
    assert max(near) <= near[4] + 1e-6
    softmax = log_softmax(found.slopes["softmax"] * s, axis=1)[rows, winner][~test].sum()
    assert found.likelihood_ratio == pytest.approx(2 * (near[4] - softmax), abs=1e-4)


def test_absent_candidates_do_not_count(scores: np.ndarray) -> None:
    s = scores[:300]
    winner = drawn(law("softmax", s), np.random.default_rng(4))
    wide = np.c_[s, np.full(300, np.nan), np.full(300, -np.inf)]
    padded, plain = choose_link(wide, winner), choose_link(s, winner)
    assert padded.slopes == pytest.approx(plain.slopes, rel=1e-5) and padded.left_out == 0
    assert padded.blend_interval == pytest.approx(plain.blend_interval, abs=1e-4)
    first = np.take_along_axis(s, np.argsort(np.arange(24) != winner[:, None], 1, kind="stable"), 1)
    assert choose_link(first).slopes == pytest.approx(choose_link(s, winner).slopes)
    wide[:5] = np.nan
    wide[5, np.arange(26) != winner[5]] = np.nan
    assert choose_link(wide, winner, bootstrap=0).left_out == 6


def test_links_that_the_scores_do_not_allow_are_absent(scores: np.ndarray) -> None:
    rng = np.random.default_rng(5)
    dots = choose_link(20 * scores, drawn(law("power", scores), rng), bootstrap=20)
    assert dots.slopes.keys() == {"softmax", "power"} and dots.best == "power"
    assert dots.blend is dots.blend_interval is dots.p_value is None
    signed = scores - 0.3
    assert choose_link(signed, drawn(10 * signed, rng), bootstrap=0).slopes.keys() == {"softmax", "shortfall", "nested"}
    rounding = np.minimum(scores, 1 + 2e-7)
    rounding[0] = 1 + 2e-7
    assert math.isfinite(choose_link(rounding, drawn(10 * rounding, rng), bootstrap=0).held_out["shortfall"])


def test_winners_that_cannot_be_fitted_give_a_reason(scores: np.ndarray) -> None:
    reasons = {
        "highest score": choose_link(scores, scores.argmax(1)),
        "do not score higher": choose_link(scores, scores.argmin(1)),
        "Fewer than 50": choose_link(scores[:60], 0),
        "Fewer than": choose_link(np.empty((0, 3))),
    }
    for words, found in reasons.items():
        assert words in found.reason and not found.estimable
        assert found.blend is None and not found.slopes and found.best is None


@pytest.mark.parametrize("options", [{"winner": 24}, {"held_out": 1.0}])
def test_wrong_arguments_are_named(scores: np.ndarray, options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        choose_link(scores, **options)
    with pytest.raises(ValueError, match="two dimensions"):
        choose_link(scores[0])


def test_one_newton_step_is_close_to_fitting_each_sample_again(scores: np.ndarray) -> None:
    few = scores[:, :8]
    winner = drawn(law("nested", few), np.random.default_rng(6))
    found = choose_link(few, winner, bootstrap=400)
    rng = np.random.default_rng(7)
    again = []
    for _ in range(25):
        rows = rng.integers(1200, size=1200)
        again.append(choose_link(few[rows], winner[rows], bootstrap=0).blend)
    assert np.ptp(found.blend_interval) / (2 * 1.96) == pytest.approx(np.std(again), rel=0.45)
