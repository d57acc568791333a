"""Whole runs in two processes (gloo): the same training as in one, resumed bit by bit, evaluated once, launched."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from simcse_weince import InfoNCELoss, SimCSEArguments, SimCSETrainer, STSEvaluator, WeinceLoss
from simcse_weince.run_folder import last_complete_checkpoint
from simcse_weince.sentence.arguments import parse_training_arguments
from simcse_weince.sentence.encoder import build_encoder
from simcse_weince.sentence.pairs import read_pairs
from simcse_weince.sentence.training_run import train
from tests.distributed import launched, run_distributed
from tests.test_training_run import (
    PAIRS,
    SENTENCES,
    RunningLoss,
    assert_equal_runs,
    command,
    history,
    run,
    weights,
)
from tests.tiny_models import write_tiny_bert

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def place(tmp_path):
    """A folder with an encoder, sentences and graded pairs."""
    write_tiny_bert(tmp_path / "encoder")
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES) + "\n")
    (tmp_path / "pairs.tsv").write_text(PAIRS)
    return tmp_path


def train_on(rank, words):
    with launched(rank):
        return train(parse_training_arguments(words))


def losses(place, out):
    return [entry for entry in history(place, out) if "loss" in entry]


@pytest.mark.parametrize("words", [[], ["--mini_batch_size", "3"]], ids=["plain", "cached"])
def test_dd03_two_processes_train_as_one(place, words):
    """Batches of 2 x 8 and of 16 without dropout: the same rows, losses, statistics and weights, also by GradCache.

    By plain gradient descent, to which the length of a gradient matters as well as its direction.
    """
    write_tiny_bert(place / "still", dropout=0.0)
    rows = "".join(f"{a},{b},the train is late\n" for a, b in zip(SENTENCES, SENTENCES[1:], strict=False))
    (place / "pairs.csv").write_text("anchor,positive,negative\n" + rows)
    common = [*words, "--dataloader_drop_last", "--optim", "sgd", "--max_grad_norm", "0", "--learning_rate", "0.003",
              "--pooler_type", "avg", "--mlp_only_train", "false"]  # fmt: skip
    run(place, *common, text="pairs.csv", encoder="still", out="one")
    half = ["--per_device_train_batch_size", "8"]
    run_distributed(2, train_on, command(place, *common, *half, text="pairs.csv", encoder="still", out="two"))
    assert len(losses(place, "one")) == len(losses(place, "two")) == 6
    for one, two in zip(losses(place, "one"), losses(place, "two"), strict=True):
        for name in ("loss", "blend", "positive_cosine", "negative_cosine", "masked_candidates"):
            assert two[name] == pytest.approx(one[name], rel=2e-3, abs=1e-4), name
    start = load_file(place / "still" / "model.safetensors")
    for name, weight in weights(place, "one").items():
        torch.testing.assert_close(weights(place, "two")[name], weight, rtol=0, atol=1e-5)
    assert max((weight - start[name]).abs().max() for name, weight in weights(place, "one").items()) > 1e-2
    record = json.loads((place / "two" / "run.json").read_text())
    assert record["processes"] == 2
    assert (
        record["negatives_per_anchor"] == json.loads((place / "one" / "run.json").read_text())["negatives_per_anchor"]
    )


def test_tr06_resume_of_two_processes_is_the_same_run(place):
    """With dropout, stopped after 2 of 6 steps: weights, losses and statistics are bit-equal."""
    for out in ("whole", "parts"):
        run_distributed(2, train_on, command(place, "--per_device_train_batch_size", "8", out=out))
    for step in (4, 6):
        shutil.rmtree(place / "parts" / f"checkpoint-{step}")
    (place / "parts" / "model.safetensors").unlink()
    words = ["--per_device_train_batch_size", "8", "--resume_from_checkpoint", "last"]
    run_distributed(2, train_on, command(place, *words, out="parts"))
    assert_equal_runs(place, "whole", "parts")


def train_running_loss(rank, place, out, resume):
    with launched(rank):
        encoder = build_encoder(str(place / "encoder"), pooler_type="cls", mlp_only_train=True, device="cpu")
        loss = RunningLoss(encoder, gather_across_devices=True)
        arguments = SimCSEArguments(str(place / out), use_cpu=True, max_steps=4, per_device_train_batch_size=8,
                                    per_device_eval_batch_size=8, eval_strategy="no", save_steps=2,
                                    learning_rate=1e-3)  # fmt: skip
        data = Dataset.from_dict({"text": SENTENCES})
        trainer = SimCSETrainer(encoder, arguments, data, data.select(range(16)), loss)
        trainer.train(resume_from_checkpoint=resume)
        before = loss.criterion.shape_average.item()
        assert trainer.evaluate()["eval_loss"] > 0 and loss.criterion.shape_average.item() == before
        return before, {name: weight.detach().clone() for name, weight in encoder.named_parameters()}


def test_dd11_la04_state_of_the_loss_is_equal_on_ranks_and_survives(place):
    """A running average: equal on both ranks, untouched by evaluation, bit-equal after a stop in the middle."""
    whole = run_distributed(2, train_running_loss, place, "whole", None)
    resumed = run_distributed(2, train_running_loss, place, "parts", str(place / "whole" / "checkpoint-2"))
    assert len({average for average, _ in whole + resumed}) == 1 and whole[0][0] != 4.0
    halfway = load_file(place / "whole" / "checkpoint-2" / "loss_state.safetensors")
    assert halfway["loss.criterion.shape_average"].item() != whole[0][0]
    for name, weight in whole[0][1].items():
        assert torch.equal(weight, whole[1][1][name]) and torch.equal(weight, resumed[0][1][name]), name


def train_counting_saves(rank, place):
    with launched(rank):
        encoder = build_encoder(str(place / "encoder"), pooler_type="avg", device="cpu")
        arguments = SimCSEArguments(str(place / "out"), use_cpu=True, max_steps=2, save_steps=1, eval_strategy="no",
                                    load_best_model_at_end=False, per_device_train_batch_size=8)  # fmt: skip
        saved, save = [], encoder.save_pretrained
        encoder.save_pretrained = lambda folder: (saved.append(Path(folder).parent.name), save(folder))
        trainer = SimCSETrainer(encoder, arguments, Dataset.from_dict({"text": SENTENCES}), loss=InfoNCELoss(encoder))
        trainer.train()
        trainer.save_model()
        return saved


def test_the_first_process_alone_writes_the_encoder(place):
    """The host calls `_save` in every process since transformers 5.24; two that write one folder leave it torn."""
    assert run_distributed(2, train_counting_saves, place) == [["checkpoint-1", "checkpoint-2", "out"], []]


def test_dd05_streams_of_texts_of_different_lengths(place):
    run_distributed(2, train_on, command(place, "--streaming", "--max_steps", "2"))
    assert len(losses(place, "out")) == 2


def evaluate_seven(rank, place):
    with launched(rank):
        encoder = build_encoder(str(place / "encoder"), pooler_type="avg", device="cpu")
        arguments = SimCSEArguments(str(place / "out"), use_cpu=True, max_steps=2, eval_steps=2, save_strategy="no",
                                    load_best_model_at_end=False, per_device_train_batch_size=8)  # fmt: skip
        calls = []

        class Counted(STSEvaluator):
            def __call__(self, *args, **kwargs):
                calls.append(len(self.pairs))
                return super().__call__(*args, **kwargs)

        data = Dataset.from_dict({"text": SENTENCES})
        evaluator = Counted(read_pairs(place / "seven.tsv"), "seven")
        trainer = SimCSETrainer(encoder, arguments, data, loss=InfoNCELoss(encoder), evaluator=evaluator)
        return trainer.evaluate()["eval_seven_spearman_cosine"], calls


def test_dd06_seven_pairs_are_evaluated_once(place):
    (place / "seven.tsv").write_text("".join(PAIRS.splitlines(keepends=True)[:8]))
    alone = STSEvaluator(read_pairs(place / "seven.tsv"), "seven")(
        build_encoder(str(place / "encoder"), pooler_type="avg", device="cpu").eval()
    )
    answers = run_distributed(2, evaluate_seven, place)
    assert [calls for _, calls in answers] == [[7], []]
    assert [score for score, _ in answers] == pytest.approx([alone["seven_spearman_cosine"]] * 2)


def train_with_pooler(rank, place):
    with launched(rank):
        encoder = SentenceTransformer(modules=[Transformer(str(place / "encoder")), Pooling(32, "mean")], device="cpu")
        assert any("pooler" in name for name, _ in encoder.named_parameters())
        arguments = SentenceTransformerTrainingArguments(
            str(place / "out"), max_steps=3, per_device_train_batch_size=8, save_strategy="no", report_to="none",
            use_cpu=True, disable_tqdm=True, logging_steps=1,
        )  # fmt: skip
        loss = WeinceLoss(encoder, gather_across_devices=True)
        trainer = SentenceTransformerTrainer(encoder, arguments, Dataset.from_dict({"text": SENTENCES}), loss=loss)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_dd07_a_pooler_that_nobody_uses(place):
    """BERT's pooler gets no gradient under mean pooling, and two views are one forward."""
    first, second = run_distributed(2, train_with_pooler, place)
    assert len(first) == 3 and first == second


def train_several(rank, place, kind, split):
    with launched(rank):
        encoder = build_encoder(str(place / "encoder"), pooler_type="avg", device="cpu")
        triplets = {"anchor": SENTENCES, "positive": SENTENCES[::-1], "negative": SENTENCES[5:] + SENTENCES[:5]}
        columns = {"texts": ["anchor"], "pairs": ["anchor", "positive"] + ["negative"] * (kind == "columns")}
        data = {name: Dataset.from_dict(triplets).select_columns(chosen) for name, chosen in columns.items()}
        loss = WeinceLoss(encoder, gather_across_devices=True)
        if kind == "losses":
            loss = {"texts": loss, "pairs": InfoNCELoss(encoder, gather_across_devices=True)}
        arguments = SimCSEArguments(str(place / "out"), use_cpu=True, max_steps=4, eval_strategy="no",
                                    save_strategy="no", per_device_train_batch_size=8, logging_steps=1,
                                    multi_dataset_batch_sampler="round_robin",
                                    accelerator_config={"split_batches": split})  # fmt: skip
        trainer = SimCSETrainer(encoder, arguments, data, loss=loss)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", ["columns", "losses"])
def test_several_data_sets_that_differ_cannot_be_gathered(place, kind):
    """In turn, each process takes the next batch, of another data set; unless each batch is split over processes."""
    with pytest.raises(RuntimeError) as error:
        run_distributed(2, train_several, place, kind, False)
    assert str(error.value).count("ValueError: processes cannot gather batches of different kinds") == 2
    assert len(run_distributed(2, train_several, place, kind, True)[1]) == 4


def test_several_data_sets_that_are_alike_are_gathered(place):
    """Single sentences are pairs of their two views."""
    assert len(run_distributed(2, train_several, place, "alike", False)[1]) == 4


# ---- launchers ----


def torchrun(*words):
    """A free port is chosen by the launcher; nothing of ours names one."""
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d"]
    return [*program, "--rdzv-endpoint", "localhost:0", str(ROOT / "scripts" / "train_simcse.py"), *words]


def start(program):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_dd10_no_address_and_no_port_of_ours():
    for path in [*(ROOT / "simcse_weince").rglob("*.py"), *(ROOT / "scripts").rglob("*.*")]:
        if path.suffix in (".py", ".sh", ".yaml"):
            assert not re.search(r"MASTER_\w+.?\]?\s*=[^=]|main_process_port[= ]*[1-9]|29500", path.read_text()), (
                path.name
            )


@pytest.mark.slow
def test_dd06_dd10_two_launches_at_once(place):
    """One report and one summary each, no port in each other's way; in a folder of their own."""
    programs = [
        start(torchrun(*command(place, "--per_device_train_batch_size", "8", "--max_steps", "2", out=out)))
        for out in ("one", "two")
    ]
    for program, out in zip(programs, ("one", "two"), strict=True):
        output, error = program.communicate(timeout=500)
        assert program.returncode == 0, error[-3000:]
        assert output.count("2 steps; the encoder is in") == 1
        assert error.count("negatives per anchor: 15") == error.count("kept 48") == 1
        assert [entry["step"] for entry in history(place, out) if "eval_dev_spearman_cosine" in entry] == [0, 2]
    assert_close = torch.testing.assert_close
    assert_close(weights(place, "one"), weights(place, "two"), rtol=0, atol=0)


@pytest.mark.slow
def test_tr06_two_processes_are_killed_and_resumed(place):
    words = command(place, "--per_device_train_batch_size", "8", out="parts")
    run_distributed(2, train_on, command(place, "--per_device_train_batch_size", "8", out="whole"))
    program = subprocess.Popen(
        torchrun(*words), env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    deadline = time.time() + 300
    while last_complete_checkpoint(place / "parts") is None and program.poll() is None and time.time() < deadline:
        time.sleep(0.01)
    # torchrun gives its processes sessions of their own: alone, they would go on and keep the folder locked.
    workers = psutil.Process(program.pid).children(recursive=True)
    for process in (program, *workers):
        process.kill()
    psutil.wait_procs(workers)
    assert program.wait() == -signal.SIGKILL and not (place / "parts" / "run.json").exists()
    resumed = start(torchrun(*words, "--resume_from_checkpoint", "last"))
    assert (resumed.communicate(timeout=500), resumed.returncode)[1] == 0
    assert_equal_runs(place, "whole", "parts")


@pytest.mark.slow
def test_accelerate_that_starts_one_process_for_two_is_told_of(place):
    """`accelerate launch --cpu --num_processes 2` starts one process unless it is given MPI's host file."""
    program = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launch = start([*program, str(ROOT / "scripts" / "train_simcse.py"), *command(place, "--max_steps", "2")])
    error = launch.communicate(timeout=500)[1]
    assert launch.returncode == 0 and "torchrun --nproc_per_node 2" in error


def test_fsdp_is_refused_before_the_encoder_is_loaded(place, capfd):
    from tests.test_training_run import refused

    assert "--gradient_checkpointing" in refused(place, capfd, "--fsdp", "--fsdp_config", "{}")
