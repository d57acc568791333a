"""The README's blocks run as they stand, and what it names exists."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_three_uses_run_in_order(tmp_path, minilm):
    """Every bash and python block, in a copy of the folders that they read."""
    for name in ("data", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    blocks = re.findall(r"```(bash|python)\n(.*?)```", README, flags=re.DOTALL)
    assert [language for language, _ in blocks] == ["bash", "bash", "python"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    for language, block in blocks:
        program = ["bash", "-euo", "pipefail", "-c", block] if language == "bash" else [sys.executable, "-c", block]
        done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{block}\n{done.stderr[-3000:]}"
    assert (tmp_path / "runs/readme/scores.json").is_file() and (tmp_path / "runs/readme/sentences.npy").is_file()


def test_every_option_it_names_exists():
    from transformers import HfArgumentParser

    from simcse_weince.sentence.arguments import DataArguments, LossArguments, ModelArguments, SimCSEArguments
    from simcse_weince.vision.arguments import EncoderArguments, EvaluationArguments, ImageArguments, VisionArguments

    text: Any = [ModelArguments, DataArguments, LossArguments, SimCSEArguments]
    images: Any = [ImageArguments, EncoderArguments, EvaluationArguments, VisionArguments]
    parsers = HfArgumentParser(text), HfArgumentParser(images)
    known = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    sources = "".join(path.read_text() for path in (ROOT / "simcse_weince" / "commands").glob("*.py"))
    of_accelerate = {"--multi_gpu", "--num_processes", "--cpu"}
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z_0-9-]*", README)) - of_accelerate:
        underscored = "--" + option[2:].replace("-", "_")
        assert underscored in known or f'"{underscored}"' in sources or option in ("--config", "--version"), option


def test_every_file_it_names_exists():
    for name in set(re.findall(r"(?:scripts|data)/[\w/.]+\.(?:sh|py|yaml|md|txt|tsv)", README)):
        assert (ROOT / name).is_file(), name


def test_what_the_migration_table_says_to_write_runs(tiny_bert):
    import torch
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    from simcse_weince import CachedWeinceLoss, InfoNCELoss, Weince, WeinceLoss
    from simcse_weince.sentence.encoder import build_encoder

    table = README[README.index("| what you have | what to write |") :].split("\n\n")[0].splitlines()[2:]
    codes = [code for row in table for code in re.findall(r"`([^`]+)`", row.split("|")[2])]
    model, dims = build_encoder(tiny_bert), [32, 16]
    columns = [model.preprocess([f"{word} {i}" for i in range(12)]) for word in ("the dog", "a house")]
    first, second = (model(dict(column))["sentence_embedding"] for column in columns)
    guided = torch.randn(12, 12)
    losses = {kind.__name__: kind for kind in (Weince, WeinceLoss, CachedWeinceLoss, MatryoshkaLoss)}
    known = {"model": model, "dims": dims, "guided": guided, "first": first, "second": second, **losses}
    results = [eval(code, known) for code in [*codes, "WeinceLoss(model, gate=0.0)"]]
    values = [
        found if isinstance(found, torch.Tensor) else found([dict(column) for column in columns], None)
        for found in results
    ]
    assert len(values) == 7 and all(value.isfinite() for value in values)
    torch.manual_seed(0)
    plain = InfoNCELoss(model.eval())([dict(column) for column in columns])
    torch.testing.assert_close(results[-1]([dict(column) for column in columns]), plain)
