"""The losses over several processes: columns, duplicates and counts of negatives are those of the global batch."""

import logging
from unittest.mock import patch

import pytest
import torch
from torch import nn

from simcse_weince import CachedWeinceLoss, InfoNCELoss, WeinceLoss
from tests.distributed import run_distributed


class Table(nn.Module):
    """An encoder that looks its embeddings up: text number k, the single token k, has row k."""

    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = nn.Parameter(embeddings)

    def forward(self, features):
        return {**features, "sentence_embedding": self.embeddings[features["input_ids"][:, 0]]}


def texts(rank, loss_class, embeddings, ids, options):
    """Train one step on this rank's texts, columns of text numbers."""
    loss = loss_class(Table(embeddings), gather_across_devices=True, **options)
    columns = [
        {"input_ids": torch.tensor(c)[:, None], "attention_mask": torch.ones(len(c), 1).long()} for c in ids[rank]
    ]
    value = loss(columns)
    value.backward()
    return value.item(), loss.model.embeddings.grad, loss.stats()


@pytest.mark.parametrize("negatives", [0, 1, 2])
@pytest.mark.parametrize("loss_class", [InfoNCELoss, WeinceLoss])
def test_la08_hard_negatives_are_gathered_column_by_column(loss_class, negatives):
    """Positive equal to its anchor, all else at right angles: any other order costs log(2) and more."""
    directions = torch.eye(128)
    embeddings = torch.cat([directions[:32], directions])
    columns = torch.arange(32 * (2 + negatives)).reshape(-1, 32)
    ids = [half.tolist() for half in columns.split(16, dim=1)]
    answers = run_distributed(2, texts, loss_class, embeddings, ids, {})
    assert all(value < 1e-4 for value, *_ in answers)


@pytest.mark.parametrize("options", [{}, {"layout": "both_views"}])
@pytest.mark.parametrize("sizes", [(4, 1), (5, 4)])
def test_dd05_uneven_batches_and_repeated_texts_across_ranks(sizes, options):
    """accelerate fills the last batches up with texts of other ranks; the same happens in any corpus with copies."""
    embeddings = torch.randn(9, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = [[3, 0, 1, 2, 8, 7, 0, 1, 4][: sizes[0]], [3, 4, 0, 6][: sizes[1]]]
    answers = run_distributed(2, texts, WeinceLoss, embeddings, [[part, part] for part in ids], options)
    whole = sum(ids, [])
    value, gradient, stats = texts(0, WeinceLoss, embeddings, [[whole, whole]], options)
    assert sum(answer[0] for answer in answers) / 2 == pytest.approx(value, abs=1e-9)
    torch.testing.assert_close(sum(answer[1] for answer in answers) / 2, gradient)
    assert stats["masked_candidates"] > 0
    for answer in answers:
        assert answer[2] == pytest.approx(stats, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("negatives", [0, 1])
def test_cached_loss_over_two_processes(negatives):
    embeddings = torch.randn(128, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = torch.arange(40 * (2 + negatives)).reshape(-1, 40)
    value, gradient, stats = texts(0, WeinceLoss, embeddings, [ids.tolist()], {})
    parts = [part.tolist() for part in ids.split([22, 18], dim=1)]
    answers = run_distributed(2, cached_texts, embeddings, parts)
    assert sum(answer[0] for answer in answers) / 2 == pytest.approx(value, abs=1e-9)
    torch.testing.assert_close(sum(answer[1] for answer in answers) / 2, gradient)
    assert all(answer[2] == pytest.approx(stats, rel=1e-5, abs=1e-6) for answer in answers)


def cached_texts(rank, embeddings, ids):
    # The table has no modules that could be asked whether they are static.
    with patch("simcse_weince.losses.has_static_embedding_input", return_value=False):
        return texts(rank, CachedWeinceLoss, embeddings, ids, {"mini_batch_size": 5})


def step(rank, gather):
    """One text on each process."""
    loss = WeinceLoss(Table(torch.eye(4) + 0.1), gather_across_devices=gather)
    columns = [{"input_ids": torch.tensor([[rank]])}, {"input_ids": torch.tensor([[2 + rank]])}]
    value = loss(columns)
    value.backward()
    return value.item()


def test_dd08_a_batch_of_one_needs_the_others():
    with pytest.raises(RuntimeError, match="per_device_train_batch_size") as error:
        run_distributed(2, step, False)
    assert str(error.value).count("gather_across_devices=True") == 2
    assert all(value > 0.5 for value in run_distributed(2, step, True))


def test_dd04_negatives_are_those_of_all_ranks():
    embeddings = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(128).reshape(2, 64)
    halves = [half.tolist() for half in ids.split(32, dim=1)]
    _, _, stats = texts(0, WeinceLoss, embeddings, [ids.tolist()], {})
    for value in (answer[2] for answer in run_distributed(2, texts, WeinceLoss, embeddings, halves, {})):
        assert value == pytest.approx(stats, rel=1e-4, abs=1e-5)
    assert run_distributed(2, negatives_said, halves) == [["negatives per anchor: 63"]] * 2


def negatives_said(rank, ids):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("simcse_weince.losses")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        texts(rank, InfoNCELoss, torch.randn(128, 8), ids, {})
    finally:
        logger.removeHandler(handler)
    return messages
