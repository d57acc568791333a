"""The losses under what people wrap around an encoder: adapters, compilers, checkpointing, two towers, evaluation."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset, Features as Columns, IterableDataset, Value
from PIL import Image
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Router, Transformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from simcse_weince import (
    CachedWeinceLoss,
    InfoNCELoss,
    LossStatsCallback,
    ReleasedWeince,
    SimCSEArguments,
    SimCSETrainer,
    WeinceLoss,
)
from simcse_weince.sentence.encoder import SimCSEEncoder, build_encoder
from tests.distributed import run_distributed
from tests.tiny_models import write_tiny_bert, write_tiny_clip

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
def test_compliance_13_lora_trains_the_adapter_alone(loss_class: type, columns: int, folder: str):
    encoder = encoder_of(folder)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["query"]), encoder[0].auto_model)
    loss = loss_class(encoder.train())
    loss(features(encoder, columns)).backward()
    # The other half of an adapter starts at 0, and so does the gradient of this one.
    assert moved(encoder) and all("lora_B" in name for name in moved(encoder))


def test_compliance_13_compiled_encoder(folder: str):
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


@every_loss
def test_fsdp2_gives_the_loss_and_the_gradients_of_one_process(loss_class: type, folder: str):
    """`fully_shard` on each layer and on the whole; launchers and trainers around it are the host's affair."""
    value, gradient, stats = sharded_step(0, folder, loss_class, 20)
    for other_value, other_gradient, other_stats in run_distributed(2, sharded_step, folder, loss_class, 10):
        assert other_value == pytest.approx(value, rel=1e-5)
        assert other_stats == pytest.approx(stats, rel=1e-3, abs=1e-4)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-3, atol=1e-4)


def sharded_step(rank: int, folder: str, loss_class: type, rows: int) -> tuple[float, dict, dict]:
    encoder = encoder_of(folder, dropout=0.0)
    if rows < len(COLUMNS[0]):
        mesh = init_device_mesh("cpu", (len(COLUMNS[0]) // rows,))
        for layer in encoder[0].auto_model.encoder.layer:
            fully_shard(layer, mesh=mesh)
        fully_shard(encoder, mesh=mesh)
    loss = loss_class(encoder, gather_across_devices=True)
    value = loss([encoder.preprocess(column[rank * rows :][:rows]) for column in COLUMNS])
    value.backward()
    gradients = {name: weight.grad for name, weight in encoder.named_parameters() if weight.grad is not None}
    whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}
    assert len(whole) > 20
    return value.item(), whole, loss.stats()


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


def arguments_of(folder: Path, **options: Any) -> SentenceTransformerTrainingArguments:
    defaults = {"per_device_train_batch_size": 20, "max_steps": 4, "save_strategy": "no", "learning_rate": 1e-3}
    return SentenceTransformerTrainingArguments(
        str(folder), logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, **{**defaults, **options}
    )


def losses_of(trainer: SentenceTransformerTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@every_loss
def test_images_and_their_captions(loss_class: type, tmp_path: Path):
    """A CLIP read from disk, in the host's trainer: a column of images, a column of texts."""
    encoder = SentenceTransformer(write_tiny_clip(tmp_path / "clip"), device="cpu")
    images = [Image.new("RGB", (16, 16), (12 * i, 120, 255 - 12 * i)) for i in range(20)]
    data = Dataset.from_dict({"image": images, "text": [f"{chr(97 + i)} picture" for i in range(20)]})
    trainer = SentenceTransformerTrainer(
        encoder, arguments_of(tmp_path, max_steps=20, learning_rate=1e-2), data, loss=loss_class(encoder)
    )
    trainer.train()
    assert losses_of(trainer)[-1] < 0.7 * losses_of(trainer)[0]


def test_a_router_with_two_encoders(folder: str, tmp_path: Path):
    towers = [[Transformer(folder), Pooling(32, "mean")] for _ in range(2)]
    encoder = SentenceTransformer(modules=[Router.for_query_document(*towers)], device="cpu")
    before = {name: weight.clone() for name, weight in encoder.named_parameters()}
    data = Dataset.from_dict({"anchor": COLUMNS[0], "positive": COLUMNS[1]})
    arguments = arguments_of(tmp_path, router_mapping={"anchor": "query", "positive": "document"})
    SentenceTransformerTrainer(encoder, arguments, data, loss=WeinceLoss(encoder)).train()
    moved_towers = {name[:30] for name, weight in encoder.named_parameters() if not torch.equal(weight, before[name])}
    assert any("query" in name for name in moved_towers) and any("document" in name for name in moved_towers)


@every_loss
def test_streams_and_bfloat16_weights(loss_class: type, folder: str, tmp_path: Path):
    encoder = encoder_of(folder, torch_dtype="bfloat16")
    rows = [{"text": text} for text in COLUMNS[0] * 4]
    stream = IterableDataset.from_generator(lambda: iter(rows), features=Columns({"text": Value("string")}))
    trainer = SentenceTransformerTrainer(encoder, arguments_of(tmp_path), stream, loss=loss_class(encoder))
    trainer.train()
    assert len(losses_of(trainer)) == 4 and all(0 < loss < 10 for loss in losses_of(trainer))
    assert all(weight.isfinite().all() and weight.dtype == torch.bfloat16 for weight in encoder.parameters())


@pytest.mark.parametrize("several_losses", [False, True])
def test_several_data_sets(several_losses: bool, folder: str, tmp_path: Path):
    """Sentences in one, pairs in the other; with a loss for both or one for each, whose statistics are told apart."""
    encoder = encoder_of(folder)
    data = {
        "texts": Dataset.from_dict({"text": COLUMNS[0] * 2}),
        "pairs": Dataset.from_dict({"anchor": COLUMNS[0] * 2, "positive": COLUMNS[1] * 2}),
    }
    loss = {"texts": WeinceLoss(encoder), "pairs": InfoNCELoss(encoder)} if several_losses else WeinceLoss(encoder)
    arguments = SimCSEArguments(str(tmp_path), use_cpu=True, max_steps=4, logging_steps=1, eval_strategy="no",
                                save_strategy="no", per_device_train_batch_size=20)  # fmt: skip
    trainer = SimCSETrainer(encoder, arguments, data, loss=loss)
    trainer.train()
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    if several_losses:
        assert 0 < last["texts_blend"] < 1 and "pairs_blend" not in last and "pairs_positive_cosine" in last
    else:
        assert 0 < last["blend"] < 1


class RunningLoss(InfoNCELoss):
    """A loss that remembers something from batch to batch."""

    criterion_class = ReleasedWeince

    def get_config_dict(self) -> dict[str, Any]:
        return {}


def test_callback_logs_and_keeps_the_state_in_a_plain_trainer(folder: str, tmp_path: Path):
    """Statistics in the log beside the host's entries; 4 steps equal 2 steps, a stop, and 2 more."""

    def trained(resume: bool | str) -> tuple[SentenceTransformerTrainer, float]:
        encoder = encoder_of(folder)
        data = Dataset.from_dict({"text": [f"{text} {number}" for number in range(4) for text in COLUMNS[0]]})
        loss = RunningLoss(encoder)
        trainer = SentenceTransformerTrainer(
            encoder, arguments_of(tmp_path / "run", save_strategy="steps", save_steps=2), data, loss=loss
        )
        trainer.add_callback(LossStatsCallback(trainer))
        trainer.train(resume_from_checkpoint=resume)
        return trainer, loss.criterion.shape_average.item()

    whole, average = trained(False)
    told = [entry for entry in whole.state.log_history if "blend" in entry]
    assert [entry["step"] for entry in told] == [1, 2, 3, 4] and len(losses_of(whole)) == 4
    assert all(0 < entry["blend"] < 1 and "shape_average" in entry for entry in told)
    halfway = load_file(tmp_path / "run" / "checkpoint-2" / "loss_state.safetensors")
    assert halfway["loss.criterion.shape_average"].item() != pytest.approx(average, abs=1e-4)
    resumed, again = trained(str(tmp_path / "run" / "checkpoint-2"))
    assert again == average and losses_of(resumed) == losses_of(whole)


class Scripted(BaseEvaluator):
    """Scores as they are told."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores = list(scores)

    def __call__(self, model: SentenceTransformer, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {"score": self.scores.pop(0)}


@pytest.mark.parametrize("ours", [False, True])
def test_la04_best_model_brings_the_state_of_its_loss(ours: bool, folder: str, tmp_path: Path):
    """The first of two evaluations is the best: its running average comes back with its weights."""
    encoder = encoder_of(folder)
    loss, data = RunningLoss(encoder), Dataset.from_dict({"text": COLUMNS[0] * 4})
    evaluator = Scripted(0.9, 0.1)
    steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    options = {**steps, "load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
    if ours:
        arguments = SimCSEArguments(str(tmp_path), use_cpu=True, max_steps=4, per_device_train_batch_size=20,
                                    eval_on_start=False, learning_rate=1e-3, **options)  # fmt: skip
        trainer = SimCSETrainer(encoder, arguments, data, loss=loss, evaluator=evaluator)
    else:
        arguments = arguments_of(tmp_path, **options)
        trainer = SentenceTransformerTrainer(encoder, arguments, data, loss=loss, evaluator=evaluator)
        trainer.add_callback(LossStatsCallback(trainer))
    trainer.train()
    kept = [load_file(tmp_path / f"checkpoint-{step}" / "loss_state.safetensors") for step in (2, 4)]
    averages = [state["loss.criterion.shape_average"].item() for state in kept]
    assert loss.criterion.shape_average.item() == averages[0] != averages[1]
