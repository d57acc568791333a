"""The vision trainer: its loss, its log, its checkpoints, and two processes that are one."""

import logging
import os

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, set_seed

from simcse_weince.criterion import InfoNCE, ReleasedWeince, Weince
from simcse_weince.errors import InputError
from simcse_weince.vision.arguments import VisionArguments
from simcse_weince.vision.backbones import VisionEncoder, build_backbone
from simcse_weince.vision.datasets import ImageSet
from simcse_weince.vision.probe import extract_features
from simcse_weince.vision.trainer import Lars, VisionTrainer
from simcse_weince.vision.views import TwoViews, ViewOptions
from tests.distributed import run_distributed


def images(rows=48, classes=3, seed=0):
    """Noise around one colour for each class, 8 x 8 pixels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % classes
    colours = torch.tensor([[200, 60, 60], [60, 200, 60], [60, 60, 200]])[labels]
    noise = torch.randint(-50, 50, (rows, 3, 8, 8), generator=generator)
    return ImageSet((colours[:, :, None, None] + noise).to(torch.uint8), labels, ["r", "g", "b"], "colours")


def encoder_of(name="resnet18", seed=0):
    torch.manual_seed(seed)
    return VisionEncoder(build_backbone(name, image_size=8, width=0.125), 8, projection_size=16)


def trainer_of(folder, criterion=None, encoder=None, data=None, views=None, **arguments):
    """Six steps of 16 images on the CPU."""
    arguments = {"per_device_train_batch_size": 16, "max_steps": 6, "logging_steps": 1, "use_cpu": True, "seed": 7,
                 "eval_strategy": "no", "disable_tqdm": True, **arguments}  # fmt: skip
    args = VisionArguments(output_dir=str(folder), **arguments)
    set_seed(args.seed)
    data = data or images()
    criterion = criterion or Weince(0.5, layout="both_views")
    views = views or TwoViews(ViewOptions(), 8)
    return VisionTrainer(encoder or encoder_of(), args, views=views, criterion=criterion, train_dataset=data,
                         eval_dataset=data)  # fmt: skip


def losses(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def mirrored(images, generator):
    """Two views without chance."""
    pixels = images.float() / 255
    return pixels, pixels.flip(-1)


# ---- loss and log ----


def test_the_loss_is_the_criterion_of_both_views(tmp_path):
    criterion = Weince(0.5, layout="both_views")
    trainer = trainer_of(tmp_path, criterion, views=mirrored)
    batch = images().images[:16]
    first, second = trainer.encoder(torch.cat(mirrored(batch, None))).chunk(2)
    expected = Weince(0.5, layout="both_views")(first, second)
    torch.testing.assert_close(trainer.compute_loss(trainer.encoder, {"images": batch}), expected)


def test_statistics_are_in_the_log(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    assert len(losses(trainer)) == 6
    for entry in losses(trainer):
        assert {"blend", "shape", "hardness", "evidence", "positive_cosine", "negative_cosine"} <= entry.keys()
    assert trainer.criterion.most_negatives == 30


def test_accumulated_batches_are_averaged(tmp_path, monkeypatch):
    """The logged loss of one step of two batches is their mean."""
    trainer = trainer_of(tmp_path, views=mirrored, max_steps=1, gradient_accumulation_steps=2)
    found, compute_loss = [], VisionTrainer.compute_loss

    def kept(self, *args, **kwargs):
        found.append(compute_loss(self, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(VisionTrainer, "compute_loss", kept)
    trainer.train()
    assert len(found) == 2 and losses(trainer)[0]["loss"] == pytest.approx(torch.stack(found).mean().item(), rel=1e-5)


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path):
    encoder = encoder_of()
    with torch.no_grad():
        encoder.head[0].weight.fill_(float("inf"))
    with pytest.raises(InputError, match="the loss is nan at step 1"):
        trainer_of(tmp_path, encoder=encoder).train()


def test_an_incomplete_batch_is_left_out(tmp_path):
    trainer = trainer_of(tmp_path, data=images(rows=47), max_steps=-1, num_train_epochs=1)
    trainer.train()
    assert trainer.state.global_step == 2


# ---- the score during training ----


def test_knn_score_during_training(tmp_path):
    trainer = trainer_of(tmp_path, eval_strategy="steps", eval_steps=3, eval_on_start=True)
    trainer.train()
    scores = [entry["eval_knn_accuracy"] for entry in trainer.state.log_history if "eval_knn_accuracy" in entry]
    assert len(scores) == 3 and all(0 <= score <= 1 for score in scores) and scores[-1] > 0.8


def test_evaluation_changes_nothing(tmp_path):
    """With and without scores on the way, the training is the same."""
    runs = []
    for name, options in (("with", {"eval_strategy": "steps", "eval_steps": 2}), ("without", {})):
        trainer = trainer_of(tmp_path / name, **options)
        trainer.train()
        runs.append((losses(trainer), trainer.encoder.training))
    assert runs[0] == runs[1] and len(runs[0][0]) == 6


def test_only_so_many_images_are_scored(tmp_path, monkeypatch):
    seen = []

    def counted(encoder, images, **options):
        seen.append(len(images))
        return extract_features(encoder, images, **options)

    monkeypatch.setattr("simcse_weince.vision.trainer.extract_features", counted)
    trainer_of(tmp_path, knn_images=24).evaluate()
    trainer_of(tmp_path).evaluate()
    assert seen == [24, 48]


# ---- what is saved and restored ----


@pytest.mark.parametrize("criterion", [Weince, ReleasedWeince])
def test_resume_is_the_same_run(tmp_path, criterion):
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 9}
    whole = trainer_of(tmp_path / "whole", criterion(0.5, layout="both_views"), **options)
    whole.train()
    resumed = trainer_of(tmp_path / "again", criterion(0.5, layout="both_views"), encoder_of(seed=1), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for (name, one), two in zip(whole.encoder.state_dict().items(), resumed.encoder.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
    for name, one in whole.criterion.state_dict().items():
        assert torch.equal(one, resumed.criterion.state_dict()[name]), name
    assert losses(whole) == losses(resumed)


def test_la04_state_of_the_loss_is_in_the_checkpoint(tmp_path):
    criterion = ReleasedWeince(layout="both_views")
    trainer = trainer_of(tmp_path, criterion, save_strategy="steps", save_steps=6)
    trainer.train()
    saved = load_file(tmp_path / "checkpoint-6" / "loss_state.safetensors")
    average = saved["loss.shape_average"]
    assert average != 4 and torch.equal(average, criterion.shape_average)
    assert not list(tmp_path.rglob("training_args.bin"))


def test_the_saved_folder_is_a_model_of_transformers(tmp_path):
    trainer = trainer_of(tmp_path / "run", max_steps=2)
    trainer.train()
    trainer.save_model()
    plain = AutoModel.from_pretrained(tmp_path / "run").eval()
    features = extract_features(trainer.encoder, images().images)
    with torch.no_grad():
        same = plain(pixel_values=images().images.float() / 255).pooler_output.flatten(1)
    torch.testing.assert_close(features, same)
    again = VisionEncoder.from_pretrained(tmp_path / "run")
    assert torch.equal(again.head[0].weight, trainer.encoder.head[0].weight)


# ---- many processes ----


class Recorded:
    """Views without chance that remember the seed they were offered."""

    def __init__(self):
        self.seeds = []

    def __call__(self, images, generator):
        self.seeds.append(generator.initial_seed())
        return tuple(view.double() for view in mirrored(images, generator))


def train_as_one(rank, folder, processes):
    """Three steps of 16 images over all processes, of a ViT with a weight that nothing uses."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(value) for name, value in environment.items()} if processes > 1 else {})
    try:
        encoder = encoder_of("vit-small").double()  # so that only a wrong gradient makes a difference
        encoder.backbone.register_parameter("unused", nn.Parameter(torch.zeros(3)))
        views = Recorded()
        trainer = trainer_of(
            folder, ReleasedWeince(layout="both_views"), encoder, views=views, max_steps=3, optimizer="lars",
            learning_rate=1e-3, warmup_steps=0, per_device_train_batch_size=16 // processes, save_strategy="no",
            eval_strategy="steps", eval_steps=3,
        )  # fmt: skip
        trainer.train()
        assert trainer.args.world_size == processes
        weights = {name: value.clone() for name, value in encoder.state_dict().items()}
        scores = [entry for entry in trainer.state.log_history if "eval_knn_accuracy" in entry]
        return weights, losses(trainer), trainer.criterion.shape_average.item(), views.seeds, scores
    finally:
        for name in environment:
            os.environ.pop(name, None)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


@pytest.mark.slow
def test_dd04_two_processes_are_one(tmp_path):
    """DD-04, DD-06, DD-07, DD-11: loss, statistics, state and weights of the global batch; one score for all."""
    weights, log, shape, _, scores = run_distributed(1, train_as_one, str(tmp_path / "one"), 1)[0]
    answers = run_distributed(2, train_as_one, str(tmp_path / "two"), 2)
    for other, other_log, other_shape, _, other_scores in answers:
        for name, value in weights.items():
            torch.testing.assert_close(other[name], value, rtol=1e-6, atol=1e-9, msg=name)
        for one, two in zip(log, other_log, strict=True):
            for name in one.keys() - {"grad_norm"}:
                assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
        assert other_shape == pytest.approx(shape, rel=1e-4)
        assert other_scores[-1]["eval_knn_accuracy"] == scores[-1]["eval_knn_accuracy"]
    (_, _, first_shape, first_seeds, _), (_, _, second_shape, second_seeds, _) = answers
    assert first_shape == second_shape
    assert not set(first_seeds) & set(second_seeds)  # no two images get one crop because they are on two processes


# ---- LARS ----


def test_vi10_lars_takes_zero_weights_and_zero_gradients():
    zero, idle = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.ones(3, 2))
    zero.grad, idle.grad = torch.ones(3, 2), torch.zeros(3, 2)
    Lars([zero, idle], lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(zero.detach(), torch.full((3, 2), -0.1))
    assert torch.equal(idle.detach(), torch.ones(3, 2))


def test_vi10_lars_neither_decays_nor_scales_biases_and_norms():
    norm = nn.BatchNorm1d(4)
    optimizer = Lars(norm.parameters(), lr=0.1, weight_decay=1.0)
    norm.weight.grad, norm.bias.grad = torch.zeros(4), torch.full((4,), 2.0)
    optimizer.step()
    assert torch.equal(norm.weight.detach(), torch.ones(4))
    torch.testing.assert_close(norm.bias.detach(), torch.full((4,), -0.2))


def test_vi10_lars_step_by_hand():
    """Trust 0.001 * 2 / 4 on the first step; the second adds 0.9 of it."""
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = Lars([weight], lr=1.0, weight_decay=0.0)
    weight.grad = torch.full((2, 2), 2.0)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), 0.999))
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), 0.999 - 0.9e-3 - 0.999e-3))


def test_lars_trains_and_resumes(tmp_path):
    options = {"optimizer": "lars", "save_strategy": "steps", "save_steps": 3, "save_total_limit": 9}
    whole = trainer_of(tmp_path / "whole", **options)
    whole.train()
    assert isinstance(whole.optimizer.optimizer, Lars)
    assert whole.args.learning_rate == pytest.approx(0.3 * 16 / 256) and whole.args.weight_decay == 1e-6
    rates = [entry["learning_rate"] for entry in losses(whole)]
    assert rates[0] < max(rates) > rates[-1]
    resumed = trainer_of(tmp_path / "again", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(whole) == losses(resumed)


def test_the_default_is_plain_adam(tmp_path):
    """Equal to torch's Adam with learning rate 3e-4: the decoupled weight decay is 0, and nothing is clipped."""
    trainer = trainer_of(tmp_path, InfoNCE(0.5, layout="both_views"), views=mirrored, max_steps=1)
    twin, batches = encoder_of().to(memory_format=torch.channels_last), []
    compute_loss = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, **options: (
        batches.append(inputs["images"]) or compute_loss(model, inputs)
    )
    trainer.train()
    first, second = twin(torch.cat(mirrored(batches[0], None))).chunk(2)
    InfoNCE(0.5, layout="both_views")(first, second).backward()
    torch.optim.Adam(twin.parameters(), lr=3e-4).step()
    for one, two in zip(trainer.encoder.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_warns_of_nothing_in_an_ordinary_run(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="simcse_weince"):
        trainer_of(tmp_path).train()
    assert not caplog.records
