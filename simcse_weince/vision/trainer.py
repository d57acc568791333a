"""The trainer: transformers.Trainer with two views, the shared criterion and a kNN score, and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers.trainer import TRAINING_ARGS_NAME

from simcse_weince.criterion import InfoNCE
from simcse_weince.errors import InputError
from simcse_weince.gather import Shard
from simcse_weince.outputs import write_text
from simcse_weince.sentence.trainer import LossTrainer
from simcse_weince.vision.arguments import VisionArguments
from simcse_weince.vision.backbones import VisionEncoder
from simcse_weince.vision.datasets import ImageSet
from simcse_weince.vision.probe import Labelled, extract_features, knn_scores, stratified_split

# Decides which labelled images are bank and which are queries of the score during training: the same in every run.
_KNN_SPLIT_SEED = 0

_MODEL_CARD = """\
---
library_name: transformers
pipeline_tag: image-feature-extraction
---

An image encoder trained with simcse-weince: after `import simcse_weince.vision` it is loaded by
`AutoModel.from_pretrained`. Its scores, and how it was made, are in `run.json`.
"""


class ImageBatches(Dataset):
    """Images that the loader takes a batch at a time, as one uint8 tensor (N, 3, H, W) under "images"."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """A batch, already collated; the loader of torch prefers this to ``__getitem__``."""
        return {"images": self.images[indices]}


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling with momentum, as SimCLR uses it.

    The step of a weight is scaled by ``trust * |weight| / |gradient|``, or not at all where either is 0. Tensors of one
    dimension (biases, norm layers) are neither decayed nor scaled. Nothing here depends on or waits for the device.

    Source: You et al., "Large Batch Training of Convolutional Networks", arXiv 1708.03888; Chen et al., "A Simple
    Framework for Contrastive Learning of Visual Representations", appendix B.6.
    """

    def __init__(
        self, parameters: Any, lr: float, momentum: float = 0.9, weight_decay: float = 1e-6, trust: float = 1e-3
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                step = weight.grad
                if weight.ndim > 1:
                    step = step + group["weight_decay"] * weight
                    size, length = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(step)
                    scaled = (size > 0) & (length > 0)
                    step = step * torch.where(scaled, group["trust"] * size / length.masked_fill(~scaled, 1), 1)
                state = self.state[weight]
                velocity = state["velocity"] = state.get("velocity", torch.zeros_like(weight)).mul_(group["momentum"])
                weight.sub_(velocity.add_(step, alpha=group["lr"]))
        return loss


def knn_split(known: ImageSet, images: int) -> tuple[Tensor, Tensor]:
    """Rows of the labelled training images, at most so many, that are bank and queries of the score during training.

    Raises:
        InputError: No class has an image for each.
    """
    if known.labels is None:
        raise ValueError("eval_dataset must have labels")
    rows = torch.arange(len(known.labels))
    if len(rows) > images:
        rows = stratified_split(known.labels, images / len(rows), _KNN_SPLIT_SEED)[1]
    bank, queries = (rows[part] for part in stratified_split(known.labels[rows], 0.2, _KNN_SPLIT_SEED))
    if not len(queries):
        raise InputError(
            f"--knn_images {images} leaves no class with two images, one to look for the other; raise it, give more "
            "images, or say --eval_strategy no"
        )
    return bank, queries


class VisionTrainer(LossTrainer):
    """A Trainer of a `VisionEncoder`; as its base class, with these differences.

    * A batch reaches the device as uint8, where ``views`` makes the two views of all its images.
    * The loss is the criterion's, on the projections of the views. Its statistics join the training log, its state the
      checkpoints. Over several GPUs batch norm too uses the global batch, as SimCLR's does.
    * Evaluation is the kNN accuracy of a fifth of (at most ``args.knn_images``) labelled training images among the
      others, ``eval_knn_accuracy``, in the precision of the weights. Test images play no part.
    * :meth:`save_model` writes the folder of `VisionEncoder.save_pretrained`.

    Args:
        model: the encoder.
        args: the arguments.
        views: from (N, 3, H, W) uint8 and a ``generator`` to two float tensors, normally a `TwoViews`.
        criterion: from two tensors of projections to a scalar, with ``layout="both_views"``.
        train_dataset: images, of which labels are not used.
        eval_dataset: labelled training images.
        gather: compare with the images of all processes.
        normalize: as in `ViewOptions`, for the evaluation.
        options: others of `transformers.Trainer`.
    """

    args: VisionArguments

    def __init__(
        self,
        model: VisionEncoder,
        args: VisionArguments,
        *,
        views: Callable[..., tuple[Tensor, Tensor]],
        criterion: InfoNCE,
        train_dataset: ImageSet,
        eval_dataset: ImageSet | None = None,
        gather: bool = True,
        normalize: Any = None,
        **options: Any,
    ) -> None:
        if args.world_size > 1 and args.device.type == "cuda":
            nn.SyncBatchNorm.convert_sync_batchnorm(model)
        # A third less time for a ResNet, nothing for a ViT.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.encoder, self.known = model, eval_dataset
        self.views, self.gather, self.normalize = views, gather, normalize
        self.loss = self.criterion = criterion.to(args.device)
        super().__init__(
            model, args, train_dataset=ImageBatches(train_dataset.images), eval_dataset=eval_dataset,
            data_collator=dict, **options,  # a batch is one already
        )  # fmt: skip
        self.loss_is_scaled_for_ga = False  # a mean over the batch

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """`Lars` where the arguments say so, else the host's."""
        if self.optimizer is None and self.args.optimizer == "lars":
            weights = [weight for weight in (model or self.encoder).parameters() if weight.requires_grad]
            self.optimizer = Lars(weights, self.args.learning_rate, weight_decay=self.args.weight_decay)
        return super().create_optimizer(model)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss of a batch of :class:`ImageBatches`."""
        images = inputs["images"]
        # The random state that is restored with a checkpoint is equal on all processes; their images are not the same
        # and should not all be cropped in the same place.
        seed = int(torch.randint(2**62, ())) + self.args.process_index
        views = self.views(images, generator=torch.Generator(images.device).manual_seed(seed))
        projections = model(torch.cat(views))
        shard = Shard.of(len(images), images.device) if self.gather else None
        loss = self.criterion(*projections.chunk(2), shard=shard)
        return (loss, projections) if return_outputs else loss

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        """The kNN accuracy, computed by one process and told to all."""
        scores: list[dict[str, float]] = [{}]
        if self.is_world_process_zero() and self.known is not None:
            scores = [{f"{metric_key_prefix}_knn_accuracy": self._knn_accuracy(self.known)}]
        metrics: dict[str, float] = broadcast_object_list(scores)[0]
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _knn_accuracy(self, known: ImageSet) -> float:
        parts = knn_split(known, self.args.knn_images)
        rows, sizes = torch.cat(parts), [len(part) for part in parts]
        batch_size = self.args.per_device_eval_batch_size
        features = extract_features(self.encoder, known.images[rows], normalize=self.normalize, batch_size=batch_size)
        labels = torch.as_tensor(known.labels)[rows].to(features.device)
        bank, queries = map(Labelled, features.split(sizes), labels.split(sizes))
        return knn_scores(bank, queries, k=min(50, len(bank.labels)))["accuracy"]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the encoder as a folder of transformers; into a checkpoint, its weights as the host restores them."""
        if _internal_call and output_dir is not None:  # without a folder, the call is by push_to_hub
            super().save_model(output_dir, _internal_call=True)
        elif self.args.should_save:
            self.encoder.save_pretrained(str(output_dir or self.args.output_dir))

    def create_model_card(self, *args: Any, **options: Any) -> None:
        """Write a card that points to what the run has left; the host's draft asks for a model of transformers."""
        write_text(Path(str(self.args.output_dir), "README.md"), _MODEL_CARD)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        state_dict = self.encoder.state_dict() if state_dict is None else state_dict
        super()._save(output_dir, {name: value.contiguous() for name, value in state_dict.items()})
        # A pickle that nothing reads: the arguments are in the run's own files.
        Path(str(output_dir), TRAINING_ARGS_NAME).unlink(missing_ok=True)
