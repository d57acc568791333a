"""The arms that come from elsewhere: the authors' released objective and the host's hardness-weighted loss."""

import pytest
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer

from simcse_weince import InfoNCE, ReleasedWeince
from simcse_weince.losses import HardnessWeightedLoss, ReleasedWeinceLoss, embed_columns
from simcse_weince.sentence.arguments import LossArguments
from tests.test_training_run import SENTENCES, place, refused, run  # noqa: F401 (a fixture)


@pytest.fixture
def model(tiny_bert):
    return SentenceTransformer(tiny_bert, device="cpu").train()


@pytest.fixture
def column(model):
    return model.preprocess(SENTENCES[:16])


def views(model, column):
    """The two views that a seed gives, (N, d) each."""
    torch.manual_seed(0)
    return embed_columns(model, [dict(column), dict(column)], separate_first=False)


def loss_of(loss, column):
    torch.manual_seed(0)
    return loss([dict(column)])


def test_released_loss_is_its_criterion_on_two_views_and_keeps_its_average(model, column):
    loss = ReleasedWeinceLoss(model)
    first, second = views(model, column)
    expected = ReleasedWeince(0.05)
    assert torch.allclose(loss_of(loss, column), expected(first, second))
    assert loss.state_dict()["criterion.shape_average"] == expected.shape_average != 4.0
    card = loss.get_config_dict()
    assert (card["shape"], card["floor"], card["top_m"], card["layout"]) == (1.0, 1e-6, 50, "both_views")


def test_infonce_released_is_infonce_and_the_same_two_terms(model, column):
    bare = ReleasedWeinceLoss(model, gate=0.0, weibull_weight=0.0, softmax_weight=0.0)
    assert torch.allclose(loss_of(bare, column), InfoNCE(0.05, layout="both_views")(*views(model, column)))
    assert loss_of(ReleasedWeinceLoss(model, gate=0.0), column) > loss_of(bare, column)


def test_infonce_matched_is_infonce_at_the_temperature_of_each_anchor(model, column):
    """The temperature-matched control: no shortfall part, temperature / (1 - blend)."""
    from simcse_weince import Weince

    first, second = views(model, column)
    matched = Weince(0.05, shape=0.0)
    blend = matched.anchor_statistics(first, second).blend
    assert 0 < blend.min() < blend.max() < 1
    logits = (1 - blend)[:, None] / 0.05 * F.normalize(first) @ F.normalize(second).T
    assert torch.allclose(matched(first, second), F.cross_entropy(logits, torch.arange(16)))


@pytest.mark.parametrize("strength", [0.0, 3.0])
def test_hardness_weighted_loss_adds_the_cosines_of_negatives_without_gradient(model, column, strength):
    value = loss_of(HardnessWeightedLoss(model, temperature=0.1, hardness_strength=strength), column)
    torch.manual_seed(0)
    first, second = embed_columns(model, [dict(column), dict(column)])
    assert not torch.allclose(first, second)  # one column, two views
    cosine = F.normalize(first) @ F.normalize(second).T
    expected = F.cross_entropy(cosine / 0.1 + strength * cosine.detach().clone().fill_diagonal_(0), torch.arange(16))
    assert torch.allclose(value, expected)
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    ours, theirs = (torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (value, expected))
    assert all(a is b is None or torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


def test_released_arguments_leave_its_own_defaults_alone():
    assert LossArguments(loss="released").options_of("released") == {"temperature": 0.05}
    options = LossArguments(loss="released", gate="0.0", floor=1e-3).options_of("released")
    assert options == {"temperature": 0.05, "gate": 0.0, "floor": 1e-3}
    # What is asked for in so many words is obeyed, though it is the default of another criterion.
    options = LossArguments(loss="released", shape="anchor", floor=1e-4).options_of("released")
    assert options == {"temperature": 0.05, "shape": "anchor", "floor": 1e-4}


@pytest.mark.parametrize("loss", ["released", "mnrl-hardness"])
def test_the_trainer_trains_with_it(place, loss):  # noqa: F811
    result = run(place, "--loss", loss, "--max_steps", 2)
    assert result.steps == 2 and result.dev_best is not None


def test_the_trainer_refuses_what_they_cannot_do(place, capfd):  # noqa: F811
    refused(place, capfd, "--loss", "released", "--mini_batch_size", 4)
    refused(place, capfd, "--loss", "mnrl-hardness", "--hardness_strength", -1)
    refused(place, capfd, "--loss", "mnrl-hardness", "--temperature", 0)
