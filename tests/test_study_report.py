"""The tables, the verdict and the page of a study, from records with known numbers."""

import json

import numpy as np
import pytest
from scipy import stats

from simcse_weince.cli import main
from simcse_weince.study.report import summarize, tables, to_markdown, verdict, write_page
from tests.test_study_plan import finish, plan

SCORES = {"infonce": [0.780, 0.779, 0.777], "weince": [0.785, 0.781, 0.781], "weibull": [0.790, 0.781, 0.792]}


@pytest.fixture
def study(tmp_path):
    """Three arms, of which the last has nothing to choose; temperature 0.07 is the best of two on dev."""
    study = plan(
        tmp_path, arms=["infonce", "weince", "weibull"], baselines=["infonce", "weince"], curves=["dev", "blend"]
    )
    for run in study.runs("settings"):
        finish(study, run, select=0.8 + run.setting["temperature"] + run.seed / 1000)
    for run in study.runs("report"):
        score = SCORES[run.arm][run.seed - 1]
        curve = [{"step": step, "dev": score + step / 1000} for step in (0, 10)] + [{"step": 10, "blend": 0.5}]
        finish(study, run, run={"result": {"test_after": score}}, curve=curve if run.arm != "infonce" else curve[:2])
    return study


def remove(study, arm, seed=3):
    run = next(run for run in study.runs("report") if (run.arm, run.seed) == (arm, seed))
    study.record_path(run).unlink()


def test_scores_and_differences_are_those_of_scipy_in_points(study):
    score = summarize(study)["scores"]["STS-B test"]
    weince = score["arms"]["weince"]
    assert weince["setting"] == {"temperature": 0.07} and weince["each"] == pytest.approx([78.5, 78.1, 78.1])
    assert [(one["arm"], one["baseline"]) for one in score["differences"]] == [
        ("weince", "infonce"), ("weibull", "infonce"), ("weibull", "weince")]  # fmt: skip
    first = score["differences"][0]
    expected = stats.ttest_rel(*(np.multiply(100, SCORES[arm]) for arm in ("weince", "infonce"))).confidence_interval()
    assert (first["low"], first["high"]) == pytest.approx(tuple(expected))
    # Three seeds: 2 / 2^3 at best, times the three differences.
    assert first["p"] == 0.25 and first["p_holm"] == 0.75


def test_settings_are_told_with_the_chosen_one(study):
    settings = summarize(study)["settings"]
    assert [(one["arm"], one["setting"]["temperature"], one["chosen"]) for one in settings] == [
        ("infonce", 0.05, False), ("infonce", 0.07, True), ("weince", 0.05, False), ("weince", 0.07, True)]  # fmt: skip
    assert settings[1]["mean"] == pytest.approx(88.15)


def test_only_complete_arms_count(study):
    remove(study, "weince")
    summary = summarize(study)
    assert summary["incomplete"] == {"weince": "2 of 3"} and list(summary["scores"]["STS-B test"]["arms"]) == [
        "infonce",
        "weibull",
    ]
    assert "weince" not in summary["curves"]["dev"] and "| weince | 2 of 3 |" in to_markdown(summary)
    study.record_path(study.runs("settings")[0]).unlink()
    assert summarize(study)["incomplete"] == {"infonce": "0 of 3", "weince": "2 of 3"}
    assert "There is no difference to test" in verdict(summarize(study))


def test_a_collapsed_seed_leaves_its_arm_without_a_mean_but_in_the_tables(study):
    run = next(run for run in study.runs("report") if run.arm == "weince")
    finish(study, run, run={"result": {"test_after": None}})
    summary = summarize(study)
    score = summary["scores"]["STS-B test"]
    assert [(one["arm"], one["baseline"]) for one in score["differences"]] == [("weibull", "infonce")]
    assert ["weince", "temperature 0.07", "-", "-", "-", "- 78.10 78.10"] in tables(summary)[0][2]
    assert "STS-B test: weince has no score in 1 of 3 seeds, so it is compared with none." in verdict(summary)


def test_a_collapsed_setting_is_shown_as_one(study):
    for run in study.runs("settings"):
        if run.setting["temperature"] == 0.05:
            finish(study, run, select=None)
    summary = summarize(study)
    assert [one["mean"] is None for one in summary["settings"]] == [True, False] * 2
    assert ["weince", "temperature 0.05", "-", "-", "-", ""] in tables(summary)[-1][2]


def test_an_early_look_shows_no_more_than_the_end_will(tmp_path):
    """Holm's correction is over all planned differences: six seeds can show one, not one of three."""
    arms = ["infonce", "weince", "weibull", "mnrl-hardness"]
    study = plan(tmp_path, arms=arms, grid={}, seeds={"report": list(range(6))})
    for run in study.runs("report"):
        finish(study, run, run={"result": {"test_after": 0.78 + run.seed / 1e4 + 0.01 * (run.arm == "weince")}})
    remove(study, "weibull", seed=5)
    remove(study, "mnrl-hardness", seed=5)
    summary = summarize(study)
    one = summary["scores"]["STS-B test"]["differences"][0]
    assert (one["p"], one["p_holm"], one["seeds_for_a_point"]) == (2 / 2**6, 3 * 2 / 2**6, 7)
    assert verdict(summary).startswith("Not finished: weibull, mnrl-hardness. STS-B test: 0 of 3 differences are shown")


def test_runs_that_were_not_made_alike_are_named(study):
    for run in study.runs("report"):
        corpus = {"files": [{"name": "text.txt", "sha256": "a" if run.seed < 3 else "b"}]}
        score, precision = {"test_after": SCORES[run.arm][run.seed - 1]}, "bf16" if run.arm == "weince" else "float32"
        finish(study, run, run={"precision": precision, "corpus": corpus, "result": score})
    assert "The runs were not made alike: they differ in data, precision." in to_markdown(summarize(study))


@pytest.mark.parametrize("other", [{"versions": {"torch": "2.6"}}, {"device": "cuda"}, {"processes": 2}])
def test_runs_of_other_versions_or_machines_are_named(tmp_path, other):
    study = plan(tmp_path, arms=["infonce", "weibull"], grid={}, seeds={"report": [1]})
    for run in study.runs("report"):
        made = {"versions": {"torch": "2.9"}, "device": "cpu", "processes": 1, "result": {"test_after": 0.7}}
        finish(study, run, run=made if run.arm == "infonce" else {**made, **other})
    assert f"they differ in {next(iter(other))}." in verdict(summarize(study))


@pytest.mark.parametrize(
    "other",
    [
        {"run": {"images": {"bank": {"name": "x.npz", "sha256": "b"}}}},
        {"run": {"corpus": {"files": [{"name": "b/stream"}]}}},
        {"run": {"graded_pairs": {"dev": {"files": {"pairs.tsv": "b"}}}}},
        {"evaluations": {"suite": {"tasks": [{"files": {"STS.input.a.txt": "b"}}]}}},
    ],
)
def test_data_of_any_kind_is_compared(tmp_path, other):
    study = plan(tmp_path, arms=["infonce", "weibull"], grid={}, seeds={"report": [1]})
    for run in study.runs("report"):
        text = json.dumps({"run": {}, **other})
        record = json.loads(text if run.arm == "infonce" else text.replace('"b', '"a'))
        finish(study, run, **{**record, "run": {**record["run"], "result": {"test_after": 0.7}}})
    assert "they differ in data." in verdict(summarize(study))


def test_names_break_neither_a_table_nor_a_figure(tmp_path):
    pytest.importorskip("matplotlib")
    arms = {"infonce": {}, "we|ince $\\foo$\n<b>": {"loss": "weince"}}
    study = plan(tmp_path, arms=arms, grid={}, seeds={"report": [1]}, curves=["dev"])
    for run in study.runs("report"):
        finish(study, run, run={"result": {"test_after": 0.7}}, curve=[{"step": 0, "dev": 0.5}])
    summary = summarize(study)
    assert r"| we\|ince $\foo$ <b> |" in to_markdown(summary)
    write_page(summary, tmp_path / "page.html")
    assert "&lt;b&gt;" in (tmp_path / "page.html").read_text()


def test_the_verdict_says_what_cannot_be_shown_and_what_it_would_take(study):
    summary = summarize(study)
    text = verdict(summary)
    assert text.startswith("STS-B test: 0 of 3 differences are shown")
    assert "With 3 seeds that p cannot be below 0.75" in text
    widest = max(summary["scores"]["STS-B test"]["differences"], key=lambda one: one["sd"])
    assert f"{widest['seeds_for_a_point']} seeds" in text and "hours" in text


def test_no_number_of_seeds_is_promised_with_which_its_own_criterion_could_not_be_met(study):
    for run in study.runs("report"):  # arms that differ by the same for each seed: two would do for a t test
        finish(study, run, run={"result": {"test_after": 0.7 + run.seed / 1000 + 0.01 * (run.arm == "weince")}})
    summary = summarize(study)
    # Three differences: 3 * 2 / 2^6 is above 0.05, 3 * 2 / 2^7 below.
    assert all(row[-2:] == ["7", "7"] for row in tables(summary)[1][2])
    assert "two arms need 7 seeds" in verdict(summary)


def test_twelve_seeds_can_show_a_difference(tmp_path):
    study = plan(tmp_path, arms=["infonce", "weibull"], grid={}, seeds={"report": list(range(12))})
    for run in study.runs("report"):
        finish(study, run, run={"result": {"test_after": 0.78 + run.seed / 1e4 + 0.01 * (run.arm == "weibull")}})
    assert "1 of 2 differences" not in verdict(summarize(study))
    assert "1 of 1 differences are shown, by p after Holm of at most 0.05: weibull +1.00 to infonce." in verdict(
        summarize(study)
    )


def test_one_seed_can_be_read_though_not_compared(tmp_path, capsys):
    study = plan(tmp_path, arms=["infonce", "weibull"], grid={}, seeds={"report": [1]})
    for run in study.runs("report"):
        finish(study, run, run={"result": {"test_after": 0.78 + 0.01 * (run.arm == "weibull")}})
    summary = summarize(study)
    assert "With 1 seed that p cannot be below 1" in verdict(summary)
    assert "| weibull - infonce | +1.00 | -  | -             | 1 | 1       | -             | -             |" in (
        to_markdown(summary)
    )


def test_curves_are_means_over_seeds_with_their_spread(study):
    curves = summarize(study)["curves"]
    assert curves["dev"]["weince"]["steps"] == [0, 10]
    assert curves["dev"]["weince"]["mean"][0] == pytest.approx(np.mean(SCORES["weince"]))
    assert curves["dev"]["weince"]["sd"][1] == pytest.approx(np.std(SCORES["weince"], ddof=1))
    assert "infonce" not in curves["blend"]


def test_hundreds_of_hours_are_written_out(study):
    assert "(250 hours of runs)" in verdict({**summarize(study), "seconds_of_a_run": 6 * 3600.0})


def test_with_what_the_runs_were_made_is_told_once_or_how_it_differs(study):
    assert len(summarize(study)["made_with"]) == 1
    run = next(run for run in study.runs("report") if run.arm == "weince")
    record = json.loads(study.record_path(run).read_text())
    record["run"]["precision"] = "bf16"
    study.record_path(run).write_text(json.dumps(record))
    assert {made["precision"] for made in summarize(study)["made_with"]} == {None, "bf16"}


def test_the_page_holds_the_tables_and_the_curves(study, tmp_path):
    pytest.importorskip("matplotlib")
    summary = summarize(study)
    write_page(summary, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert all(title in page for title, _, _ in tables(summary)) and page.count("<img") == 2
    assert verdict(summary)[:60] in page


def test_markdown_columns_are_aligned(study):
    lines = [line for line in to_markdown(summarize(study)).splitlines() if line.startswith("| ")]
    header = next(line for line in lines if line.startswith("| arm"))
    assert "| weince  | temperature 0.07 | 78.23 | 0.23 | 77.66 to 78.81 | 78.50 78.10 78.10 |" in lines
    assert len(header) == len(lines[lines.index(header) + 1])


def test_compare_prints_the_study_and_writes_json_and_page(study, tmp_path, capsys):
    (study.output_dir / "study.yaml").write_text((tmp_path / "study.yaml").read_text())
    output = study.output_dir / "summary.json"
    for _ in range(2):  # a result may be written anew beside what it was made of
        assert main(["compare", "--study", str(study.output_dir), "--output", str(output)]) == 0
        assert capsys.readouterr().out == to_markdown(summarize(study))
    assert json.loads(output.read_text())["scores"]["STS-B test"]["arms"].keys() == SCORES.keys()


@pytest.mark.parametrize("option", ["--output", "--report"])
@pytest.mark.parametrize("read", ["records/study.yaml", "records/report/weibull-seed=1.json", "study.yaml"])
def test_compare_does_not_write_over_what_it_reads(study, tmp_path, capsys, option, read):
    (study.output_dir / "study.yaml").write_text((tmp_path / "study.yaml").read_text())
    text = (tmp_path / "study.yaml").read_text().replace("runs/study", str(study.output_dir))
    (tmp_path / "study.yaml").write_text(text)
    shown = tmp_path / "study.yaml" if read == "study.yaml" else study.output_dir
    before = (tmp_path / read).read_text()
    assert main(["compare", "--study", str(shown), option, str(tmp_path / read)]) == 2
    assert "would replace what is read" in capsys.readouterr().err and (tmp_path / read).read_text() == before


def test_compare_takes_runs_or_a_study(study, capsys):
    assert main(["compare", "runs/a", "--study", str(study.output_dir)]) == 2
    assert main(["compare"]) == 2
    assert main(["compare", "--study", str(study.output_dir / "none")]) == 2
