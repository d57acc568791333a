"""``simcse-weince evaluate`` and ``encode``: what they print and write, and how they refuse."""

import errno
import io
import json
import os
import shutil
import threading

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

import simcse_weince
from simcse_weince.cli import main

PAIRS = "sentence1\tsentence2\tscore\na red door\ta red house\t3\nthe cat\tthe dog\t1\nrain falls\tit rains\t5\n"


@pytest.fixture
def place(tmp_path, tiny_bert):
    (tmp_path / "pairs.tsv").write_text(PAIRS)
    (tmp_path / "text.txt").write_text("the dog runs\n\na red door\n")
    return tmp_path


def refused(capfd, *words):
    assert main([str(word) for word in words]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("simcse-weince: error: ") and "Traceback" not in "".join(lines)
    return lines[-1]


def test_evaluate_prints_and_writes(place, tiny_bert, capfd):
    """Without a stored pooling the first token is used, and the JSON says what was measured, with nothing private."""
    output = place / "new" / "scores.json"
    words = ["evaluate", tiny_bert, "--pairs", str(place / "pairs.tsv"), "--output", str(output), "--bootstrap=50"]
    assert main(words) == 0
    printed = capfd.readouterr().out
    assert "pairs.tsv" in printed and "3 pairs" in printed
    record = json.loads(output.read_text())
    assert record["model"] == "tiny_bert" and record["tasks"][0]["pairs"] == 3 and record["seed"] == 0
    assert len(record["tasks"][0]["files"]["pairs.tsv"]) == 64 and str(place) not in output.read_text()


def test_the_seed_of_evaluate_is_that_of_the_resamples(place, tiny_bert):
    rows = [line.rsplit("\t", 1) for line in PAIRS.splitlines()[1:] * 4]
    text = "".join(f"{pair}{'!' * number}\t{score}\n" for number, (pair, score) in enumerate(rows))
    (place / "many.tsv").write_text("sentence1\tsentence2\tscore\n" + text)
    words = ["evaluate", tiny_bert, "--pairs", str(place / "many.tsv"), "--bootstrap=50", "--output"]
    for seed in ("0", "7", "8"):
        assert main([*words, str(place / seed), "--seed", seed]) == 0
    assert main([*words, str(place / "default")]) == 0
    zero, seven, eight, default = (json.loads((place / name).read_text()) for name in ("0", "7", "8", "default"))
    found = [str(record["tasks"][0]["intervals"]) for record in (zero, seven, eight)]
    assert len(set(found)) == 3 and "None" not in str(found) and seven["seed"] == 7 and default == zero


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["evaluate", "", "--pairs", "{place}/pairs.tsv"], "MODEL"),
        (["evaluate", "m", "--data_dir", ""], "--data_dir"),
        (["evaluate", "m", "--pairs", "{place}/pairs.tsv", ""], "--pairs"),
        (["encode", "m", "{place}/text.txt", "--output="], "--output"),
        (["compare", "--study", ""], "--study"),
        (["compare", "{place}", ""], "RUN_DIR"),
        (["study", "study.yaml", "--output-dir", ""], "--output_dir"),
        (["vision-train", "--images", "", "--output_dir", "{place}/run"], "--images"),
    ],
)
def test_an_empty_word_is_refused_by_its_name(place, capfd, words, name):
    """As of a shell variable that is not set: `--data_dir ""` was this folder, and `--eval_file ""` left out."""
    assert f"{name} is empty" in refused(capfd, *(word.format(place=place) for word in words))


def test_options_may_have_hyphens(place, tiny_bert):
    words = ["evaluate", tiny_bert, "--pairs", str(place / "pairs.tsv"), "--batch-size", "2", "--pooler-type=avg"]
    assert main(words) == 0


def test_the_tokenizer_that_a_folder_lacks_can_be_named(place, tiny_bert, capfd):
    bare = place / "bare"
    shutil.copytree(tiny_bert, bare, ignore=shutil.ignore_patterns("tokenizer*", "vocab*"))
    words = ["evaluate", bare, "--pairs", place / "pairs.tsv"]
    assert "--tokenizer_name" in refused(capfd, *words)
    assert main([*map(str, words), "--tokenizer_name", tiny_bert]) == 0


def test_a_revision_of_the_hub_can_be_named_wherever_an_encoder_is_loaded(place, tiny_bert, monkeypatch):
    asked = []
    real = simcse_weince.sentence.encoder.build_encoder

    def build(model, *, model_revision, **options):
        asked.append(model_revision)
        return real(model, **options)

    monkeypatch.setattr(simcse_weince.sentence.encoder, "build_encoder", build)
    pairs = ["--pairs", str(place / "pairs.tsv"), "--model_revision", "v1.2"]
    assert main(["evaluate", tiny_bert, *pairs]) == 0 and asked == ["v1.2"]
    sentences = str(place / "text.txt")
    main(["diagnose", tiny_bert, sentences, "--model_revision", "v1.3"])  # of two sentences there is no tail
    assert asked == ["v1.2", "v1.3"]


def test_version(capfd):
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"simcse-weince {simcse_weince.__version__}\n"


def test_delimiter_may_be_written_as_an_escape(place, tiny_bert):
    (place / "pairs.csv").write_text(PAIRS)
    assert main(["evaluate", tiny_bert, "--pairs", str(place / "pairs.csv"), "--delimiter", "\\t"]) == 0


def test_ev03_files_of_two_scales(place, tiny_bert, case_inputs, capfd, caplog):
    scores = []
    for name in ("sts_scale05.tsv", "sts_scale01.tsv"):
        assert main(["evaluate", tiny_bert, "--pairs", str(case_inputs / name), "--output", str(place / name)]) == 0
        scores.append(json.loads((place / name).read_text())["tasks"][0]["correlations"]["all"])
    assert scores[0]["spearman"] == scores[1]["spearman"]
    assert scores[0]["pearson"] == pytest.approx(scores[1]["pearson"], abs=1e-12)
    both = [str(case_inputs / name) for name in ("sts_scale05.tsv", "sts_scale01.tsv")]
    assert main(["evaluate", tiny_bert, "--pairs", *both]) == 0
    assert "different score ranges" in caplog.text


def test_ev01_constant_gold_is_undefined(place, tiny_bert, case_inputs, capfd):
    output = place / "scores.json"
    words = ["evaluate", tiny_bert, "--pairs", str(case_inputs / "sts_constant_scores.tsv"), "--output", str(output)]
    assert main(words) == 0
    assert "undefined (constant gold)" in capfd.readouterr().out
    assert json.loads(output.read_text())["tasks"][0]["correlations"]["all"]["spearman"] is None


def test_encode_keeps_every_line(place, tiny_bert, capfd):
    """Row i of the array is line i of the file, blank lines included."""
    words = ["encode", tiny_bert, str(place / "text.txt"), "--output", str(place / "a.npy"), "--cache_dir"]
    assert main([*words, str(place / "cache"), "--pooler_type", "avg"]) == 0
    vectors = np.load(place / "a.npy", allow_pickle=False)
    expected = SentenceTransformer(tiny_bert, device="cpu").encode(["the dog runs", "", "a red door"])
    assert vectors.dtype == np.float32 and "3 embeddings of width 32" in capfd.readouterr().out
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.tsv", "text\nthe dog runs\n\na red door\n"),
        ("a.csv", "text,more\nthe dog runs,1\n\na red door,2\n"),
        ("a.jsonl", '{"text": "the dog runs"}\n\n{"text": "a red door"}\n'),
    ],
)
def test_encode_keeps_blank_lines_of_tables(place, tiny_bert, name, text):
    (place / name).write_text(text)
    words = ["encode", tiny_bert, str(place / name), "--output", str(place / "a.npy"), "--cache_dir"]
    assert main([*words, str(place / "cache"), "--pooler_type", "avg"]) == 0
    expected = SentenceTransformer(tiny_bert, device="cpu").encode(["the dog runs", "", "a red door"])
    np.testing.assert_allclose(np.load(place / "a.npy", allow_pickle=False), expected, atol=1e-6)


def test_what_is_read_is_not_written_over(place, tiny_bert, capfd):
    (place / "link.tsv").symlink_to(place / "pairs.tsv")
    pairs, text = place / "pairs.tsv", place / "text.txt"
    for words in (["evaluate", tiny_bert, "--pairs", pairs, "--output", place / "link.tsv"],
                  ["encode", tiny_bert, text, "--output", text],
                  ["search", tiny_bert, pairs, "--pool", text, "--json", text],
                  ["diagnose", tiny_bert, text, "--report", text],
                  ["vision-eval", tiny_bert, "--images", text, "--output", text]):  # fmt: skip
        assert "would replace what is read" in refused(capfd, *words)
    assert (place / "pairs.tsv").read_text() == PAIRS and "dog" in (place / "text.txt").read_text()


def test_a_file_of_a_folder_that_is_read_is_not_written_over(place, tiny_bert, capfd):
    """Neither a part of the encoder nor a file of the data; a result, which may lie there too, is written anew."""
    model, data = place / "model", place / "data"
    shutil.copytree(tiny_bert, model)
    data.mkdir()
    (data / "a.txt").write_text("the dog runs\na red door\n")
    (data / "b.txt").symlink_to(place / "text.txt")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    text, pairs = place / "text.txt", place / "pairs.tsv"
    for words in (["encode", model, data, "--output", data / "a.txt"],
                  ["encode", model, data, "--output", data / "b.txt"],
                  ["encode", model, text, "--output", model / "config.json"],
                  ["encode", tiny_bert, text, "--tokenizer_name", model, "--output", model / "vocab.txt"],
                  ["evaluate", model, "--pairs", pairs, "--output", model / "vocab.txt"],
                  ["evaluate", tiny_bert, "--data_dir", data, "--output", data / "a.txt"],
                  ["search", tiny_bert, pairs, "--pool", data, "--json", data / "a.txt"],
                  ["search", model, pairs, "--pool", text, "--plot", model / "vocab.txt"],
                  ["diagnose", model, text, "--json", model / "config.json"],
                  ["diagnose", tiny_bert, data, "--report", data / "a.txt"],
                  ["vision-eval", model, "--images", text, "--output", model / "config.json"],
                  ["vision-eval", tiny_bert, "--images", data, "--output", data / "a.txt"]):  # fmt: skip
        assert "would replace what is read" in refused(capfd, *words)
    assert before == {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    for words in (["evaluate", model, "--pairs", pairs, "--bootstrap", 0, "--output", model / "scores.json"],
                  ["encode", model, data, "--cache_dir", place / "cache", "--output", data / "a.npy"]):  # fmt: skip
        for _ in range(2):
            assert main([str(word) for word in words]) == 0
            assert words[-1].stat().st_size


@pytest.mark.parametrize(
    "words",
    ["evaluate {bert} {option} {missing} {option} {pairs}", "search {bert} {pairs} {option} {missing} {option} {text}"],
)
def test_a_list_that_is_given_in_two_parts_is_one(place, tiny_bert, capfd, words):
    option = "--pairs" if words.startswith("evaluate") else "--pool"
    text, pairs, missing = place / "text.txt", place / "pairs.tsv", place / "missing.txt"
    pairs.write_text("anchor\tpositive\n" + "".join(f"door {number}\thouse {number}\n" for number in range(20)))
    words = words.format(bert=tiny_bert, option=option, text=text, pairs=pairs, missing=missing).split()
    assert "missing.txt" in refused(capfd, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evalute"], "unknown command evalute"),
        (["evaluate"], "MODEL"),
        (["evaluate", "{bert}", "--pairs", "missing.tsv"], "missing.tsv"),
        (["evaluate", "{bert}", "--tasks", "sts99"], "sts99"),
        (["evaluate", "{bert}", "--data_dir", "nowhere"], "nowhere"),
        (["evaluate", "{bert}", "--bootstrap", "-1"], "--bootstrap"),
        (["evaluate", "{bert}", "--batch_size", "0"], "--batch_size"),
        (["evaluate", "{bert}", "--seed", "-5"], "--seed: -5 is less than 0"),
        (["evaluate", "{bert}", "--pairs", "pairs.tsv", "--delimiter", "abc"], "--delimiter: 'abc' is not one"),
        (["evaluate", "{bert}", "--pairs", "pairs.tsv", "--tasks", "stsb"], "--tasks does not go with --pairs"),
        (["evaluate", "{bert}", "--pairs", "pairs.tsv", "--split", "dev"], "--split does not go with --pairs"),
        (["evaluate", "{bert}", "--pairs", "pairs.tsv", "--data_dir", "."], "--data_dir does not go with --pairs"),
        (["evaluate", "{bert}", "--data_dir", ".", "--skip_bad"], "--skip_bad goes only with --pairs"),
        (["evaluate", "{bert}", "--pairs", "pairs.tsv", "{place}/pairs.tsv"], "named twice"),
        (["evaluate", "{bert}", "--pairs", "{place}/pairs.tsv", "--output", "{place}"], "--output"),
        (["evaluate", "{place}/missing", "--pairs", "{place}/pairs.tsv"], "missing"),
        (["evaluate", "{place}", "--pairs", "{place}/pairs.tsv"], "no config.json"),
        (["encode", "{bert}", "missing.txt", "--output", "{place}/a.npy"], "missing.txt"),
        (["encode", "{bert}", "{place}/text.txt"], "--output"),
        (["encode", "{bert}", "{place}/text.txt", "--output", "{place}/text.txt/a.npy"], "--output"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(place, tiny_bert, capfd, monkeypatch, words, message):
    monkeypatch.chdir(place)
    assert message in refused(capfd, *(word.format(bert=tiny_bert, place=place) for word in words))


def test_a_full_disk_is_one_sentence_and_leaves_nothing(place, tiny_bert, capfd, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    message = refused(capfd, "encode", tiny_bert, place / "text.txt", "--output", place / "new" / "a.npy",
                      "--cache_dir", place / "cache")  # fmt: skip
    assert message.endswith(f"{place / 'new' / 'a.npy'}: No space left on device")
    assert not list((place / "new").iterdir())


def test_encode_asks_for_the_column_and_writes_no_nan(place, tiny_bert, capfd):
    (place / "table.tsv").write_text("sent0\tsent1\na red door\t\nrain falls\t\n")
    words = ["encode", tiny_bert, place / "table.tsv", "--output", place / "a.npy", "--cache_dir", place / "cache"]
    assert "--text_column: 'sent0', 'sent1'" in refused(capfd, *words)
    assert main([*map(str, words), "--text_column", "sent0"]) == 0
    weights = load_file(f"{tiny_bert}/model.safetensors")
    weights["embeddings.position_embeddings.weight"][4] = float("nan")  # [CLS] and [SEP] alone do not reach it
    save_file(weights, f"{tiny_bert}/model.safetensors", metadata={"format": "pt"})
    words[2:5] = [place / "text.txt", "--output", place / "b.npy"]
    (place / "text.txt").write_text("the dog\n\na red door house\n")
    assert "text.txt: sentence 3: its embedding is not finite" in refused(capfd, *words, "--batch_size", 1)
    assert not (place / "b.npy").exists()


def test_evaluate_refuses_an_encoder_that_gives_nan(place, tiny_bert, capfd):
    weights = load_file(f"{tiny_bert}/model.safetensors")
    save_file({name: weight * float("nan") for name, weight in weights.items()}, f"{tiny_bert}/model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    words = ["evaluate", tiny_bert, "--pairs", place / "pairs.tsv", "--output", place / "scores.json"]
    message = refused(capfd, *words)
    assert f"{tiny_bert}: an embedding is not finite" in message and "--torch_dtype" in message
    assert not (place / "scores.json").exists()


def test_encode_writes_into_a_pipe(place, tiny_bert):
    os.mkfifo(place / "pipe")
    received = []
    reader = threading.Thread(target=lambda: received.append((place / "pipe").read_bytes()), daemon=True)
    reader.start()
    words = ["encode", tiny_bert, str(place / "text.txt"), "--output", str(place / "pipe")]
    assert main([*words, "--cache_dir", str(place / "cache")]) == 0
    reader.join(timeout=10)
    assert np.load(io.BytesIO(received[0]), allow_pickle=False).shape == (3, 32)


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["evaluate", "--help"], ["encode", "--help"]])
def test_help(words, capfd):
    try:
        assert main(words) == 0
    except SystemExit as stop:
        assert stop.code == 0
    assert "usage: simcse-weince" in capfd.readouterr().out


@pytest.mark.usefixtures("untouched_network")
def test_pk05_evaluate_and_encode_without_network(place, tiny_bert):
    assert main(["evaluate", tiny_bert, "--pairs", str(place / "pairs.tsv")]) == 0
    words = ["encode", tiny_bert, str(place / "text.txt"), "--output", str(place / "a.npy")]
    assert main([*words, "--cache_dir", str(place / "cache")]) == 0
