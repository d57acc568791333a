"""What data/README.md promises about data/sample, and about the public data sets where they are at hand."""

import re
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

DATA = Path(__file__).resolve().parents[1] / "data"
BANDS = ["0–0.9", "1–1.9", "2–2.9", "3–3.9", "4–5"]


def _lines(name: str) -> list[str]:
    text = (DATA / "sample" / name).read_bytes().decode("utf-8")
    assert text.endswith("\n") and "\r" not in text and "\ufeff" not in text
    assert unicodedata.is_normalized("NFC", text)
    return text[:-1].split("\n")


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    header, *lines = _lines("pairs.tsv")
    assert header.split("\t") == ["sentence1", "sentence2", "score", "genre"]
    return [line.split("\t") for line in lines]


@pytest.fixture(scope="module")
def scores(rows: list[list[str]]) -> np.ndarray:
    return np.array([float(row[2]) for row in rows])


@pytest.fixture(scope="module")
def readme() -> str:
    return (DATA / "README.md").read_text(encoding="utf-8")


def _table(readme: str, first_header: str) -> dict[str, list[str]]:
    """Rows of the README table whose first column has this header: first cell -> the other cells."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in readme.split("\n")]
    start = next(number for number, row in enumerate(cells) if row[0] == first_header)
    end = next(number for number, row in enumerate(cells) if number > start and row == [""])
    return {row[0].strip("`"): row[1:] for row in [cells[start], *cells[start + 2 : end]]}


def test_every_row_has_four_clean_fields(rows):
    assert len(rows) >= 250
    for row in rows:
        assert len(row) == 4
        assert all(field and field == " ".join(field.split()) for field in row)
        assert '"' not in "".join(row)  # readers with and without quoting must agree
        assert re.fullmatch(r"[0-4]\.\d|5\.0", row[2])


def test_grades_cover_the_range_evenly(scores):
    assert scores.min() == 0 and scores.max() == 5
    assert np.histogram(scores, bins=[0, 1, 2, 3, 4, 5.1])[0].min() >= 25
    assert np.mean(scores % 1 != 0) > 0.5


def test_no_sentence_occurs_twice(rows):
    sentences = [sentence for row in rows for sentence in row[:2]] + _lines("sentences.txt")
    plain = Counter(" ".join(re.findall(r"\w+", sentence.lower())) for sentence in sentences)
    assert [sentence for sentence, count in plain.items() if count > 1] == []


def test_sentences_are_short_prose():
    for sentence in _lines("sentences.txt"):
        assert sentence == " ".join(sentence.split())
        assert 8 <= len(sentence.split()) <= 30
        assert sentence[0].isupper() and sentence[-1] == "."


def test_readme_counts_equal_the_files(readme, rows, scores):
    assert int(_table(readme, "file")["sample/pairs.tsv"][0]) == len(rows)
    assert int(_table(readme, "file")["sample/sentences.txt"][0]) == len(_lines("sentences.txt"))

    genres, table = [row[3] for row in rows], _table(readme, "genre")
    assert len(set(genres)) >= 6
    assert table.pop("genre") == [*BANDS, "all"]
    assert set(table) == {*genres, "all"}
    band = np.minimum(scores.astype(int), 4)
    for genre, cells in table.items():
        counts = np.bincount(band[[genre in (name, "all") for name in genres]], minlength=5).tolist()
        assert [int(cell) for cell in cells] == [*counts, sum(counts)]


def test_word_overlap_does_not_predict_the_grade(readme, rows, scores):
    def cosine(first: str, second: str) -> float:
        a, b = (Counter(re.findall(r"[a-z0-9']+", sentence.lower())) for sentence in (first, second))
        return sum(a[word] * b[word] for word in a) / np.sqrt(
            sum(n * n for n in a.values()) * sum(n * n for n in b.values())
        )

    spearman = spearmanr(scores, [cosine(*row[:2]) for row in rows]).statistic
    assert spearman == pytest.approx(float(_table(readme, "sentence vectors")["word counts"][0]), abs=0.005)


def test_a_pretrained_encoder_predicts_the_grade(readme, rows, scores, minilm):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    transformer = SentenceTransformer(minilm, device="cpu")[0]
    encoder = SentenceTransformer(modules=[transformer, Pooling(384, ("cls", "mean"))], device="cpu")
    vectors = encoder.encode([row[0] for row in rows] + [row[1] for row in rows], show_progress_bar=False)
    for half, name in zip(np.split(vectors, 2, axis=1), ("[CLS]", "mean"), strict=True):
        first, second = np.split(half / np.linalg.norm(half, axis=1, keepdims=True), 2)
        spearman = spearmanr(scores, (first * second).sum(axis=1)).statistic
        listed = float(_table(readme, "sentence vectors")[f"all-MiniLM-L6-v2, {name}"][0])
        assert spearman == pytest.approx(listed, abs=0.01)


def test_readme_checksums_equal_the_public_files(readme, shared):
    from simcse_weince.sentence.pairs import load_sts

    listed = {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})  (.+)$", readme, re.MULTILINE)}
    senteval, original, stsb = (str(shared / "data" / name) for name in ("senteval", "sts_original", "stsb"))
    for year in range(12, 17):
        assert load_sts(f"sts{year}", data_dir=senteval).sha256 == listed[f"STS{year}, SentEval"]
        assert load_sts(f"sts{year}", data_dir=original).sha256 == listed[f"STS{year}, original"]
    for split in ("train", "dev", "test"):
        assert load_sts("stsb", split, data_dir=senteval).sha256 == listed[f"sts-{split}.csv, SentEval"]
        assert load_sts("stsb", split, data_dir=stsb).sha256 == listed[f"sts-{split}.csv, original"]
    assert load_sts("sickr", data_dir=senteval).sha256 == listed["SICK_test_annotated.txt"]


def test_the_pair_reader_loses_nothing(rows, scores):
    from simcse_weince.sentence.pairs import read_pairs

    pairs = read_pairs(DATA / "sample" / "pairs.tsv")
    assert (pairs.first, pairs.second) == ([row[0] for row in rows], [row[1] for row in rows])
    assert pairs.scores.tolist() == scores.tolist()
