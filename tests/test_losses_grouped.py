"""Batches embedded in groups of similar length: the same loss, gradients and statistics, with less padding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import AdaptiveLayerLoss, MatryoshkaLoss
from torch import Tensor

from simcse_weince import CachedInfoNCELoss, CachedWeinceLoss, InfoNCELoss, SimCSEArguments, WeinceLoss
from simcse_weince.sentence.arguments import LossArguments
from simcse_weince.sentence.encoder import SimCSEEncoder, build_encoder
from simcse_weince.sentence.training_run import _build_loss
from tests.tiny_models import write_tiny_bert

WORDS = "dog house music lamp rain train river year city water".split()
LENGTHS = [(7 * row) % 20 + 1 for row in range(43)]
COLUMNS = (
    [" ".join(WORDS[(row + i) % 10] for i in range(length)) for row, length in enumerate(LENGTHS)],
    [" ".join(WORDS[(row + 2 * i) % 10] for i in range(21 - length)) for row, length in enumerate(LENGTHS)],
    [WORDS[row % 10] for row in range(43)],
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> SimCSEEncoder:
    """In float64 and without dropout, so that other orders of the same sums agree."""
    folder = write_tiny_bert(tmp_path_factory.mktemp("model"))
    return build_encoder(folder, pooler_type="avg", dropout=0.0, device="cpu").double().train()


def features(encoder: SimCSEEncoder, columns: int) -> list[dict[str, Any]]:
    return [encoder.preprocess(column) for column in COLUMNS[:columns]]


def step(encoder: SimCSEEncoder, loss: torch.nn.Module, columns: int) -> list[Tensor]:
    encoder.zero_grad()
    value = loss(features(encoder, columns), None)
    value.backward()
    return [value.detach(), *(w.grad.clone() for w in encoder.parameters() if w.grad is not None)]


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize(
    ("loss_class", "options"),
    [
        (InfoNCELoss, {}),
        (WeinceLoss, {"shape": "shrunk"}),
        (WeinceLoss, {"directions": ("query_to_doc", "doc_to_query")}),
        (CachedInfoNCELoss, {"mini_batch_size": 9}),
        (CachedWeinceLoss, {"mini_batch_size": 9}),
    ],
)
def test_groups_change_neither_loss_nor_gradients_nor_statistics(
    loss_class: type, options: dict[str, Any], columns: int, encoder: SimCSEEncoder
):
    whole, grouped = (loss_class(encoder, group_by_length=wish, **options) for wish in (False, True))
    expected = step(encoder, whole, columns)
    assert len(expected) > 20
    torch.testing.assert_close(step(encoder, grouped, columns), expected, rtol=1e-7, atol=1e-9)
    assert grouped.stats() == pytest.approx(whole.stats(), rel=1e-5)


def shapes(encoder: SimCSEEncoder, loss: torch.nn.Module, columns: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Shapes of the inputs of every forward."""
    seen, forward = [], encoder.forward
    monkeypatch.setattr(encoder, "forward", lambda one: seen.append(tuple(one["input_ids"].shape)) or forward(one))
    step(encoder, loss, columns)
    monkeypatch.undo()
    return seen


def test_each_group_is_as_wide_as_its_longest_text(encoder: SimCSEEncoder, monkeypatch: pytest.MonkeyPatch):
    lengths = sorted(features(encoder, 1)[0]["attention_mask"].sum(1).tolist())
    widest = max(lengths)
    assert shapes(encoder, WeinceLoss(encoder), 1, monkeypatch) == [(32, lengths[15]), (32, lengths[31]), (22, widest)]
    assert shapes(encoder, WeinceLoss(encoder, group_by_length=False), 1, monkeypatch) == [(86, widest)]


def test_padding_on_the_left_stays(encoder: SimCSEEncoder):
    """Positions are counted from the left."""
    columns = features(encoder, 1)
    assert columns[0].keys() >= {"input_ids", "attention_mask"}
    mirrored = [{name: value.flip(1) if isinstance(value, Tensor) else value for name, value in columns[0].items()}]
    values = [InfoNCELoss(encoder, group_by_length=wish)([dict(mirrored[0])]) for wish in (True, False)]
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("columns", [1, 2])
def test_matryoshka_over_groups(columns: int, encoder: SimCSEEncoder):
    values = []
    for wish in (True, False):
        inner = WeinceLoss(encoder, group_by_length=wish)
        values.append(step(encoder, MatryoshkaLoss(encoder, inner, matryoshka_dims=[32, 16]), columns))
    torch.testing.assert_close(*values, rtol=1e-7, atol=1e-9)


def test_layers_are_handed_over_in_one_forward(encoder: SimCSEEncoder, monkeypatch: pytest.MonkeyPatch):
    """AdaptiveLayerLoss finds in the second forward what the first wrote into the feature dicts."""
    loss = AdaptiveLayerLoss(encoder, WeinceLoss(encoder, group_by_length=True), n_layers_per_step=-1)
    assert {rows for rows, _ in shapes(encoder, loss, 2, monkeypatch)} == {43}


def test_batches_that_were_padded_on_purpose_stay_whole(encoder: SimCSEEncoder, tmp_path: Path):
    for wish, expected in ((True, False), (False, None)):
        arguments = SimCSEArguments(
            output_dir=str(tmp_path), pad_to_max_length=wish, eval_strategy="no", report_to="none"
        )
        assert _build_loss(encoder, LossArguments(), {}, arguments).group_by_length is expected
