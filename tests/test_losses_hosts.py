"""The losses under what people wrap around an encoder: adapters, compilers, checkpointing, two towers, evaluation."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import nn

from simcse_weince import CachedWeinceLoss, InfoNCELoss, WeinceLoss
from simcse_weince.sentence.encoder import SimCSEEncoder, build_encoder
from tests.tiny_models import write_tiny_bert

WORDS = "dog house music lamp rain train river year city water".split()
COLUMNS = [f"the {word} is red" for word in WORDS * 2], [f"one {word}" for word in WORDS * 2]
LOSSES = [WeinceLoss, CachedWeinceLoss]
every_loss = pytest.mark.parametrize("loss_class", LOSSES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_bert(tmp_path_factory.mktemp("model"))


def encoder_of(folder: str, **options: Any) -> SimCSEEncoder:
    return build_encoder(folder, pooler_type="avg", device="cpu", **options).train()


def features(encoder: SentenceTransformer, columns: int = 2) -> list[dict[str, Any]]:
    return [encoder.preprocess(column) for column in COLUMNS[:columns]]


def moved(model: nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}


@every_loss
@pytest.mark.parametrize("columns", [1, 2])
def test_lora_trains_the_adapter_alone(loss_class: type, columns: int, folder: str):
    encoder = encoder_of(folder)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["query"]), encoder[0].auto_model)
    loss = loss_class(encoder.train())
    loss(features(encoder, columns)).backward()
    # The other half of an adapter starts at 0, and so does the gradient of this one.
    assert moved(encoder) and all("lora_B" in name for name in moved(encoder))


def test_compiled_encoder(folder: str):
    encoder = encoder_of(folder, dropout=0.0)
    loss = WeinceLoss(encoder)
    expected = loss(features(encoder))
    loss.model = torch.compile(encoder, backend="eager")  # as the trainer does
    value = loss(features(encoder))
    value.backward()
    torch.testing.assert_close(value, expected)
    assert len(moved(encoder)) > 20


@every_loss
def test_gradient_checkpointing_changes_nothing(loss_class: type, folder: str):
    results = []
    for checkpointing in (False, True):
        encoder = encoder_of(folder)
        if checkpointing:
            encoder[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
            assert encoder[0].auto_model.is_gradient_checkpointing
        torch.manual_seed(0)
        value = loss_class(encoder)(features(encoder))
        value.backward()
        results.append([value.detach(), *(w.grad for w in encoder.parameters() if w.grad is not None)])
    torch.testing.assert_close(*results)


class Tower(nn.Module):
    """Two encoders in one, as for images and their captions: a column of pixels, a column of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(3 * 4 * 4, 8), nn.EmbeddingBag(50, 8)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        if "pixel_values" in features:
            return {**features, "sentence_embedding": self.image(features["pixel_values"].flatten(1))}
        return {**features, "sentence_embedding": self.text(features["input_ids"])}


@pytest.mark.parametrize(
    "options", [{}, {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}]
)
def test_two_towers_learn_to_agree(options: dict[str, Any]):
    model, generator = Tower(), torch.Generator().manual_seed(0)
    pixels = torch.randn(24, 3, 4, 4, generator=generator)
    captions = torch.randint(50, (24, 5), generator=generator)
    loss, values = WeinceLoss(model, **options), []
    optimizer = torch.optim.Adam(loss.parameters(), 0.02)
    for _ in range(30):
        value = loss([{"pixel_values": pixels}, {"input_ids": captions, "attention_mask": torch.ones_like(captions)}])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < 0.3 * values[0]
    assert loss.stats()["masked_candidates"] == 0


@pytest.mark.parametrize(
    ("loss_class", "wrapped"), [(InfoNCELoss, False), (WeinceLoss, False), (CachedWeinceLoss, True)]
)
def test_la05_evaluation_between_steps_changes_no_step(loss_class: type, wrapped: bool, folder: str, tmp_path: Path):
    """Also that a wrapped cached loss and a data set of pairs go through the trainer."""
    losses = []
    for evaluated in (False, True):
        encoder = encoder_of(folder, dropout=0.0)
        loss = loss_class(encoder)
        if wrapped:
            loss = MatryoshkaLoss(encoder, loss, matryoshka_dims=[32, 16])
        arguments = SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=20, learning_rate=1e-3, logging_steps=1, max_steps=4,
            save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
            eval_strategy="steps" if evaluated else "no", eval_steps=1,
        )  # fmt: skip
        data = Dataset.from_dict({"anchor": COLUMNS[0], "positive": COLUMNS[1]})
        trainer = SentenceTransformerTrainer(encoder, arguments, data, data if evaluated else None, loss)
        trainer.train()
        history = trainer.state.log_history
        losses.append([entry["loss"] for entry in history if "loss" in entry])
        assert sum("eval_loss" in entry for entry in history) == (4 if evaluated else 0)
    assert losses[0] == losses[1] and len(losses[0]) == 4 and losses[0][-1] < losses[0][0]
