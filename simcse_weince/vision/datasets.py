"""Images and their labels from the official downloads, folders of images and Hugging Face data sets."""

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SPLITS = ("train", "test", "unlabeled")


@dataclass
class ImageSet:
    """Images of one size.

    Attributes:
        images: uint8, (N, 3, H, W), in memory or mapped from a file.
        labels: int64, (N,), indices into `classes`; None where there are no labels.
        classes: Names of the classes, or None where the source does not say.
        name: Of the data set, such as "CIFAR-10".
    """

    images: Tensor
    labels: Tensor | None
    classes: list[str] | None
    name: str


def load_images(
    source: str | Path, split: str, *, image_size: int | None = None, cache_dir: str | Path | None = None
) -> ImageSet:
    """Read one split (first version: .npz files)."""
    with np.load(source, allow_pickle=False) as stored:
        images = torch.from_numpy(stored[f"x_{split}"]).permute(0, 3, 1, 2).contiguous()
        labels = torch.from_numpy(stored[f"y_{split}"]).long()
        return ImageSet(images, labels, [str(name) for name in stored["classes"]], Path(source).stem)
