"""Streamed cosines against the full matrix, and the encoder loop against the host's own."""

import numpy as np
import pytest
import torch

from simcse_weince.extremes import scores as module
from simcse_weince.extremes.pot import fit_pot
from simcse_weince.extremes.scores import encode_texts, stream_scores

ROWS, WIDTH = 60, 5


@pytest.fixture(params=[1 << 24, 300], ids=["one chunk", "chunks of 5 anchors"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_COSINES", request.param)


def vectors(seed=0, rows=ROWS):
    return np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32)


def full_matrix(first, second, keys, candidate_keys):
    """Cosines in float64 with NaN where a pair is no negative, by a double loop."""
    first, second = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (first.astype(float), second.astype(float)))
    cosine = first @ second.T
    for i in range(len(first)):
        for j in range(len(second)):
            if i == j or candidate_keys[j] in (candidate_keys[i], keys[i]) or keys[i] == keys[j]:
                cosine[i, j] = np.nan
    return cosine


@pytest.mark.parametrize("paired", [False, True])
def test_streamed_scores_are_those_of_the_full_matrix(chunks, paired):
    keys = np.arange(ROWS)
    keys[[3, 17, 40]] = 3  # three equal texts
    candidate_keys = keys + 1000 if paired else keys
    if paired:
        candidate_keys[20] = 7  # the positive of one anchor is the text of another
        keys[50] = 51  # two positives of one anchor
    second = vectors(1) if paired else vectors()
    cosine = full_matrix(vectors(), second, keys, candidate_keys)
    found = stream_scores(vectors(), second if paired else None, keys=keys, hardest=4,
                          candidate_keys=candidate_keys if paired else None)  # fmt: skip
    np.testing.assert_allclose(found.hardest, np.sort(np.nan_to_num(cosine, nan=-9), axis=1)[:, :-5:-1], atol=1e-6)
    if not paired:  # each pair once
        cosine[np.tril_indices(ROWS)] = np.nan
    negatives = cosine[~np.isnan(cosine)]
    assert found.pairs == len(negatives)
    assert found.duplicates == (9 if paired else 3)
    above = np.argwhere(np.nan_to_num(cosine, nan=-9) > found.threshold)
    assert found.exceedance_pairs.tolist() == above.tolist() and found.exceedance_pairs.dtype == np.int64
    np.testing.assert_allclose(found.exceedances, cosine[tuple(above.T)], atol=1e-6)
    assert found.share_above == len(above) / len(negatives)
    assert found.threshold == pytest.approx(np.quantile(negatives, 0.9), abs=0.05)
    if paired:
        first, second = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (vectors(), second))
        np.testing.assert_allclose(found.positive, (first * second).sum(1), atol=1e-6)
    else:
        assert found.positive.size == 0


def test_quantiles_of_all_pairs_are_found_among_the_exceedances():
    found = stream_scores(vectors(rows=500))
    cosine = full_matrix(vectors(rows=500), vectors(rows=500), np.arange(500), np.arange(500))
    expected = np.quantile(cosine[~np.isnan(cosine)], 0.99)
    assert found.total == found.pairs
    assert fit_pot(found.exceedances, total=found.total, bootstrap=0).threshold == pytest.approx(expected, abs=1e-3)
    thinned = stream_scores(vectors(rows=500), max_exceedances=5000)
    thinned = fit_pot(thinned.exceedances, total=thinned.total, quantile=0.95, bootstrap=0)
    assert thinned.threshold == pytest.approx(np.nanquantile(cosine, 0.95), abs=0.005)
    assert fit_pot(found.exceedances, total=found.total, quantile=0.5, bootstrap=0).threshold == found.exceedances.min()


def test_the_threshold_does_not_count_pairs_of_duplicates():
    rows = vectors(rows=200)
    rows[80:] = rows[80]  # 36 % of all pairs
    keys = np.minimum(np.arange(200), 80)
    found = stream_scores(rows, keys=keys)
    assert found.share_above == pytest.approx(0.1, abs=0.02) and found.threshold < 0.9
    assert stream_scores(np.ones((9, 3), np.float32), keys=np.zeros(9)).pairs == 0


def test_more_exceedances_than_wanted_are_thinned_evenly():
    every = stream_scores(vectors(rows=800))
    some = stream_scores(vectors(rows=800), max_exceedances=5000)
    assert len(every.exceedances) > 30_000 and some.share_above == every.share_above
    assert abs(len(some.exceedances) - 5000) < 350  # five standard deviations
    assert some.exceedances.mean() == pytest.approx(every.exceedances.mean(), abs=0.005)
    assert all(len(np.unique(members)) > 650 for members in some.exceedance_pairs.T)
    again = stream_scores(vectors(rows=800), max_exceedances=5000)
    np.testing.assert_array_equal(some.exceedances, again.exceedances)


def test_dg06_rows_without_direction_are_counted_and_left_out(caplog):
    broken = vectors()
    broken[[2, 9, 30]] = [[0.0], [np.nan], [np.inf]]
    found = stream_scores(broken, keys=np.arange(ROWS))
    good = stream_scores(np.delete(vectors(), [2, 9, 30], axis=0))
    assert found.left_out == 3 and "3 rows have no direction" in caplog.text
    np.testing.assert_array_equal(found.hardest, good.hardest)
    assert np.isfinite(found.exceedances).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros((4, 3), np.float32),), "two rows with a direction, got 0"),
        ((np.ones((4, 3), int),), r"floating \(N, d\)"),
        ((np.ones(4, np.float32),), r"floating \(N, d\)"),
        ((vectors(), vectors()[:5]), "candidates must be shaped like anchors"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        stream_scores(*arguments)


def test_half_precision_is_compared_in_float32():
    half = torch.as_tensor(vectors()).bfloat16()
    np.testing.assert_array_equal(stream_scores(half).hardest, stream_scores(half.float()).hardest)


TEXTS = ["the dog runs", "a very long sentence about water and people and the river", "the dog runs", "rain falls", "x"]


@pytest.fixture
def encoder(tiny_bert):
    from simcse_weince.sentence.encoder import build_encoder

    return build_encoder(tiny_bert, pooler_type="avg", device="cpu")


def test_texts_are_embedded_as_the_host_does(encoder, monkeypatch):
    monkeypatch.setattr(module, "_TOKENIZED_AT_ONCE", 2)
    found, keys = encode_texts(encoder, TEXTS, batch_size=2)
    np.testing.assert_allclose(found, encoder.encode(TEXTS), atol=1e-6)
    assert keys[0] == keys[2] and len(keys.unique()) == 4


def test_dropout_views_differ_repeat_and_leave_no_trace(encoder):
    encoder.eval()
    state = torch.random.get_rng_state()
    first, second, again = (encode_texts(encoder, TEXTS, dropout_seed=seed)[0] for seed in (0, 1, 0))
    assert torch.equal(first, again) and not torch.allclose(first, second)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(part.training for part in encoder.modules())
