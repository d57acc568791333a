"""Study files: arms, settings, the order of runs, and what is refused."""

import json
from pathlib import Path

import pytest
import yaml

from simcse_weince.errors import InputError
from simcse_weince.outputs import shareable
from simcse_weince.sentence.arguments import parse_training_arguments
from simcse_weince.study.plan import PRESETS, lookup, read_study

STUDY = {
    "output_dir": "runs/study",
    "options": {"model_name_or_path": "m", "train_file": "/home/somebody/text.txt"},
    "arms": {"infonce": None, "weince": {}, "weibull": {}, "large": {"preset": "weince", "per_device_batch": 256}},
    "grid": {"temperature": [0.05, 0.07]},
    "seeds": {"settings": [11, 12], "report": [1, 2, 3]},
    "scores": {"STS-B test": "result.test_after"},
}


def write(tmp_path, **changes):
    study = {name: value for name, value in {**STUDY, **changes}.items() if value is not ...}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    return tmp_path / "study.yaml"


def plan(tmp_path, **changes):
    return read_study(write(tmp_path, **changes), output_dir=tmp_path / "records")


def finish(study, trial, **content):
    """A record as the runner leaves it."""
    path = study.record_path(trial)
    path.parent.mkdir(parents=True, exist_ok=True)
    made_by = study.made_by(trial.phase)
    record = {"options": shareable(trial.options), "made_by": made_by, "select": 0.8, "evaluations": {}, "curve": []}
    path.write_text(json.dumps({**record, "setting": trial.setting, "seconds": 9.0, "run": {}, **content}))


def test_presets_are_filled_in_and_fixed_options_leave_the_grid(tmp_path):
    study = plan(tmp_path)
    assert study.arms["large"] == {"loss": "weince", "per_device_batch": 256}
    assert study.settings("infonce") == [{"temperature": 0.05}, {"temperature": 0.07}]
    # The pure shortfall link has no temperature, so there is nothing to choose for it.
    assert study.settings("weibull") == [{}] and study.arms["weibull"]["gate"] == 1.0
    assert study.baselines == ["infonce"]


def test_settings_can_be_chosen_with_fewer_steps(tmp_path):
    arms = {"infonce": None, "long": {"preset": "weince", "max_steps": 90}}
    steps = {"options": {"max_steps": 30, "train_file": "t"}, "settings_options": {"max_steps": 10, "temperature": 1}}
    study = plan(tmp_path, arms=arms, **steps)
    first, second = ([one.options for arm in arms for one in study.trials(phase, arm, {"temperature": 0.07})]
                     for phase in ("settings", "report"))  # fmt: skip
    assert [one["max_steps"] for one in first] == [10, 10, 90, 90] and {one["train_file"] for one in first} == {"t"}
    assert [one["max_steps"] for one in second] == [30, 30, 30, 90, 90, 90]
    assert {one["temperature"] for one in first} == {0.07}
    # What the command line sets is for every run.
    study = read_study(tmp_path / "study.yaml", options={"max_steps": 3})
    assert study.trials("settings", "infonce", {})[0].options["max_steps"] == 3


def test_options_without_a_value_are_none(tmp_path):
    assert plan(tmp_path, options=None, settings_options=None).options == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no study"),
        (b"arms", "is no study"),
        ("arms: [é]".encode("latin-1"), "is not UTF-8; save it so"),
        (
            b"output_dir: o\narms: [infonce]\nscores: {t: x}\nseeds: {report: [1]}\noptions: &a {x: *a}\n",
            "holds itself",
        ),
        (b"output_dir: o\narms: {a: {x: &a [*a]}}\nscores: {t: x}\nseeds: {report: [1]}\n", "holds itself"),
    ],
)
def test_what_is_no_study_is_refused_in_words(tmp_path, content, message):
    (tmp_path / "study.yaml").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_study(tmp_path / "study.yaml")


def test_a_value_may_stand_for_two(tmp_path):
    (tmp_path / "study.yaml").write_text(
        "output_dir: o\narms: [infonce]\nscores: &a {t: result.x}\nseeds: {report: [1]}\noptions: {y: *a, z: *a}\n"
    )
    assert read_study(tmp_path / "study.yaml").options["z"] == {"t": "result.x"}


def test_arms_without_options_can_be_a_list(tmp_path):
    assert plan(tmp_path, arms=["infonce", "weibull"]).arms == {arm: PRESETS[arm] for arm in ("infonce", "weibull")}


def test_a_grid_of_an_arm_replaces_that_of_the_study(tmp_path):
    arms = {"infonce": {}, "weince": {"grid": {"evidence_margin": [0, 2, 6], "hardness_sharpness": [5, 10]}}}
    study = plan(tmp_path, arms=arms)
    assert len(study.settings("weince")) == 6
    assert "grid" not in study.trials("settings", "weince", study.settings("weince")[0])[0].options


def test_runs_go_seed_by_seed_and_have_names_of_their_own(tmp_path):
    study = plan(tmp_path)
    runs = study.runs("settings")
    assert [(run.arm, run.seed) for run in runs[:6]] == [
        (arm, 11) for arm in ("infonce", "weince", "large") for _ in "12"
    ]
    assert len({run.name for run in runs}) == len(runs) == 12
    assert runs[1].name == "infonce-temperature=0.07-seed=11" and runs[1].options["temperature"] == 0.07


def test_a_report_run_waits_for_every_setting_of_its_arm_and_takes_the_best_on_dev(tmp_path):
    study = plan(tmp_path)
    assert [run and run.arm for run in study.runs("report")[:4]] == [None, None, "weibull", None]
    scores = {0.05: 0.80, 0.07: 0.81}
    *others, last = [run for run in study.runs("settings") if run.arm == "weince"]
    for run in others:
        finish(study, run, select=scores[run.setting["temperature"]])
    assert study.chosen("weince") is None
    finish(study, last, select=scores[last.setting["temperature"]])
    assert study.chosen("weince") == {"temperature": 0.07}
    assert [run and run.name for run in study.runs("report")[:2]] == [None, "weince-temperature=0.07-seed=1"]


def test_a_setting_with_a_collapsed_seed_is_not_chosen(tmp_path):
    study = plan(tmp_path, arms={"infonce": {}})
    for run in study.runs("settings"):
        collapsed = run.setting == {"temperature": 0.07} and run.seed == 12
        finish(study, run, select=None if collapsed else 0.7 + run.setting["temperature"])
    assert study.chosen("infonce") == {"temperature": 0.05}


def test_records_of_other_options_are_refused(tmp_path):
    study = plan(tmp_path)
    finish(study, study.runs("settings")[0])
    changed = read_study(write(tmp_path), output_dir=tmp_path / "records", options={"max_steps": 7})
    with pytest.raises(InputError, match="other options"):
        changed.record(changed.runs("settings")[0])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"select": "result.dev_last"}, "other select"),
        ({"evaluations": {"last": "evaluate {last} --tasks sts12"}}, "other evaluations"),
        ({"command": "vision-train", "processes": 2}, "other command and processes"),
    ],
)
def test_records_that_were_made_another_way_are_refused(tmp_path, changes, named):
    study = plan(tmp_path, evaluations={"last": "evaluate {last} --tasks stsb"})
    phase = "report" if "evaluations" in changes else "settings"
    run = next(run for run in study.runs(phase) if run and run.arm == ("weibull" if phase == "report" else "infonce"))
    finish(study, run)
    changed = plan(tmp_path, **{"evaluations": {"last": "evaluate {last} --tasks stsb"}, **changes})
    with pytest.raises(InputError, match=f"json: was made with {named}; use another"):
        changed.record(run)


def test_records_from_before_they_said_how_they_were_made_are_read(tmp_path):
    study = plan(tmp_path)
    run = study.runs("settings")[0]
    finish(study, run, made_by=None, processes=1)
    assert study.record(run)["select"] == 0.8
    with pytest.raises(InputError, match="other processes"):
        plan(tmp_path, processes=2).record(run)


def test_a_key_that_is_given_twice_is_refused_with_its_line(tmp_path):
    path = write(tmp_path)
    path.write_text(path.read_text().replace("  weince: {}", "  weince: {}\n  infonce: {temperature: 0.3}"))
    line = path.read_text().splitlines().index("  infonce: {temperature: 0.3}") + 1
    with pytest.raises(InputError, match=f"study.yaml: line {line}: infonce is given twice"):
        read_study(path)


def test_a_mapping_may_be_merged_into_another(tmp_path):
    path = write(tmp_path)
    path.write_text(path.read_text() + "curves: [&a {x: 1}, {<<: *a, y: 2}]\n")
    with pytest.raises(InputError, match=r"curves must be .*\[{'x': 1}, {'x': 1, 'y': 2}\]"):
        read_study(path)


def test_a_date_is_the_text_that_it_is_on_the_command_line(tmp_path):
    path = write(tmp_path, options={"run_name": "DATE"})
    path.write_text(path.read_text().replace("DATE", "2026-01-02"))
    assert read_study(path).options == {"run_name": "2026-01-02"}


@pytest.mark.parametrize(
    "content", ["", '{"options": {', "[]", "{}", "null", {"options": []}, {"select": "0.8"}, {"curve": [{"loss": 1.0}]}]
)
def test_a_damaged_record_is_named_with_the_remedy(tmp_path, content):
    study = plan(tmp_path)
    run = study.runs("settings")[0]
    finish(study, run, **(content if isinstance(content, dict) else {}))
    if isinstance(content, str):
        study.record_path(run).write_text(content)
    with pytest.raises(InputError, match="seed=11.json: not .*; remove it"):
        study.record(run)


def test_a_record_that_holds_a_token_of_the_hub_is_still_read(tmp_path):
    study = read_study(write(tmp_path), output_dir=tmp_path / "records", options={"hub_token": "hf_x"})
    run = study.runs("settings")[0]
    finish(study, run, options={**shareable(run.options), "hub_token": "hf_x"})
    assert study.record(run)["select"] == 0.8 and "hub_token" not in shareable(run.options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"armes": {}}, "armes"),
        ({"scores": ...}, "scores"),
        ({"output_dir": ...}, "has no output_dir; name one with --output_dir, or the folder of the study"),
        ({"output_dir": ""}, "has no output_dir"),
        ({"arms": {"wience": {}}}, "no preset wience"),
        ({"seeds": {"report": [1, 1]}}, "used twice"),
        ({"seeds": {"settings": [1], "report": [1]}}, "other seeds"),
        ({"seeds": {"report": [1, 2]}}, "a grid needs seeds"),
        ({"seeds": {"report": [1], "settings": [2], "test": [3]}}, "report and settings"),
        ({"baselines": ["simcse"]}, "baselines names no arm: simcse"),
        ({"arms": "infonce"}, "arms must be a list of names, or options by name, not 'infonce'"),
        ({"arms": None}, "arms must be a list of names, or options by name, not None"),
        ({"arms": ["infonce", "infonce"]}, "an arm is twice"),
        ({"arms": {"weince": {"seed": 3}}}, "arm weince: seed is set by the study itself"),
        ({"options": {"grid": {"temperature": [1, 2]}}}, "options: grid is a key of the study or of an arm"),
        ({"settings_options": {"seed": 3}}, "settings_options: seed is set by the study itself"),
        ({"settings_options": ["max_steps"]}, r"settings_options must be dict\[str, Any\], not \['max_steps'\]"),
        ({"scale": float("nan")}, "scale must be a finite number other than 0"),
        ({"scale": 0}, "scale must be a finite number other than 0"),
        ({"seeds": {"report": [-1]}, "grid": {}}, "seed -1 is not between 0 and 4294967295"),
        ({"seeds": {"report": [2**32]}, "grid": {}}, "seed 4294967296 is not between"),
        ({"evaluations": {"result": "evaluate {run}"}}, "evaluation result: the scores of run.json have this name"),
        ({"evaluations": {"../x": "evaluate {run}"}}, "evaluation ../x: its name must be letters, digits and _"),
        ({"command": "train --bf16"}, "there is no command 'train --bf16'"),
        ({"select": "result.test_after"}, "select: result.test_after is a score on test"),
        ({"baselines": ["infonce", "infonce"]}, "an arm is twice among baselines"),
        ({"grid": {"seed": [3, 4]}}, "grid: seed is set by the study itself"),
        ({"options": {"max_grad_norm": float("inf")}}, "an option is not a finite number"),
        ({"grid": {"train_file": ["/a/text.txt", "/b/text.txt"]}}, "name infonce-train_file=text.txt-seed=11"),
        ({"grid": {"temperature": 0.05}}, r"grid must be dict\[str, list\[Any\]\], not {'temperature': 0.05}"),
        ({"grid": {"x": "abc"}}, "grid must be"),
        ({"grid": {"x": []}}, "grid of infonce has an option without values"),
        ({"arms": {"infonce": {"grid": {"x": "abc"}}}}, "grid must be"),
        ({"grid": {"temperature": [0.05, 0.05]}}, "two runs have the name infonce-temperature=0.05-seed=11"),
        ({"curves": "blend"}, r"curves must be list\[str\], not 'blend'"),
        ({"processes": "2"}, "processes must be int, not '2'"),
        ({"processes": 0}, "processes must be at least 1"),
        ({"scale": "x"}, "scale must be float"),
        ({"scores": ["result.x"]}, "scores must be"),
        ({"scores": "result.x"}, "scores must be"),
        ({"seeds": {"report": "12"}}, "seeds must be"),
        ({"select": 3}, "select must be str"),
        ({"evaluations": ["evaluate {run}"]}, "evaluations must be"),
        ({"evaluations": {"a": 'evaluate "{run}'}}, "evaluation a: .*quotation"),
        ({"evaluations": {"a": "evaluate {run"}}, "evaluation a: "),
        ({"evaluations": {"a": "evaluate {}"}}, "evaluation a: "),
        ({"evaluations": {"a": ""}}, "evaluation a: "),
        ({"evaluations": {"a": "evalute {run}"}}, "evaluation a: .*no command 'evalute' among train, evaluate"),
        ({"command": "trian"}, "no command 'trian' among train, evaluate"),
        ({"evaluations": {"suite": "evaluate {run} --data_dir {data_dir}"}}, "evaluation suite: .*data_dir"),
        # An option that is fixed for one arm only is no option of every run.
        ({"evaluations": {"a": "evaluate {run} --x {gate}"}}, "evaluation a: .* for infonce .*gate"),
    ],
)
def test_what_is_wrong_with_a_study_is_said_in_one_sentence(tmp_path, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        read_study(write(tmp_path, **changes))
    assert str(tmp_path / "study.yaml") in str(caught.value) and "\n" not in str(caught.value)


def test_records_are_read_from_one_folder_and_written_to_another(tmp_path):
    study = read_study(write(tmp_path), output_dir=tmp_path / "one")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "study.yaml").write_text((tmp_path / "study.yaml").read_text())
    assert read_study(tmp_path / "one").output_dir == study.output_dir
    assert read_study(tmp_path / "one", output_dir=tmp_path / "two").output_dir == tmp_path / "two"


def test_an_evaluation_can_name_any_option_of_its_run(tmp_path):
    command = "evaluate {run.name} --a {temperature:.2f} --b {seed} --c '{train_file}' --d {last} {loss}"
    study = plan(tmp_path, arms=["infonce"], evaluations={"a": command})
    assert study.runs("settings")[1].words(command, run=tmp_path, last="l") == [
        "evaluate", tmp_path.name, "--a", "0.07", "--b", "11", "--c", "/home/somebody/text.txt", "--d", "l", "infonce"
    ]  # fmt: skip


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(InputError, match="none.yaml: cannot be read"):
        read_study(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("arms: [")
    with pytest.raises(InputError, match="broken.yaml: is no study"):
        read_study(tmp_path / "broken.yaml")


def test_lookup_follows_names_and_numbers():
    record = {"result": {"dev": 0.5, "undefined": None}, "tasks": [{"score": 1}]}
    assert lookup(record, "tasks.0.score") == 1.0 and lookup(record, "result.undefined") is None
    for place in ("result.test", "tasks.3.score", "result", "result.dev.more"):
        with pytest.raises(InputError, match=place.replace(".", r"\.")):
            lookup(record, place)


def test_every_preset_is_a_command_line_of_the_trainer(tmp_path):
    for arm, options in PRESETS.items():
        flags = [f"--{name}={value}" for name, value in options.items()]
        groups = parse_training_arguments(
            ["--model_name_or_path", "m", "--train_file", "t", "--output_dir", str(tmp_path), "--use_cpu", *flags]
        )
        assert groups.loss.loss == options["loss"], arm
        assert groups.loss.options_of(groups.loss.loss)["temperature"] == 0.05


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "scripts" / "studies").glob("*.yaml")), ids=str)
def test_the_studies_that_are_shipped_can_be_read(path):
    study = read_study(path)
    assert len(study.seeds["report"]) >= 2 and set(study.baselines) <= set(study.arms)
    assert all(run is not None for run in study.runs("settings"))
