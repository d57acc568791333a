"""The published results: what the page and the README say is what the records say."""

import json
import re
import tarfile
from pathlib import Path

import pytest

from simcse_weince.study.plan import read_study
from simcse_weince.study.report import summarize, tables, verdict
from simcse_weince.study.statistics import fewest_seeds

ROOT = Path(__file__).resolve().parents[1]
RESULTS = sorted((ROOT / "data" / "results").glob("*.json"))
RECORDS = sorted((ROOT / "data" / "results").glob("*.records.tar.xz"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "data" / "results" / "README.md").read_text(encoding="utf-8")


def rows_of(text):
    """The rows of all Markdown tables, as tuples of cells."""
    return {tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines() if line[:1] == "|"}


def test_there_are_results():
    assert RESULTS


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_page_shows_every_table_of_the_record(path):
    summary = json.loads(path.read_text(encoding="utf-8"))
    assert not summary["incomplete"]
    for title, header, rows in tables(summary):
        assert f"### {title}" in PAGE and {tuple(header), *map(tuple, rows)} <= rows_of(PAGE), title
    assert verdict(summary) in re.sub(r"\s+", " ", PAGE)
    for score in summary["scores"].values():
        assert min(one["seeds_for_a_point"] for one in score["differences"]) >= fewest_seeds(len(score["differences"]))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_published_records_give_the_published_summary(path, tmp_path):
    folder = tmp_path / path.name.partition(".")[0]
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    summary = json.loads((path.parent / f"{folder.name}.json").read_text(encoding="utf-8"))
    assert summarize(read_study(folder / "study.yaml", output_dir=folder)) == summary


def test_the_readme_names_results():
    assert sum(f"{path.stem}.yaml" in README for path in RESULTS) >= 3


@pytest.mark.parametrize("path", [one for one in RESULTS if f"{one.stem}.yaml" in README], ids=lambda path: path.stem)
def test_the_readme_shows_the_first_table(path):
    _, header, rows = tables(json.loads(path.read_text(encoding="utf-8")))[0]
    assert {tuple(header), *map(tuple, rows)} <= rows_of(README)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_record_is_of_the_shipped_study_and_can_be_shared(path, tmp_path):
    summary = json.loads(path.read_text(encoding="utf-8"))
    study = read_study(ROOT / "scripts" / "studies" / f"{path.stem}.yaml")
    assert list(summary["scores"]) == list(study.scores) and list(summary["curves"]) == study.curves
    arms = next(iter(summary["scores"].values()))["arms"]
    assert list(arms) == list(study.arms) and all(one["n"] == len(study.seeds["report"]) for one in arms.values())
    assert str(Path.home()) not in path.read_text() and path.stat().st_size < 200_000
