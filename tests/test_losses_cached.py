"""The cached losses equal the plain ones: value, gradients, dropout, duplicates, wrappers, trainer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.losses.merged_forward import column_merging_disabled
from sentence_transformers.sentence_transformer.losses import AdaptiveLayerLoss, Matryoshka2dLoss, MatryoshkaLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from torch import Tensor, nn

from simcse_weince import CachedInfoNCELoss, CachedWeinceLoss, InfoNCELoss, WeinceLoss
from simcse_weince.sentence.encoder import SimCSEEncoder, build_encoder
from tests.tiny_models import write_tiny_bert

WORDS = "dog house music lamp rain train river year".split()
ROWS = [*WORDS, *WORDS, *WORDS[:3]]
COLUMNS = (
    [f"the {word} is in the city" for word in ROWS],
    [f"one {word} and {'a red' if i < 8 else 'the'} {word}" for i, word in enumerate(ROWS)],
    [f"{word} plays still" for word in reversed(ROWS)],
)
PAIRS = [(InfoNCELoss, CachedInfoNCELoss), (WeinceLoss, CachedWeinceLoss)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_bert(tmp_path_factory.mktemp("model"))


def encoder_of(folder: str, dropout: float | None = None) -> SimCSEEncoder:
    """In float64, so that other orders of the same sums agree."""
    return build_encoder(folder, pooler_type="avg", dropout=dropout, device="cpu").double().train()


def step(loss: nn.Module, columns: int) -> list[Tensor]:
    """Value and gradients of one step, from the same seed."""
    loss.zero_grad()
    torch.manual_seed(5)
    value = loss([loss.model.preprocess(column) for column in COLUMNS[:columns]], None)
    value.backward()
    gradients = [weight.grad.clone() for weight in loss.model.parameters() if weight.grad is not None]
    assert len(gradients) > 20 and any(gradient.abs().max() > 1e-3 for gradient in gradients)
    return [value.detach(), *gradients]


@pytest.mark.parametrize("mini_batch_size", [1, 3, 8])
@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize(("plain", "cached"), PAIRS)
def test_compliance_07_la09_equals_the_plain_loss(
    plain: type, cached: type, columns: int, mini_batch_size: int, folder: str
):
    """Nineteen rows, so that the last mini-batch is smaller; duplicates among the rows."""
    encoder = encoder_of(folder, 0.0)
    expected, expected_stats = step(loss := plain(encoder), columns), loss.stats()
    found = step(loss := cached(encoder, mini_batch_size=mini_batch_size), columns)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert loss.stats() == pytest.approx(expected_stats, rel=1e-3, abs=1e-5)


class InMiniBatches(nn.Module):
    """Embeds as a cached loss does in its first pass, but keeps the graph."""

    def __init__(self, model: SentenceTransformer, size: int) -> None:
        super().__init__()
        self.model, self.size = model, size

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        parts = zip(*(value.split(self.size) for value in features.values() if isinstance(value, Tensor)), strict=True)
        names = [name for name, value in features.items() if isinstance(value, Tensor)]
        outputs = []
        for part in parts:
            batch = dict(zip(names, part, strict=True))
            width = batch["attention_mask"].any(0).sum()
            outputs.append(self.model({name: value[:, :width] for name, value in batch.items()})["sentence_embedding"])
        return {"sentence_embedding": torch.cat(outputs)}


@pytest.mark.parametrize("mini_batch_size", [1, 3, 8])
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize(("plain", "cached"), PAIRS)
def test_compliance_07_la09_dropout_is_replayed(
    plain: type, cached: type, columns: int, mini_batch_size: int, folder: str
):
    encoder = encoder_of(folder)
    options: Any = {"group_by_length": False}  # masks are compared, which are drawn for the rows in their order
    direct = plain(InMiniBatches(encoder, mini_batch_size), **options)
    direct.model.preprocess = encoder.preprocess
    with column_merging_disabled():
        expected = step(direct, columns)
    options["mini_batch_size"] = mini_batch_size
    found = step(cached(encoder, **options), columns)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert abs(step(cached(encoder_of(folder, 0.0), **options), columns)[0] - found[0]) > 1e-3


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize(("plain", "cached"), PAIRS)
def test_compliance_08_matryoshka_equals_matryoshka_of_the_plain_loss(
    plain: type, cached: type, columns: int, folder: str
):
    encoder = encoder_of(folder, 0.0)
    expected = step(MatryoshkaLoss(encoder, plain(encoder), matryoshka_dims=[32, 16, 8]), columns)
    found = step(MatryoshkaLoss(encoder, cached(encoder, mini_batch_size=3), matryoshka_dims=[32, 16, 8]), columns)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_two_batches_before_one_backward(folder: str):
    """Keys of texts and embeddings belong to a batch, not to the loss."""
    encoder = encoder_of(folder, 0.0)
    loss = CachedWeinceLoss(encoder, mini_batch_size=4)
    gradients = []
    for second in (False, True):
        loss.zero_grad()
        value = loss([encoder.preprocess(column) for column in COLUMNS[:2]])
        if second:
            loss([encoder.preprocess(column[:5]) for column in COLUMNS[:2]])
        value.backward()
        gradients.append([weight.grad.clone() for weight in encoder.parameters() if weight.grad is not None])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("wrapper", [AdaptiveLayerLoss, Matryoshka2dLoss])
def test_adaptive_layers_are_refused(wrapper: type, folder: str):
    encoder = encoder_of(folder)
    more = {"matryoshka_dims": [32, 16]} if wrapper is Matryoshka2dLoss else {}
    loss = wrapper(encoder, CachedWeinceLoss(encoder), **more)
    with pytest.raises(ValueError, match="use WeinceLoss instead"):
        loss([encoder.preprocess(column) for column in COLUMNS[:2]], None)
    # The refusal leaves the encoder as it was.
    assert step(CachedWeinceLoss(encoder), 2)[0].isfinite()


def test_static_embeddings_and_wrong_sizes_are_refused(folder: str):
    encoder = encoder_of(folder)
    static = SentenceTransformer(
        modules=[StaticEmbedding(encoder.tokenizer.backend_tokenizer, embedding_dim=8)], device="cpu"
    )
    with pytest.raises(ValueError, match="use InfoNCELoss instead"):
        CachedInfoNCELoss(static)
    for name in ("mini_batch_size", "mini_batch_num_tokens"):
        with pytest.raises(ValueError, match=name):
            CachedWeinceLoss(encoder, **{name: 0})
    with pytest.raises(ValueError, match="temperature"):
        CachedWeinceLoss(encoder, temperature=0)


def test_evaluation_needs_no_gradient_and_tokens_bound_mini_batches(folder: str):
    encoder = encoder_of(folder, 0.0)
    features = [encoder.preprocess(column) for column in COLUMNS[:2]]
    rows: list[int] = []
    encoder.register_forward_pre_hook(lambda module, arguments: rows.append(len(arguments[0]["input_ids"])))
    with torch.no_grad():
        value = CachedWeinceLoss(encoder, mini_batch_num_tokens=30)(features)
        assert rows and max(rows) < 19 and sum(rows) == 38
        torch.testing.assert_close(value, WeinceLoss(encoder)(features))


@pytest.mark.parametrize("cached", [CachedInfoNCELoss, CachedWeinceLoss])
def test_configuration_rebuilds_the_loss(cached: type, folder: str):
    encoder = encoder_of(folder)
    loss = cached(encoder, 0.07, mini_batch_size=5, gather_across_devices=True, mask_duplicates=False, chunk_size=4)
    options = json.loads(json.dumps(loss.get_config_dict()))
    assert options["temperature"] == loss.temperature == 0.07 and options["mini_batch_size"] == 5
    assert cached(encoder, **options).get_config_dict() == loss.get_config_dict()
    assert loss.scale == 1 / 0.07 and "2101.06983" in loss.citation


def test_trainer_and_model_card(folder: str, tmp_path: Path):
    encoder = encoder_of(folder)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "run"), per_device_train_batch_size=16, learning_rate=1e-3, logging_steps=1,
        max_steps=6, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    texts = [f"the {a} and the {b}" for a in WORDS for b in WORDS]
    loss = CachedWeinceLoss(encoder, mini_batch_size=4)
    trainer = SentenceTransformerTrainer(encoder, arguments, Dataset.from_dict({"text": texts}), loss=loss)
    trainer.train()
    history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert history[-1] < history[0] and loss.stats()["positive_cosine"] < 0.9999
    encoder.save(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    for words in ("- loss:CachedWeinceLoss", "- loss:WeinceLoss", '"mini_batch_size": 4', "2101.06983"):
        assert words in card
