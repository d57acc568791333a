"""Studies that are run: records, resuming after kill -9, shards, failures and devices."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import yaml

from simcse_weince.cli import main
from simcse_weince.errors import InputError
from simcse_weince.study import runner
from simcse_weince.study.plan import read_study
from tests.test_training_run import place  # noqa: F401 (a fixture)


def write(place, **changes):  # noqa: F811
    """A study of two arms and two seeds of two steps each."""
    study = {
        "output_dir": str(place / "records"),
        "options": {
            "model_name_or_path": str(place / "encoder"), "train_file": str(place / "text.txt"),
            "eval_file": str(place / "pairs.tsv"), "test_file": str(place / "pairs.tsv"), "use_cpu": True,
            "cache_dir": str(place / "cache"), "per_device_train_batch_size": 16, "max_steps": 2, "eval_steps": 1,
            "logging_steps": 1, "learning_rate": 1e-3, "pooler_type": "cls", "mlp_only_train": True,
        },
        "arms": {"infonce": {}, "weince": {}},
        "seeds": {"report": [1, 2]},
        "scores": {"test": "result.test_after", "last": "last.tasks.0.correlations.all.spearman"},
        "curves": ["eval_dev_spearman_cosine"],
        "evaluations": {"last": "evaluate {last} --pairs {test_file} --bootstrap 0"},
        **changes,
    }  # fmt: skip
    (place / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    return place / "study.yaml"


def records(folder):
    """Every record, without the time that it took; not one that is being written."""
    found = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/[!.]*.json"))}
    return {name: {**record, "seconds": None} for name, record in found.items()}


def wait_for(condition, process):
    for _ in range(6000):
        if condition():
            return
        assert process.poll() is None, "the study ended before it could be killed"
        time.sleep(0.05)
    raise AssertionError("nothing happened for five minutes")


@pytest.mark.slow
def test_a_study_killed_twice_gives_the_records_of_an_uninterrupted_one(place):  # noqa: F811
    study = write(place, evaluations={}, scores={"test": "result.test_after"})
    command = [sys.executable, "-m", "simcse_weince.cli", "study", str(study)]
    folder, whole = place / "records", place / "uninterrupted"
    twin = subprocess.Popen([*command, "--output_dir", str(whole)], stderr=subprocess.DEVNULL)

    first = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    wait_for(lambda: [*folder.glob("work/report/*/encoder/checkpoint-1/trainer_state.json")], first)
    os.killpg(first.pid, signal.SIGKILL)  # the machine goes down in the middle of a run
    first.wait()
    assert not records(folder)

    second = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(records(folder)) == 1 and [*folder.glob("work/report/weince-seed=1/encoder/*")], second)
    finished = {path: path.stat().st_mtime_ns for path in folder.glob("report/*.json")}
    os.kill(second.pid, signal.SIGKILL)  # only the study: what it had started lives on
    second.wait()

    assert main(["study", str(study)]) == 0
    assert twin.wait() == 0
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert len(records(folder)) == 4 and records(folder) == records(whole)
    assert not [*folder.glob("work/report/*")]
    one = records(folder)["infonce-seed=1.json"]
    assert [entry["step"] for entry in one["curve"] if "eval_dev_spearman_cosine" in entry] == [0, 1, 2]
    assert str(place) not in json.dumps(records(folder)) + (folder / "study.yaml").read_text()


# What a training of so many steps ends with: it is killed, or stopped by a signal, which it may answer itself.
ENDS = {9: -signal.SIGKILL, 102: -signal.SIGINT, 115: -signal.SIGTERM, 130: 130}


@pytest.fixture
def trained(monkeypatch):
    """Stands for the processes of a study: leaves the files of a training, whose scores grow with the temperature."""
    calls = []

    def run(command, *, stdout, env, **options):
        words = command[command.index("simcse_weince.cli") + 1 :]
        values = dict(zip(words[1::2], words[2::2], strict=False))
        calls.append({"command": command, "words": words, "env": env})
        if words[0] == "evaluate":
            result = {"tasks": [{"correlations": {"all": {"spearman": 0.7}}}]}
            runner.write_text(words[-1], json.dumps(result))
            return subprocess.CompletedProcess(command, 0)
        chosen = yaml.safe_load(open(values["--config"], encoding="utf-8"))
        if chosen.get("max_steps") == 13:
            stdout.write("simcse-weince: error: thirteen\n")
            stdout.flush()
            return subprocess.CompletedProcess(command, 2)
        if chosen.get("max_steps") in ENDS:
            return subprocess.CompletedProcess(command, ENDS[chosen["max_steps"]])
        score = chosen.get("temperature", 0.05) + chosen["seed"] / 1000
        folder = runner.os.fspath(values["--output_dir"])
        run = {"seed": chosen["seed"], "result": {"dev_best": score, "test_after": score - 0.01}, "scores": {"test": 1}}
        runner.write_text(f"{folder}/run.json", json.dumps(run))
        log = [
            {"step": 1, "loss": 2.0, "blend": float("nan"), "hardness": None},
            {"step": 2, "train_loss": 2.1, "train_runtime": 9.0},
        ]
        runner.write_text(f"{folder}/trainer_state.json", json.dumps({"log_history": log}))
        for step in (9, 10):
            os.makedirs(f"{folder}/checkpoint-{step}", exist_ok=True)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(runner.subprocess, "run", run)
    return calls


GRID = {"grid": {"temperature": [0.03, 0.07]}, "seeds": {"settings": [8, 9], "report": [1, 2]}}


def test_settings_are_chosen_on_dev_alone_and_tested_once(place, trained):  # noqa: F811
    assert main(["study", str(write(place, **GRID))]) == 0
    found = records(place / "records")
    first_phase = [record for record in found.values() if record["phase"] == "settings"]
    assert len(first_phase) == 8 and all(record["select"] for record in first_phase)
    assert "test" not in json.dumps([{**record, "options": None} for record in first_phase])
    report = [record for record in found.values() if record["phase"] == "report"]
    assert len(report) == 4 and all(record["setting"] == {"temperature": 0.07} for record in report)
    evaluated = [call["words"][1] for call in trained if call["words"][0] == "evaluate"]
    assert len(evaluated) == len(report) and {os.path.basename(path) for path in evaluated} == {"checkpoint-10"}
    assert report[0]["curve"] == [{"step": 1, "loss": 2.0, "blend": None, "hardness": None}]


def test_a_study_over_files_is_reported_from_its_folder_which_tells_of_no_place_and_no_secret(place, trained, capsys):  # noqa: F811
    texts = [str(place / "a.txt"), str(place / "b.txt")]
    own, folder = f"--pairs '{place}/my own.tsv' --data_dir={place}/sts", place / "records"
    content = yaml.safe_load(write(place).read_text())
    study = write(place, **{**GRID, "grid": {"train_file": texts}}, options={**content["options"], "hub_token": "hf_x"},
                  evaluations={"last": f"evaluate {{last}} {own}"})  # fmt: skip
    assert main(["study", str(study)]) == 0
    assert yaml.safe_load((folder / "study.yaml").read_text())["evaluations"] == {
        "last": "evaluate '{last}' --pairs 'my own.tsv' --data_dir=sts"
    }
    summary = place / "summary.json"
    for shown in (folder, study):
        assert main(["compare", "--study", str(shown), "--output", str(summary)]) == 0
        left = [path for path in folder.rglob("*") if path.is_file()]
        text = "".join(path.name + path.read_text() for path in [*left, summary]) + capsys.readouterr().out
        assert "infonce-train_file=a.txt-seed=8.json" in text and "infonce - " not in text
        assert str(place) not in text and str(place).replace("/", "_") not in text and "hf_x" not in text
    assert main(["study", str(study)]) == 0 and len(trained) == 16


def test_nothing_is_run_twice(place, trained, caplog):  # noqa: F811
    study = str(write(place, **GRID))
    assert main(["study", study]) == 0
    count = len(trained)
    assert main(["study", study]) == 0 and len(trained) == count == 16
    assert "12 of 12 runs, about 00:00 left" in caplog.text


def test_more_seeds_and_arms_can_be_added(place, trained):  # noqa: F811
    assert main(["study", str(write(place))]) == 0
    more = write(place, arms={"infonce": {}, "weince": {}, "weibull": {}}, seeds={"report": [1, 2, 3]})
    assert main(["study", str(more)]) == 0
    assert sum(call["words"][0] == "train" for call in trained) == 9


def test_shards_share_the_runs_and_wait_for_one_another(place, trained, caplog):  # noqa: F811
    study = str(write(place, **GRID))
    assert main(["study", study, "--shard", "1/2"]) == 0
    assert len(records(place / "records")) == 4 and "2 runs wait for settings" in caplog.text
    assert main(["study", study, "--shard", "2/2"]) == 0
    assert main(["study", study, "--shard", "1/2"]) == 0
    assert len(records(place / "records")) == 12 and len(trained) == 16


def test_failed_runs_are_named_with_their_last_words(place, trained, capfd, caplog):  # noqa: F811
    arms = {"infonce": {}, "weince": {"max_steps": 13}, "weibull": {}}
    study = str(write(place, arms=arms))
    assert main(["study", study]) == 2
    assert "2 runs failed (weince-seed=1, weince-seed=2)" in capfd.readouterr().err
    assert "error: thirteen" in caplog.text and len(records(place / "records")) == 4
    assert (place / "records" / "work" / "report" / "weince-seed=1" / "log.txt").is_file()


def test_a_study_whose_first_run_fails_stops_there(place, trained):  # noqa: F811
    study = str(write(place))
    assert main(["study", study, "--set", "max_steps=13"]) == 2 and len(trained) == 1


def test_set_may_be_given_again_for_another_option(place, trained):  # noqa: F811
    assert main(["study", str(write(place)), "--set", "max_steps=4", "--set", "train_file=other.txt"]) == 0
    options = [record["options"] for record in records(place / "records").values()]
    assert all(one["max_steps"] == 4 and one["train_file"] == "other.txt" for one in options) and options


@pytest.mark.parametrize(
    "words", [["--set", "max_steps=4", "max_steps=5"], ["--set", "max_steps=4", "--set", "max_steps=4"]]
)
def test_an_option_that_is_set_twice_is_refused(place, trained, capfd, words):  # noqa: F811
    assert main(["study", str(write(place)), *words]) == 2
    assert "--set: max_steps is given twice; leave one of them out" in capfd.readouterr().err and not trained


def test_other_options_in_the_same_folder_are_refused(place, trained, capfd):  # noqa: F811
    study = str(write(place))
    assert main(["study", study]) == 0
    assert main(["study", study, "--set", "max_steps=4", "learning_rate=1e-4"]) == 2
    assert "other options" in capfd.readouterr().err


def test_a_run_that_was_begun_with_other_options_is_begun_anew(place, trained):  # noqa: F811
    """Something failed after its training, the file was mended, and with it an option: the training does not count."""
    words, one = yaml.safe_load(write(place).read_text())["options"], {"arms": {"infonce": {}}, "evaluations": {}}
    seeds = {"report": [1]}
    study = write(place, **one, seeds=seeds, options={**words, "temperature": 0.05}, scores={"x": "result.nothing"})
    assert main(["study", str(study)]) == 2
    left = place / "records" / "work" / "report" / "infonce-seed=1" / "encoder" / "checkpoint-2"
    left.mkdir()
    study = write(place, **one, seeds=seeds, options={**words, "temperature": 0.5}, scores={"x": "result.test_after"})
    assert main(["study", str(study), "--keep_models"]) == 0
    [record] = records(place / "records").values()
    assert record["select"] == pytest.approx(0.501) and record["options"]["temperature"] == 0.5
    assert [call["words"][0] for call in trained] == ["train", "train"] and not left.exists()


def test_a_run_that_was_begun_on_another_number_of_devices_is_begun_anew(place, trained):  # noqa: F811
    one = {"arms": {"infonce": {}}, "evaluations": {}, "seeds": {"report": [1]}}
    assert main(["study", str(write(place, **one, scores={"x": "result.nothing"}))]) == 2
    assert main(["study", str(write(place, **one, scores={"x": "result.test_after"}, processes=2))]) == 0
    assert ["accelerate.commands.launch" in call["command"] for call in trained] == [False, True]


def test_a_refused_training_leaves_no_older_result_behind(place, trained):  # noqa: F811
    study = write(place, arms={"infonce": {}}, seeds={"report": [1]}, evaluations={}, scores={"x": "result.nothing"})
    assert main(["study", str(study)]) == 2
    run_json = place / "records" / "work" / "report" / "infonce-seed=1" / "encoder" / "run.json"
    assert run_json.is_file()
    moved = {"train_file": str(place / "elsewhere" / "text.txt")}  # the same name, so the begun run is gone on with
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 2))
        assert main(["study", str(study), "--set", *(f"{name}={value}" for name, value in moved.items())]) == 2
    assert not run_json.exists()


def test_a_score_that_no_record_has_is_named_after_the_first_run(place, trained, capfd):  # noqa: F811
    study = write(place, evaluations={}, scores={"test": "result.test_after", "STS-B": "result.test_aftr"})
    assert main(["study", str(study)]) == 2
    assert "score 'STS-B' of infonce-seed=1 has no number at result.test_aftr" in capfd.readouterr().err
    assert len(trained) == 1 and not records(place / "records")


def test_a_saved_arm_is_not_taken_for_the_preset_of_its_name(place, trained):  # noqa: F811
    study = write(place, arms={"infonce": {}, "weibull": {"preset": "weince", "temperature": 0.1}})
    assert main(["study", str(study)]) == 0
    assert "gate" not in read_study(place / "records").arms["weibull"]
    assert main(["compare", "--study", str(place / "records")]) == 0


def test_a_date_on_the_command_line_is_text(place, trained):  # noqa: F811
    assert main(["study", str(write(place)), "--set", "model_revision=2024-01-01"]) == 0
    assert all(record["options"]["model_revision"] == "2024-01-01" for record in records(place / "records").values())


def test_models_are_kept_on_demand(place, trained):  # noqa: F811
    """But no score on test of a run that settings are chosen by."""
    assert main(["study", str(write(place, **GRID)), "--keep_models"]) == 0
    assert len([*(place / "records").glob("work/*/*/encoder/run.json")]) == 4
    assert len([*(place / "records").glob("work/report/*/encoder/run.json")]) == 4


@pytest.mark.parametrize("wrong", ["result.nope", "sts.average"])
def test_a_score_that_no_training_has_is_named_before_settings_are_chosen(place, trained, capfd, wrong):  # noqa: F811
    assert main(["study", str(write(place, **GRID, scores={"x": wrong}))]) == 2 and len(trained) == 1
    assert f"has no number at {wrong}" in capfd.readouterr().err


def test_a_run_that_the_machine_kills_costs_itself_alone(place, trained, capfd):  # noqa: F811
    arms = {"infonce": {}, "weince": {"max_steps": 9}, "weibull": {}}
    assert main(["study", str(write(place, arms=arms))]) == 2
    assert "2 runs failed (weince-seed=1, weince-seed=2)" in capfd.readouterr().err
    assert len(records(place / "records")) == 4


@pytest.mark.parametrize("steps", [102, 115, 130])
def test_a_run_that_is_interrupted_ends_the_study(place, trained, steps):  # noqa: F811
    arms = {"infonce": {}, "weince": {"max_steps": steps}, "weibull": {}}
    assert main(["study", str(write(place, arms=arms, evaluations={}, scores={"x": "result.test_after"}))]) == 2
    assert len(trained) == 2 and [*records(place / "records")] == ["infonce-seed=1.json"]


def test_of_two_studies_at_once_one_trains_a_run_and_the_other_waits_for_its_record(place, trained, monkeypatch):  # noqa: F811
    study = read_study(write(place, arms={"infonce": {}}, seeds={"report": [1]}))
    train, others = runner.subprocess.run, []

    def while_another_starts(command, **options):
        if not others:
            others.append(pool.submit(runner.run_study, study))
            wait(others, timeout=0.5)  # time enough to train, if it would
        return train(command, **options)

    monkeypatch.setattr(runner.subprocess, "run", while_another_starts)
    with ThreadPoolExecutor() as pool:
        runner.run_study(study)
        others[0].result()
    assert [call["words"][0] for call in trained] == ["train", "evaluate"]


def test_parallel_runs_get_devices_of_their_own(monkeypatch):
    monkeypatch.setattr(runner.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner.torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def devices(parallel, processes):
        return [slot["CUDA_VISIBLE_DEVICES"] for slot in runner._slots(parallel, processes)]

    assert devices(4, 1) == ["0", "1", "2", "3"] and devices(2, 2) == ["0,1", "2,3"]
    assert devices(6, 1) == ["0", "1", "2", "3", "0", "1"] and devices(3, 3) == ["0,1,2", "3,0,1", "2,3,0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert devices(2, 1) == ["5", "7"]
    with pytest.raises(InputError, match="needs 3 devices"):
        devices(1, 3)


def test_a_run_on_several_devices_is_started_by_accelerate(place, trained):  # noqa: F811
    runner.run_study(read_study(write(place, processes=2)), parallel=2)
    training = next(call for call in trained if call["words"][0] == "train")
    assert "accelerate.commands.launch" in training["command"] and "--num_processes=2" in training["command"]
    assert all("accelerate" not in " ".join(call["command"]) for call in trained if call["words"][0] == "evaluate")


@pytest.mark.slow
def test_its_processes_find_one_another_on_cpus(tmp_path):
    """`accelerate launch --cpu --num_processes 2` starts a single process where there is no MPI."""
    # each process leaves a file of its own: lines that two of them write to one pipe can run into each other
    (tmp_path / "world.py").write_text(
        "import os, pathlib\n"
        "from transformers import TrainingArguments\n"
        "world_size = str(TrainingArguments('x').world_size)\n"
        "(pathlib.Path(__file__).parent / f'rank{os.environ[\"RANK\"]}').write_text(world_size)\n"
    )
    environment = {**os.environ, **runner._slots(1, 2)[0], "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*runner._launcher(2), "world"], env=environment, capture_output=True, text=True, timeout=300)
    world_sizes = {file.name: file.read_text() for file in tmp_path.glob("rank*")}
    assert world_sizes == {"rank0": "2", "rank1": "2"}, done.stderr[-2000:]


@pytest.mark.parametrize(
    "words", [["--shard", "3/2"], ["--shard", "x"], ["--set", "steps"], ["--set", "x={bad"], ["--parallel", "0"]]
)
def test_wrong_options_are_refused(place, capfd, words):  # noqa: F811
    assert main(["study", str(write(place)), *words]) == 2
    assert capfd.readouterr().err.startswith("simcse-weince: error: ")
