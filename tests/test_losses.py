"""The losses inside sentence-transformers: columns, duplicates, views, and the host's own wrappers and trainer."""

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings, strategies as st
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import (
    AdaptiveLayerLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening

from simcse_weince.criterion import InfoNCE, ReleasedWeince, Weince
from simcse_weince.gather import Shard
from simcse_weince.losses import CachedWeinceLoss, InfoNCELoss, WeinceLoss, text_keys, without_copies
from simcse_weince.sentence.encoder import SimCSEEncoder, build_encoder
from tests import reference
from tests.tiny_models import write_tiny_bert

SENTENCES = ["the dog runs", "a red house", "music in the city", "four people and a lamp", "rain falls", "first train"]
POSITIVES = ["the dog is running", "a house", "the city plays", "a lamp", "water falls", "one train"]
NEGATIVES = ["the cat sleeps", "a green door", "a river", "two men", "the year", "a parcel"]
OTHERS = ["alpha", "beta", "gamma", "delta", "number", "still"]
LOSSES = [InfoNCELoss, WeinceLoss]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_bert(tmp_path_factory.mktemp("model"))


@pytest.fixture
def encoder(folder: str) -> SimCSEEncoder:
    return build_encoder(folder, pooler_type="avg", device="cpu").train()


@pytest.fixture
def still_encoder(folder: str) -> SimCSEEncoder:
    """Dropout is off, so that two forwards of one batch agree."""
    return build_encoder(folder, pooler_type="avg", dropout=0.0, device="cpu").train()


class Table(nn.Module):
    """An encoder that looks its embeddings up: text number k, the single token k, has row k."""

    def __init__(self, embeddings: Tensor) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(embeddings)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return {**features, "sentence_embedding": self.embeddings[features["input_ids"][:, 0]]}


def preprocess(encoder: SimCSEEncoder, *columns: list[str]) -> list[dict[str, Any]]:
    return [encoder.preprocess(column) for column in columns]


def one_token_texts(ids: list[list[int]]) -> list[dict[str, Any]]:
    return [
        {"input_ids": column[:, None], "attention_mask": torch.ones_like(column)[:, None]}
        for column in torch.tensor(ids)
    ]


def keep_mask(columns: list[dict[str, Any]], both_views: bool = False) -> Tensor:
    keys = InfoNCELoss(nn.Identity()).batch_keys(columns)
    rows = without_copies(keys, InfoNCE(layout="both_views" if both_views else "columns"), Shard((keys.shape[1],)))
    return torch.cat(
        [rows(slice(start, start + 3)) for start in range(0, 2 * len(keys[0]) if both_views else len(keys[0]), 3)]
    )


def gradients(model: nn.Module) -> list[Tensor]:
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


# ---- values ----


@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize(("loss_class", "options"), [(InfoNCELoss, {}), (WeinceLoss, {"gate": 0.0})])
def test_compliance_05_equals_the_hosts_ranking_loss(
    loss_class: type[InfoNCELoss], options: dict, columns: int, still_encoder: SimCSEEncoder
):
    loss = loss_class(still_encoder, 0.05, **options)
    assert loss.scale == pytest.approx(20) and loss.temperature == 0.05
    texts = [SENTENCES, POSITIVES, NEGATIVES, OTHERS][:columns]
    results = []
    for candidate in (loss, MultipleNegativesRankingLoss(still_encoder, scale=20)):
        still_encoder.zero_grad()
        value = candidate(iter(preprocess(still_encoder, *texts)), None)
        value.backward()
        results.append([value.detach(), *gradients(still_encoder)])
    assert len(results[0]) == len(results[1]) > 20
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


DIRECTIONS = [
    (("query_to_doc", "doc_to_query"), "per_direction"),
    (("query_to_doc", "doc_to_query"), "joint"),
    (("query_to_doc", "query_to_query"), "joint"),
    (("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"), "joint"),
]


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize(("directions", "partition_mode"), DIRECTIONS)
@pytest.mark.parametrize(("loss_class", "options"), [(InfoNCELoss, {}), (WeinceLoss, {"gate": 0.0})])
def test_directions_are_those_of_the_hosts_ranking_loss(
    loss_class: type[InfoNCELoss], options: dict, directions: tuple, partition_mode: str, columns: int, chunk_size: int
):
    options = {**options, "directions": directions, "partition_mode": partition_mode, "chunk_size": chunk_size}
    embeddings = torch.randn(80, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    for make in (
        lambda model: loss_class(model, layout="columns", **options),
        lambda model: MultipleNegativesRankingLoss(model, directions=directions, partition_mode=partition_mode),
    ):
        loss = make(Table(embeddings))
        value = loss(one_token_texts(torch.arange(20 * columns).reshape(-1, 20).tolist()), None)
        value.backward()
        results.append([value.detach(), loss.model.embeddings.grad])
    torch.testing.assert_close(*results)


def test_duplicates_in_all_directions():
    """The masks of the four directions are those of both views, side by side instead of one over the other."""
    columns = one_token_texts([[1, 2, 1, 4], [11, 12, 13, 2]])
    keys = InfoNCELoss(nn.Identity()).batch_keys(columns)
    keep = without_copies(keys, InfoNCE(directions=DIRECTIONS[-1][0]), Shard((4,)))(slice(0, 4))
    both = keep_mask(columns, both_views=True)
    assert torch.equal(keep, torch.cat([both[:4, 4:], both[:4, :4], both[4:, :4], both[4:, 4:]], dim=1))
    embeddings = torch.randn(14, 8, generator=torch.Generator().manual_seed(0))
    loss = InfoNCELoss(Table(embeddings), directions=DIRECTIONS[-1][0])
    assert loss(columns).isfinite()
    # Positives, their copies in doc_to_query, and the anchors themselves are no masked candidates.
    assert loss.stats()["masked_candidates"] == (~keep).sum() - 4 * 4


@pytest.mark.parametrize("negatives", [0, 1, 2])
@pytest.mark.parametrize("loss_class", LOSSES)
def test_la08_positive_equal_to_its_anchor_costs_nothing(loss_class: type[InfoNCELoss], negatives: int):
    """Candidates in another order than the positives' own would cost log(2) and more."""
    directions = torch.eye(64)
    model = Table(torch.cat([directions[:16], directions]))
    ids = torch.arange(16 * (2 + negatives)).reshape(-1, 16).tolist()
    assert loss_class(model)(one_token_texts(ids)).item() < 1e-4


@pytest.mark.parametrize("loss_class", LOSSES)
def test_single_column_is_one_forward_of_two_views(
    loss_class: type[InfoNCELoss], encoder: SimCSEEncoder, monkeypatch: pytest.MonkeyPatch
):
    rows, views, forward = [], [], encoder.forward
    loss = loss_class(encoder)
    monkeypatch.setattr(
        encoder, "forward", lambda features: rows.append(len(features["input_ids"])) or forward(features)
    )
    loss.criterion.register_forward_pre_hook(lambda module, arguments: views.extend(arguments))
    features = preprocess(encoder, SENTENCES)
    value = loss(iter(features))
    assert rows == [12]
    assert value.ndim == 0 and value.isfinite() and value.requires_grad
    first, second = views
    cosine = torch.cosine_similarity(first, second)
    assert first.shape == second.shape == (6, 32)
    assert cosine.min() > 0 and cosine.max() < 0.9999
    assert loss.stats()["positive_cosine"] == pytest.approx(cosine.mean().item(), abs=1e-5)


@pytest.mark.parametrize("loss_class", LOSSES)
def test_compliance_03_la05_evaluation_is_finite_and_touches_nothing(
    loss_class: type[InfoNCELoss], encoder: SimCSEEncoder
):
    """Without dropout both views coincide, and float32 rounds their cosine to 1.0000002."""
    encoder.eval()
    loss = loss_class(encoder)
    assert loss.training
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    with torch.no_grad():
        first, second = (loss(preprocess(encoder, SENTENCES * 3)) for _ in range(2))
    assert first.isfinite() and torch.equal(first, second)
    torch.testing.assert_close(dict(loss.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("loss_class", LOSSES)
def test_la04_a_loss_keeps_nothing_but_the_model(loss_class: type[InfoNCELoss], encoder: SimCSEEncoder):
    loss = loss_class(encoder)
    loss(preprocess(encoder, SENTENCES)).backward()
    assert set(loss.state_dict()) == {f"model.{name}" for name in encoder.state_dict()}


@pytest.mark.parametrize("loss_class", LOSSES)
def test_compliance_04_half_precision_weights_and_surrounding_autocast(loss_class: type[InfoNCELoss], folder: str):
    values = []
    for dtype, autocast in ((None, False), (None, True), ("bfloat16", False)):
        encoder = build_encoder(folder, pooler_type="avg", dropout=0.0, torch_dtype=dtype, device="cpu").train()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = loss_class(encoder)(preprocess(encoder, SENTENCES * 4, POSITIVES * 4))
        value.backward()
        assert value.dtype == torch.float32
        assert all(gradient.isfinite().all() for gradient in gradients(encoder))
        values.append(value.item())
    assert values[1:] == pytest.approx([values[0]] * 2, rel=0.02)


@pytest.mark.parametrize("columns", [1, 2])
def test_dd08_training_on_batches_of_one_is_refused(columns: int, still_encoder: SimCSEEncoder):
    loss = InfoNCELoss(still_encoder)
    one = preprocess(still_encoder, *[["a dog"], ["a cat"]][:columns])
    with torch.no_grad():
        assert loss(one) == 0
    with pytest.raises(ValueError, match="per_device_train_batch_size"):
        loss(one)
    with pytest.raises(ValueError, match="own_negatives_only"):
        InfoNCELoss(still_encoder, own_negatives_only=True)(preprocess(still_encoder, SENTENCES, POSITIVES))
    assert loss(preprocess(still_encoder, SENTENCES)) > 0
    # A last batch may be of one.
    assert loss(one) == 0


@pytest.mark.parametrize("loss_class", LOSSES)
@pytest.mark.parametrize("columns", [2, 3, 4])
def test_compliance_06_several_positives_in_tuples_equal_the_double_loop(loss_class: type[InfoNCELoss], columns: int):
    """Rows (q, p1), (q, p2), with hard negatives: p2 is no negative in the row of p1, nor is any copy of q or p1."""
    generator = torch.Generator().manual_seed(0)
    rows, embeddings = 40, torch.randn(200, 8, generator=generator, dtype=torch.float64)
    ids = torch.arange(rows * columns).reshape(columns, rows)
    ids[0, 1::4] = ids[0, ::4]  # every second anchor has two positives, the first of them three
    ids[0, 2] = ids[0, 0]
    if columns > 2:
        ids[2, 3], ids[2, 5], ids[2, 7] = ids[0, 3], ids[1, 6], ids[0, 20]
    keep = [[not copy for copy in row] for row in copies_by_hand(ids.tolist())]
    vectors = [embeddings[column].numpy() for column in ids]
    table = reference.rows(vectors[0], vectors[1], vectors[2:], keep=keep)
    if loss_class is InfoNCELoss:
        losses, expected = reference.infonce(table, 0.05), {}
    else:
        found = reference.weince(table, temperature=0.05)
        losses, expected = found.losses, {name: getattr(found, name) for name in ("blend", "shape", "hardness")}
    loss = loss_class(Table(embeddings))
    assert loss(one_token_texts(ids.tolist())).item() == pytest.approx(fmean(losses), rel=1e-9)
    stats = loss.stats()
    assert stats["masked_candidates"] == sum(row.count(False) for row in keep) - rows > 20
    for name, values in expected.items():
        assert stats[name] == pytest.approx(fmean(values), rel=1e-5), name
    # The same through an explicit mask of the criterion alone.
    alone = loss.criterion(*(embeddings[column] for column in ids), keep=torch.tensor(keep))
    assert alone.item() == pytest.approx(fmean(losses), rel=1e-9)


def test_ln02_positives_that_equal_their_anchors_are_warned_of(
    encoder: SimCSEEncoder, still_encoder: SimCSEEncoder, caplog: pytest.LogCaptureFixture
):
    """Dropout is off and a column is its own positive, once as one column and once as the host's doubled column."""
    WeinceLoss(encoder)(preprocess(encoder, SENTENCES))
    WeinceLoss(still_encoder)(preprocess(still_encoder, SENTENCES, POSITIVES))
    assert "positives equal" not in caplog.text
    for columns in ([SENTENCES], [SENTENCES, SENTENCES]):
        WeinceLoss(still_encoder)(preprocess(still_encoder, *columns))
        assert caplog.text.count("set the dropout of the encoder to 0.1") == 1
        caplog.clear()


def test_wrong_options_name_their_argument(still_encoder: SimCSEEncoder):
    with pytest.raises(ValueError, match="reduction"):
        WeinceLoss(still_encoder, reduction="none")
    with pytest.raises(ValueError, match="temperature"):
        WeinceLoss(still_encoder, temperature=0)
    with pytest.raises(TypeError, match="gates"):
        WeinceLoss(still_encoder, gates="both")


# ---- duplicates ----


def copies_by_hand(ids: list[list[int]]) -> list[list[bool]]:
    """Candidate j is a copy for anchor i if its text, or the anchor that j belongs to, is one of the pair i."""
    anchors, positives, *negatives = ids
    rows = range(len(anchors))
    copies = []
    for i in rows:
        pair = {anchors[i], positives[i]}
        copies.append([positives[j] in pair or anchors[j] == anchors[i] for j in rows])
        copies[i] += [column[j] in pair for column in negatives for j in rows]
    return copies


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_copies_are_those_of_the_double_loop(data: st.DataObject):
    columns, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    text = st.integers(0, data.draw(st.sampled_from([2, 5, 20])))
    ids = data.draw(st.lists(st.lists(text, min_size=rows, max_size=rows), min_size=columns, max_size=columns))
    copies = ~keep_mask(one_token_texts(ids))
    assert copies.tolist() == copies_by_hand(ids * 2 if columns == 1 else ids)


def test_hard_negative_equal_to_a_text_of_its_pair_is_left_out():
    keep = keep_mask(one_token_texts([[1, 2, 3], [11, 12, 13], [11, 2, 21]]))
    assert keep[:, 3:].tolist() == [[False, True, True], [True, False, True], [True, True, True]]


def test_copies_in_both_views():
    first, second = [1, 2, 1, 4], [11, 12, 13, 2]
    keep = keep_mask(one_token_texts([first, second]), both_views=True)
    texts, partners = first + second, second + first
    for i in range(8):
        for j in range(8):
            copy = texts[j] in (texts[i], partners[i]) or partners[j] == texts[i]
            assert keep[i, j].item() is not copy, (i, j)
    embeddings = torch.randn(14, 8, generator=torch.Generator().manual_seed(0))
    loss = InfoNCELoss(Table(embeddings), layout="both_views")
    assert loss(one_token_texts([first, second])).isfinite()
    assert loss.stats()["masked_candidates"] == (~keep).sum() - 8 - 8


@pytest.mark.parametrize(
    ("loss_class", "options", "logit"),
    [
        (InfoNCELoss, {}, lambda cosine: cosine / 0.05),
        (WeinceLoss, {"gate": 1.0, "shape": 1.0}, lambda cosine: -(1 - cosine + 1e-4).log()),
    ],
)
def test_df02_twins_are_removed_from_each_others_candidates(
    loss_class: type[InfoNCELoss], options: dict, logit: Any, case_inputs: Path, still_encoder: SimCSEEncoder
):
    lines = (case_inputs / "train_duplicates.txt").read_text(encoding="utf-8").splitlines()
    features = still_encoder.preprocess([line.strip() for line in lines])
    keys = text_keys(features).tolist()
    assert len(keys) == 12 and len(set(keys)) == 6
    loss = loss_class(still_encoder, **options)
    value = loss([features])
    assert loss.stats()["masked_candidates"] == sum(keys.count(key) - 1 for key in keys) == 32

    vectors = still_encoder(dict(features))["sentence_embedding"].detach()
    cosine = torch.cosine_similarity(vectors[:, None].double(), vectors.double(), dim=2).clamp(max=1)
    by_hand = []
    for i, key in enumerate(keys):
        candidates = [i, *(j for j in range(12) if keys[j] != key)]
        by_hand.append(-logit(cosine[i, candidates]).log_softmax(0)[0])
    # In float32 a shortfall of 0 is up to 2e-7 off, beside a floor of 1e-4; by how much depends on the processor.
    assert value.item() == pytest.approx(torch.stack(by_hand).mean().item(), rel=3e-3)
    assert loss_class(still_encoder, mask_duplicates=False, **options)([features]).item() > value.item() + 0.1


def test_df02_twins_are_not_in_each_others_tail(case_inputs: Path, encoder: SimCSEEncoder):
    lines = (case_inputs / "train_duplicates.txt").read_text(encoding="utf-8").splitlines()
    encoder.eval()
    hardness = {}
    for mask_duplicates in (True, False):
        loss = WeinceLoss(encoder, mask_duplicates=mask_duplicates)
        assert loss([encoder.preprocess([line.strip() for line in lines] * 2 + SENTENCES * 2)]).isfinite()
        hardness[mask_duplicates] = loss.stats()["hardness"]
    assert hardness[False] < 1e-4 < 1e-3 < hardness[True]


def test_tk02_truncation_makes_texts_equal(case_inputs: Path, encoder: SimCSEEncoder):
    texts = (case_inputs / "train_long_prefix.txt").read_text(encoding="utf-8").splitlines()
    features = encoder.preprocess(texts, max_length=16)
    assert features["input_ids"].shape[1] == 16
    keys = text_keys(features).tolist()
    repeated = [keys.count(key) for key in set(keys) if keys.count(key) > 1]
    assert repeated == [4] and len(keys) - len(set(keys)) == 3
    assert WeinceLoss(encoder)([features]).isfinite()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 50_000), min_size=1, max_size=9), min_size=1, max_size=8), st.integers(0, 3))
def test_text_keys_see_ids_and_their_order_but_no_padding(texts: list[list[int]], spare: int):
    def padded(side: str, pad: int, width: int) -> dict[str, Tensor]:
        rows = [(text, [pad] * (width - len(text))) for text in texts]
        ids = [text + fill if side == "right" else fill + text for text, fill in rows]
        mask = [[1] * len(t) + [0] * len(f) if side == "right" else [0] * len(f) + [1] * len(t) for t, f in rows]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}

    width = max(map(len, texts))
    keys = text_keys(padded("right", 0, width))
    assert torch.equal(text_keys(padded("left", 7, width + spare)), keys)
    flattened = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": text} for text in texts])
    assert torch.equal(text_keys(flattened), keys)
    for first, first_key in zip(texts, keys.tolist(), strict=True):
        for second, second_key in zip(texts, keys.tolist(), strict=True):
            assert (first_key == second_key) == (first == second)


def test_text_keys_of_neighbouring_texts_differ():
    """Swapped, shifted, repeated and cut texts, and all texts of two tokens over 300 ids."""
    ids = torch.cartesian_prod(torch.arange(300), torch.arange(300))
    assert text_keys({"input_ids": ids}).unique().numel() == 90_000
    assert text_keys({"input_ids": ids.flip(1)})[1] != text_keys({"input_ids": ids})[1]
    lengths = torch.arange(1, 513)[:, None] >= torch.arange(1, 513)
    repeated = {"input_ids": torch.zeros(512, 512, dtype=torch.long), "attention_mask": lengths.long()}
    assert text_keys(repeated).unique().numel() == 512


@pytest.mark.parametrize("both_views", [False, True])
def test_masking_never_waits_for_the_device(both_views: bool):
    """Tensors without values: anything that had to look at one would raise."""
    columns = [{"input_ids": torch.ones(4, 9, dtype=torch.long, device="meta")} for _ in range(2)]
    assert keep_mask(columns, both_views).shape == ((8, 8) if both_views else (4, 4))
    flattened = {"input_ids": torch.ones(1, 9, dtype=torch.long), "cu_seq_lens_q": torch.tensor([0, 4, 9])}
    assert text_keys({name: value.to("meta") for name, value in flattened.items()}).shape == (2,)


def test_copies_are_masked_where_a_chat_template_makes_messages_of_texts(tmp_path):
    folder = write_tiny_bert(tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    model = SentenceTransformer(folder, device="cpu")
    features = model.preprocess(["the man runs", "the man runs", "a dog sleeps", "the lamp is blue"])
    assert features["modality"] == "message"
    loss = InfoNCELoss(model)
    loss([features])
    assert loss.stats()["masked_candidates"] == 2


def test_inputs_that_are_not_text_have_no_keys():
    assert text_keys({"pixel_values": torch.zeros(2, 3, 8, 8)}) is None
    ids = torch.ones(2, 4, dtype=torch.long)
    assert text_keys({"input_ids": ids, "modality": "message", "pixel_values": ids}) is None
    columns = [{"input_ids": ids}, {"pixel_values": torch.zeros(2, 3)}]
    assert InfoNCELoss(nn.Identity()).batch_keys(columns) is None


def test_texts_laid_end_to_end_are_trained_and_masked():
    """Flash attention without padding, where columns cannot be merged into one forward."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    features = dict(collate([{"input_ids": [text]} for text in (1, 2, 1, 3)]))

    class FlatTable(Table):
        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            return super().forward({**features, "input_ids": features["input_ids"].T})

    loss = InfoNCELoss(FlatTable(torch.randn(4, 8, generator=torch.Generator().manual_seed(0))))
    assert loss([features]).isfinite()
    assert loss.stats()["masked_candidates"] == 2


# ---- the host's wrappers, trainer and model card ----


@pytest.mark.parametrize("columns", [1, 2])
def test_matryoshka(columns: int, encoder: SimCSEEncoder):
    loss = MatryoshkaLoss(encoder, WeinceLoss(encoder), matryoshka_dims=[32, 16, 8])
    value = loss(preprocess(encoder, *[SENTENCES, POSITIVES][:columns]), None)
    value.backward()
    assert value.isfinite() and gradients(encoder)


@pytest.mark.parametrize("cached", [False, True])
def test_compliance_08_every_width_has_its_own_statistics(cached: bool, still_encoder: SimCSEEncoder):
    """Those of a criterion that sees nothing but this width."""
    inner = CachedWeinceLoss(still_encoder, mini_batch_size=5) if cached else WeinceLoss(still_encoder)
    MatryoshkaLoss(still_encoder, inner, matryoshka_dims=[8, 32, 16])(
        preprocess(still_encoder, SENTENCES * 4, POSITIVES * 4), None
    ).backward()
    columns = preprocess(still_encoder, SENTENCES * 4, POSITIVES * 4)
    keep = keep_mask(columns)
    embeddings = [still_encoder(dict(column))["sentence_embedding"].detach() for column in columns]
    found = inner.stats()
    for width, suffix in ((32, ""), (16, "_16"), (8, "_8")):
        criterion = Weince()
        criterion(*(column[:, :width] for column in embeddings), keep=keep)
        expected = {f"{name}{suffix}": value for name, value in criterion.stats().items()}
        assert {name: found.pop(name) for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert found == {}


class RunningLoss(InfoNCELoss):
    criterion_class = ReleasedWeince


def test_compliance_08_a_running_average_is_of_one_width(still_encoder: SimCSEEncoder):
    loss = MatryoshkaLoss(still_encoder, RunningLoss(still_encoder), matryoshka_dims=[32, 16])
    with pytest.raises(ValueError, match="use WeinceLoss"):
        loss(preprocess(still_encoder, SENTENCES * 4, POSITIVES * 4), None)


def test_a_running_average_is_of_one_layer(still_encoder: SimCSEEncoder):
    loss = AdaptiveLayerLoss(still_encoder, RunningLoss(still_encoder))
    with pytest.raises(ValueError, match="layers of AdaptiveLayerLoss would share one running average"):
        loss(preprocess(still_encoder, SENTENCES * 4, POSITIVES * 4), None)


def test_compliance_09_adaptive_layers_need_two_columns(encoder: SimCSEEncoder):
    loss = AdaptiveLayerLoss(encoder, WeinceLoss(encoder))
    value = loss(preprocess(encoder, SENTENCES, POSITIVES), None)
    value.backward()
    assert value.isfinite() and gradients(encoder)
    with pytest.raises(ValueError, match="duplicate the column"):
        loss(preprocess(encoder, SENTENCES), None)


@pytest.mark.parametrize("pooler_type", ["avg_top2", "avg_first_last"])
def test_poolings_over_layers_train_on_a_single_column(pooler_type: str, folder: str):
    encoder = build_encoder(folder, pooler_type=pooler_type, device="cpu").train()
    loss, features = (
        MatryoshkaLoss(encoder, WeinceLoss(encoder), matryoshka_dims=[32, 16]),
        preprocess(encoder, SENTENCES),
    )
    for _ in range(2):
        loss(features, None).backward()
    assert gradients(encoder)


def trained(encoder: SimCSEEncoder, loss: InfoNCELoss, folder: Path, **options: Any) -> SentenceTransformerTrainer:
    words = ["dog", "house", "music", "lamp", "rain", "train", "river", "year"]
    texts = [f"the {first} and the {second} {third}" for first in words for second in words[:4] for third in words[:2]]
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=16, learning_rate=1e-3, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    dataset = Dataset.from_dict({"text": texts})
    trainer = SentenceTransformerTrainer(encoder, arguments, dataset, dataset.select(range(16)), loss)
    trainer.train()
    return trainer


@pytest.mark.parametrize("loss_class", LOSSES)
def test_la07_trainer_on_a_single_text_column(loss_class: type[InfoNCELoss], encoder: SimCSEEncoder, tmp_path: Path):
    loss = loss_class(encoder)
    trainer = trained(encoder, loss, tmp_path, max_steps=12)
    history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert history[-1] < history[0] < math.log(16)
    assert loss.stats()["positive_cosine"] < 0.9999
    assert math.isfinite(trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize("loss_class", LOSSES)
def test_compliance_01_one_step_of_the_trainer_moves_every_weight(
    loss_class: type[InfoNCELoss], folder: str, tmp_path: Path
):
    encoder = build_encoder(folder, mlp_only_train=True, device="cpu")
    before = {name: weight.detach().clone() for name, weight in encoder.named_parameters() if weight.requires_grad}
    assert any(name.startswith("2.linear") for name in before) and len(before) > 30
    trained(encoder, loss_class(encoder), tmp_path, max_steps=1)
    after = dict(encoder.named_parameters())
    # Keys have no bias that matters: softmax is blind to what all keys share.
    still = [name for name, weight in before.items() if torch.equal(after[name], weight) and "key.bias" not in name]
    assert still == []


def test_compliance_12_model_card_names_loss_options_and_paper(encoder: SimCSEEncoder, tmp_path: Path):
    trained(encoder, WeinceLoss(encoder, evidence="likelihood"), tmp_path / "run", max_steps=1)
    encoder.save(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    for words in ("- loss:WeinceLoss", "simcse_weince.losses.WeinceLoss", '"evidence": "likelihood"', "2606.00262"):
        assert words in card
    assert str(tmp_path) not in card
    assert not [path for path in (tmp_path / "saved").rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]


@pytest.mark.parametrize("loss_class", LOSSES)
def test_configuration_rebuilds_the_loss(loss_class: type[InfoNCELoss], encoder: SimCSEEncoder):
    loss = loss_class(encoder, 0.07, mask_duplicates=False, chunk_size=4)
    options = json.loads(json.dumps(loss.get_config_dict()))
    assert options["temperature"] == 0.07 and options["mask_duplicates"] is False
    assert loss_class(encoder, **options).get_config_dict() == loss.get_config_dict()
    assert loss.citation.startswith("@inproceedings")
