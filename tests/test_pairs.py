"""Graded pairs: no row is lost, merged or misread, and what cannot be used is named."""

import gzip
import hashlib
import logging
import socket
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from simcse_weince.errors import InputError
from simcse_weince.sentence.pairs import TASKS, _ends, concatenate, load_sts, read_pair_files, read_pairs


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def test_df04_quotation_marks_in_a_tsv_are_text(case_inputs):
    pairs = read_pairs(case_inputs / "sts_quotes.tsv")
    assert pairs.scores.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert pairs.first[0] == '"Go home," she said' and pairs.first[2] == '"unclosed start'


def test_df04_a_csv_keeps_its_quoting(tmp_path):
    path = write(tmp_path / "p.csv", 'sentence1,sentence2,score\n"a, b","say ""x""\nagain",1\nc,d,2\n')
    pairs = read_pairs(path)
    assert pairs.first == ["a, b", "c"] and pairs.second == ['say "x"\nagain', "d"]
    with pytest.raises(InputError, match="q.csv: line 3: unexpected end of data"):
        read_pairs(write(tmp_path / "q.csv", 'sentence1,sentence2,score\na,b,1\n"unclosed,b,1\nc,d,2\n'))


def test_df04_a_wrong_number_of_fields_is_named_with_its_line(tmp_path):
    path = write(tmp_path / "p.tsv", "sentence1\tsentence2\tscore\na\tb\t1\nc\td\ne\tf\t3\ttoo much\ng\th\t4\n")
    with pytest.raises(InputError, match="p.tsv: .*line 3: 2 fields, .*has 3; line 4: 4 fields, .*has 3"):
        read_pairs(path)
    assert read_pairs(path, skip_bad=True).first == ["a", "g"]


def test_df05_original_stsb_layout_has_a_varying_number_of_columns(case_inputs, tmp_path):
    pairs = read_pairs(case_inputs / "sts_raw_layout.csv")
    assert pairs.scores.tolist() == [5.0, 1.2, 3.4, 0.0]
    assert pairs.first[2] == 'Use a "soft" cloth.' and pairs.second[1] == "The cat slept."
    row = "main-news\tx\t2000\t0001\t{}\tone\ttwo\n"
    with pytest.raises(InputError, match="line 2: 6 fields, 7 or more are needed; line 3: score '' is not a number"):
        read_pairs(write(tmp_path / "p.csv", row.format(1) + "main-news\tx\t2000\t1\t2\tone\n" + row.format("")))


@pytest.mark.parametrize("folder", ["stsb", "senteval/STS/STSBenchmark"])
def test_df05_stsb_has_its_published_sizes(shared, folder):
    sizes = [len(read_pairs(shared / "data" / folder / f"sts-{split}.csv")) for split in ("train", "dev", "test")]
    assert sizes == [5749, 1500, 1379]


def test_df05_another_size_than_the_published_one_is_reported(tmp_path, caplog):
    write(tmp_path / "sts-dev.csv", "main-news\tx\t2000\t0001\t1.0\tone\ttwo\n")
    assert len(load_sts("stsb", "dev", tmp_path)) == 1
    assert "stsb dev has 1 pairs, the published set has 1500" in caplog.text


def test_df06_unicode_separators_do_not_end_a_line(tmp_path):
    odd = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh"
    for name in ("p.tsv", "p.csv"):
        separator = "\t" if name == "p.tsv" else ","
        rows = (["sentence1", "sentence2", "score"], [odd, "x", "1"], ["y", odd, "2"])
        pairs = read_pairs(write(tmp_path / name, "\r\n".join(separator.join(row) for row in rows)))
        assert pairs.first == [odd.replace("\r", " "), "y"]


def test_df08_byte_order_mark_semicolons_and_decimal_commas(case_inputs, caplog):
    path = case_inputs / "sts_bom_excel.csv"
    pairs = read_pairs(path)
    assert pairs.scores.tolist() == [4.2, 0.3, 4.8] and pairs.second[2] == "he is playing chess"
    assert "read with delimiter ';' and decimal sign ','" in caplog.text
    assert read_pairs(path, delimiter=";", decimal=",").scores.tolist() == [4.2, 0.3, 4.8]
    with pytest.raises(InputError, match="does not name the columns"):
        read_pairs(path, delimiter=",")
    with pytest.raises(InputError, match="line 2: score '4,2' is not a number"):
        read_pairs(path, decimal=".")


def test_df09_another_encoding_is_named_and_can_be_chosen(tmp_path):
    path = write(tmp_path / "p.tsv", "sentence1\tsentence2\tscore\ncafé\tb\t1\n", "latin-1")
    with pytest.raises(InputError, match="p.tsv: line 2: byte 29 is not utf-8; .*--encoding latin-1"):
        read_pairs(path)
    assert read_pairs(path, encoding="latin-1").first == ["café"]
    path = write(tmp_path / "q.tsv", "sentence1\tsentence2\tscore\ncafé\tb\t1\n", "utf-16")
    with pytest.raises(InputError, match="q.tsv: line 1: .*--encoding utf-16"):
        read_pairs(path)
    assert read_pairs(path, encoding="utf-16").first == ["café"]


def test_df11_header_only_and_empty_files_hold_no_pairs(tmp_path):
    header = write(tmp_path / "sts_header_only.tsv", "sentence1\tsentence2\tscore\n")
    with pytest.raises(InputError, match=r"sts_header_only.tsv: no usable pairs \(0 rows read, 0 kept\)"):
        read_pairs(header)
    with pytest.raises(InputError, match=r"no usable pairs \(0 rows read, 0 kept\)"):
        read_pairs(write(tmp_path / "empty.tsv", ""))


def test_df13_separators_inside_tsv_sentences_stay_there(tmp_path):
    pairs = read_pairs(write(tmp_path / "p.tsv", "s1\ts2\tlabel\na, b; c\td,e\t0.5\n"))
    assert (pairs.first, pairs.second, pairs.scores.tolist()) == (["a, b; c"], ["d,e"], [0.5])


def test_df15_unusable_json_lines_are_named_or_skipped(tmp_path, caplog):
    lines = [
        '{"sentence1": "a", "sentence2": "b", "score": 1, "extra": [1]}',
        "",
        '{"sentence1": null, "sentence2": "b", "score": 1}',
        '{"sentence1": "only one"}',
        '{"sentence1": 7, "sentence2": "seven", "score": 1}',
        '{"sentence1": "bad", }',
        '{"sentence1": "a", "sentence2": "b", "score": true}',
        '{"sentence1": "half \\ud800 surrogate", "sentence2": "x", "score": 2}',
    ]
    path = write(tmp_path / "p.jsonl", "\n".join(lines))
    with pytest.raises(InputError, match="line 3: .*line 4: .*line 5: .*line 6: .*line 7: ") as refusal:
        read_pairs(path)
    assert "line 1:" not in str(refusal.value) and "line 2:" not in str(refusal.value)
    pairs = read_pairs(path, skip_bad=True)
    assert pairs.first == ["a", "half \ufffd surrogate"] and "unusable rows skipped: 5" in caplog.text


def test_ev03_scores_are_never_clipped_and_mixed_scales_are_reported(case_inputs, caplog):
    fives, ones = (read_pairs(case_inputs / f"sts_scale{scale}.tsv") for scale in ("05", "01"))
    assert fives.scale == (0.3, 4.8) and ones.scale == (0.06, 0.96)
    np.testing.assert_array_equal(fives.positives, ones.positives)
    assert not caplog.records
    joined = concatenate("both", [fives, ones])
    assert "different score ranges (sts_scale05.tsv 0.3..4.8, sts_scale01.tsv 0.06..0.96)" in caplog.text
    assert joined.parts == (("sts_scale05.tsv", slice(0, 6)), ("sts_scale01.tsv", slice(6, 12)))
    np.testing.assert_array_equal(joined.scores[joined.parts[1][1]], ones.scores)


def test_ev04_scores_that_are_strings_become_numbers(case_inputs):
    pairs = read_pairs(case_inputs / "sts_string_scores.jsonl")
    assert pairs.scores.dtype == np.float64 and pairs.scores.tolist() == [1.0, 2.0, 10.0, 9.5, 0.0, 3.0]


@pytest.mark.parametrize("score", ["N/A", "", "nan", "inf", "4,2"])
def test_ev04_a_score_that_is_no_number_is_named_with_its_line(tmp_path, score):
    """As is one of 400 digits in a .jsonl."""
    with pytest.raises(InputError, match="q.jsonl.*line 1: score 9+ is not a number"):
        read_pairs(write(tmp_path / "q.jsonl", '{"sentence1": "a", "sentence2": "b", "score": %s}\n' % ("9" * 400)))
    path = write(tmp_path / "p.tsv", f"sentence1\tsentence2\tscore\na\tb\t1\n\nc\td\t{score}\n")
    with pytest.raises(InputError, match=f"p.tsv.*line 4: score '{score}' is not a number"):
        read_pairs(path)


def test_ev10_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="missing.tsv: no such file"):
        read_pairs(tmp_path / "missing.tsv")


def test_columns_are_found_by_name(tmp_path):
    path = write(tmp_path / "p.csv", "id, Left ,right,how close\n1,a,b,3\n")
    with pytest.raises(InputError, match="line 1 does not name the columns sentence1, sentence2, score"):
        read_pairs(path)
    assert read_pairs(path, columns=("Left", "right", "how close")).scores.tolist() == [3.0]
    sick = write(tmp_path / "q.txt", "pair_ID\tsentence_A\tsentence_B\trelatedness_score\r\n1\ta\tb\t3.3\r\n")
    assert read_pairs(sick).scores.tolist() == [3.3] and read_pairs(sick).second == ["b"]
    spreadsheet = write(tmp_path / "r.csv", "sentence1,sentence2,score,,\na,b,3,,\n")
    assert read_pairs(spreadsheet).scores.tolist() == [3.0]
    with pytest.raises(ValueError, match="columns"):
        read_pairs(path, columns=("left", "right"))
    with pytest.raises(ValueError, match="delimiter"):
        read_pairs(path, delimiter="::")


def test_a_name_that_is_there_is_the_column_itself(tmp_path):
    path = write(tmp_path / "p.csv", "sentence1,sentence2,Score,score\na,b,1,5\nc,d,2,4\n")
    for name, scores in (("score", [5, 4]), ("Score", [1, 2])):
        assert read_pairs(path, columns=["sentence1", "sentence2", name]).scores.tolist() == scores


def test_a_first_line_without_end_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match=r"p\.csv: line 1: field larger than field limit"):
        read_pairs(write(tmp_path / "p.csv", "x" * 10_000_001 + "\n"))


def test_compressed_files_and_their_checksum(tmp_path):
    text = b"sentence1,sentence2,score\na,b,1\n"
    (tmp_path / "p.csv.gz").write_bytes(gzip.compress(text))
    pairs = read_pairs(tmp_path / "p.csv.gz")
    assert pairs.first == ["a"]
    assert pairs.files == {"p.csv.gz": hashlib.sha256((tmp_path / "p.csv.gz").read_bytes()).hexdigest()}
    assert pairs.sha256 == pairs.files["p.csv.gz"]


def test_pairs_in_parquet_keep_their_numbers(tmp_path):
    columns = {"s1": ["a", "c", None], "s2": ["b", "d", "f"], "score": [0.25, 4, 1]}
    parquet.write_table(pa.table(columns), tmp_path / "p.parquet")
    with pytest.raises(InputError, match="p.parquet: .*row 3: empty sentence"):
        read_pairs(tmp_path / "p.parquet")
    assert read_pairs(tmp_path / "p.parquet", skip_bad=True).scores.tolist() == [0.25, 4.0]


SIZES = {"sts12": 3108, "sts13": 1500, "sts14": 3750, "sts15": 3000, "sts16": 1186, "stsb": 1379, "sickr": 4927}


@pytest.mark.parametrize("folder", [".", "senteval", "senteval/STS"])
def test_every_test_set_is_found_in_the_senteval_layout(shared, folder, caplog):
    sets = [load_sts(task, data_dir=shared / "data" / folder) for task in TASKS]
    assert {pairs.name: len(pairs) for pairs in sets} == SIZES
    assert not caplog.records
    assert [part for part, _ in sets[1].parts] == ["FNWN", "OnWN", "headlines"]
    assert not any(file.startswith("/") for pairs in sets for file in pairs.files)
    assert sets[-1].note == "SICK-R test split, 4,927 pairs, not the 9,927 of mteb/sickr-sts"
    assert sets[-1].scale == (1.0, 5.0)


@pytest.mark.parametrize("task", ["sts12", "sts13", "sts14", "sts15", "sts16"])
def test_original_layout_has_the_same_pairs(shared, task):
    original = load_sts(task, data_dir=shared / "data" / "sts_original")
    tokenised = load_sts(task, data_dir=shared / "data" / "senteval")
    np.testing.assert_array_equal(original.scores, tokenised.scores)
    assert original.parts == tokenised.parts
    assert not any("http" in sentence for sentence in original.second[:1500:100])


def test_unequal_inputs_and_scores_are_refused(tmp_path):
    folder = tmp_path / "STS14-en-test"
    folder.mkdir()
    write(folder / "STS.input.news.txt", "a\tb\nc\td\ne\tf\n")
    write(folder / "STS.gs.news.txt", "1\n\n3\n")
    pairs = load_sts("sts14", data_dir=tmp_path)
    assert pairs.first == ["a", "e"] and pairs.scores.tolist() == [1.0, 3.0]
    write(folder / "STS.input.news.txt", "a\tb\n\ne\n")
    write(folder / "STS.gs.news.txt", "1\n2\n3\n")
    with pytest.raises(InputError, match="STS14-en-test/STS.input.news.txt.*line 2: no tab.*line 3: no tab"):
        load_sts("sts14", data_dir=tmp_path)
    write(folder / "STS.gs.news.txt", "1\n3\n")
    with pytest.raises(InputError, match="STS.input.news.txt: 3 lines, but STS.gs.news.txt has 2"):
        load_sts("sts14", data_dir=tmp_path)


def test_unknown_tasks_splits_and_folders_are_named(tmp_path):
    with pytest.raises(InputError, match="unknown STS task 'sts17'"):
        load_sts("sts17", data_dir=tmp_path)
    with pytest.raises(InputError, match="sts12 has no 'dev' split"):
        load_sts("sts12", "dev", tmp_path)
    with pytest.raises(InputError, match=r"dev split of stsb is not there; looked for STSBenchmark/sts-dev.csv"):
        load_sts("stsb", "dev", tmp_path)


def test_pk05_an_unreachable_hub_ends_in_one_sentence(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(InputError, match="sentence-transformers/stsb cannot be had .*--data_dir.*STSBenchmark"):
        load_sts("stsb", "dev", cache_dir=str(tmp_path))


@pytest.mark.parametrize(
    "task, split, rows, repository, hub_split",
    [
        ("stsb", "dev", 1500, "sentence-transformers/stsb", "validation"),
        ("sts12", "test", 3108, "mteb/sts12-sts", "test"),
        ("sickr", "test", 9927, "mteb/sickr-sts", "test"),
    ],
)
def test_sets_of_the_hub(monkeypatch, caplog, task, split, rows, repository, hub_split):
    import datasets

    def load(name, split, cache_dir):
        assert (name, split, cache_dir) == (repository, hub_split, "cache")
        return datasets.Dataset.from_dict({"sentence1": ["a"] * rows, "sentence2": ["b"] * rows, "score": [0.5] * rows})

    monkeypatch.setattr(datasets, "load_dataset", load)
    pairs = load_sts(task, split, cache_dir="cache")
    assert len(pairs) == rows and list(pairs.files) == [repository]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    if task == "sickr":
        assert pairs.split == "all" and pairs.note.startswith("SICK-R of mteb/sickr-sts, 9,927 pairs of all splits")
    else:
        assert pairs.split == split and not pairs.note


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path):
    paths = [tmp_path / "x" / "a" / "dev.tsv", tmp_path / "x" / "b" / "dev.tsv", tmp_path / "y" / "a" / "dev.tsv"]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text(f"sentence1\tsentence2\tscore\n{path.parent.name}\tred\t1\n")
    assert read_pair_files(paths[:1]).name == "dev.tsv"
    two, three = read_pair_files(paths[:2]), read_pair_files(paths)
    assert list(two.files) == [name for name, _ in two.parts] == ["a/dev.tsv", "b/dev.tsv"]
    assert list(three.files) == ["x/a/dev.tsv", "x/b/dev.tsv", "y/a/dev.tsv"] and len(three) == 3
    assert _ends([Path("/dev.tsv"), Path("/a/dev.tsv")], 2) == ["dev.tsv", "a/dev.tsv"]
    (tmp_path / "link.tsv").symlink_to(paths[0])
    for twice in (paths[0], tmp_path / "link.tsv", tmp_path / "x" / "b" / ".." / "a" / "dev.tsv"):
        with pytest.raises(InputError, match="named twice"):
            read_pair_files([*paths, twice])
