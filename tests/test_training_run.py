"""Whole runs of ``simcse-weince train`` on tiny encoders: what is checked, written, restored and reported."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import AdaptiveLayerLoss
from transformers import PreTrainedModel
from transformers.trainer_utils import IntervalStrategy

from simcse_weince import InfoNCELoss, ReleasedWeince, SimCSEArguments, SimCSETrainer, STSEvaluator, WeinceLoss
from simcse_weince.cli import main
from simcse_weince.run_folder import Patience, last_complete_checkpoint, prepare
from simcse_weince.sentence.arguments import parse_training_arguments
from simcse_weince.sentence.encoder import build_encoder, view_cosine
from simcse_weince.sentence.pairs import read_pairs
from simcse_weince.sentence.training_run import _read_corpus, _token_report, train
from tests.tiny_models import write_tiny_bert

PAIRS = """sentence1\tsentence2\tscore
a red door\ta red house\t3.0
the cat sleeps\tthe dog sleeps\t2.5
a man plays music\ta man plays the music\t4.8
rain falls on the city\tthe train is blue\t0.2
six people on a river\tfour people on the river\t3.5
the year is one\tthe first year\t4.0
a woman runs\ta blue lamp\t0.0
the dog runs\tthe dog is still\t1.5
"""
SENTENCES = [f"{who} {what} {where}" for who in ("the man", "a woman", "the dog", "people")
             for what in ("runs", "sleeps", "plays music", "plans a train")
             for where in ("in the city", "by the river", "at the red door")]  # fmt: skip


class RunningLoss(InfoNCELoss):
    """A loss that remembers something from batch to batch."""

    criterion_class = ReleasedWeince

    def get_config_dict(self):
        return {}


@pytest.fixture
def place(tmp_path):
    """A folder with an encoder, sentences and graded pairs."""
    write_tiny_bert(tmp_path / "encoder")
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES) + "\n")
    (tmp_path / "pairs.tsv").write_text(PAIRS)
    return tmp_path


def command(place: Path, *extra, out="out", text="text.txt", encoder="encoder"):
    """A run of 6 steps of 16 sentences, evaluated every 2."""
    return [
        "--model_name_or_path", str(place / encoder), "--train_file", str(place / text),
        "--output_dir", str(place / out), "--eval_file", str(place / "pairs.tsv"), "--cache_dir", str(place / "cache"),
        "--per_device_train_batch_size", "16", "--max_steps", "6", "--eval_steps", "2", "--learning_rate", "1e-3",
        "--logging_steps", "1", "--pooler_type", "cls", "--mlp_only_train", "--save_total_limit", "9",
        "--use_cpu", *map(str, extra),
    ]  # fmt: skip


def run(place, *extra, **where):
    return train(parse_training_arguments(command(place, *extra, **where)))


def refused(place, capfd, *extra, loaded=False, **where):
    """Exit code 2, one sentence, no traceback, and the encoder was not loaded."""
    weights = patch.object(PreTrainedModel, "from_pretrained", side_effect=AssertionError("the encoder was loaded"))
    with nullcontext() if loaded else weights:
        assert main(["train", *command(place, *extra, **where)]) == 2
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("simcse-weince: error: ") and "Traceback" not in error
    assert "the encoder was loaded" not in error, error
    return error


def history(place, out="out"):
    return json.loads((place / out / "trainer_state.json").read_text())["log_history"]


def weights(place, out="out"):
    return load_file(place / out / "model.safetensors")


def assert_equal_runs(place, first, second):
    one, two = weights(place, first), weights(place, second)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name
    timing = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "train_runtime",
              "train_samples_per_second", "train_steps_per_second", "total_flos"}  # fmt: skip
    logs = [
        [{k: v for k, v in entry.items() if k not in timing} for entry in history(place, out) if "loss" in entry]
        for out in (first, second)
    ]
    assert logs[0] == logs[1] and len(logs[0]) == 6


# ---- what a run leaves behind ----


def test_tr01_saved_folder_scores_as_in_training(place, capfd):
    """Score in training = plain SentenceTransformer on the folder = the evaluate command; the head is not saved."""
    result = run(place, "--bf16")
    pairs = read_pairs(place / "pairs.tsv")
    saved = SentenceTransformer(str(place / "out"), device="cpu")
    assert [type(module).__name__ for module in saved] == ["Transformer", "Pooling"]
    scores = STSEvaluator(pairs, "dev")(saved)
    assert scores["dev_spearman_cosine"] == pytest.approx(result.dev_best, abs=1e-6)
    [during] = [entry for entry in history(place) if entry["step"] == result.best_step and "eval_runtime" in entry]
    # Unlike ranks these tell the encoder in its own precision from one under autocast.
    for name in ("pearson_cosine", "uniformity"):
        assert scores[f"dev_{name}"] == pytest.approx(during[f"eval_dev_{name}"], abs=1e-6)
    assert main(["evaluate", str(place / "out"), "--pairs", str(place / "pairs.tsv"), "--output",
                 str(place / "scores.json"), "--device", "cpu"]) == 0  # fmt: skip
    scores = json.loads((place / "scores.json").read_text())
    assert scores["tasks"][0]["correlations"]["all"]["spearman"] == pytest.approx(result.dev_best, abs=1e-6)
    assert f"{100 * result.dev_best:.2f}" in capfd.readouterr().out
    assert not any("head" in name for name in weights(place))


def test_tr13_same_seed_same_result_with_provenance(place):
    run(place, out="one")
    run(place, out="two")
    assert_equal_runs(place, "one", "two")
    record = json.loads((place / "one" / "run.json").read_text())
    for key in ("versions", "seed", "device", "precision", "arguments", "corpus", "negatives_per_anchor", "result"):
        assert key in record
    assert record["corpus"]["kept"] == len(SENTENCES) and len(record["corpus"]["files"][0]["sha256"]) == 64
    assert record["graded_pairs"]["dev"]["pairs"] == 8 and record["negatives_per_anchor"] == 15


def test_files_that_are_shared_name_no_folder_of_this_machine(place):
    run(place)
    for path in (place / "out").rglob("*"):
        if path.suffix in (".json", ".md", ".yaml", ".txt") and "checkpoint" not in str(path.relative_to(place)):
            assert str(place) not in path.read_text(), path.name
    assert not list((place / "out").rglob("training_args.bin"))


def test_tr07_everything_written_loads_without_pickled_code(place):
    from transformers.trainer_pt_utils import safe_globals

    run(place)
    files = [path for path in (place / "out").rglob("*") if path.suffix in (".pt", ".pth", ".bin")]
    assert files
    with safe_globals():  # NumPy's own random state, in the host's rng_state.pth
        for path in files:
            torch.load(path, weights_only=True)


def test_statistics_are_in_the_log(place):
    run(place)
    entries = [entry for entry in history(place) if "loss" in entry]
    for name in ("blend", "shape", "evidence", "hardness", "positive_cosine", "negative_cosine", "masked_candidates"):
        assert all(name in entry for entry in entries), name
    assert 0 < entries[0]["blend"] < 1


def test_statistics_of_a_wrapped_loss_are_in_the_log(place):
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    encoder = build_encoder(str(place / "encoder"), pooler_type="avg", device="cpu")
    loss = MatryoshkaLoss(encoder, WeinceLoss(encoder), [32, 16])
    arguments = SimCSEArguments(str(place / "out"), use_cpu=True, max_steps=1, logging_steps=1, eval_strategy="no",
                                save_strategy="no", per_device_train_batch_size=16)  # fmt: skip
    trainer = SimCSETrainer(encoder, arguments, Dataset.from_dict({"text": SENTENCES}), loss=loss)
    trainer.train()
    assert 0 < trainer.state.log_history[0]["blend"] < 1


def test_evaluation_before_the_first_and_after_the_last_step(place):
    run(place, "--max_steps", "5")
    assert [entry["step"] for entry in history(place) if "eval_dev_spearman_cosine" in entry] == [0, 2, 4, 5]


def test_no_checkpoint_is_written_where_none_is_wanted(place):
    run(place, "--load_best_model_at_end", "false", "--save_strategy", "no", "--max_steps", "3")
    assert not list((place / "out").glob("checkpoint-*")) and (place / "out" / "model.safetensors").is_file()


def test_tr09_float16_weights_are_trained_as_float32(place, caplog):
    SentenceTransformer(str(place / "encoder"), device="cpu").half().save(str(place / "half"))
    run(place, "--fp16", "--max_steps", "2", encoder="half")
    assert "training them as float32" in caplog.text
    assert all(weight.dtype == torch.float32 for weight in weights(place).values())


def test_the_saved_encoder_is_loaded_with_the_options_of_its_run(place):
    """bfloat16 weights and another attention: the score of the saved folder is still that of the training."""
    result = run(place, "--torch_dtype", "bfloat16", "--attn_implementation", "eager", "--max_steps", "2")
    assert result.steps == 2 and (place / "out" / "run.json").is_file()


def test_infonce_trains_too(place):
    result = run(place, "--loss", "infonce", "--temperature", "0.1")
    assert result.steps == 6 and all("blend" not in entry for entry in history(place))


def test_pairs_and_hard_negatives_train_without_dropout(place):
    write_tiny_bert(place / "still", dropout=0.0)
    rows = ["anchor,positive,negative"] + [
        f"{a},{b},the train is late" for a, b in zip(SENTENCES, SENTENCES[1:], strict=False)
    ]
    (place / "triplets.csv").write_text("\n".join(rows) + "\n")
    run(place, text="triplets.csv", encoder="still")
    assert json.loads((place / "out" / "run.json").read_text())["negatives_per_anchor"] == 31


@pytest.mark.parametrize("loss", ["weince", "infonce"])
def test_mini_batches_change_nothing_but_memory(place, loss):
    """GradCache: the same losses and statistics as the plain run, whose dropout is drawn otherwise."""
    write_tiny_bert(place / "still", dropout=0.0)
    (place / "pairs.csv").write_text(
        "a,b\n" + "".join(f"{a},{b}\n" for a, b in zip(SENTENCES, SENTENCES[1:], strict=False))
    )
    words = ("--loss", loss, "--max_steps", "2", "--text_column", "a", "b", "--learning_rate", "1e-5")
    run(place, *words, text="pairs.csv", encoder="still", out="plain")
    run(place, *words, "--mini_batch_size", "5", text="pairs.csv", encoder="still", out="cached")
    logs = [[entry["loss"] for entry in history(place, out) if "loss" in entry] for out in ("plain", "cached")]
    assert logs[0] == pytest.approx(logs[1], rel=1e-4)
    assert ("blend" in [entry for entry in history(place, "cached") if "loss" in entry][0]) == (loss == "weince")
    state = load_file(place / "cached" / "checkpoint-2" / "loss_state.safetensors")
    assert state and all(name.startswith("train_only_head.") for name in state)


def test_streaming(place):
    assert run(place, "--streaming", "--max_steps", "2").steps == 2


# ---- modes, best checkpoint, metric ----


def test_tr02_training_mode_survives_evaluation(place):
    encoder = build_encoder(str(place / "encoder"), pooler_type="cls", mlp_only_train=True, device="cpu")
    pairs = read_pairs(place / "pairs.tsv")
    arguments = SimCSEArguments(str(place / "out"), use_cpu=True, max_steps=2, metric_for_best_model="loss",
                                load_best_model_at_end=False, save_strategy="no", eval_steps=1)  # fmt: skip
    trainer = SimCSETrainer(encoder, arguments, Dataset.from_dict({"text": SENTENCES}), loss=InfoNCELoss(encoder),
                            evaluator=STSEvaluator(pairs))  # fmt: skip
    encoder.train()
    first, second = trainer.evaluate(), trainer.evaluate()
    key = "eval_sts-dev_spearman_cosine"
    assert encoder.training and first[key] == second[key]
    assert view_cosine(encoder, SENTENCES[:4]) < 0.999


def test_tr03_unknown_metric_is_refused_with_the_known_ones(place, capfd):
    error = refused(place, capfd, "--metric_for_best_model", "foo")
    assert "foo" in error and "dev_spearman_cosine" in error and "stsb_spearman" in error


@pytest.mark.parametrize("name", ["stsb_spearman", "dev_spearman_cosine", "eval_dev_pearson_cosine", "pearson"])
def test_tr03_metric_names_of_simcse_and_of_the_host(place, name):
    run(place, "--metric_for_best_model", name, "--max_steps", "2")
    assert (place / "out" / "modules.json").is_file()


def script_scores(monkeypatch, scores):
    """Make evaluations during training return `scores` in turn; what they really are stays in the result."""
    real = STSEvaluator.__call__
    remaining = list(scores)

    def scripted(self, model, output_path=None, epoch=-1, steps=-1):
        metrics = real(self, model, output_path, epoch, steps)
        if steps > 0:
            metrics[self.primary_metric] = remaining.pop(0)
        return metrics

    monkeypatch.setattr(STSEvaluator, "__call__", scripted)


@pytest.mark.parametrize("words", [[], ["--save_steps", "4"]])
def test_tr04_best_model_is_restored_whole(place, monkeypatch, words):
    """The best of three evaluations is the first: saved are its weights, not the last ones."""
    pairs = read_pairs(place / "pairs.tsv")
    run(place, "--lr_scheduler_type", "constant", "--max_steps", "2", out="short")
    truth = STSEvaluator(pairs)(SentenceTransformer(str(place / "short"), device="cpu"))
    script_scores(monkeypatch, [truth["sts-dev_spearman_cosine"], -0.9, -0.95])
    result = run(place, "--lr_scheduler_type", "constant", *words, out="again")
    assert result.best_step == 2
    best = load_file(place / "again" / "checkpoint-2" / "model.safetensors")
    last = load_file(place / "again" / "checkpoint-6" / "model.safetensors")
    assert all(torch.equal(weights(place, "again")[name], best[name]) for name in best)
    assert any(not torch.equal(best[name], last[name]) for name in best)


def test_tr04_a_saved_folder_that_scores_otherwise_is_an_error(place, monkeypatch):
    real = STSEvaluator.__call__

    def better(self, model, output_path=None, epoch=-1, steps=-1):
        metrics = real(self, model, output_path, epoch, steps)
        return {**metrics, self.primary_metric: metrics[self.primary_metric] + 0.001 * (steps > 0)}

    monkeypatch.setattr(STSEvaluator, "__call__", better)
    with pytest.raises(RuntimeError, match=r"scores -?0\.\d+ on .*, not the ") as caught:
        run(place, "--max_steps", "2")
    found, claimed = map(float, re.findall(r"-?0\.\d{4}", str(caught.value)))
    assert claimed - found == pytest.approx(0.001, abs=1.1e-4)


def test_tr08_decline_is_reported(place, monkeypatch, caplog):
    caplog.set_level("INFO", logger="simcse_weince")
    script_scores(monkeypatch, [0.8, 0.7, 0.77])
    monkeypatch.setattr("simcse_weince.sentence.training_run._check_saved", lambda result, *rest: result)
    result = run(place)
    assert (result.best_step, result.dev_best, result.dev_last) == (2, 0.8, 0.77)
    assert "best score 0.8000 at step 2 of 6" in caplog.text
    assert "far below the best" in caplog.text


def test_tr08_a_run_that_only_harms_says_so(place, monkeypatch, caplog):
    script_scores(monkeypatch, [-0.99, -0.99, -0.99])
    monkeypatch.setattr("simcse_weince.sentence.training_run._check_saved", lambda result, *rest: result)
    run(place)
    assert "training made this encoder worse" in caplog.text


def test_ev01_an_undefined_score_is_null_and_never_best(place, monkeypatch):
    """An encoder that gives one vector for everything has no score: not 0, not the best, null in the record."""
    script_scores(monkeypatch, [float("nan")] * 3)
    result = run(place)
    assert (result.best_step, result.dev_best, result.dev_last) == (None, None, None)
    assert json.loads((place / "out" / "run.json").read_text())["result"]["dev_best"] is None


def test_ev01_constant_gold_cannot_select(place, capfd, case_inputs):
    error = refused(place, capfd, "--eval_file", case_inputs / "sts_constant_scores.tsv")
    assert "all scores are equal" in error


@pytest.mark.parametrize(
    ("scores", "words"), [([0.8, 0.7, 0.6], []), ([0.5, 0.55, 0.6], ["--early_stopping_threshold", "0.1"])]
)
def test_early_stopping(place, monkeypatch, scores, words):
    script_scores(monkeypatch, scores)
    monkeypatch.setattr("simcse_weince.sentence.training_run._check_saved", lambda result, *rest: result)
    assert run(place, "--early_stopping_patience", "1", *words).steps == 4


def test_patience_counts_again_with_its_threshold():
    """What it counts by on resume: of these scores three in a row are not better enough than the best so far."""
    log = [{"step": step, "x": score} for step, score in enumerate((0.9, 0.5, 0.55, 0.56, 0.64))]
    state, arguments = SimpleNamespace(log_history=log), SimpleNamespace(metric_for_best_model="x")
    assert Patience(3, 0.1).is_over(arguments, state)
    assert not Patience(4, 0.1).is_over(arguments, state) and not Patience(1, 0.01).is_over(arguments, state)


def test_tr12_learning_rate_and_weight_decay_reach_the_optimizer(place, monkeypatch):
    seen = {}
    create = SimCSETrainer.create_optimizer

    def spy(self, *args):
        optimizer = create(self, *args)
        seen["groups"] = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        seen["parameters"] = {id(p) for group in optimizer.param_groups for p in group["params"]}
        seen["head"] = {id(p) for p in self.model.train_only_head.parameters()}
        return optimizer

    monkeypatch.setattr(SimCSETrainer, "create_optimizer", spy)
    run(place, "--learning_rate", "2e-4", "--weight_decay", "0.3")
    assert {decay for _, decay in seen["groups"]} == {0.3, 0.0} and all(lr <= 2e-4 for lr, _ in seen["groups"])
    assert seen["head"] <= seen["parameters"]


def test_the_model_card_shows_the_score_of_what_was_saved(place):
    header, *rows = (line.split("\t") for line in PAIRS.splitlines())
    turned = [header] + [[first, second, f"{5 - float(score)}"] for first, second, score in rows]
    (place / "test.tsv").write_text("".join("\t".join(row) + "\n" for row in turned))
    result = run(place, "--test_file", place / "test.tsv", "--learning_rate", "3e-3", "--bf16")
    card = (place / "out" / "README.md").read_text()
    after = SentenceTransformer(str(place / "out"), device="cpu")
    scores = STSEvaluator(read_pairs(place / "test.tsv"), "x")(after)
    assert result.test_after == pytest.approx(scores["x_spearman_cosine"], abs=1e-6)
    assert result.test_before != result.test_after
    assert f"{round(result.test_after, 4)}" in card and f"{round(result.test_before, 4)}" not in card
    assert f"{round(scores['x_pearson_cosine'], 4)}" in card  # not that under autocast


@pytest.mark.parametrize("words", [["--learning_rate", "1e30"], ["--learning_rate", "1e30", "--logging_steps", "9"]])
def test_a_training_that_diverges_is_an_error(place, capfd, words):
    """Found in the log, or at the end: weights that are not finite are never saved as the result."""
    error = refused(
        place, capfd, *words, "--max_grad_norm", "0", "--eval_strategy", "no", "--save_strategy", "no", loaded=True
    )
    assert "lower --learning_rate" in error and not (place / "out" / "model.safetensors").exists()


def test_one_long_text_costs_no_memory(place):
    """Texts are counted in batches that are cut, not padded to the longest of thousands."""
    from simcse_weince.sentence.training_run import _token_report

    encoder = build_encoder(str(place / "encoder"), pooler_type="avg", device="cpu")
    widths = []
    preprocess = encoder.preprocess
    encoder.preprocess = lambda texts, **options: widths.append(preprocess(texts, **options)) or widths[-1]
    report = _token_report(encoder, ["the dog"] * 300 + ["the dog runs " * 3000, "a cat"], 16)
    assert report == {"texts": 302, "truncated": 1, "with_equal_ids": 300, "redundant": 299}
    assert max(features["input_ids"].shape[1] for features in widths) == 17


# ---- stopping and going on ----


@pytest.mark.parametrize("stop", [2, 4])
def test_tr06_resume_is_the_same_run(place, stop):
    """Stopped in the first or in the second epoch (of 3 steps) and resumed: weights and statistics are bit-equal."""
    run(place, "--max_steps", "6", out="whole")
    run(place, "--max_steps", "6", out="parts")
    for folder in (place / "parts").glob("checkpoint-*"):
        if int(folder.name.split("-")[1]) > stop:
            subprocess.run(["rm", "-r", str(folder)], check=True)
    (place / "parts" / "model.safetensors").unlink()
    run(place, "--max_steps", "6", "--resume_from_checkpoint", "last", out="parts")
    assert_equal_runs(place, "whole", "parts")


def test_tr06_a_stream_is_resumed(place, capfd):
    """As above, where nothing is hashed; other sentences are told by the size of their file."""
    words = ["--streaming", "--max_steps", "6"]
    run(place, *words, out="whole")
    run(place, *words, out="parts")
    for name in ("checkpoint-4", "checkpoint-6", "model.safetensors"):
        subprocess.run(["rm", "-r", str(place / "parts" / name)], check=True)
    (place / "other.txt").write_text("\n".join(SENTENCES[:20]) + "\n")
    again = [*words, "--resume_from_checkpoint", "last"]
    assert "other sentences" in refused(place, capfd, *again, out="parts", text="other.txt")
    run(place, *again, out="parts")
    assert_equal_runs(place, "whole", "parts")


def stop_after(place, step):
    """Leave of a finished run what one that was killed after `step` has left."""
    for folder in (place / "out").glob("checkpoint-*"):
        if int(folder.name.split("-")[1]) > step:
            subprocess.run(["rm", "-r", str(folder)], check=True)
    for name in ("model.safetensors", "run.json"):
        (place / "out" / name).unlink()


@pytest.mark.parametrize("stop", [4, 6])
def test_tr06_patience_is_resumed(place, monkeypatch, stop):
    """Two evaluations in a row without a better score end the run, be there a stop between them or after them."""
    monkeypatch.setattr("simcse_weince.sentence.training_run._check_saved", lambda result, *rest: result)
    scores, words = [0.8, 0.7, 0.6], ["--early_stopping_patience", "2", "--max_steps", "10"]
    with monkeypatch.context() as patch:
        script_scores(patch, scores)
        assert run(place, *words).steps == 6
    stop_after(place, stop)
    script_scores(monkeypatch, [*scores[stop // 2 :], 0.5, 0.4])
    assert run(place, *words, "--resume_from_checkpoint", "last").steps == 6


def test_patience_may_change_on_resume(place, monkeypatch):
    """Raised, taken away and given back: what counts are the scores, not what an earlier part of the run has noted."""
    monkeypatch.setattr("simcse_weince.sentence.training_run._check_saved", lambda result, *rest: result)
    words = ["--resume_from_checkpoint", "last", "--max_steps", "16"]
    for scores, changed, steps in (
        ([0.8, 0.7], ["--early_stopping_patience", "1"], 4),
        ([0.6], ["--early_stopping_patience", "2"], 6),
        ([0.9], ["--max_steps", "8"], 8),
        ([0.8, 0.7], ["--early_stopping_patience", "2"], 12),
    ):
        with monkeypatch.context() as patch:
            script_scores(patch, scores)
            assert run(place, *words, *changed).steps == steps


def test_patience_may_begin_on_resume(place, monkeypatch):
    monkeypatch.setattr("simcse_weince.sentence.training_run._check_saved", lambda result, *rest: result)
    script_scores(monkeypatch, [0.8, 0.7, 0.6, 0.5])
    run(place, "--max_steps", "2")
    words = ["--early_stopping_patience", "1", "--max_steps", "10", "--resume_from_checkpoint", "last"]
    assert run(place, *words).steps == 4


@pytest.mark.slow
def test_tr06_kill_and_resume(place):
    """kill -9 in the middle, resume: final weights and statistics are bit-equal to the uninterrupted run."""
    run(place, out="whole")
    words = command(place, out="parts")
    program = [sys.executable, "-m", "simcse_weince.cli", "train", *words]
    process = subprocess.Popen(program, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.time() + 120
    while last_complete_checkpoint(place / "parts") is None and process.poll() is None and time.time() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL and not (place / "parts" / "run.json").exists()
    assert main(["train", *words, "--resume_from_checkpoint", "last"]) == 0
    assert_equal_runs(place, "whole", "parts")


def test_overwriting_removes_the_checkpoints_of_the_run_before(place):
    run(place)
    run(place, "--overwrite_output_dir", "--max_steps", "2")
    assert [folder.name for folder in (place / "out").glob("checkpoint-*")] == ["checkpoint-2"]


def test_an_overwriting_run_that_dies_leaves_nothing_that_looks_finished(place, capfd, monkeypatch):
    run(place, "--max_steps", "2")

    def die(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("simcse_weince.run_folder.train_or_resume", die)
    assert main(["train", *command(place, "--overwrite_output_dir", "--loss", "infonce")]) == 130
    assert main(["evaluate", str(place / "out"), "--pairs", str(place / "pairs.tsv")]) == 2
    assert not {"run.json", "trainer_state.json"} & {path.name for path in (place / "out").iterdir()}


def test_a_run_does_not_clear_away_the_encoder_it_starts_from(place, capfd):
    words = ["--overwrite_output_dir", "--model_name_or_path", place / "encoder"]
    for also in ([], ["--resume_from_checkpoint", "last"]):
        assert "another --output_dir" in refused(place, capfd, *words, *also, out="encoder")
    assert (place / "encoder" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--loss", "infonce"], "--loss by default, not infonce"),
        (["--per_device_train_batch_size", "8"], "--per_device_train_batch_size 16, not 8"),
        (["--seed", "1"], "--seed by default, not 1"),
        (["--train_file", "{other}"], "other sentences"),
        (["--dedupe"], "--dedupe by default, not True"),
        (["--optim", "sgd"], "--optim by default, not sgd"),
        (["--data_seed", "1"], "--data_seed by default, not 1"),
    ],
)
def test_resume_refuses_another_run(place, capfd, words, named):
    run(place, "--max_steps", "2")
    (place / "other.txt").write_text("\n".join(reversed(SENTENCES)) + "\n")  # of the same size
    words = [word.format(other=place / "other.txt") for word in words]
    assert named in refused(place, capfd, *words, "--resume_from_checkpoint", "last", "--max_steps", "4")


@pytest.fixture
def begun(place):
    """A run with a checkpoint, as much of it as is looked at before the encoder is loaded."""
    prepare(place / "out", parse_training_arguments(command(place)).chosen, None)
    checkpoint = place / "out" / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text("{}")
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({}, checkpoint / name)


@pytest.mark.parametrize(
    "option",
    [
        "dedupe", "encoding latin-1", "max_train_samples 40", "skip_bad", "streaming", "text_column text",
        "batch_sampler no_duplicates", 'prompts {"text":"x"}', "eval_file PLACE/other.tsv",
        "gradient_accumulation_steps 2", "max_seq_length 16", "metric_for_best_model pearson",
        "optim_args momentum=0.5", "adam_beta1 0.8", "adam_beta2 0.9", "adam_epsilon 1e-6", "max_grad_norm 2",
        "lr_scheduler_type cosine", 'lr_scheduler_kwargs {"num_cycles":2}', "dropout 0.2", "temperature 0.1",
    ],
)  # fmt: skip
@pytest.mark.usefixtures("begun")
def test_what_makes_a_run_cannot_change_on_resume(place, capfd, option):
    (place / "other.tsv").write_text(PAIRS)
    words = f"--{option}".replace("PLACE", str(place)).split()
    assert f"was written with {words[0]} " in refused(place, capfd, *words, "--resume_from_checkpoint", "last")


@pytest.mark.usefixtures("begun")
def test_what_makes_no_other_run_may_change_on_resume(place, capfd):
    words = ["--cache_dir", place / "elsewhere", "--mini_batch_size", "8", "--max_steps", "9", "--logging_steps", "3"]
    with pytest.raises(AssertionError, match="the encoder was loaded"):  # so nothing was refused
        refused(place, capfd, *words, "--resume_from_checkpoint", "last")


def test_resuming_a_finished_run_trains_nothing(place):
    """As after a crash between the last checkpoint and the saving of the encoder."""
    result = run(place)
    before = weights(place)
    for name in ("model.safetensors", "run.json"):
        (place / "out" / name).unlink()
    assert run(place, "--resume_from_checkpoint", "last") == result
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(place).items())
    assert not (place / "out" / "checkpoint-7").exists()


def test_an_output_folder_is_no_checkpoint(place, capfd):
    run(place)
    error = refused(place, capfd, "--resume_from_checkpoint", place / "out", out="elsewhere")
    assert "not a complete checkpoint" in error


def test_two_runs_do_not_share_a_folder(place, capfd):
    from filelock import FileLock

    (place / "out").mkdir()
    with FileLock(place / "out" / ".lock"):
        assert "another run is writing there" in refused(place, capfd)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataloader_num_workers", "-1"], "num_workers"),
        (["--optim", "adamw_bnb_8bit"], "bitsandbytes"),
        (["--lr_scheduler_type", "warmup_stable_decay"], "num_decay_steps"),
        (["--lr_scheduler_kwargs", '{"foo": 1}'], "foo"),
        (["--optim_args", "foo"], "unpack"),
        (["--accelerator_config", '{"foo": 1}'], "foo"),
        (["--learning_rate_mapping", '{"(": 1e-3}'], "unterminated"),
        (["--batch_sampler", "group_by_label"], "label"),
    ],
)
def test_options_that_the_host_refuses_late_cost_no_earlier_run(place, capfd, words, message):
    kept = place / "out" / "checkpoint-9" / "kept"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert message in refused(place, capfd, *words, "--overwrite_output_dir", loaded=True)
    assert kept.exists()


def test_a_tracker_that_is_unknown_or_not_installed_is_refused(place, capfd, monkeypatch):
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: False)
    assert "--report_to: foo is not supported" in refused(place, capfd, "--report_to", "foo")
    assert "--report_to: WandbCallback requires wandb to be installed" in refused(place, capfd, "--report_to", "wandb")


def test_what_a_killed_run_left_is_cleared(place):
    (place / "out").mkdir()
    (place / "out" / "training_config.yaml").write_text("{}")
    (place / "out" / "checkpoint-2" / ".saving-123").mkdir(parents=True)
    (place / "out" / ".saving-123").mkdir()
    run(place, "--resume_from_checkpoint", "last")
    assert not list((place / "out").rglob(".saving-*"))


def test_resume_skips_a_checkpoint_that_was_being_written(place):
    run(place)
    newest = place / "out" / "checkpoint-6"
    (newest / "trainer_state.json").write_text('{"epoch": 1.')
    assert last_complete_checkpoint(place / "out").name == "checkpoint-4"


def test_resume_from_a_damaged_checkpoint_is_one_sentence(place, capfd):
    run(place, "--max_steps", "2")
    for name in ("model.safetensors", "loss_state.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        path = place / "out" / "checkpoint-2" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-20])
        error = refused(place, capfd, "--resume_from_checkpoint", "last")
        assert f"checkpoint-2/{name} is damaged; remove checkpoint-2" in error
        path.write_bytes(whole)


def test_compliance_10_la04_state_of_the_loss_and_of_the_head_survive(place):
    """A loss with a running average: 4 steps equal 2 steps, a stop, and 2 more from the checkpoint."""

    def trained(out, resume=None):
        encoder = build_encoder(str(place / "encoder"), pooler_type="cls", mlp_only_train=True, device="cpu")
        loss = RunningLoss(encoder)
        arguments = SimCSEArguments(str(place / out), use_cpu=True, max_steps=4, per_device_train_batch_size=16,
                                    eval_strategy="no", save_steps=2, learning_rate=1e-3)  # fmt: skip
        trainer = SimCSETrainer(encoder, arguments, Dataset.from_dict({"text": SENTENCES}), loss=loss)
        trainer.train(resume_from_checkpoint=resume)
        state = {**loss.criterion.state_dict(), **encoder.train_only_head.state_dict()}
        return {name: tensor.clone() for name, tensor in state.items()}

    whole = trained("whole")
    resumed = trained("parts", str(place / "whole" / "checkpoint-2"))
    assert len(whole) > 2 and all(torch.equal(whole[name], resumed[name]) for name in whole)
    halfway = load_file(place / "whole" / "checkpoint-2" / "loss_state.safetensors")
    assert any(not torch.equal(halfway[name], final) for name, final in
               ((f"loss.criterion.{k}", v) for k, v in whole.items()) if name in halfway)  # fmt: skip


def test_la04_a_checkpoint_without_that_state_warns(place, caplog):
    run(place)
    (place / "out" / "checkpoint-6" / "loss_state.safetensors").unlink()
    run(place, "--resume_from_checkpoint", str(place / "out" / "checkpoint-6"), "--max_steps", "7")
    assert "has no loss_state.safetensors" in caplog.text


def test_compliance_02_la05_evaluation_leaves_the_loss_alone(place):
    encoder = build_encoder(str(place / "encoder"), pooler_type="cls", device="cpu")
    loss = RunningLoss(encoder)
    data = Dataset.from_dict({"text": SENTENCES})
    arguments = SimCSEArguments(str(place / "out"), use_cpu=True, per_device_eval_batch_size=16, eval_strategy="no")
    trainer = SimCSETrainer(encoder, arguments, data, data, loss=loss)
    before = {name: tensor.clone() for name, tensor in loss.state_dict().items()}
    assert trainer.evaluate()["eval_loss"] > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in loss.state_dict().items())


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("left", [
    "checkpoint-100/model.safetensors", "run.json", "modules.json", "model-00001-of-00002.safetensors", "config.json",
    "all_results.json", "README.md",
])  # fmt: skip
def test_what_an_earlier_run_or_another_tool_left_is_not_cleared_unasked(place, capfd, left, last):
    """As by a run that was killed in its first checkpoint, a model of another trainer, or a project of the user's."""
    kept = place / "out" / left
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    error = refused(place, capfd, *(["--resume_from_checkpoint", "last"] if last else []))
    assert f"holds an earlier run or model ({left.split('/')[0]}); replace it with --overwrite_output_dir" in error
    assert kept.exists()


def test_checkpoints_without_an_optimizer_are_not_cleared_unasked(place, capfd):
    run(place, "--save_only_model", "--max_steps", "4")
    (place / "out" / "run.json").unlink()  # as killed before its end
    assert "(checkpoint-2)" in refused(place, capfd, "--resume_from_checkpoint", "last")
    assert (place / "out" / "checkpoint-2" / "model.safetensors").exists()


def test_options_of_the_sentences_reach_their_reader(place):
    rows = ["a,b", "one,caf\xe9", "two,caf\xe9", "no second cell", "three,tea", "four,milk"]
    (place / "rows.csv").write_text("\n".join(rows), encoding="latin-1")
    words = ["--encoding", "latin-1", "--skip_bad", "--dedupe", "--max_train_samples", "2", "--text_column", "b"]
    groups = parse_training_arguments(command(place, *words, text="rows.csv"))
    corpus = _read_corpus(groups.data, str(place / "cache"), groups.training)
    assert corpus.dataset["text"][:] == ["caf\xe9", "tea"]
    assert corpus.report.dropped == {"duplicate": 1, "bad": 1}


def test_graded_pairs_are_read_as_the_sentences_are(place, capfd):
    """What the messages advise must have an effect."""
    (place / "latin.tsv").write_text(PAIRS.replace("red door", "caf\xe9"), encoding="latin-1")
    (place / "bad.tsv").write_text(PAIRS + "no score\tat all\tx\n")
    words = ["--eval_file", place / "latin.tsv", "--test_file", place / "bad.tsv", "--max_steps", "2"]
    assert "--encoding latin-1" in refused(place, capfd, *words)
    assert "bad.tsv: unusable rows: 1" in refused(place, capfd, *words, "--encoding", "latin-1")
    run(place, *words, "--encoding", "latin-1", "--skip_bad")
    assert (place / "out" / "run.json").exists()


def test_what_is_no_checkpoint_is_left_alone(place):
    for name in ("checkpoint-best", "checkpoint-notes.txt"):
        (place / "out" / name).mkdir(parents=True)
    run(place, "--overwrite_output_dir", "--max_steps", "2")
    assert (place / "out" / "checkpoint-best").is_dir() and (place / "out" / "checkpoint-notes.txt").is_dir()


def test_a_stream_of_the_hub_is_that_of_its_data_set(place, capfd, monkeypatch):
    stream = Dataset.from_dict({"text": SENTENCES}).to_iterable_dataset()
    monkeypatch.setattr("datasets.load_dataset", lambda *name, **options: stream)
    words = command(place, "--streaming", "--max_steps", "2")
    words[words.index("--train_file") : words.index("--output_dir")] = ["--dataset_name", "a/one"]
    assert main(["train", *words]) == 0
    for option, other in (("name a/one", "a/two"), ("name a/one", "b/one"), ("split by default", "validation"),
                          ("config_name by default", "en")):  # fmt: skip
        changed = [f"--dataset_{option.split()[0]}", other]
        assert main(["train", *words, *changed, "--resume_from_checkpoint", "last"]) == 2
        assert f"--dataset_{option}, not {other}" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["label", "scores", "dataset_name"])
def test_a_column_that_the_host_takes_for_numbers_is_refused(place, capfd, name):
    (place / "named.csv").write_text(f"text,{name}\n" + "".join(f"{line},{line} too\n" for line in SENTENCES))
    error = refused(place, capfd, "--text_column", "text", name, text="named.csv")
    assert f"named.csv: column {name}" in error and "rename it" in error


def test_arguments_can_be_made_of_others(place):
    arguments = SimCSEArguments(str(place / "out"), use_cpu=True)
    assert replace(arguments, seed=2).save_steps == arguments.save_steps == 125
    silent = SimCSEArguments(str(place / "out"), use_cpu=True, eval_strategy=IntervalStrategy.NO)
    assert not silent.load_best_model_at_end and silent.metric_for_best_model is None


def test_evaluations_by_epoch_set_no_steps(place, caplog):
    SimCSEArguments(str(place / "out"), use_cpu=True, eval_strategy="epoch", save_steps=100)
    assert "save_steps" not in caplog.text


def test_the_encoder_may_be_named_by_another_path_on_resume(place, monkeypatch):
    monkeypatch.chdir(place)
    run(place, "--max_steps", "2", "--model_name_or_path", "./encoder")
    assert run(place, "--max_steps", "4", "--resume_from_checkpoint", "last").steps == 4


def test_an_earlier_run_is_not_overwritten(place, capfd):
    run(place)
    stamp = (place / "out" / "model.safetensors").stat().st_mtime_ns
    error = refused(place, capfd)
    assert "--overwrite_output_dir" in error and "--resume_from_checkpoint last" in error
    assert (place / "out" / "model.safetensors").stat().st_mtime_ns == stamp
    run(place, "--overwrite_output_dir")


def test_tr10_nothing_of_a_run_stays_alive(place):
    models = []
    for number in range(3):
        encoder = build_encoder(str(place / "encoder"), pooler_type="cls", device="cpu")
        arguments = SimCSEArguments(str(place / f"out{number}"), use_cpu=True, max_steps=2, eval_strategy="no",
                                    save_strategy="no", per_device_train_batch_size=16)  # fmt: skip
        trainer = SimCSETrainer(encoder, arguments, Dataset.from_dict({"text": SENTENCES}), loss=InfoNCELoss(encoder))
        trainer.train()
        models.append(weakref.ref(encoder))
        del encoder, trainer
    gc.collect()
    assert [model() for model in models] == [None] * 3


# ---- what is found before the first step ----


def test_ln02_dropout_off_is_refused(place, capfd):
    write_tiny_bert(place / "still", dropout=0.0)
    assert "--dropout 0.1" in refused(place, capfd, encoder="still", loaded=True)
    run(place, "--dropout", "0.1", encoder="still")
    assert [entry["positive_cosine"] for entry in history(place) if "loss" in entry][0] < 0.9999


def test_ln08_one_sentence_in_a_stream(place, capfd):
    (place / "one.txt").write_text("a red door\n")
    assert "1 sentence is not enough" in refused(place, capfd, "--streaming", text="one.txt")


@pytest.mark.parametrize("words", [[], ["--batch_sampler", "no_duplicates"]])
def test_dd08_equal_sentences_are_no_negatives(place, capfd, words):
    (place / "equal.txt").write_text("a red door\n" * 20)
    assert "all sentences are equal" in refused(place, capfd, *words, text="equal.txt")


def test_dd08_equal_tokens_are_no_negatives(place, capfd):
    (place / "cut.txt").write_text("".join(f"a red door {name}\n" for name in ("dog", "rain", "house", "runs")))
    error = refused(place, capfd, "--max_seq_length", "5", text="cut.txt", loaded=True)
    assert "cut.txt: all texts have equal tokens at --max_seq_length 5" in error


def test_dd08_equal_anchors_have_their_hard_negatives(place):
    rows = [f"a red door,a door {number},{text}" for number, text in enumerate(SENTENCES[:20])]
    (place / "triplets.csv").write_text("\n".join(["a,b,c", *rows]))
    run(place, "--text_column", "a", "b", "c", "--max_steps", "2", text="triplets.csv")
    assert all(entry["loss"] > 0 for entry in history(place) if "loss" in entry)


def test_dd08_a_loss_that_stays_0_is_warned_of_once(place, caplog):
    encoder = build_encoder(str(place / "encoder"), pooler_type="cls", device="cpu")
    arguments = SimCSEArguments(str(place / "out"), use_cpu=True, max_steps=4, logging_steps=1, eval_strategy="no",
                                save_strategy="no", per_device_train_batch_size=4)  # fmt: skip
    texts = Dataset.from_dict({"text": ["a red door"] * 16})
    SimCSETrainer(encoder, arguments, texts, loss=InfoNCELoss(encoder)).train()
    assert caplog.text.count("the loss is 0 and nothing is learned") == 1


def test_ln08_the_last_batch_of_one(place, case_inputs):
    """17 lines in batches of 16: the last row contributes nothing and nothing breaks."""
    (place / "tail.txt").write_bytes((case_inputs / "train_tail_17.txt").read_bytes())
    result = run(place, "--max_steps", "-1", "--num_train_epochs", "1", text="tail.txt")
    losses = [entry["loss"] for entry in history(place) if "loss" in entry]
    assert result.steps == 2 and losses[1] == 0 and losses[0] > 0


@pytest.mark.parametrize("batch", [["1"], ["1", "--gradient_accumulation_steps", "64"]])
def test_la10_a_batch_of_one_has_no_negatives(place, capfd, batch):
    assert "no negatives" in refused(place, capfd, "--per_device_train_batch_size", *batch)


def test_la10_accumulation_adds_no_negatives(place, caplog):
    caplog.set_level("INFO", logger="simcse_weince")
    run(place, "--gradient_accumulation_steps", "2", "--max_steps", "2")
    assert "adds no negatives" in caplog.text and "negatives per anchor: 15" in caplog.text


def test_the_negatives_of_a_small_corpus_are_counted(place):
    (place / "ten.txt").write_text("\n".join(SENTENCES[:10]) + "\n")
    run(place, "--max_steps", "2", text="ten.txt")
    assert json.loads((place / "out" / "run.json").read_text())["negatives_per_anchor"] == 9


@pytest.mark.parametrize("name", ["train_empty.txt", "train_only_blank.txt"])
def test_df11_nothing_to_train_on(place, capfd, case_inputs, name):
    (place / name).write_bytes((case_inputs / name).read_bytes())
    assert f"{name}: no usable sentences" in refused(place, capfd, text=name)


def test_df12_one_sentence_and_fewer_than_a_batch(place, capfd, case_inputs, caplog):
    (place / "one.txt").write_bytes((case_inputs / "train_one_line.txt").read_bytes())
    assert "1 sentence is not enough" in refused(place, capfd, text="one.txt")
    (place / "three.txt").write_text("a red door\nthe dog runs\nrain falls\n")
    error = refused(place, capfd, "--dataloader_drop_last", text="three.txt")
    assert "3 sentences are fewer than one batch of 16" in error
    assert run(place, "--max_steps", "2", text="three.txt").steps == 2
    assert "only 3 sentences for a batch of 16" in caplog.text


def test_tk02_equal_ids_after_truncation_are_reported(place, case_inputs, caplog):
    (place / "long.txt").write_bytes((case_inputs / "train_long_prefix.txt").read_bytes())
    run(place, "--max_seq_length", "16", "--max_steps", "2", text="long.txt")
    tokens = json.loads((place / "out" / "run.json").read_text())["tokens"]
    assert (tokens["with_equal_ids"], tokens["redundant"]) == (4, 3) and tokens["truncated"] >= 4
    assert [entry["masked_candidates"] for entry in history(place) if "loss" in entry][0] > 0


def test_tk01_a_length_beyond_the_position_table_is_refused(place, capfd):
    write_tiny_bert(place / "short", max_position_embeddings=40)
    assert "--max_seq_length 64" in refused(place, capfd, "--max_seq_length", "64", encoder="short")


@pytest.mark.parametrize("option", ["--eval_file", "--test_file"])
def test_ev10_a_missing_file_is_found_before_the_encoder(place, capfd, monkeypatch, option):
    monkeypatch.setattr("simcse_weince.sentence.training_run.build_encoder", None)
    assert "missing.tsv" in refused(place, capfd, option, place / "missing.tsv")


def test_sts_data_that_cannot_be_had_names_the_ways_out(place, capfd):
    words = [word for word in command(place) if "pairs.tsv" not in word and word != "--eval_file"]
    assert main(["train", *words]) == 2
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert "--data_dir" in error and "--eval_file" in error and "--eval_strategy no" in error


def test_ev06_selecting_on_the_test_pairs_warns(place, caplog):
    run(place, "--test_file", place / "pairs.tsv", "--max_steps", "2")
    assert "it is optimistic" in caplog.text
    record = json.loads((place / "out" / "run.json").read_text())["graded_pairs"]
    assert record["dev"]["pairs"] == record["test"]["pairs"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "0"], "temperature"),
        (["--gate", "sometimes"], "gate"),
        (["--loss", "infonce", "--gate", "0.5"], "--gate means nothing with --loss infonce"),
        (["--loss", "mnrl-hardness", "--pivot", "0.1"], "--pivot means nothing with --loss mnrl-hardness"),
        (["--hardness_strength", "2"], "--hardness_strength means nothing with --loss weince"),
        (["--shape_", "1"], "unknown option --shape_; did you mean --shape"),
        (["--streaming", "--max_steps", "-1"], "--max_steps"),
        (["--max_train_samples", "0"], "--max_train_samples 0"),
        (["--pooler_type", "avg"], "--mlp_only_train"),
        (["--train_file", "missing.txt"], "missing.txt"),
        (["--text_column", "nosuch"], "plain text has no columns nosuch"),
        (["--data_dir", "nowhere"], "nowhere: --data_dir is no folder"),
        (["--model_name_or_path", "missing-encoder"], "missing-encoder"),
        (["--resume_from_checkpoint", "nowhere"], "nowhere: not a complete checkpoint"),
        (["--dropout", "1.5"], "--dropout 1.5"),
        (["--mini_batch_size", "0"], "--mini_batch_size 0"),
        (["--greater_is_better", "false"], "--greater_is_better false"),
        (["--eval_file", ""], "--eval_file is empty"),
        (["--text_column", "a", ""], "--text_column is empty"),
        (["--resume_from_checkpoint="], "--resume_from_checkpoint is empty"),
        (["--neftune_noise_alpha", "5"], "--neftune_noise_alpha"),
        (["--warmup_ratio", "3"], "--warmup_ratio 3.0 is not between 0 and 1"),
        (["--adam_beta1", "2"], "--adam_beta1 2.0 is not from 0 to below 1"),
        (["--lr_scheduler_kwargs", "{{bad"], "--lr_scheduler_kwargs {bad: not JSON"),
        (["--learning_rate", "-1"], "--learning_rate -1.0"),
        (["--learning_rate", "nan"], "--learning_rate nan"),
        (["--gradient_accumulation_steps", "0"], "--gradient_accumulation_steps 0"),
        (["--per_device_train_batch_size", "0"], "--per_device_train_batch_size 0"),
        (["--per_device_eval_batch_size", "0"], "--per_device_eval_batch_size 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--seed", "4294967296"], "--seed 4294967296"),
        (["--max_steps", "0"], "--max_steps 0"),
        (["--max_steps", "-1", "--num_train_epochs", "0"], "--num_train_epochs 0.0"),
        (["--eval_steps", "-1"], "--eval_steps -1"),
        (["--early_stopping_patience", "0"], "--early_stopping_patience 0"),
        (["--early_stopping_patience", "2", "--eval_strategy", "no"], "--early_stopping_patience"),
        (["--text_column", "a", "a"], "--text_column names a column twice"),
        (["--dataset_split", "test"], "--dataset_split"),
        (["--label_smoothing_factor", "nan"], "--label_smoothing_factor nan is not a finite number"),
        (["--early_stopping_threshold", "inf"], "--early_stopping_threshold inf is not a finite number"),
        (["--output_dir", "{place}/text.txt/out"], "is below, a file"),
    ],
)
def test_wrong_options_are_one_sentence(place, capfd, words, message):
    assert message in refused(place, capfd, *(word.format(place=place) for word in words))


# ---- where it writes, what it asks for ----


def test_pk03_only_the_output_folder_changes(place, tmp_path_factory, monkeypatch):
    """Run from an empty folder, with a nested output folder whose name has spaces."""
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    before = {path for path in place.rglob("*")}
    run(place, out="new folder/run one")
    assert not list(Path.cwd().iterdir())
    new = {path.relative_to(place).parts[0] for path in set(place.rglob("*")) - before}
    assert new == {"new folder", "cache"}


@pytest.mark.usefixtures("untouched_network")
def test_pk05_local_files_need_no_network(place):
    assert run(place).steps == 6
    assert main(["evaluate", str(place / "out"), "--pairs", str(place / "pairs.tsv"), "--bootstrap", "0"]) == 0


@pytest.mark.slow
def test_accelerate_launch_runs_the_script(place):
    script = Path(__file__).parents[1] / "scripts" / "train_simcse.py"
    program = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", str(script)]
    subprocess.run([*program, *command(place)], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=300,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    assert (place / "out" / "run.json").is_file()


# ---- the hub ----


PUSH = ["--push_to_hub", "--hub_model_id", "me/encoder", "--hub_token", "hf_secret"]


def test_what_is_pushed_is_finished_and_holds_no_pickle_no_token_and_no_head(place, uploads):
    run(place, "--max_steps", "2", "--eval_steps", "1", *PUSH)
    [(files, secret)] = uploads
    assert {"model.safetensors", "modules.json", "README.md", "run.json", "training_config.yaml"} <= files
    assert not files & {"training_args.bin", "loss_state.safetensors", ".lock"} and not secret
    assert not [*place.glob("out/**/training_args.bin")] and not (place / "out/loss_state.safetensors").exists()


# ---- the trainer without the command line ----


def test_the_default_metric_is_that_of_the_evaluator(place):
    model = build_encoder(str(place / "encoder"), pooler_type="cls")
    arguments = SimCSEArguments(str(place / "api"), max_steps=2, eval_steps=1, use_cpu=True, report_to="none")
    data = Dataset.from_dict({"text": SENTENCES})
    options = {"model": model, "args": arguments, "train_dataset": data, "loss": WeinceLoss(model)}
    with pytest.raises(ValueError, match="'stsb_spearman' is a score of an STSEvaluator"):
        SimCSETrainer(**options, evaluator=EmbeddingSimilarityEvaluator(["a"], ["b"], [1.0]))
    evaluator = STSEvaluator(read_pairs(place / "pairs.tsv"), "mine")
    both = SimCSETrainer(**options, evaluator=[EmbeddingSimilarityEvaluator(["a"], ["b"], [1.0]), evaluator])
    assert both.args.metric_for_best_model == "eval_mine_spearman_cosine"
    arguments.metric_for_best_model = "stsb_spearman"
    trainer = SimCSETrainer(**options, evaluator=evaluator)
    trainer.train()
    assert trainer.args.metric_for_best_model == "eval_mine_spearman_cosine" and trainer.state.best_metric is not None
    options["args"] = replace(arguments, metric_for_best_model="stsb_spearman", load_best_model_at_end=False)
    other = SimCSETrainer(**options, evaluator=EmbeddingSimilarityEvaluator(["a"], ["b"], [1.0]))
    assert other.args.metric_for_best_model is None  # the host would ask for it at each evaluation


@pytest.mark.parametrize("words", [["--learning_rate", "1e-2"], ["--weight_decay", "0.5"], ["--warmup_steps", "3"]])
def test_a_checkpoint_does_not_go_on_with_another_optimization_which_it_would_not_obey(place, capfd, words):
    run(place, "--max_steps", "2")
    assert main(["train", *command(place, "--resume_from_checkpoint", "last", *words)]) == 2
    assert f"was written with {words[0]}" in capfd.readouterr().err


def test_no_checkpoints_with_the_best_one_to_be_kept_is_said_to_be_impossible(place, caplog):
    parse_training_arguments(command(place, "--save_strategy", "no"))
    assert "--no_load_best_model_at_end" in caplog.text
    caplog.clear()
    parse_training_arguments(command(place, "--save_strategy", "no", "--no_load_best_model_at_end"))
    assert not [record for record in caplog.records if record.name.startswith("simcse_weince")]


@pytest.mark.parametrize("flattened", [False, True])
def test_texts_are_counted_whether_or_not_flash_attention_lays_them_end_to_end(place, flattened):
    encoder = build_encoder(str(place / "encoder"))
    if flattened:
        features = {"input_ids": torch.ones(1, 12, dtype=torch.long), "cu_seq_lens_q": torch.tensor([0, 3, 12])}
        encoder.preprocess = lambda texts, **options: features
    report = _token_report(encoder, ["the man", "the man runs by the river in the city"], 6)
    assert report["texts"] == 2 and report["truncated"] == 1


def test_the_released_objective_takes_no_hard_negatives_and_counts_both_views(place, capfd):
    (place / "triplets.tsv").write_text("a\tb\tc\nthe man\tthe dog\ta river\na city\tpeople\tmusic\n")
    words = ["--loss", "released", "--text_column", "a", "b", "c"]
    assert "takes no hard negatives" in refused(place, capfd, *words, text="triplets.tsv")
    run(place, "--loss", "released", "--max_steps", "1", "--eval_strategy", "no")
    assert json.loads((place / "out" / "run.json").read_text())["negatives_per_anchor"] == 30


def test_layers_are_whole_where_a_loss_asks_for_all_of_them_once_more(place):
    model = build_encoder(str(place / "encoder"), pooler_type="cls_before_pooler")
    arguments = SimCSEArguments(str(place / "api"), max_steps=1, use_cpu=True, report_to="none", eval_strategy="no",
                                gradient_checkpointing=True)  # fmt: skip
    data = Dataset.from_dict({"a": SENTENCES, "b": SENTENCES})
    loss = AdaptiveLayerLoss(model, InfoNCELoss(model, mask_duplicates=False))
    trainer = SimCSETrainer(model=model, args=arguments, train_dataset=data, loss=loss)
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))
