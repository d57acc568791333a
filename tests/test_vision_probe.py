"""Probes of frozen features against definitions, other implementations and the cases of the case book."""

import logging

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from simcse_weince.errors import InputError
from simcse_weince.vision.backbones import VisionEncoder, build_backbone
from simcse_weince.vision.probe import (
    RECALLS,
    Labelled,
    ProbeOptions,
    extract_features,
    knn_predict,
    knn_scores,
    linear_accuracy,
    linear_probe,
    run_probes,
    stratified_split,
)


def clusters(rows, classes=3, width=8, spread=1.0, seed=0):
    """Points around one centre for each class."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.eye(classes, width)
    labels = torch.arange(rows) % classes
    return Labelled(centres[labels] + spread * torch.randn(rows, width, generator=generator), labels)


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return VisionEncoder(build_backbone("resnet18", image_size=8, width=0.125), 8)


@pytest.fixture(scope="module")
def images():
    return torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


# ---- features ----


def test_vi01_every_image_counts_in_any_batches(encoder, images):
    labels = torch.arange(50) % 3
    bank = Labelled(extract_features(encoder, images), labels)
    for batch_size in (1, 7, 32, 256):
        features = extract_features(encoder, images, batch_size=batch_size)
        assert features.shape[0] == 50
        torch.testing.assert_close(features, bank.features, rtol=1e-4, atol=1e-5)
        record = run_probes(bank, Labelled(features, labels), ProbeOptions(probes=["knn"], probe_seeds=[1], knn=5))
        assert record["knn"]["images"] == {"train": 41, "validation": 9, "test": 50}
        # At least the images that are in the bank are their own nearest; by chance a third would be right.
        assert record["knn"]["scores"]["test_recall_at_1"]["mean"] >= 41 / 50


def test_vi07_features_are_deterministic_and_leave_the_mode(encoder, images):
    encoder.train()
    buffers = {name: value.clone() for name, value in encoder.named_buffers()}
    first = extract_features(encoder, images)
    assert torch.equal(first, extract_features(encoder, images)) and encoder.training
    assert all(torch.equal(value, buffers[name]) for name, value in encoder.named_buffers())


def test_ev07_bfloat16_encoder(images):
    torch.manual_seed(0)
    encoder = VisionEncoder(build_backbone("resnet18", image_size=8, width=0.125), 8)
    exact = extract_features(encoder, images)
    features = extract_features(encoder.bfloat16(), images)
    assert features.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(features, exact).min() > 0.99


def test_features_that_are_not_finite_are_refused(images):
    encoder = VisionEncoder(build_backbone("resnet18", image_size=8, width=0.125), 8)
    with torch.no_grad():
        next(encoder.parameters()).fill_(float("nan"))
    with pytest.raises(InputError, match="not finite"):
        extract_features(encoder, images)


# ---- accuracy ----


@pytest.mark.parametrize("batch_size", [1, 7, 256])
def test_vi02_accuracy_is_correct_rows_over_rows(batch_size):
    """10 of 26 rows wrong, all of them in the last batches: a mean over batches of 16 would say 0.5."""
    labels = torch.tensor([0] * 16 + [1] * 10)
    features = torch.tensor([[1.0, 0.0]]).repeat(26, 1)  # always class 0
    assert linear_accuracy(Labelled(features, labels), torch.eye(2), torch.zeros(2), batch_size) == 16 / 26


# ---- nearest neighbours ----


def test_vi06_more_neighbours_than_items(case_inputs, caplog):
    bank, labels, queries = (torch.from_numpy(np.load(case_inputs / f"knn_{name}.npy", allow_pickle=False))
                             for name in ("bank", "bank_labels", "query"))  # fmt: skip
    bank = Labelled(bank.float(), labels.long())
    assert knn_predict(bank, queries.float(), k=1).tolist() == [0, 1] and not caplog.records
    with caplog.at_level(logging.WARNING):
        five = knn_predict(bank, queries.float(), k=5)
    assert "only 3 items for 5 neighbours" in caplog.text
    assert torch.equal(five, knn_predict(bank, queries.float(), k=3))


@pytest.mark.parametrize("label", [7, -1])
def test_vi06_labels_outside_the_classes_are_refused(label):
    bank = Labelled(torch.eye(3), torch.tensor([0, 1, label]))
    with pytest.raises(ValueError, match="labels must be from 0 to below num_classes=3"):
        knn_predict(bank, torch.eye(3), k=1, num_classes=3)


def test_vi06_a_class_that_only_the_queries_have_is_a_miss():
    scores = knn_scores(Labelled(torch.eye(3), torch.arange(3)), Labelled(torch.eye(3), torch.tensor([0, 1, 7])), k=1)
    assert scores["accuracy"] == pytest.approx(2 / 3) and scores["recall_at_50"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("k, temperature", [(1, 0.1), (5, 0.1), (5, 1e-3), (20, 1.0)])
def test_vote_is_that_of_scikit_learn(k, temperature):
    bank, queries = clusters(60), clusters(45, seed=1)

    def weights(distance):
        return np.exp((distance.min(axis=1, keepdims=True) - distance) / temperature)

    other = KNeighborsClassifier(k, metric="cosine", weights=weights)
    expected = other.fit(bank.features.numpy(), bank.labels.numpy()).predict(queries.features.numpy())
    assert knn_predict(bank, queries.features, k, temperature).tolist() == expected.tolist()


def test_recall_by_definition():
    bank, queries = clusters(60, spread=2.0), clusters(45, spread=2.0, seed=1)
    cosine = torch.nn.functional.normalize(queries.features) @ torch.nn.functional.normalize(bank.features).T
    ranked = bank.labels[cosine.argsort(descending=True)]
    scores = knn_scores(bank, queries, k=10)
    for r in RECALLS:
        hits = [label in row[:r] for row, label in zip(ranked.tolist(), queries.labels.tolist(), strict=True)]
        assert scores[f"recall_at_{r}"] == pytest.approx(np.mean(hits))


# ---- splits ----


def test_split_is_stratified_and_whole():
    labels = torch.tensor([0] * 40 + [1] * 15 + [2] * 2 + [3])
    first, second = stratified_split(labels, 0.2, seed=3)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(58))
    assert torch.bincount(labels[second], minlength=4).tolist() == [8, 3, 1, 0]
    assert torch.equal(second, stratified_split(labels, 0.2, seed=3)[1])
    assert not torch.equal(second, stratified_split(labels, 0.2, seed=4)[1])


# ---- linear probes ----


def test_adam_probe_learns_and_is_reproducible():
    train, validation, test = (
        clusters(300, spread=0.3),
        clusters(60, spread=0.3, seed=1),
        clusters(61, spread=0.3, seed=2),
    )
    options = ProbeOptions(probe_epochs=30, probe_learning_rate=0.01)
    scores = linear_probe(train, validation, test, 1, options)
    assert scores["test_accuracy"] == 1.0 and scores == linear_probe(train, validation, test, 1, options)
    assert linear_probe(train, validation, test, 2, ProbeOptions(probe_epochs=1)) != linear_probe(
        train, validation, test, 3, ProbeOptions(probe_epochs=1)
    )


@pytest.mark.parametrize("lbfgs", [False, True])
def test_the_epoch_is_chosen_by_the_validation_split(lbfgs):
    """Whatever the labels of the test images are, the same classifier is chosen."""
    train, validation, test = clusters(90), clusters(45, seed=1), clusters(45, seed=2)
    options = ProbeOptions(probe_epochs=5, probe_learning_rate=0.1)
    right = linear_probe(train, validation, test, 1, options, lbfgs=lbfgs)
    wrong = linear_probe(train, validation, test._replace(labels=(test.labels + 1) % 3), 1, options, lbfgs=lbfgs)
    assert right["validation_accuracy"] == wrong["validation_accuracy"]
    assert right["test_accuracy"] > 0.5 > wrong["test_accuracy"]


def test_lbfgs_is_the_logistic_regression_of_scikit_learn(monkeypatch):
    monkeypatch.setattr("simcse_weince.vision.probe.PENALTIES", (1e-2,))
    train, test = clusters(120, spread=1.5), clusters(200, spread=1.5, seed=1)
    center, scale = train.features.mean(0), train.features.std(0, correction=0)
    x, unseen = ((part.features - center) / scale for part in (train, test))
    # scikit-learn's penalty is |w|^2 / (2 C) beside the sum over rows.
    other = LogisticRegression(C=1 / (2 * 1e-2 * len(x)), max_iter=1000).fit(x.numpy(), train.labels.numpy())
    found = linear_probe(train, train, test, 1, ProbeOptions(), lbfgs=True)
    assert found["test_accuracy"] == pytest.approx(other.score(unseen.numpy(), test.labels.numpy()), abs=0.006)


def test_record_names_the_protocol_and_has_every_seed():
    options = ProbeOptions(probes=["knn", "linear", "lbfgs"], probe_seeds=[1, 2], probe_epochs=2, knn=5)
    record = run_probes(clusters(90), clusters(31, seed=1), options)
    assert list(record) == ["knn", "linear", "lbfgs"]
    assert "20% of each class" in record["knn"]["protocol"] and "5 nearest" in record["knn"]["protocol"]
    assert "10% of each class" in record["linear"]["protocol"] and "2 epochs" in record["linear"]["protocol"]
    for found in record.values():
        assert found["images"]["test"] == 31 and found["seeds"] == [1, 2]
        assert all(len(summary["each"]) == 2 and summary["sd"] is not None for summary in found["scores"].values())
    assert set(record["knn"]["scores"]) == {f"{role}_{name}" for role in ("validation", "test")
                                            for name in ("accuracy", *(f"recall_at_{r}" for r in RECALLS))}  # fmt: skip


def test_one_image_of_each_class_leaves_nothing_to_validate_with():
    with pytest.raises(InputError, match="none is left to validate with"):
        run_probes(Labelled(torch.eye(3), torch.arange(3)), clusters(9), ProbeOptions(probes=["knn"]))


@pytest.mark.parametrize(
    "wrong", [{"probes": ["cnn"]}, {"probes": ["none", "knn"]}, {"knn": 0}, {"knn_temperature": 0.0}]
)
def test_protocols_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InputError, match=f"--{next(iter(wrong))}"):
        ProbeOptions(**wrong)
