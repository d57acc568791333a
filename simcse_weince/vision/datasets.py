"""Images and their labels from the official downloads, folders of images and Hugging Face data sets."""

import codecs
import hashlib
import io
import pickle
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from simcse_weince.errors import InputError, first_line, import_extra
from simcse_weince.outputs import replacing

SPLITS = {
    "train": ["train"],
    "test": ["test", "validation", "valid", "val"],
    "unlabeled": ["unlabeled", "unsupervised"],
}
# Folders of images that are a split: those names, and what `datasets` takes for them.
_SPLIT_OF = {
    **{name: name for names in SPLITS.values() for name in names},
    "training": "train", "testing": "test", "eval": "test", "evaluation": "test", "dev": "validation",
}  # fmt: skip
_READER_VERSION = 2  # part of every cache key: raise it whenever the same files give other images or labels
_Files = dict[str, Callable[[], bytes]]  # path below the folder of a layout -> its content


@dataclass
class ImageSet:
    """Images of one size.

    Attributes:
        images: uint8, (N, 3, H, W), in memory or mapped from a file.
        labels: int64, (N,), from 0, in one order of the classes for all splits; None where there are none.
        classes: Names of the classes, or None where the source does not say.
        name: Of the data set, such as "CIFAR-10".
    """

    images: Tensor
    labels: Tensor | None
    classes: list[str] | None
    name: str

    def __post_init__(self) -> None:
        if not len(self.images):
            raise ValueError("the split is empty")


# What each split of an official download needs; also what tells the data set.
_LAYOUTS: dict[str, dict[str, list[str]]] = {
    "CIFAR-10": {
        "train": [*(f"data_batch_{number}" for number in range(1, 6)), "batches.meta"],
        "test": ["test_batch", "batches.meta"],
    },
    "CIFAR-100": {"train": ["train", "meta"], "test": ["test", "meta"]},
    "ImageNet-32": {"train": [f"train_data_batch_{number}" for number in range(1, 11)], "test": ["val_data"]},
    "STL-10": {
        "train": ["train_X.bin", "train_y.bin", "class_names.txt"],
        "test": ["test_X.bin", "test_y.bin", "class_names.txt"],
        "unlabeled": ["unlabeled_X.bin"],
    },
    "Tiny-ImageNet": {"train": ["wnids.txt"], "test": ["wnids.txt", "val/val_annotations.txt"]},
}
_MARKS = {file: name for name, splits in _LAYOUTS.items() for files in splits.values() for file in files}
del _MARKS["class_names.txt"]  # of STL-10, but also of many a folder of images


def load_images(
    source: str | Path, split: str, *, image_size: int | None = None, cache_dir: str | Path | None = None
) -> ImageSet:
    """Read one split of a data set, whose kind is recognised by its files.

    Official downloads, unpacked or as .tar, .tar.gz or .zip: CIFAR-10, CIFAR-100, STL-10, ImageNet-32 (pickles or .npz)
    and Tiny-ImageNet, where "test" means the labelled validation images of the last two. An .npz with x_train, y_train,
    x_test, y_test and perhaps classes. What `datasets` loads as images: a folder ``train/<class>/`` and
    ``test/<class>/``, or ``<class>/``, or without classes; a folder of .parquet; a data set of the Hugging Face hub.

    Args:
        source: Path, or Hugging Face id where no such path exists.
        split: "train", "test" or "unlabeled".
        image_size: Side in pixels of the square to which image files are resized as they are decoded; None keeps their
            size, which then must be one for all. Official arrays are kept as they are.
        cache_dir: Where downloads and decoded images are kept, to be mapped by later runs and other processes.
            Default: the cache folder of `datasets`, and ``simcse_weince`` in it.

    Raises:
        InputError: The layout is not known, partial or wrong; the message names what is missing.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
    path, cache = Path(source), Path(cache_dir or Path(datasets.config.HF_DATASETS_CACHE, "simcse_weince"))
    kept = {"cache_dir": str(cache_dir)} if cache_dir else {}
    try:
        if not path.exists():
            return _read_dataset(str(source), {"path": str(source), **kept}, split, image_size, cache)
        if path.suffix == ".npz":
            return _read_npz(path, split)
        files = _list_files(path)
        found = set()
        for file in files:
            stem = file.removesuffix(".npz")
            for tail in (stem.rsplit("/", 1)[-1], "/".join(stem.rsplit("/", 2)[-2:])):
                if tail in _MARKS:
                    found.add((_MARKS[tail], stem.removesuffix(tail)))
        if len(found) > 1:
            listed = ", ".join(sorted(f"{name} in {folder or '.'}" for name, folder in found))
            raise InputError(f"{path}: holds several data sets ({listed}); name the folder of one")
        if found:
            ((name, folder),) = found
            below = {file.removeprefix(folder): read for file, read in files.items() if file.startswith(folder)}
            return _read_official(name, below, path / folder, split, image_size, cache)
        if any(file.endswith(".parquet") for file in files):
            builder: dict[str, Any] = {"path": str(path)}
        else:
            builder = {"path": "imagefolder", "data_dir": str(path), "data_files": _folders_of_splits(files)}
        return _read_dataset(str(path), {**builder, **kept}, split, image_size, cache)
    except InputError:
        raise
    except Exception as error:  # what is damaged makes the readers stumble in every way there is
        raise InputError(f"{source}: no images can be read there for {split} ({first_line(error)})") from error


def _folders_of_splits(files: Iterable[str]) -> dict[str, list[str]] | None:
    """The patterns of each split in a folder of images; None leaves archives to `datasets`.

    By the folders at the top alone: `datasets` looks for such words everywhere, so that a class called train, or an
    image called dog_test_1.png, would change its split.
    """
    if any(re.search(r"\.(zip|tar|t?gz|bz2|xz|7z)$", file) for file in files):
        return None
    depths: dict[str, int] = {}
    for top, *below in (file.split("/") for file in files if "/" in file):
        depths[top] = max(depths.get(top, 0), len(below))
    named = {top for top in depths if top.lower() in _SPLIT_OF}
    if named != depths.keys():  # beside folders of classes, one with such a name is a class, unless it has its own
        named = {top for top in named if depths[top] > 1}
    described = [file for file in files if re.fullmatch(r"metadata\.(csv|jsonl|parquet)", file)]
    patterns: dict[str, list[str]] = {}
    for top in sorted(named):
        patterns.setdefault(_SPLIT_OF[top.lower()], []).append(f"{top}/**")
    return {split: [*folders, *described] for split, folders in patterns.items()} or {"train": ["**"]}


def _list_files(source: Path) -> _Files:
    """List the files of a folder or an archive, each with the way to read it."""
    if source.is_dir():
        paths = [path for path in sorted(source.rglob("*")) if path.is_file()]
        return {path.relative_to(source).as_posix(): path.read_bytes for path in paths}
    if zipfile.is_zipfile(source):
        zipped = zipfile.ZipFile(source)
        return {name: partial(zipped.read, name) for name in zipped.namelist()}
    if tarfile.is_tarfile(source):
        archive: Any = tarfile.open(source)
        members = [member for member in archive if member.isfile()]
        return {member.name: partial(lambda member: archive.extractfile(member).read(), member) for member in members}
    raise InputError(f"{source}: neither a folder nor an .npz, .tar, .tar.gz or .zip")


def _read_official(name: str, files: _Files, folder: Path, split: str, image_size: int | None, cache: Path) -> ImageSet:
    needed = list(_LAYOUTS[name].get(split, ()))
    if not needed:
        raise InputError(f"{folder}: {name} has no {split} images; use its train split")
    if name == "ImageNet-32" and any(file.endswith(".npz") for file in files):
        needed = [f"{file}.npz" for file in needed]
    _require(needed, files, f"{folder}: {name}")
    if name == "STL-10":
        return _read_stl10(files, folder, needed)
    if name == "Tiny-ImageNet":
        return _read_tiny_imagenet(files, folder, split, image_size, cache)
    classes, label_key = None, "labels"
    if name.startswith("CIFAR"):
        prefix = "fine_" if name == "CIFAR-100" else ""
        classes, label_key = _read_batch(files, needed.pop())[f"{prefix}label_names"], f"{prefix}labels"

    def build() -> dict[str, Tensor]:
        batches = [_read_batch(files, file) for file in needed]
        images = torch.cat([_planes(batch["data"].reshape(-1, 3, 32, 32)) for batch in batches])
        numbers = np.concatenate([batch[label_key] for batch in batches])
        count, first = (len(classes), 0) if classes else (1000, 1)
        return {"images": images, "labels": _labels(numbers, len(images), count, first)}

    # ImageNet-32 has 4 GB: mapped, they are in memory once for all processes.
    arrays = build() if classes else _cached(cache, build, _state(folder, needed))
    return ImageSet(arrays["images"], arrays["labels"], classes, name)


def _require(names: Iterable[str], present: Iterable[str], what: str) -> None:
    if missing := sorted(set(names) - set(present)):
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise InputError(f"{what} lacks {listed}; unpack the whole official download there")


class _ArrayUnpickler(pickle.Unpickler):
    """Reads dicts, lists, numbers, text and numpy arrays, and refuses every other object that a pickle can ask for."""

    _ALLOWED = {
        "_reconstruct": np.empty(0).__reduce__()[0],
        "_frombuffer": np.empty(0).__reduce_ex__(5)[0],
        "ndarray": np.ndarray,
        "dtype": np.dtype,
        "encode": codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("numpy", "_codecs") and name in self._ALLOWED:
            return self._ALLOWED[name]
        raise pickle.UnpicklingError(f"a pickle asks for {module}.{name}, which no data set needs")


def _read_batch(files: _Files, name: str) -> dict[str, Any]:
    content = io.BytesIO(files[name]())
    return dict(np.load(content)) if name.endswith(".npz") else _ArrayUnpickler(content, encoding="latin1").load()


def _read_stl10(files: _Files, folder: Path, needed: list[str]) -> ImageSet:
    mapped = Path(folder, needed[0])
    in_folder = mapped.is_file()
    pixels = np.memmap(mapped, mode="c") if in_folder else np.frombuffer(bytearray(files[needed[0]]()), np.uint8)
    images = torch.from_numpy(pixels.reshape(-1, 3, 96, 96).swapaxes(2, 3))  # planes are stored by columns
    if len(needed) == 1:
        return ImageSet(images, None, None, "STL-10")
    classes = files["class_names.txt"]().decode().split()
    labels = np.frombuffer(files[needed[1]](), np.uint8)
    return ImageSet(images, _labels(labels, len(images), len(classes), 1), classes, "STL-10")


def _read_tiny_imagenet(files: _Files, folder: Path, split: str, image_size: int | None, cache: Path) -> ImageSet:
    classes = files["wnids.txt"]().decode().split()
    if split == "train":
        names = sorted(name for name in files if re.fullmatch(r"train/[^/]+/images/[^/]+\.JPEG", name))
        wnids = [name.split("/")[1] for name in names]
    else:
        rows = [line.split("\t") for line in files["val/val_annotations.txt"]().decode().splitlines()]
        names, wnids = [f"val/images/{row[0]}" for row in rows], [row[1] for row in rows]
        _require(names, files, f"{folder}: Tiny-ImageNet")
    _require(classes, wnids, f"{folder}: {split} of Tiny-ImageNet")
    _require(wnids, classes, f"{folder / 'wnids.txt'}")
    encoded = ((name, io.BytesIO(files[name]())) for name in names)
    images = _decode(encoded, len(names), image_size, cache, _state(folder, names))
    return ImageSet(images, torch.tensor([classes.index(wnid) for wnid in wnids]), classes, "Tiny-ImageNet")


def _read_npz(path: Path, split: str) -> ImageSet:
    with np.load(path, allow_pickle=False) as stored:
        if not {f"x_{split}", f"y_{split}"} <= set(stored):
            raise InputError(f"{path}: needs the arrays x_{split} and y_{split}, and has {', '.join(stored)}")
        images = _planes(stored[f"x_{split}"])
        classes = [str(name) for name in stored["classes"]] if "classes" in stored else None
        return ImageSet(images, _labels(stored[f"y_{split}"], len(images), len(classes or ())), classes, path.stem)


def _read_dataset(source: str, builder: dict[str, Any], split: str, image_size: int | None, cache: Path) -> ImageSet:
    """Read what `datasets` can load."""
    loaded = datasets.load_dataset(**builder)
    chosen = next((name for name in SPLITS[split] if name in loaded), None)
    if chosen is None:
        raise InputError(f"{source}: has no {split} split, only {', '.join(loaded)}")
    rows = loaded[chosen]
    pictures = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    named = {name: kind.names for name, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)}
    if len(pictures) != 1:
        raise InputError(f"{source}: needs one column of images and has {len(pictures)}")
    column = next((name for name in ("label", "labels", "fine_label", *named) if name in named), None)
    encoded = ((f"image {number}", row[pictures[0]]) for number, row in enumerate(rows.select_columns(pictures)))
    images = _decode(encoded, len(rows), image_size, cache, rows._fingerprint)
    if column is None or split == "unlabeled" or -1 in rows[column]:  # -1 where a challenge keeps them to itself
        return ImageSet(images, None, None, Path(source).name)
    classes = named[column]
    if different := set(rows[column]) ^ set(loaded["train" if "train" in loaded else chosen][column]):
        listed = ", ".join(classes[number] for number in sorted(different)[:5])
        raise InputError(f"{source}: the classes of train and {chosen} differ: only one of them has {listed}")
    return ImageSet(images, _labels(rows[column], len(rows), len(classes)), classes, Path(source).name)


def _state(folder: Path, names: list[str]) -> list[Any]:
    """Tell these files in this state from all others: part of a cache key."""
    archive = next((path for path in (folder, *folder.parents) if path.is_file()), None)
    stats = [path.stat() for path in ([archive] if archive else [folder / name for name in names])]
    return [str(folder.resolve()), names, [(stat.st_size, stat.st_mtime_ns) for stat in stats]]


def _cached(folder: Path, build: Callable[[], dict[str, Tensor]], *key: Any) -> dict[str, Tensor]:
    """Map what `build` made for this key, now or in an earlier run."""
    path = folder / f"images-{hashlib.sha256(repr((_READER_VERSION, key)).encode()).hexdigest()[:32]}.safetensors"
    if not path.is_file():
        tensors = build()
        with replacing(path) as temporary:
            save_file(tensors, temporary)
    return load_file(path)


def _decode(encoded: Iterable[tuple[str, Any]], count: int, image_size: int | None, cache: Path, state: Any) -> Tensor:
    """Decode named images, files or of Pillow, into uint8 (N, 3, H, W), unless an earlier run did."""

    def build() -> dict[str, Tensor]:
        pillow = import_extra("PIL.Image", "vision", "image files need Pillow")
        images = torch.empty(0)
        for index, (name, image) in enumerate(tqdm(encoded, "images", count, disable=None, leave=False)):
            try:
                image = image if isinstance(image, pillow.Image) else pillow.open(image)
                if image.mode[0] in "IF":  # Pillow would cut what is above 255, not scale it
                    raise ValueError(f"{name}: more than 8 bits a channel; convert it to 8")
                image = image.convert("RGB")
            except OSError as error:
                raise ValueError(f"{name}: {error}") from error
            if image_size is not None:
                image = image.resize((image_size, image_size), pillow.Resampling.BICUBIC)
            if not index:
                images = torch.empty(count, 3, image.height, image.width, dtype=torch.uint8)
            if images.shape[2:] != (image.height, image.width):
                raise ValueError(f"{name} differs in size from the first image; name one size with --image_size")
            images[index] = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return {"images": images}

    return _cached(cache, build, state, image_size)["images"]


def _planes(images: np.ndarray) -> Tensor:
    """Bring an array of images into uint8 (N, 3, H, W)."""
    if images.ndim == 4 and images.shape[1] != 3:
        images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"images must be uint8 of shape (N, H, W, 3), not {images.dtype} {images.shape}")
    return torch.from_numpy(images)


def _labels(labels: Any, count: int, classes: int, first: int = 0) -> Tensor:
    """Count labels from 0, one for each image; `classes` 0 means that their number is not known."""
    given = np.asarray(labels)
    with np.errstate(invalid="ignore"):
        whole = given.astype(np.int64)
    if not np.array_equal(whole, given):
        raise ValueError("labels must be whole numbers")
    numbers = torch.from_numpy(whole.reshape(-1))
    if len(numbers) != count:
        raise ValueError(f"{len(numbers)} labels for {count} images")
    if count and (numbers.min() < first or (classes and numbers.max() >= first + classes)):
        raise ValueError(f"labels from {numbers.min()} to {numbers.max()} for {classes} classes from {first} up")
    return numbers - first
