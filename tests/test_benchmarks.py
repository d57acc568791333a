"""The benchmark scripts run, at a size of nothing, so that they are there when someone has the machine for them."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts" / "benchmarks"


def run(name: str, arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> list[str]:
    """Lines that a script prints."""
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_gpu_script_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    sizes = "--device cpu --layers 1 --width 24 --batches 8 20 --mini_batch_size 8 --repetitions 3 --float32"
    lines = run("gpu.py", sizes, monkeypatch, capsys)
    assert [int(line.split()[0]) for line in lines[-2:]] == [8, 20]
    assert all(float(cell) > 0 for line in lines[-2:] for cell in (line.split()[1], line.split()[2], line.split()[6]))
    assert all(len(line.split()) == 14 and float(line.split()[10]) > -100 for line in lines[-2:])


def test_criterion_speed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    lines = run("criterion_speed.py", "--sizes 16 --repetitions 2", monkeypatch, capsys)
    ratios = {line.split("  ")[0]: float(line[34:].split()[0]) for line in lines[2:]}
    assert ratios.keys() == {"WEINCE / InfoNCE", "WEINCE, likelihood / InfoNCE", "WEINCE / floor", "InfoNCE / floor"}
    assert min(ratios.values()) > 0


def test_encode_speed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path, tiny_bert: str):
    (tmp_path / "text.txt").write_text("a man in a house\nwater\na man in a house\n")
    arguments = f"--train_file {tmp_path / 'text.txt'} --model {tiny_bert} --repetitions 2"
    line = run("encode_speed.py", arguments, monkeypatch, capsys)[-1]
    assert float(line.split()[1]) > 0 and "3 sentences, 2 distinct" in line
