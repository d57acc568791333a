"""Training runs beside one another, from what a training leaves in its folder."""

import json
import os
import subprocess
import sys

import pytest

from simcse_weince.cli import main
from simcse_weince.extremes.runs import build_comparison, differences, read_runs
from simcse_weince.page import Page
from tests.test_page import Reader


def write_run(folder, *, loss, dev, **options):
    folder.mkdir(parents=True)
    history = [{"step": 0, "eval_sts-dev_spearman_cosine": 0.6, "eval_runtime": 3.0}]
    for step, score in zip((10, 20, 30), dev, strict=True):
        history.append({"step": step, "epoch": 0.1, "loss": 1 / step, "blend": 0.1 * step, "masked_candidates": 0.0})
        history.append({"step": step, "eval_sts-dev_spearman_cosine": score})
    best = max(dev)
    result = {
        "steps": 30,
        "dev_best": best,
        "best_step": 10 * dev.index(best) + 10,
        "dev_last": dev[-1],
        "test_name": None,
    }
    record = {"arguments": {"loss": loss, "output_dir": str(folder), **options}, "result": result}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return str(folder)


@pytest.fixture
def folders(tmp_path):
    return [
        write_run(tmp_path / "one", loss="weince", dev=[0.7, 0.75, 0.74], gate="both"),
        write_run(tmp_path / "two", loss="infonce", dev=[0.7, 0.65, 0.4]),
    ]


def test_only_what_differs_is_listed(folders):
    assert differences(read_runs(folders)) == [["gate", "both", "default"], ["loss", "weince", "infonce"]]


def test_the_page_tells_the_best_and_the_fallen_run_first(folders, tmp_path):
    page = build_comparison(read_runs(folders))
    assert page.lead.splitlines()[:2] == [
        "one has the highest dev score, 0.7500.",
        "two fell from 0.7000 at step 10 to 0.4000.",
    ]
    page.write(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    reader = Reader(text)
    figures = [attributes["alt"] for tag, attributes in reader.tags if tag == "img"]
    assert [alt.split()[0] for alt in figures] == ["sts-dev_spearman_cosine", "loss", "blend"]
    assert "one 0.74, two 0.4" in figures[0]
    assert "runtime" not in text and "masked_candidates" not in text and str(tmp_path) not in text


def test_curves_have_the_steps_of_the_log(folders):
    curves = read_runs(folders)[0].curves()
    assert curves["sts-dev_spearman_cosine"] == [(0, 0.6), (10, 0.7), (20, 0.75), (30, 0.74)]
    assert set(curves) == {"sts-dev_spearman_cosine", "loss", "blend", "masked_candidates"}


def test_equal_folder_names_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / arm / "seed0", loss="weince", dev=[0.1, 0.2, 0.3]) for arm in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == ["a/seed0", "b/seed0"]


def test_runs_are_told_apart_by_as_many_parents_as_it_takes(tmp_path):
    places = ["x/run", "y/x/run", "other"]
    folders = [write_run(tmp_path / place, loss="weince", dev=[0.1, 0.2, 0.3]) for place in places]
    parent = tmp_path.name
    assert [run.name for run in read_runs(folders)] == [f"{parent}/x/run", "y/x/run", "other"]
    assert [run.name for run in read_runs([*folders, folders[2]])] == [f"{parent}/x/run", "y/x/run", "other"]


def test_the_command_prints_the_table_and_writes_the_page(folders, tmp_path, capsys):
    assert main(["compare", *folders, "--report", str(tmp_path / "page.html")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["one", "two"] and ["dev_best", "0.7500", "0.7000"] in lines
    assert ["loss", "weince", "infonce"] in lines
    assert (tmp_path / "page.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", ...), ("trainer_state.json", ...), *(("run.json", content) for content in (
            "{", "[1]", "null", "{}", '{"arguments": {}, "result": [1]}', '{"arguments": [1], "result": {}}',
            '{"arguments": {}, "result": {"dev_best": 0.9, "dev_last": "x"}}')),
        *(("trainer_state.json", content) for content in (
            "[1]", '{"log_history": null}', '{"log_history": [{"a": 1}]}')),
    ],
)  # fmt: skip
def test_a_folder_without_a_finished_run_is_refused(folders, tmp_path, capsys, name, content):
    (tmp_path / "two" / name).unlink() if content is ... else (tmp_path / "two" / name).write_text(content)
    assert main(["compare", *folders, "--report", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert f"two/{name}: " in error and "; name the --output_dir of a finished training run" in error


def test_what_is_compared_is_not_written_over(folders, capsys):
    before = read_runs(folders)
    for name in ("run.json", "trainer_state.json"):
        assert main(["compare", *folders, "--report", f"{folders[0]}/{name}"]) == 2
        assert "--report would replace what is read" in capsys.readouterr().err
    assert before == read_runs(folders)
    for _ in range(2):
        assert main(["compare", *folders, "--report", f"{folders[0]}/compared.html"]) == 0


def test_every_run_is_in_the_legend_whatever_it_is_called(tmp_path, monkeypatch):
    """A pair of $ begins a formula in matplotlib, and a leading _ hides a line."""
    names = ["_base", "a$\\b$c", "plain"]
    folders = [write_run(tmp_path / name, loss="weince", dev=[0.1, 0.2, 0.3 + len(name)]) for name in names]
    figures = []
    add = Page.figure
    monkeypatch.setattr(
        Page, "figure", lambda page, figure, *words: (figures.append(figure), add(page, figure, *words))
    )
    build_comparison(read_runs(folders))
    drawn = [[text.get_text().strip() for text in figure.axes[0].get_legend().get_texts()] for figure in figures]
    assert drawn and all(legend == ["_base", r"a\$\b\$c", "plain"] for legend in drawn)


def test_a_name_that_the_terminal_lacks_costs_nothing(tmp_path):
    write_run(tmp_path / "\xe9", loss="weince", dev=[0.1, 0.2, 0.3])
    words = [sys.executable, "-m", "simcse_weince.cli", "compare", "\xe9", "--report", "page.html"]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and r"\xe9" in done.stdout and (tmp_path / "page.html").exists()
