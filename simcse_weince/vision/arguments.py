"""Dataclasses that are the flags, the YAML keys and the saved configuration of a vision run, as for sentences."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from transformers import TrainingArguments
from transformers.training_args import ParallelMode

from simcse_weince.configuration import check_numbers, check_training_numbers, option, parse_groups
from simcse_weince.criterion import InfoNCE, ReleasedWeince, Weince
from simcse_weince.errors import InputError
from simcse_weince.sentence.arguments import TailArguments, fit_to_cpu
from simcse_weince.vision.probe import ProbeOptions
from simcse_weince.vision.views import ViewOptions

_SCORE = "knn_accuracy"  # what the evaluation during training yields


@dataclass
class ImageArguments:
    """The images, and how they become pixels."""

    images: str | None = option(
        None, "Folder in an official layout, folder of images by class, .npz file, or Hugging Face data set id"
    )
    bank_split: Literal["train", "test"] = option("train", "Labelled split that probes learn from")
    test_split: Literal["train", "test"] = option("test", "Labelled split that results are reported on")
    image_size: int | None = option(None, "Side of the square views in pixels; default: that of the images")
    views: str | None = option(
        None,
        'Options of the views that differ from the recipe, as JSON: {"blur_probability": 0.5, "jitter": [0, 0, 0, 0]}',
    )
    cache_dir: str | None = option(None, "Where downloads and decoded images are kept; default: the Hugging Face cache")

    def __post_init__(self) -> None:
        if not self.images:
            raise InputError("--images is missing: a folder of images, or the id of a Hugging Face data set")
        if self.bank_split == self.test_split:
            raise InputError(
                f"--bank_split and --test_split are both {self.test_split}: the images that are scored would be those "
                "that the probes learn from"
            )
        check_numbers(self, {"image_size": 1})

    def view_options(self) -> ViewOptions:
        """The recipe with what ``views`` changes.

        Raises:
            InputError: an unknown or impossible option.
        """
        try:
            return ViewOptions(**json.loads(self.views or "{}"))
        except (ValueError, TypeError) as error:
            raise InputError(f"--views {self.views}: {error}") from error


@dataclass
class EncoderArguments:
    """The encoder to start from."""

    model_name_or_path: str = option(
        "resnet18", "resnet18, resnet50 or vit-small (random weights), or an image encoder's folder or Hugging Face id"
    )
    width: float = option(1.0, "Factor on the channels of a named encoder, such as 0.25 for a CPU")
    projection_size: int = option(64, "Width of the projection that the criterion compares")

    def __post_init__(self) -> None:
        check_numbers(self, {"projection_size": 1}, ["width"])


@dataclass
class VisionLossArguments(TailArguments):
    """The criterion; names and defaults are those of `simcse_weince.Weince`, except for the temperature."""

    loss: Literal["infonce", "weince", "released"] = option("weince", "Criterion")
    temperature: float = option(0.5, "Divides the cosines of the softmax part")
    shape: str | None = option(None, "Tail shape: anchor, shrunk, or a number; default: anchor, for released 1.0")
    floor: float | None = option(None, "Added to the shortfall; default: 1e-4, for released 1e-6")
    gather_across_devices: bool = option(True, "Compare with the images of all processes, not only one's own")

    def criterion(self) -> InfoNCE:
        """The chosen criterion in the layout of two views.

        Raises:
            InputError: an option is out of range, or belongs to another criterion.
        """
        options = self.options_of(self.loss)
        try:
            kinds = {"infonce": InfoNCE, "weince": Weince, "released": ReleasedWeince}
            return kinds[self.loss](layout="both_views", **options)
        except (ValueError, TypeError) as error:
            raise InputError(f"loss options: {error}") from error


@dataclass
class EvaluationArguments:
    """What only the evaluation of a saved encoder needs."""

    batch_size: int = option(512, "Images at a time; the features do not depend on it")
    device: str | None = option(None, "cpu, cuda, cuda:1, mps; default: the first GPU if there is one")
    features: str | None = option(None, "Folder for the features and labels of bank and test images, as .npy")
    output: str | None = option(None, "JSON file for every score with its protocol")

    def __post_init__(self) -> None:
        check_numbers(self, {"batch_size": 1})


@dataclass
class VisionArguments(TrainingArguments):
    """Training arguments of transformers with the defaults of the paper's SimCLR recipe.

    Differences: Adam with a constant learning rate of 3e-4, no weight decay and no clipping; batch 256, an incomplete
    one left out; 100 epochs; after each a kNN score on training images and a checkpoint. ``optimizer: lars`` is as in
    SimCLR: learning rate 0.3 * batch / 256, weight decay 1e-6, a tenth of warm-up, then cosine.
    """

    output_dir: str | None = option(None, "Folder of the trained encoder, its checkpoints and its reports")
    train_split: Literal["train", "unlabeled"] = option("train", "Split to train on, without its labels")
    optimizer: Literal["adam", "lars"] = option("adam", "Optimizer")
    learning_rate: float = option(None, "Peak learning rate; default: 3e-4, for lars 0.3 * batch / 256")
    lr_scheduler_type: str = option(None, "Schedule; default: constant, for lars cosine")
    warmup_steps: float = option(None, "Steps, or below 1 a share of all, of warm-up; default: 0, for lars 0.1")
    weight_decay: float = option(None, "Weight decay; default: 0, for lars 1e-6")
    max_grad_norm: float = option(0.0, "Longest gradient; 0: any")
    per_device_train_batch_size: int = option(256, "Images of a batch on each device")
    per_device_eval_batch_size: int = option(512, "Images at a time in evaluation")
    num_train_epochs: float = option(100.0, "Passes over the images")
    dataloader_drop_last: bool = option(True, "Leave out an incomplete batch")
    remove_unused_columns: bool = option(False, "Has no effect: images have no columns")
    eval_strategy: str = option("epoch", "When to compute the kNN score: steps, epoch or no")
    knn_images: int = option(10_000, "Labelled training images for that score: four fifths bank, one fifth queries")
    save_strategy: str = option("epoch", "When to write a checkpoint: steps, epoch or no")
    save_total_limit: int | None = option(1, "Checkpoints to keep")
    logging_steps: float = option(50, "Steps between log lines")
    logging_nan_inf_filter: bool = option(False, "Hide a loss that is not finite, which else ends the training")
    overwrite_output_dir: bool = option(False, "Allow an --output_dir that already holds a run")

    def __post_init__(self) -> None:
        """Fill what depends on the optimizer or on this machine."""
        if not self.output_dir:
            raise InputError("--output_dir is missing")
        lars, given = self.optimizer == "lars", self.learning_rate
        self.learning_rate = 3e-4 if given is None else given
        self.lr_scheduler_type = self.lr_scheduler_type or ("cosine" if lars else "constant")
        self.warmup_steps = self.warmup_steps if self.warmup_steps is not None else 0.1 * lars
        self.weight_decay = self.weight_decay if self.weight_decay is not None else 1e-6 * lars
        fit_to_cpu(self)
        for name in ("gradient_checkpointing", "label_smoothing_factor"):
            if getattr(self, name):
                raise InputError(f"--{name} does not go with images here; leave it out")
        if self.disable_tqdm is None:
            self.disable_tqdm = not sys.stderr.isatty()
        if self.load_best_model_at_end or self.lr_scheduler_type == "reduce_lr_on_plateau":
            self.metric_for_best_model = self.metric_for_best_model or _SCORE
        if (self.metric_for_best_model or _SCORE).removeprefix("eval_") != _SCORE:
            raise InputError(f"--metric_for_best_model {self.metric_for_best_model}: the only score is {_SCORE}")
        super().__post_init__()
        if self.parallel_mode == ParallelMode.NOT_DISTRIBUTED:
            self._n_gpu = 1  # DataParallel, which nobody asked for, would see too few negatives
        if lars and given is None:
            self.learning_rate = 0.3 * self.per_device_train_batch_size * self.world_size / 256
        check_training_numbers(self)
        check_numbers(self, {"per_device_train_batch_size": 2})


class VisionGroups(NamedTuple):
    """The options of a training run, and in ``chosen`` those that are not at their defaults."""

    images: ImageArguments
    encoder: EncoderArguments
    loss: VisionLossArguments
    probes: ProbeOptions
    training: VisionArguments
    chosen: dict[str, Any]


def parse_vision_arguments(arguments: Sequence[str], prog: str | None = None) -> VisionGroups:
    """Parse the command line of a training run as :func:`~simcse_weince.configuration.parse_groups` does."""
    groups = (ImageArguments, EncoderArguments, VisionLossArguments, ProbeOptions, VisionArguments)
    usage = "%(prog)s [--config FILE.yaml] --images SOURCE --output_dir DIR [options]"
    return VisionGroups(*parse_groups(groups, arguments, prog, usage))
