"""Small fakes of the official image downloads: the real layouts and encodings with a handful of images."""

import io
import pickle
import struct
from pathlib import Path

import numpy as np
from PIL import Image

WNIDS = ["n02124075", "n04067472", "n01443537"]  # as in the real wnids.txt: not sorted


def random_images(count: int, side: int, seed: int = 0) -> np.ndarray:
    """Draw uint8 images, (count, 3, side, side)."""
    return np.random.default_rng(seed).integers(0, 256, (count, 3, side, side), dtype=np.uint8)


class _Python2Pickler(pickle._Pickler):
    """Writes what Python 2 wrote: every str is bytes without an encoding, and numpy's old module names."""

    def save_bytes(self, text: str | bytes) -> None:
        content = text.encode() if isinstance(text, str) else text
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(text)

    def save_global(self, obj: object, name: str | None = None) -> None:
        module = "numpy" if obj in (np.ndarray, np.dtype) else "numpy.core.multiarray"
        self.write(pickle.GLOBAL + f"{module}\n{obj.__name__}\n".encode())
        self.memoize(obj)

    dispatch = {**pickle._Pickler.dispatch, bytes: save_bytes, str: save_bytes, type: save_global}


def write_python2_pickle(path: Path, content: dict) -> None:
    """Write a dictionary as the official CIFAR and ImageNet-32 files have it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    _Python2Pickler(buffer, protocol=2).dump(content)
    path.write_bytes(buffer.getvalue())


def write_cifar10(root: Path, images: np.ndarray, labels: list[int]) -> Path:
    """Write ten images (3 x 32 x 32) a class or fewer: six equal parts, five of training and one of test."""
    folder = root / "cifar-10-batches-py"
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for name, part, numbers in zip(names, np.split(images, 6), np.split(np.array(labels), 6), strict=True):
        content = {"data": part.reshape(len(part), -1), "labels": numbers.tolist(), "batch_label": name}
        write_python2_pickle(folder / name, content | {"filenames": [f"{name}_{i}.png" for i in range(len(part))]})
    classes = "airplane automobile bird cat deer dog frog horse ship truck".split()
    write_python2_pickle(folder / "batches.meta", {"label_names": classes, "num_vis": 3072})
    return folder


def write_cifar100(root: Path, images: np.ndarray, fine: list[int], coarse: list[int]) -> Path:
    """Write the same images as train and test."""
    folder = root / "cifar-100-python"
    for name in ("train", "test"):
        content = {"data": images.reshape(len(images), -1), "fine_labels": fine, "coarse_labels": coarse}
        write_python2_pickle(folder / name, content)
    meta = {
        "fine_label_names": [f"fine{i}" for i in range(100)],
        "coarse_label_names": [f"coarse{i}" for i in range(20)],
    }
    write_python2_pickle(folder / "meta", meta)
    return folder


def write_stl10(root: Path, images: np.ndarray, labels: list[int]) -> Path:
    """Write images (N, 3, 96, 96) with labels from 0 as train, test and unlabeled."""
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    for split in ("train", "test", "unlabeled"):
        images.transpose(0, 1, 3, 2).tofile(folder / f"{split}_X.bin")
        if split != "unlabeled":
            (np.array(labels, np.uint8) + 1).tofile(folder / f"{split}_y.bin")
    (folder / "class_names.txt").write_text("airplane\nbird\ncar\ncat\ndeer\ndog\nhorse\nmonkey\nship\ntruck\n")
    return folder


def write_imagenet32(root: Path, images: np.ndarray, labels: list[int], *, npz: bool = False) -> Path:
    """Write ten training files of equal length, and all images as val_data; labels are given from 0."""
    root.mkdir(parents=True, exist_ok=True)
    parts = [*np.split(images, 10), images]
    numbers = [*np.split(np.array(labels) + 1, 10), np.array(labels) + 1]
    names = [*(f"train_data_batch_{number}" for number in range(1, 11)), "val_data"]
    for name, part, of_part in zip(names, parts, numbers, strict=True):
        data = part.reshape(len(part), -1)
        if npz:
            np.savez(root / f"{name}.npz", data=data, labels=of_part, mean=data.mean(0))
        else:
            content = {"data": data, "labels": of_part.tolist()}
            write_python2_pickle(root / name, content if name == "val_data" else content | {"mean": data.mean(0)})
    return root


def write_tiny_imagenet(root: Path, images_per_class: int = 2, side: int = 64) -> Path:
    """Write three classes of one colour each (red, green, blue), one training image in grey, and the flat val folder.

    Validation images are in an order that mixes the classes.
    """
    folder = root / "tiny-imagenet-200"
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    (folder / "words.txt").write_text("".join(f"{wnid}\tname of {wnid}\n" for wnid in WNIDS))
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    for wnid, colour in zip(WNIDS, colours, strict=True):
        (folder / "train" / wnid / "images").mkdir(parents=True)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t9\t9\n")
        for index in range(images_per_class):
            image = Image.new("RGB", (side, side), colour)
            if wnid == WNIDS[0] and index == 1:
                image = Image.new("L", (side, side), 128)
            image.save(folder / "train" / wnid / "images" / f"{wnid}_{index}.JPEG", quality=95)
    lines = []
    for index in range(2 * len(WNIDS)):
        which = (2 * index + 1) % len(WNIDS)
        Image.new("RGB", (side, side), colours[which]).save(folder / "val" / "images" / f"val_{index}.JPEG", quality=95)
        lines.append(f"val_{index}.JPEG\t{WNIDS[which]}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    return folder


def write_class_folders(root: Path, tree: dict[str, int], side: int = 8) -> Path:
    """Write so many PNG images into each folder of the tree."""
    for seed, (folder, count) in enumerate(tree.items()):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for index, image in enumerate(random_images(count, side, seed)):
            Image.fromarray(image.transpose(1, 2, 0)).save(root / folder / f"{index}.png")
    return root
