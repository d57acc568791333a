"""``vision-train`` and ``vision-eval`` from command line to files, on tiny images and the CPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModel

from simcse_weince.cli import main
from simcse_weince.commands import vision_train
from simcse_weince.errors import InputError
from simcse_weince.vision.arguments import parse_vision_arguments
from simcse_weince.vision.datasets import ImageSet
from simcse_weince.vision.training_run import _provenance
from simcse_weince.vision.views import TwoViews
from tests.test_vision_trainer import images

CONFIGS = Path(__file__).parents[1] / "scripts" / "configs"
DATASETS = ["cifar10", "cifar100", "stl10", "imagenet32", "tiny_imagenet"]
BACKBONES = ["resnet18", "resnet50", "vit_small"]


def write(path, train, test):
    pixels = (part.images.permute(0, 2, 3, 1).numpy() for part in (train, test))
    arrays = dict(zip(("x_train", "x_test"), pixels, strict=True))
    np.savez(
        path, classes=np.array(["r", "g", "b"]), y_train=train.labels.numpy(), y_test=test.labels.numpy(), **arrays
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """48 training and 21 test images of three colours."""
    path = tmp_path_factory.mktemp("data") / "colours.npz"
    train, test = images(48), images(21, seed=1)
    write(path, train, test)
    return path


def command(source, output_dir, *extra):
    """One epoch of three steps."""
    return [
        "--images", str(source), "--output_dir", str(output_dir), "--width", "0.125", "--projection_size", "16",
        "--per_device_train_batch_size", "16", "--num_train_epochs", "1", "--use_cpu", "--logging_steps", "1",
        "--probes", "knn", "--probe_seeds", "1", "2", "--knn", "5", *map(str, extra),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    vision_train.run(command(source, folder, "--probes", "knn", "linear", "--probe_epochs", "2"))
    return folder


def refused(capfd, *words):
    assert main([str(word) for word in words]) == 2
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("simcse-weince: error: ") and "Traceback" not in error
    return error


# ---- training ----


def test_a_run_leaves_model_and_scores(finished):
    record = json.loads((finished / "run.json").read_text())
    assert record["steps"] == 3 and record["negatives_per_anchor"] == 30 and record["seed"] == 42
    assert {"knn_test_accuracy", "knn_validation_accuracy", "knn_test_recall_at_1", "linear_test_accuracy",
            "linear_validation_accuracy"} <= record["result"].keys()  # fmt: skip
    assert record["scores"]["knn"]["images"] == {"train": 39, "validation": 9, "test": 21}
    assert record["images"]["train"]["images"] == 48 and len(record["images"]["test"]["sha256"]) == 64
    assert "5 nearest" in record["scores"]["knn"]["protocol"]
    assert AutoModel.from_pretrained(finished).config.hidden_sizes == [8, 16, 32, 64]


def test_shared_files_name_no_folder_of_this_machine(finished):
    for path in finished.glob("*"):
        if path.suffix in (".json", ".yaml"):
            assert str(finished.parent) not in path.read_text() and "/tmp" not in path.read_text(), path.name
    assert yaml.safe_load((finished / "training_config.yaml").read_text())["images"] == "colours.npz"


def test_vi11_a_new_nested_folder_with_spaces(source, tmp_path):
    folder = tmp_path / "new folder" / "run one"
    vision_train.run(command(source, folder, "--max_steps", 1))
    assert (folder / "run.json").is_file()


def test_vi11_a_finished_run_is_not_overwritten(source, tmp_path, capfd):
    words = command(source, tmp_path / "run", "--max_steps", 1, "--save_strategy", "no")
    vision_train.run(words)
    assert "--overwrite_output_dir" in refused(capfd, "vision-train", *words)
    vision_train.run([*words, "--overwrite_output_dir"])


@pytest.mark.parametrize(
    "words",
    [
        ["--load_best_model_at_end"],
        ["--load_best_model_at_end", "--metric_for_best_model", "eval_knn_accuracy"],
        ["--lr_scheduler_type", "reduce_lr_on_plateau"],
    ],
)
def test_tr03_the_best_model_is_that_of_the_only_score(source, tmp_path, words):
    vision_train.run(command(source, tmp_path / "run", "--num_train_epochs", 2, "--probes", "none", *words))
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    scores = [entry["eval_knn_accuracy"] for entry in state["log_history"] if "eval_knn_accuracy" in entry]
    assert state["best_metric"] == max(scores) and len(scores) == 2


def die(*args):
    raise KeyboardInterrupt


def test_an_overwriting_run_that_dies_leaves_nothing_that_looks_finished(
    source, finished, tmp_path, capfd, monkeypatch
):
    """Else the weights of one run would be evaluated with the options of another."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "notes.txt").write_text("mine")
    monkeypatch.setattr("simcse_weince.run_folder.train_or_resume", die)
    views = '{"normalize": [[0.5, 0.5, 0.5], [0.25, 0.25, 0.25]]}'
    assert main(["vision-train", *command(source, folder, "--overwrite_output_dir", "--views", views)]) == 130
    assert "no image encoder" in refused(capfd, "vision-eval", folder, "--images", source)
    assert not {"run.json", "trainer_state.json"} & {path.name for path in folder.iterdir()}
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_checkpoint_from_elsewhere_does_not_take_over_the_folder_of_another_run(source, finished, tmp_path, capfd):
    vision_train.run(command(source, tmp_path / "run", "--max_steps", 1, "--loss", "infonce"))
    words = command(source, tmp_path / "run", "--resume_from_checkpoint", finished / "checkpoint-3")
    assert "--overwrite_output_dir" in refused(capfd, "vision-train", *words)
    vision_train.run([*words, "--overwrite_output_dir"])
    assert "infonce" not in (tmp_path / "run" / "training_config.yaml").read_text()
    assert not (tmp_path / "run" / "checkpoint-1").exists()


@pytest.mark.parametrize("place", [".", "checkpoint-3"])
def test_a_run_does_not_clear_away_the_encoder_it_starts_from(source, finished, tmp_path, capfd, place):
    shutil.copytree(finished, tmp_path / "run")
    words = command(source, tmp_path / "run", "--overwrite_output_dir", "--width", 1, "--model_name_or_path",
                    tmp_path / "run" / place)  # fmt: skip
    assert "another --output_dir" in refused(capfd, "vision-train", *words)
    assert (tmp_path / "run" / "run.json").is_file() and (tmp_path / "run" / "checkpoint-3").is_dir()


@pytest.mark.parametrize("loss", ["infonce", "weince", "released"])
def test_every_loss_trains(source, tmp_path, loss):
    vision_train.run(command(source, tmp_path / "run", "--loss", loss, "--probes", "none"))
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert ("blend" in history[0]) == (loss != "infonce") and ("shape_average" in history[0]) == (loss == "released")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["result"] == {}


def test_resume_is_the_same_run(source, tmp_path):
    """After a stop at the second epoch of three: same weights, bit for bit, and the same scores."""
    extra = ["--loss", "released", "--num_train_epochs", 3, "--save_total_limit", 9]
    vision_train.run(command(source, tmp_path / "whole", *extra))
    vision_train.run(command(source, tmp_path / "again", *extra))
    (tmp_path / "again" / "run.json").unlink()
    for name in ("checkpoint-9/trainer_state.json", "checkpoint-6/trainer_state.json"):  # as if killed while saving
        (tmp_path / "again" / name).unlink()
    with (tmp_path / "again" / "training_config.yaml").open("a") as config:
        config.write("include_num_input_tokens_seen: false\n")  # as earlier releases wrote, and nobody had set
    vision_train.run(command(source, tmp_path / "again", *extra, "--resume_from_checkpoint", "last"))
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "again"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    first, second = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("whole", "again"))
    assert first["result"] == second["result"]


def test_resume_refuses_another_run(source, finished, capfd):
    words = command(source, finished, "--resume_from_checkpoint", "last", "--probes", "none")
    assert "--loss by default, not infonce" in refused(capfd, "vision-train", *words, "--loss", "infonce")
    assert "--views" in refused(capfd, "vision-train", *words, "--views", '{"flip": 0.0}')
    assert "--learning_rate" in refused(capfd, "vision-train", *words, "--learning_rate", "1", "--run_name", "x")


def test_resume_refuses_other_images_of_the_same_name(source, tmp_path, capfd):
    vision_train.run(
        command(source, tmp_path / "run", "--max_steps", "2", "--save_steps", "2", "--save_strategy", "steps")
    )
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / source.name, images(48, seed=5), images(21, seed=1))
    words = command(tmp_path / "other" / source.name, tmp_path / "run", "--resume_from_checkpoint", "last")
    assert main(["vision-train", *words, "--max_steps", "4", "--save_steps", "2", "--save_strategy", "steps"]) == 2
    assert "was written while training on other images" in capfd.readouterr().err


def test_resume_under_another_name(source, tmp_path):
    vision_train.run(command(source, tmp_path / "run", "--probes", "none"))
    words = ("--resume_from_checkpoint", "last", "--run_name", "second", "--log_level", "info", "--probes", "none")
    vision_train.run(command(source, tmp_path / "run", *words))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["arguments"]["run_name"] == "second"


@pytest.mark.parametrize("content", ["", "- a list", "a: [1", "1: 2"])
def test_resume_beside_a_damaged_configuration(source, finished, tmp_path, caplog, content):
    """It tells nothing about the run, and no mapping of options is expected of it."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "training_config.yaml").write_text(content)
    words = command(source, tmp_path / "run", "--resume_from_checkpoint", "last", "--probes", "none")
    assert main(["vision-train", *words]) == (0 if content != "1: 2" else 2)
    assert "nothing is compared" in caplog.text or content == "1: 2"


@pytest.mark.parametrize("name", ["model.safetensors", "loss_state.safetensors", "optimizer.pt", "rng_state.pth"])
@pytest.mark.parametrize("wish", ["last", "{folder}/checkpoint-3"])
def test_resume_from_a_damaged_checkpoint_is_one_sentence(source, tmp_path, capfd, name, wish):
    words = command(source, tmp_path / "run", "--loss", "released", "--probes", "none")
    vision_train.run(words)
    damaged = tmp_path / "run" / "checkpoint-3" / name
    damaged.write_bytes(damaged.read_bytes()[:-20])
    error = refused(capfd, "vision-train", *words, "--resume_from_checkpoint", wish.format(folder=tmp_path / "run"))
    assert f"checkpoint-3/{name} is damaged" in error and "remove checkpoint-3" in error


def test_options_of_the_views_reach_the_training(source, tmp_path, monkeypatch):
    seen = []

    def views_of(options, size):
        seen.append((options, size))
        return TwoViews(options, size)

    monkeypatch.setattr("simcse_weince.vision.training_run.TwoViews", views_of)
    config = tmp_path / "views.yaml"
    config.write_text("views:\n  blur_probability: 0.5\n  normalize: [[0.5, 0.5, 0.5], [0.2, 0.2, 0.2]]\n")
    vision_train.run(["--config", str(config), *command(source, tmp_path / "run", "--max_steps", 1)])
    assert seen[0][1] == 8 and seen[0][0].blur_probability == 0.5 and seen[0][0].normalize[0] == [0.5, 0.5, 0.5]


# ---- evaluation ----


def test_evaluation_finds_the_scores_of_the_training(source, finished, tmp_path, capfd):
    words = [finished, "--images", source, "--device", "cpu", "--output", tmp_path / "a" / "scores.json"]
    assert main(["vision-eval", *map(str, words)]) == 0
    record = json.loads((tmp_path / "a" / "scores.json").read_text())
    assert record["result"] == pytest.approx(json.loads((finished / "run.json").read_text())["result"])
    out = capfd.readouterr().out
    assert "vote of the 5 nearest" in out and "21 test images" in out and "2 epochs" in out


def test_the_saved_options_are_enough(source, tmp_path, monkeypatch, capsys):
    """Images that were named by a relative path are found again from the same place."""
    monkeypatch.chdir(source.parent)
    vision_train.run(command(source.name, tmp_path / "run"))
    assert main(["vision-eval", str(tmp_path / "run")]) == 0
    assert "21 test images" in capsys.readouterr().out


def test_vi03_the_command_line_wins_over_the_saved_options(source, finished, tmp_path):
    """Trained with 2 epochs of the probe; a configuration says 4, the command line 1, and where the images are."""
    config = tmp_path / "eval.yaml"
    config.write_text("probe_epochs: 4\nprobe_seeds: [5]\nimages: nowhere\n")
    output = tmp_path / "scores.json"
    words = [finished, "--config", config, "--images", source, "--probe-epochs", 1, "--output", output]
    assert main(["vision-eval", *map(str, words), "--device", "cpu"]) == 0
    record = json.loads(output.read_text())
    assert "1 epochs" in record["scores"]["linear"]["protocol"] and record["scores"]["linear"]["seeds"] == [5]
    assert record["arguments"]["probe_epochs"] == 1 and record["arguments"]["images"] == "colours.npz"


def test_features_are_written(source, finished, tmp_path):
    words = ["vision-eval", str(finished), "--images", str(source), "--features", str(tmp_path / "features"),
             "--probes", "none", "--device", "cpu", "--batch_size", "10"]  # fmt: skip
    assert main(words) == 0
    loaded = {path.stem: np.load(path, allow_pickle=False) for path in (tmp_path / "features").iterdir()}
    assert loaded["train_features"].shape == (48, 64) and loaded["test_features"].dtype == np.float32
    assert loaded["test_labels"].tolist() == images(21).labels.tolist() and len(loaded["train_labels"]) == 48


# ---- options ----


@pytest.mark.parametrize("word", ["--gather_across_devices False", "--no_gather_across_devices",
                                  "--gather_across_devices=0", "--gather-across-devices false"])  # fmt: skip
def test_vi04_false_is_false(source, tmp_path, word):
    groups = parse_vision_arguments([*command(source, tmp_path), *word.split()])
    assert groups.loss.gather_across_devices is False and groups.probes.probe_seeds == [1, 2]


def test_vi04_maybe_is_an_error(source, tmp_path, capfd):
    assert "maybe" in refused(capfd, "vision-train", *command(source, tmp_path), "--overwrite_output_dir", "maybe")


@pytest.mark.parametrize("loss", ["infonce", "weince", "released"])
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("dataset", DATASETS)
def test_every_row_of_the_paper_has_a_configuration(dataset, backbone, loss):
    path = CONFIGS / f"{dataset}_{backbone}.yaml"
    groups = parse_vision_arguments(["--config", str(path), "--loss", loss, "--use_cpu"])
    training = groups.training
    assert groups.loss.criterion().layout == "both_views" and groups.loss.temperature == 0.5
    assert (training.learning_rate, training.per_device_train_batch_size, training.num_train_epochs) == (3e-4, 256, 100)
    assert (training.optimizer, training.weight_decay, training.max_grad_norm) == ("adam", 0.0, 0.0)
    assert (training.train_split == "unlabeled") == (dataset == "stl10")
    assert groups.encoder.model_name_or_path.replace("-", "_") == backbone
    assert groups.loss.criterion().shape == (1.0 if loss == "released" else "anchor") if loss != "infonce" else True


def test_there_is_no_other_vision_configuration():
    assert {path.stem for path in CONFIGS.glob("*.yaml") if not path.stem.startswith("unsup_")} == {
        f"{dataset}_{backbone}" for dataset in DATASETS for backbone in BACKBONES
    }


@pytest.mark.parametrize(
    "words, message",
    [
        (["--temprature", "1"], "did you mean --temperature"),
        (["--loss", "simclr"], "invalid choice: 'simclr'"),
        (["--temperature", "0"], "loss options: temperature"),
        (["--gate", "open"], "loss options: gate"),
        (["--views", '{"blurr": 1}'], "--views"),
        (["--views", "blur"], "--views blur"),
        (["--views", '{"normalize": [["a", 0, 0], [1, 1, 1]]}'], "--views"),
        (["--views", '{"blur_probability": 1}', "--image_size", "1"], "blur_probability"),
        (["--knn_images", "4"], "--knn_images 4"),
        (["--knn_images", "-5"], "--knn_images -5"),
        (["--probes", "cnn"], "--probes cnn"),
        (["--knn", "0"], "--knn 0"),
        (["--bank_split", "unlabeled"], "invalid choice"),
        (["--learning_rate", "0"], "--learning_rate"),
        (["--per_device_train_batch_size", "1"], "--per_device_train_batch_size"),
        (["--per_device_train_batch_size", "64"], "48 images are fewer than a batch of 64"),
        (["--images", "{place}/nothing.npz"], "nothing.npz"),
        (["--eval_strategy", "sometimes"], "sometimes"),
        (["--model_name_or_path", "{place}", "--width", "1"], "no image encoder"),
        (["--model_name_or_path", "{place}"], "width can be chosen for"),
        (["--width", "0"], "--width 0.0"),
        (["--width", "nan"], "--width nan"),
        (["--projection_size", "0"], "--projection_size 0"),
        (["--image_size", "0"], "--image_size 0"),
        (["--per_device_eval_batch_size", "0"], "--per_device_eval_batch_size 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--probe_seeds", "1", "12345678901234567890123"], "--probe_seeds 12345678901234567890123"),
        (["--num_train_epochs", "0"], "--num_train_epochs 0"),
        (["--resume_from_checkpoint", "{place}"], "not a complete checkpoint"),
        (["--metric_for_best_model", "eval_loss"], "--metric_for_best_model eval_loss"),
        (["--load_best_model_at_end", "--greater_is_better", "false"], "--greater_is_better false"),
        (["--neftune_noise_alpha", "5"], "--neftune_noise_alpha"),
        (["--report_to", "foo", "--images", "{place}/nothing.npz"], "--report_to: foo"),
    ],
)
def test_wrong_options_are_one_sentence(source, tmp_path, capfd, words, message):
    words = [word.replace("{place}", str(tmp_path)) for word in words]
    assert message in refused(capfd, "vision-train", *command(source, tmp_path / "run"), *words)
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "name the encoder first"),
        (["--images", "x"], "name the encoder first"),
        (["{finished}", "--images", "nowhere.npz"], "nowhere"),
        (["{source}", "--images", "{source}"], "no image encoder"),
        (["{finished}", "--images", "{source}", "--device", "tpu9"], "tpu9"),
        (["{finished}", "--images", "{source}", "--output", "{place}"], "--output cannot be written"),
        (["{finished}", "--images", "{source}", "--batch_size", "0"], "--batch_size 0"),
        (["{finished}", "--images", "{source}", "--batch_size", "-3"], "--batch_size -3"),
        (["{finished}", "--images", "{source}", "--device", "meta"], "--device meta"),
        # Before the images are read and the encoder is loaded, which are not there.
        (["nowhere", "--images", "nowhere.npz", "--device", "meta"], "--device meta"),
        (["nowhere", "--images", "nowhere.npz", "--features", "{source}"], "--features cannot be written"),
        (["{finished}", "--images", "{source}", "--image_size", "0"], "--image_size 0"),
    ],
)
def test_wrong_evaluations_are_one_sentence(source, finished, tmp_path, capfd, words, message):
    words = [word.format(finished=finished, source=source, place=tmp_path) for word in words]
    assert message in refused(capfd, "vision-eval", *words)


def test_vi05_test_images_of_a_class_without_training_images_are_refused(source, finished, tmp_path, capfd):
    arrays = dict(np.load(source))
    for name, classes in (("named", arrays["classes"]), ("plain", None)):
        kept = {key: value for key, value in arrays.items() if key != "classes" or classes is not None}
        kept["y_train"] = arrays["y_train"] % 2
        np.savez(tmp_path / name, **kept)
    for name, missing in (("named", "b"), ("plain", "2")):
        error = refused(capfd, "vision-eval", finished, "--images", tmp_path / f"{name}.npz")
        assert f"train has no image of {missing}, which test has" in error
        vision = command(tmp_path / f"{name}.npz", tmp_path / "run")
        assert "which test has" in refused(capfd, "vision-train", *vision)


def test_what_nobody_set_is_not_recorded():
    words = ["--images", "x", "--output_dir", "y", "--probe_epochs", "7"]
    assert parse_vision_arguments(words).chosen == {"images": "x", "probe_epochs": 7}


def test_options_missing_altogether():
    with pytest.raises(InputError, match="--output_dir is missing"):
        parse_vision_arguments(["--images", "x"])
    with pytest.raises(InputError, match="--images is missing"):
        parse_vision_arguments(["--output_dir", "x", "--use_cpu"])


def test_vi09_nothing_is_bound_to_a_kind_of_device():
    package = Path(__file__).parents[1] / "simcse_weince"
    for path in [*(package / "vision").glob("*.py"), *(package / "commands").glob("vision_*.py")]:
        assert ".cuda(" not in path.read_text() and '"nccl"' not in path.read_text(), path.name


@pytest.mark.slow
def test_vi09_the_script_runs_on_two_processes_of_the_cpu(tmp_path):
    """8 synthetic images, 1 epoch, two processes on the CPU."""
    write(tmp_path / "eight.npz", images(8), images(8))
    script = Path(__file__).parents[1] / "scripts" / "train_vision.py"
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    words = command(tmp_path / "eight.npz", tmp_path / "run", "--per_device_train_batch_size", 4)
    done = subprocess.run([*program, *words], env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=400,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["processes"] == 2 and record["negatives_per_anchor"] == 14 and record["steps"] == 1


@pytest.mark.parametrize("content", ["a: [1", "- a list"])
@pytest.mark.parametrize("command", ["vision-eval", "diagnose"])
def test_a_damaged_configuration_beside_the_encoder_is_one_sentence(
    finished, source, tmp_path, capfd, command, content
):
    encoder = tmp_path / "run"
    shutil.copytree(finished, encoder, ignore=shutil.ignore_patterns("checkpoint-*"))
    (encoder / "training_config.yaml").write_text(content)
    assert "training_config.yaml: " in refused(capfd, command, encoder, "--images", source)


def test_an_option_of_another_criterion_is_refused(source, tmp_path, capfd):
    words = ["vision-train", *command(source, tmp_path / "run"), "--loss", "infonce", "--pivot", "0.05"]
    assert "--pivot means nothing with --loss infonce" in refused(capfd, *words)


def test_fp16_without_a_gpu_is_said_to_be_something_else(tmp_path, caplog):
    parse_vision_arguments(["--images", "x", "--output_dir", str(tmp_path), "--use_cpu", "--fp16"])
    assert "--fp16 needs a GPU; using" in caplog.text


def test_the_pushed_folder_is_the_finished_encoder(source, tmp_path, uploads):
    push = ["--push_to_hub", "--hub_model_id", "me/x", "--hub_token", "hf_secret"]
    vision_train.run(command(source, tmp_path / "run", *push))
    [(files, secret)] = uploads
    assert {"config.json", "model.safetensors", "run.json"} <= files and "training_args.bin" not in files and not secret
    assert AutoModel.from_pretrained(tmp_path / "run").config.model_type


def test_images_that_are_not_stored_row_by_row_have_a_hash(tmp_path):
    """STL-10 stores planes by columns; of its runs nothing but the encoder was left."""
    pixels = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    turned = ImageSet(pixels.swapaxes(2, 3).contiguous().swapaxes(2, 3), None, None, "x")
    assert not turned.images.is_contiguous() and _provenance(turned) == _provenance(ImageSet(pixels, None, None, "x"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--test_split", "train"], "--bank_split and --test_split are both train"),
        (["--gradient_checkpointing"], "--gradient_checkpointing does not go with images"),
        (["--label_smoothing_factor", "0.1"], "--label_smoothing_factor does not go with images"),
    ],
)
def test_what_makes_no_result_is_refused_before_the_images_are_read(tmp_path, capfd, words, message):
    assert message in refused(capfd, "vision-train", *command(tmp_path / "nowhere", tmp_path / "run", *words))


def test_a_run_goes_on_with_its_own_images(source, tmp_path, capfd):
    vision_train.run(command(source, tmp_path / "run", "--max_steps", 1))
    other = shutil.copy(source, tmp_path / "other.npz")
    words = ["vision-train", *command(other, tmp_path / "run", "--resume_from_checkpoint", "last")]
    assert "was written with --images colours.npz, not other.npz" in refused(capfd, *words)
