"""Every official layout gives the pixels, labels and classes it holds, and what is partial or wrong is refused."""

import os
import pickle
import shutil
import sys
import tarfile
import zipfile

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")

import datasets  # noqa: E402
from PIL import Image  # noqa: E402

from simcse_weince.errors import InputError  # noqa: E402
from simcse_weince.vision.datasets import load_images  # noqa: E402
from tests import tiny_images  # noqa: E402


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def _same(images, expected):
    assert images.dtype == torch.uint8
    np.testing.assert_array_equal(images.numpy(), expected)


def test_cifar10(tmp_path):
    images, labels = tiny_images.random_images(12, 32), [9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
    folder = tiny_images.write_cifar10(tmp_path, images, labels)
    for source in (folder, tmp_path):
        train, test = load_images(source, "train"), load_images(source, "test")
        _same(train.images, images[:10])
        _same(test.images, images[10:])
        assert train.labels.tolist() == labels[:10] and test.labels.tolist() == labels[10:]
        assert train.labels.dtype == torch.int64
        assert train.name == "CIFAR-10" and train.classes[9] == "truck" and len(train.classes) == 10


def test_cifar100_has_fine_labels(tmp_path):
    images = tiny_images.random_images(4, 32)
    folder = tiny_images.write_cifar100(tmp_path, images, fine=[99, 0, 50, 3], coarse=[19, 0, 1, 2])
    for split in ("train", "test"):
        read = load_images(folder, split)
        _same(read.images, images)
        assert read.labels.tolist() == [99, 0, 50, 3] and read.classes[99] == "fine99" and read.name == "CIFAR-100"


def test_stl10_planes_are_stored_by_columns_and_labels_start_at_one(tmp_path):
    images = tiny_images.random_images(3, 96)
    folder = tiny_images.write_stl10(tmp_path, images, [0, 9, 4])
    for split in ("train", "test"):
        read = load_images(folder, split)
        _same(read.images, images)
        assert read.labels.tolist() == [0, 9, 4] and read.classes[9] == "truck"
    unlabeled = load_images(folder, "unlabeled")
    _same(unlabeled.images, images)
    assert unlabeled.labels is None


def test_unlabeled_images_of_stl10_are_mapped_and_never_written_to(tmp_path):
    folder = tiny_images.write_stl10(tmp_path, tiny_images.random_images(3, 96), [0, 1, 2])
    before = (folder / "unlabeled_X.bin").read_bytes()
    images = load_images(folder, "unlabeled").images
    images[0] = 0
    assert (folder / "unlabeled_X.bin").read_bytes() == before
    assert images.untyped_storage().nbytes() == len(before)


@pytest.mark.parametrize("npz", [False, True])
def test_imagenet32_labels_start_at_one(tmp_path, npz):
    images, labels = tiny_images.random_images(20, 32), [999, 0, *range(18)]
    folder = tiny_images.write_imagenet32(tmp_path / "Imagenet32", images, labels, npz=npz)
    for split in ("train", "test"):
        read = load_images(folder, split)
        _same(read.images, images)
        assert read.labels.tolist() == labels and read.classes is None and read.name == "ImageNet-32"


def test_vi05_tiny_imagenet_validation_folder_is_flat(tmp_path):
    folder = tiny_images.write_tiny_imagenet(tmp_path)
    train, test = load_images(folder, "train"), load_images(folder, "test")
    assert train.classes == test.classes == tiny_images.WNIDS
    assert train.images.shape == (6, 3, 64, 64) and test.images.shape == (6, 3, 64, 64)
    assert sorted(test.labels.tolist()) == [0, 0, 1, 1, 2, 2]
    # The colour of an image tells its class: red, green, blue in the order of wnids.txt.
    assert (test.images.float().mean((2, 3)).argmax(1) == test.labels).all()
    colourful = train.images.float().mean((2, 3)).std(1) > 10
    assert colourful.sum() == 5 and train.labels[~colourful].tolist() == [0]
    assert (train.images.float().mean((2, 3)).argmax(1) == train.labels)[colourful].all()


def test_vi05_annotations_of_an_unknown_class_are_refused(tmp_path):
    folder = tiny_images.write_tiny_imagenet(tmp_path)
    annotations = folder / "val" / "val_annotations.txt"
    annotations.write_text(annotations.read_text().replace(tiny_images.WNIDS[0], "n99999999", 1))
    with pytest.raises(InputError, match="n99999999"):
        load_images(folder, "test")


def test_vi05_class_folders_of_test_must_be_those_of_train(tmp_path):
    root = tiny_images.write_class_folders(tmp_path / "d", {"train/n01": 2, "train/n02": 2, "val/images": 4})
    with pytest.raises(InputError, match="images"):
        load_images(root, "test")


@pytest.mark.parametrize("archive", ["tar", "tar.gz", "zip"])
def test_archives_are_read_as_they_are(tmp_path, archive):
    folder = tiny_images.write_tiny_imagenet(tmp_path / "unpacked")
    path = tmp_path / f"tiny.{archive}"
    if archive == "zip":
        with zipfile.ZipFile(path, "w") as target:
            for file in folder.rglob("*"):
                target.write(file, file.relative_to(folder.parent))
    else:
        with tarfile.open(path, "w:gz" if archive == "tar.gz" else "w") as target:
            target.add(folder, folder.name)
    for split in ("train", "test"):
        packed, unpacked = load_images(path, split), load_images(folder, split)
        assert packed.classes == unpacked.classes
        order = packed.labels.argsort(stable=True), unpacked.labels.argsort(stable=True)
        assert torch.equal(packed.labels[order[0]], unpacked.labels[order[1]])
        assert packed.images.float().mean() == unpacked.images.float().mean()


def _cifar10(root):
    return tiny_images.write_cifar10(root, tiny_images.random_images(6, 32), [0, 1, 2, 3, 4, 5])


def _cifar100(root):
    return tiny_images.write_cifar100(root, tiny_images.random_images(2, 32), [0, 1], [0, 1])


def _stl10(root):
    return tiny_images.write_stl10(root, tiny_images.random_images(2, 96), [0, 1])


def _imagenet32(root):
    return tiny_images.write_imagenet32(root, tiny_images.random_images(10, 32), list(range(10)))


@pytest.mark.parametrize(
    ("write", "missing", "split"),
    [
        (_cifar10, "data_batch_3", "train"),
        (_cifar10, "test_batch", "test"),
        (_cifar10, "batches.meta", "test"),
        (_cifar100, "meta", "train"),
        (_cifar100, "test", "test"),
        (_stl10, "train_y.bin", "train"),
        (_stl10, "class_names.txt", "test"),
        (_stl10, "unlabeled_X.bin", "unlabeled"),
        (_imagenet32, "train_data_batch_10", "train"),
        (_imagenet32, "val_data", "test"),
        (tiny_images.write_tiny_imagenet, "wnids.txt", "train"),
        (tiny_images.write_tiny_imagenet, "val/val_annotations.txt", "test"),
        (tiny_images.write_tiny_imagenet, "val/images/val_3.JPEG", "test"),
    ],
)
def test_a_partial_layout_is_refused_naming_what_is_missing(tmp_path, write, missing, split):
    folder = write(tmp_path)
    (folder / missing).unlink()
    with pytest.raises(InputError, match=missing.replace(".", r"\.")):
        load_images(folder, split)


def test_a_missing_class_of_tiny_imagenet_is_named(tmp_path):
    folder = tiny_images.write_tiny_imagenet(tmp_path)
    shutil.rmtree(folder / "train" / tiny_images.WNIDS[1])
    with pytest.raises(InputError, match=tiny_images.WNIDS[1]):
        load_images(folder, "train")


@pytest.mark.parametrize("write", [_cifar10, _cifar100, _imagenet32, tiny_images.write_tiny_imagenet])
def test_only_stl10_has_unlabeled_images(tmp_path, write):
    with pytest.raises(InputError, match="no unlabeled images"):
        load_images(write(tmp_path), "unlabeled")


def test_a_cut_file_is_refused(tmp_path):
    for name, folder, split in [
        ("data_batch_2", _cifar10(tmp_path / "a"), "train"),
        ("test_X.bin", _stl10(tmp_path / "b"), "test"),
    ]:
        os.truncate(folder / name, (folder / name).stat().st_size - 100)
        with pytest.raises(InputError, match=folder.name):
            load_images(folder, split)


def test_labels_out_of_range_or_of_another_number_are_refused(tmp_path):
    images = tiny_images.random_images(6, 32)
    with pytest.raises(InputError, match="labels from"):
        load_images(tiny_images.write_cifar10(tmp_path / "a", images, [0, 10, 0, 0, 0, 0]), "train")
    folder = _stl10(tmp_path / "b")
    (folder / "train_y.bin").write_bytes(b"\x01\x00")
    with pytest.raises(InputError, match="labels from 0"):
        load_images(folder, "train")
    (folder / "train_y.bin").write_bytes(b"\x01")
    with pytest.raises(InputError, match="1 labels for 2 images"):
        load_images(folder, "train")


def test_two_data_sets_in_one_folder_are_not_chosen_between(tmp_path):
    _cifar10(tmp_path)
    _stl10(tmp_path)
    with pytest.raises(InputError, match="CIFAR-10 in cifar-10-batches-py.*STL-10 in stl10_binary"):
        load_images(tmp_path, "train")


class _Payload:
    def __reduce__(self):
        return os.mkdir, ("owned",)


def test_a_pickle_that_asks_for_more_than_arrays_is_refused_and_does_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = _cifar10(tmp_path)
    (folder / "test_batch").write_bytes(pickle.dumps({"data": _Payload(), "labels": []}, protocol=2))
    with pytest.raises(InputError, match="mkdir"):
        load_images(folder, "test")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickles_rewritten_by_python3_are_read(tmp_path, protocol):
    folder, images = _cifar10(tmp_path), tiny_images.random_images(2, 32)
    content = {"data": images.reshape(2, -1), "labels": np.array([3, 4])}
    (folder / "test_batch").write_bytes(pickle.dumps(content, protocol=protocol))
    read = load_images(folder, "test")
    _same(read.images, images)
    assert read.labels.tolist() == [3, 4]


def test_npz(tmp_path):
    images = tiny_images.random_images(3, 8)
    path = tmp_path / "mine.npz"
    np.savez(path, x_train=images.transpose(0, 2, 3, 1), y_train=[[0], [1], [1]], classes=["cat", "dog"])
    read = load_images(path, "train")
    _same(read.images, images)
    assert read.labels.tolist() == [0, 1, 1] and read.classes == ["cat", "dog"] and read.name == "mine"
    with pytest.raises(InputError, match="x_test"):
        load_images(path, "test")
    np.savez(path, x_train=images.astype(np.float32), y_train=[0, 1, 1])
    with pytest.raises(InputError, match="uint8"):
        load_images(path, "train")


def test_class_folders(tmp_path):
    root = tiny_images.write_class_folders(
        tmp_path / "pets", {"train/dog": 2, "train/cat": 3, "val/cat": 1, "val/dog": 1}
    )
    train, test = load_images(root, "train"), load_images(root, "test")
    assert train.classes == test.classes == ["cat", "dog"] and train.name == "pets"
    assert train.labels.tolist() == [0, 0, 0, 1, 1] and test.labels.tolist() == [0, 1]
    _same(test.images[0], np.array(Image.open(root / "val" / "cat" / "0.png")).transpose(2, 0, 1))


def test_a_list_of_classes_beside_a_folder_of_images_makes_it_no_stl10(tmp_path):
    root = tiny_images.write_class_folders(tmp_path / "pets", {"train/dog": 2, "train/cat": 3})
    (root / "class_names.txt").write_text("cat\ndog\n")
    assert load_images(root, "train").classes == ["cat", "dog"]


def test_a_class_or_an_image_that_is_called_like_a_split_is_none(tmp_path):
    classes = {"bus": (3, 2), "train": (3, 2), "test tube": (3, 2)}
    split = {f"{name}/{kind}": count for kind, counts in classes.items()
             for name, count in zip(("train", "test"), counts, strict=True)}  # fmt: skip
    root = tiny_images.write_class_folders(tmp_path / "split", split)
    train, test = load_images(root, "train"), load_images(root, "test")
    assert train.classes == test.classes == ["bus", "test tube", "train"]
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2] and test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    root = tiny_images.write_class_folders(tmp_path / "whole", {"bus": 2, "train": 2})
    os.rename(root / "bus" / "0.png", root / "bus" / "photo_test_0.png")
    assert load_images(root, "train").labels.tolist() == [0, 0, 1, 1]
    with pytest.raises(InputError, match="no test split"):
        load_images(root, "test")


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_images_of_more_than_8_bits_are_refused(tmp_path, mode):
    root = tiny_images.write_class_folders(tmp_path / "a", {"dog": 1, "cat": 1})
    Image.fromarray(np.full((8, 8), 20_000, np.uint16)).convert(mode).save(root / "cat" / "0.tiff")
    (root / "cat" / "0.png").unlink()
    with pytest.raises(InputError, match="more than 8 bits a channel; convert it to 8"):
        load_images(root, "train")


def test_folders_without_splits_or_without_classes_are_for_training(tmp_path):
    classed = tiny_images.write_class_folders(tmp_path / "a", {"dog": 1, "cat": 1})
    assert load_images(classed, "train").labels.tolist() == [0, 1]
    with pytest.raises(InputError, match="no test split"):
        load_images(classed, "test")
    plain = load_images(tiny_images.write_class_folders(tmp_path / "b", {"": 3}), "train")
    assert plain.labels is None and plain.classes is None and len(plain.images) == 3


def test_images_of_different_sizes_need_one_size(tmp_path):
    root = tiny_images.write_class_folders(tmp_path / "a", {"dog": 1}, side=8)
    tiny_images.write_class_folders(root, {"cat": 1}, side=12)
    with pytest.raises(InputError, match="--image_size"):
        load_images(root, "train")
    assert load_images(root, "train", image_size=16).images.shape == (2, 3, 16, 16)


def test_the_message_names_source_and_remedy(tmp_path):
    folder = _cifar10(tmp_path)
    (folder / "data_batch_2").unlink()
    with pytest.raises(InputError) as caught:
        load_images(folder, "train")
    assert str(caught.value) == f"{folder}: CIFAR-10 lacks data_batch_2; unpack the whole official download there"


def test_pk01_without_pillow_arrays_are_read_and_image_files_explained(tmp_path, monkeypatch):
    arrays, files = _cifar10(tmp_path / "a"), tiny_images.write_tiny_imagenet(tmp_path / "b")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert len(load_images(arrays, "test").images) == 1
    with pytest.raises(InputError, match=r"simcse-weince\[vision\]"):
        load_images(files, "test")


def test_a_damaged_image_is_named(tmp_path):
    folder = tiny_images.write_tiny_imagenet(tmp_path)
    (folder / "val" / "images" / "val_2.JPEG").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"val_2\.JPEG"):
        load_images(folder, "test")


def test_a_folder_of_parquet_as_the_hub_has_it(tmp_path):
    pictures = [Image.fromarray(image.transpose(1, 2, 0)) for image in tiny_images.random_images(3, 8)]
    features = datasets.Features(
        {
            "img": datasets.Image(),
            "coarse_label": datasets.ClassLabel(names=["x"]),
            "fine_label": datasets.ClassLabel(names=["cat", "dog"]),
        }
    )
    content = {"img": pictures, "coarse_label": [0, 0, 0], "fine_label": [1, 0, 1]}
    for split in ("train", "test"):
        path = tmp_path / "set" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(exist_ok=True)
        datasets.Dataset.from_dict(content, features=features).to_parquet(path)
    read = load_images(tmp_path / "set", "test")
    _same(read.images, tiny_images.random_images(3, 8))
    assert read.labels.tolist() == [1, 0, 1] and read.classes == ["cat", "dog"]
    hidden = {**content, "fine_label": [-1, -1, -1]}
    datasets.Dataset.from_dict(hidden, features=features).to_parquet(path)
    assert load_images(tmp_path / "set", "test").labels is None


def test_decoded_images_are_read_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    folder = tiny_images.write_tiny_imagenet(tmp_path)
    first = load_images(folder, "train", cache_dir=tmp_path / "kept")
    with monkeypatch.context() as patched:
        patched.setattr(Image, "open", lambda *_: pytest.fail("decoded again"))
        again = load_images(folder, "train", cache_dir=tmp_path / "kept")
    assert torch.equal(first.images, again.images) and len(list((tmp_path / "kept").iterdir())) == 1
    Image.new("RGB", (64, 64)).save(
        folder / "train" / tiny_images.WNIDS[2] / "images" / f"{tiny_images.WNIDS[2]}_0.JPEG"
    )
    assert not torch.equal(first.images, load_images(folder, "train", cache_dir=tmp_path / "kept").images)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 1.6], "whole numbers"),
        ([0, 1, float("nan")], "whole numbers"),
        (["0", "1", "cat"], "cat"),
        ([0, 1, -1], "labels from -1"),
        ([0, 1, 2**64 - 1], "whole numbers"),
        ([], "the split is empty"),
    ],
)
def test_vi06_labels_are_whole_numbers(tmp_path, recwarn, labels, message):
    images = tiny_images.random_images(len(labels), 4)
    np.savez(tmp_path / "mine.npz", x_train=images, y_train=np.array(labels))
    with pytest.raises(InputError, match=f"mine.npz: no images.*{message}"):
        load_images(tmp_path / "mine.npz", "train")
    assert not recwarn.list


def test_labels_that_are_whole_numbers_in_another_type_are_read(tmp_path):
    for kind in (float, np.uint8, np.uint64, bool):
        np.savez(tmp_path / "m.npz", x_train=tiny_images.random_images(2, 4), y_train=np.array([[0], [1]], kind))
        assert load_images(tmp_path / "m.npz", "train").labels.tolist() == [0, 1]


def test_the_chosen_cache_is_the_only_one(tmp_path):
    root = tiny_images.write_class_folders(tmp_path / "pets", {"train/dog": 2, "train/cat": 2})
    load_images(root, "train", cache_dir=tmp_path / "kept")
    assert (tmp_path / "kept").is_dir() and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("content", [{}, {"notes.txt": "no images"}])
def test_a_folder_without_images_is_refused(tmp_path, content):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=tmp_path.name):
        load_images(tmp_path, "train")


def test_what_does_not_exist_is_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        load_images(tmp_path / "nowhere", "train")
    with pytest.raises(ValueError, match="split"):
        load_images(tmp_path, "validation")


def test_real_cifar10_sample(shared):
    path = shared / "data" / "images" / "cifar10_sample.npz"
    if not path.is_file():
        pytest.skip("no image samples")
    train, test = load_images(path, "train"), load_images(path, "test")
    assert train.images.shape == (10_000, 3, 32, 32) and test.images.shape == (2_000, 3, 32, 32)
    assert train.labels.bincount().tolist() == 10 * [1_000] and test.labels.bincount().tolist() == 10 * [200]
    assert train.classes[9] == "truck"


def test_real_tiny_imagenet_sample(shared, tmp_path):
    path = shared / "data" / "images" / "tiny_imagenet_sample20.tar"
    if not path.is_file():
        pytest.skip("no image samples")
    train, test = (load_images(path, split, cache_dir=tmp_path) for split in ("train", "test"))
    assert train.images.shape == (2_000, 3, 64, 64) and test.images.shape == (1_000, 3, 64, 64)
    assert train.labels.bincount().tolist() == 20 * [100] and test.labels.bincount().tolist() == 20 * [50]
    assert train.classes == test.classes and train.classes != sorted(train.classes)
    gray = (train.images[:, 0] == train.images[:, 1]).all(2).all(1) & (train.images[:, 1] == train.images[:, 2]).all(
        2
    ).all(1)
    assert 0 < gray.sum() < 100
