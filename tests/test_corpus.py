"""Reading training sentences: what is kept, what is dropped and counted, what is refused and with which words."""

import bz2
import gzip
import json
import lzma
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from simcse_weince.errors import InputError
from simcse_weince.sentence import corpus as corpus_module
from simcse_weince.sentence.corpus import CorpusOptions, read_corpus
from simcse_weince.sentence.rows import local_source, read_lines

COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.fixture
def read(tmp_path_factory):
    """`read_corpus` with a cache of the test's own."""
    cache = tmp_path_factory.mktemp("cache")

    def read_with_cache(source, **options):
        return read_corpus(source, **{"cache_dir": cache, **options})

    read_with_cache.cache = cache
    return read_with_cache


def texts(corpus) -> list[str]:
    return [row["text"] for row in corpus.dataset]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_df01_blank_lines_are_dropped_and_counted(case_inputs, read):
    corpus = read(case_inputs / "train_blank_lines.txt")
    assert corpus.report.summary() == "read 11 lines, kept 4, dropped 7 empty"
    assert corpus.report.files[0].first == {"empty": [2, 3, 4, 6, 7, 8, 10]}
    assert texts(corpus)[-1] == "Snow fell on the roof."
    assert texts(read(case_inputs / "train_blank_lines.txt", keep_blank=True)).count("") == 7


def test_df02_duplicates_are_reported_and_dropped_on_request(case_inputs, read):
    report = read(case_inputs / "train_duplicates.txt").report
    assert (report.read, report.kept, report.distinct, report.duplicates) == (12, 12, 7, 5)
    assert report.to_dict()["duplicate_rate"] == pytest.approx(5 / 12)
    corpus = read(case_inputs / "train_duplicates.txt", dedupe=True)
    assert texts(corpus)[:2] == ["The lamp is green.", "the lamp is green."]
    assert corpus.report.summary() == "read 12 lines, kept 7, dropped 5 duplicates"
    assert corpus.report.files[0].first == {"duplicate": [2, 3, 5, 9, 12]}


def test_df03_words_that_look_missing_are_text(case_inputs, read):
    corpus = read(case_inputs / "train_na_strings.csv")
    assert texts(corpus) == ["NA", "null", "None", "nan", "N/A, maybe", "ordinary sentence"]
    assert corpus.report.files[0].first == {"empty": [7]}


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("train_unicode_seps.txt", "alpha one end"),
        ("train_crlf.txt", "alpha one"),
        ("train_lone_cr.txt", "alpha one still alpha"),
        ("train_bom.txt", "alpha one"),
        ("train_tabs_quotes.txt", 'He said "no, thanks"\tand left.'),
    ],
    ids=["df06_unicode_separators", "df07_crlf", "df07_lone_cr", "df08_bom", "df13_tabs_and_quotes"],
)
def test_lines_end_at_line_feeds_only(case_inputs, read, name, first):
    corpus = read(case_inputs / name)
    assert (corpus.report.read, corpus.report.kept) == (3, 3)
    assert texts(corpus)[0] == first
    assert not any(re.search("[\r\ufeff\u2028\x85\x0b\x1c]", text) for text in texts(corpus))


def test_df09_other_encodings_are_refused_with_the_remedy(case_inputs, read):
    with pytest.raises(InputError, match=r"train_latin1\.txt: line 2: byte 13 is not utf-8; .*--encoding latin-1"):
        read(case_inputs / "train_latin1.txt")
    assert texts(read(case_inputs / "train_latin1.txt", encoding="latin-1"))[1] == "café au lait"
    with pytest.raises(InputError, match=r"train_utf16\.txt: line 1: .*--encoding utf-16"):
        read(case_inputs / "train_utf16.txt")
    assert texts(read(case_inputs / "train_utf16.txt", encoding="utf-16")) == ["alpha one", "beta two", "gamma three"]
    for nonsense in ("klingon", "base64"):
        with pytest.raises(InputError, match=f"--encoding {nonsense}"):
            read(case_inputs / "train_utf16.txt", encoding=nonsense)


def test_df09_utf16_without_a_mark_is_no_text(tmp_path, read):
    with pytest.raises(InputError, match="--encoding utf-16"):
        read(write(tmp_path / "a.txt", "alpha one\n".encode("utf-16-le")))


def test_df09_utf16_named_but_without_a_mark_is_refused(tmp_path, read):
    with pytest.raises(InputError, match="this is UTF-16; add"):
        read(write(tmp_path / "a.txt", "alpha one\n".encode("utf-16")))
    for content, line in ((b"alpha\nbe\0ta\n", 2), (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", 3)):
        for encoding in ("utf-8", "latin-1"):
            with pytest.raises(InputError, match=f"line {line}: a byte 0, so this is not a text file"):
                read(write(tmp_path / "a.txt", content), encoding=encoding)
    path = write(tmp_path / "a.txt", "alpha one\n".encode("utf-16-le"))
    with pytest.raises(InputError, match=r"a\.txt: .*--encoding utf-16-le"):
        read(path, encoding="utf-16")
    assert texts(read(path, encoding="utf-16-le")) == ["alpha one"]


def test_df11_nothing_usable_is_refused(case_inputs, tmp_path, read):
    for name, message in {
        "train_empty.txt": r"no usable sentences \(0 lines read, 0 kept\)",
        "train_only_blank.txt": r"no usable sentences \(4 lines read, 0 kept\)",
    }.items():
        for options in ({}, {}, {"streaming": True}):  # the second time from the cache
            with pytest.raises(InputError, match=f"{name}: {message}"):
                read(case_inputs / name, **options)
    for name, content in {
        "a.csv": "text\n",
        "b.csv": "",
        "c.tsv": "\n\n",
        "d.jsonl": "\n",
        "e.csv": "sent0,sent1\n",
    }.items():
        with pytest.raises(InputError, match=rf"{name}: no usable sentences \(\d rows read, 0 kept\)"):
            read(write(tmp_path / name, content))


def test_one_line_without_a_final_newline_is_read(case_inputs, read):
    assert texts(read(case_inputs / "train_one_line.txt")) == ["only one sentence without final newline"]


def test_df14_numbers_stay_as_written(case_inputs, read):
    assert texts(read(case_inputs / "train_numeric.csv")) == ["007", "3.10", "1e5", "True", "2024"]


def test_df15_bad_json_lines_are_refused_or_skipped_and_counted(case_inputs, read):
    with pytest.raises(InputError) as refusal:
        read(case_inputs / "pairs.jsonl")
    assert re.findall(r"line (\d+) \((.*?)\)", str(refusal.value)) == [
        ("3", "'sentence1' is null"),
        ("4", "'sentence2' is missing"),
        ("5", "'sentence1' is not text"),
        ("6", "broken JSON"),
    ]
    corpus = read(case_inputs / "pairs.jsonl", skip_bad=True)
    assert corpus.report.columns == corpus.dataset.column_names == ["sentence1", "sentence2"]
    assert corpus.dataset["sentence1"][:] == ["a red door", "the cat naps", "half \ufffd surrogate"]
    assert corpus.report.summary() == "read 8 rows, kept 3, dropped 1 empty, 4 skipped as bad"


def test_df15_missing_cells_of_triplets_are_refused_or_skipped(case_inputs, read):
    path = case_inputs / "train_triplets_missing.csv"
    with pytest.raises(InputError, match=r"line 3 \('hard_neg' is empty\), line 4 \('sent1' is empty\).*--skip_bad"):
        read(path)
    corpus = read(path, skip_bad=True)
    assert corpus.dataset[:] == {"sent0": ["a red door"], "sent1": ["a crimson door"], "hard_neg": ["a blue window"]}
    assert corpus.report.files[0].first == {"bad": [3, 4]}


def test_df16_an_edit_that_keeps_size_and_time_is_seen(tmp_path, read):
    path = write(tmp_path / "train.txt.gz", gzip.compress(b"alpha one\n", mtime=0))
    before = path.stat()
    assert texts(read(path)) == ["alpha one"]
    write(path, gzip.compress(b"alpha two\n", mtime=0))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert texts(read(path)) == ["alpha two"]


@pytest.mark.usefixtures("untouched_network")
def test_pk05_local_files_need_no_network(case_inputs, read):
    assert read(case_inputs / "train_crlf.txt").report.kept == 3
    assert len(list(read(case_inputs / "train_crlf.txt", streaming=True).dataset)) == 3


def test_pk05_a_hub_id_offline_is_one_clear_refusal(read):
    with pytest.raises(
        InputError, match="someone/no-such-set: no such file, and as a hub data set it cannot be loaded"
    ):
        read("someone/no-such-set")
    with pytest.raises(InputError, match=r"trian\.txt: no such file or folder"):
        read("trian.txt")


# ---- formats ----


@pytest.mark.parametrize("compression", ["", "gz", "bz2", "xz"])
def test_all_formats_give_the_same_rows(tmp_path, read, compression):
    sentences = ['He said "no".', "Über, all; that", "  padded  ", "", "last"]
    table = pa.table({"id": [1, 2, 3, 4, 5], "text": sentences})
    parquet.write_table(table, tmp_path / "plain")
    contents = {
        "a.txt": "\n".join(sentences).encode(),
        "a.csv": ('id,text\n1,"He said ""no""."\n2,"Über, all; that"\n3,  padded  \n4,\n5,last\n').encode(),
        "a.tsv": "\ufeffid\ttext\r\n".encode() + "".join(f"{i}\t{s}\r\n" for i, s in enumerate(sentences)).encode(),
        "a.jsonl": "\n".join(json.dumps({"id": 1, "text": s}) for s in sentences).encode(),
        "a.parquet": (tmp_path / "plain").read_bytes(),
    }
    for name, content in contents.items():
        path = tmp_path / (f"{name}.{compression}" if compression else name)
        corpus = read(write(path, COMPRESS[compression](content) if compression else content))
        assert texts(corpus) == ['He said "no".', "Über, all; that", "padded", "last"], name
        assert corpus.report.dropped == {"empty": 1}
        assert corpus.dataset.cache_files, "not memory mapped"
        assert list(read(path, streaming=True).dataset) == list(corpus.dataset)


def test_csv_cells_may_hold_line_ends_and_line_numbers_stay_right(tmp_path, read):
    path = write(tmp_path / "a.csv", 'text,label\n"two\nlines",1\n\n"x",1,surplus\nlast\rword,2\n')
    with pytest.raises(InputError, match=r"line 5 \(3 fields, the header has 2\)"):
        read(path)
    corpus = read(path, skip_bad=True)
    assert texts(corpus) == ["two lines", "last word"]
    assert corpus.report.files[0].first == {"empty": [4], "bad": [5]}
    with pytest.raises(InputError, match="--skip_bad"):  # what was read with it is not taken for the whole file
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", 'text\nfine\n"never closed\nmore\n', r"a\.csv: line 3: unexpected end of data.*\.tsv"),
        ("a.csv", "anchor;positive\na;b\n", r"a\.csv: line 1: one column 'anchor;positive'; separate by commas"),
        ("a.csv", "x,y\na,b\n", r"which column holds the text\? Name it with --text_column: 'x', 'y'"),
        ("a.csv", "text,sent0,sent1\na,b,c\n", r"which column holds the text"),
        ("a.csv", "text,text\na,b\n", r"line 1: two columns have the same name"),
        ("a.txt.gz", gzip.compress(b"alpha\n" * 99, mtime=0)[:-9], r"a\.txt\.gz: cannot be read .*a whole \.gz file"),
        ("a.txt.gz", b"no gzip", r"a\.txt\.gz: cannot be read"),
        ("a.txt.bz2", b"no bzip2", r"a\.txt\.bz2: cannot be read"),
        ("a.txt.xz", b"no xz", r"a\.txt\.xz: cannot be read"),
        ("a.parquet", b"no parquet at all", r"a\.parquet: not a whole parquet file"),
        ("a.docx", b"x", r"a\.docx: unknown kind of file; its name must end in \.txt"),
        ("a.jsonl", '["text"]\n', r"line 1 \(not a JSON object\)"),
        ("a.jsonl", '{"text": "half', r"line 1 \(broken JSON\)"),
        ("a.jsonl", '{"sent0": "a"}\n{"sent0": "a", "sent1": "b"}\n', r"line 1 \('sent1' is missing\)"),
        ("a.txt", b"one\ntwo \xc3", r"a\.txt: line 2: byte 8 is not utf-8"),
    ],
)
def test_unusable_files_are_refused_with_place_and_remedy(tmp_path, read, name, content, message):
    with pytest.raises(InputError, match=message) as refusal:
        read(write(tmp_path / name, content))
    assert "\n" not in str(refusal.value)
    assert not [path for path in read.cache.rglob("*") if path.is_file() and path.stem != "corpus"]


@pytest.mark.parametrize("name", ["long.csv", "long.tsv"])
def test_a_cell_may_be_long(tmp_path, read, name):
    """As long as a page on one line; no more of it is kept than of any text."""
    corpus = read(write(tmp_path / name, "text\n" + "a" * 140_000 + "\nshort\n"))
    assert {"a" * 100_000, "short"} <= set(texts(corpus))


def test_quotes_in_a_tsv_are_text(tmp_path, read):
    path = write(tmp_path / "a.tsv", 'sentence1\tsentence2\n"open\tb\nc\td"\n')
    assert read(path).dataset[:] == {"sentence1": ['"open', "c"], "sentence2": ["b", 'd"']}


@pytest.mark.parametrize(
    ("header", "wanted", "expected"),
    [
        ("id,text", None, ["text"]),
        ("hard_neg,sent1,sent0", None, ["sent0", "sent1", "hard_neg"]),
        ("negative,id,positive,anchor", None, ["anchor", "positive", "negative"]),
        ("query,positive", None, ["query", "positive"]),
        ("a,b,c", "b", ["text"]),
        ("a,b,c", ["c", "a"], ["c", "a"]),
    ],
)
def test_columns_are_chosen_by_request_or_convention(tmp_path, read, header, wanted, expected):
    path = write(tmp_path / "a.csv", f"{header}\n{header.upper()}\n")
    corpus = read(path, text_columns=wanted)
    assert corpus.dataset.column_names == expected
    used = list(corpus.report.files[0].columns)
    assert list(corpus.dataset[0].values()) == [name.upper() for name in used]
    with pytest.raises(InputError, match="no column 'other'; choose with --text_column among"):
        read(path, text_columns="other")


def test_a_lone_unusual_header_is_warned_of(tmp_path, read, caplog):
    assert texts(read(write(tmp_path / "a.csv", "A first sentence.\nA second one.\n"))) == ["A second one."]
    assert "'A first sentence.' is taken for the name of the only column" in caplog.text


def test_parquet_may_hold_dates_that_python_cannot(tmp_path, read):
    dates = pa.array([2**62, 0], pa.timestamp("us"))
    parquet.write_table(pa.table({"text": ["a", "b"], "date": dates}), tmp_path / "a.parquet")
    assert texts(read(tmp_path / "a.parquet")) == ["a", "b"]


def test_parquet_rows_that_are_no_text_are_named(tmp_path, read):
    parquet.write_table(pa.table({"text": ["a", None, "c"], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"row 2 \('text' is null\)"):
        read(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"row 1 \('n' is not text\), row 2"):
        read(tmp_path / "a.parquet", text_columns="n")


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path, read):
    write(tmp_path / "b.txt", "second\n")
    write(tmp_path / "a.csv", "sentence\nfirst\n")
    write(tmp_path / "README.md", "not text")
    write(tmp_path / ".hidden.txt", "not this")
    corpus = read(tmp_path)
    assert texts(corpus) == ["first", "second"] == texts(read([tmp_path / "a.csv", str(tmp_path / "b.txt")]))
    assert [file.name for file in corpus.report.files] == ["a.csv", "b.txt"]
    assert corpus.report.ignored == ["README.md"]
    assert str(tmp_path) not in json.dumps(corpus.report.to_dict())
    write(tmp_path / "c.csv", "sent0,sent1\na,b\n")
    with pytest.raises(InputError, match=r"c\.csv: its text columns \(sent0, sent1\) are not those of a\.csv"):
        read(tmp_path)


def test_a_folder_without_text_is_refused(tmp_path, read):
    write(tmp_path / "README", "nothing")
    with pytest.raises(InputError, match="no file in this folder ends in"):
        read(tmp_path)


def test_the_first_so_many_and_no_more_is_read(tmp_path, read):
    corpus = read(write(tmp_path / "a.txt", "\none\ntwo\nthree\n"), max_samples=2)
    assert texts(corpus) == ["one", "two"]
    assert corpus.report.summary() == "read 3 lines, kept 2, dropped 1 empty"


def test_duplicates_and_the_first_so_many_are_counted_over_all_files(tmp_path, read):
    files = [write(tmp_path / "a.txt", "one\ntwo\n"), write(tmp_path / "b.txt", "two\nthree\nfour\n")]
    corpus = read(files, dedupe=True)
    assert texts(corpus) == ["one", "two", "three", "four"]
    assert [file.dropped for file in corpus.report.files] == [{}, {"duplicate": 1}]
    assert texts(read(files, dedupe=True, max_samples=3)) == ["one", "two", "three"]
    first = read(files, max_samples=2)
    assert texts(first) == ["one", "two"] and [file.read for file in first.report.files] == [2, 0]


def test_distinct_rows_are_counted_over_all_batches(tmp_path, read):
    """More rows than are written at a time: some repeat one of their own batch, some one of another."""
    lines = [f"row {number % 15_000}" for number in range(25_000)] + ["last", "last"]
    corpus = read(write(tmp_path / "a.txt", "\n".join(lines)))
    assert (corpus.report.kept, corpus.report.distinct, corpus.report.duplicates) == (25_002, 15_001, 10_001)
    assert corpus.dataset["text"][:] == lines


@pytest.mark.parametrize("options", [{"max_samples": 0}, {"dedupe": True, "streaming": True}])
def test_senseless_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        CorpusOptions(**options)


@pytest.mark.parametrize("compression", ["", "gz", "bz2", "xz"])
@pytest.mark.parametrize("shift", range(5))
def test_borders_of_the_blocks_that_are_decoded_at_a_time_do_not_matter(tmp_path, shift, compression):
    lines = ["x" * shift, *(f"Ä{i}\r€ 𝄞" for i in range(4000))]
    content = ("\ufeff" + "\r\n".join(lines)).encode()

    def read(content):
        packed = COMPRESS.get(compression, bytes)(content)
        return list(read_lines(local_source(write(tmp_path / f"a.txt.{compression}".rstrip("."), packed))))

    assert read(content) == [line.replace("\r", " ") for line in lines]
    for broken in (content[:-1], content[:-1] + b"x\n", content[:-1] + b"x\n" * 9999):
        with pytest.raises(InputError, match=f"line 4001: byte {len(content) - 4} is not utf-8"):
            read(broken)


# ---- cache ----


def test_the_same_content_is_read_once_whatever_its_name(tmp_path, read, monkeypatch):
    path = write(tmp_path / "a.txt", "alpha\n\nbeta\n")
    first = read(path).report.to_dict()
    write_arrow = corpus_module._write_arrow
    monkeypatch.setattr(corpus_module, "_write_arrow", None)
    again = read(path.rename(tmp_path / "b.txt")).report
    assert again.files[0].name == "b.txt"
    again.files[0].name = "a.txt"
    assert json.dumps(again.to_dict()) == json.dumps(first)
    calls = []
    monkeypatch.setattr(corpus_module, "_write_arrow", lambda *given: calls.append(1) or write_arrow(*given))
    read(tmp_path / "b.txt", keep_blank=True)
    read(tmp_path / "b.txt", encoding="latin-1")
    read(tmp_path / "b.txt", dedupe=True)
    read(tmp_path / "b.txt", use_cache=False)
    assert len(calls) == 4


def test_a_cached_text_is_not_taken_for_a_compressed_one(tmp_path, read):
    """Its bytes are those of a text: decompressed they are nothing."""
    text = "alpha\nbeta\n"
    read(write(tmp_path / "a.txt", text))
    with pytest.raises(InputError, match="a.txt.gz: cannot be read"):
        read(write(tmp_path / "a.txt.gz", text))


def test_several_readers_at_once_agree(tmp_path, read):
    path = write(tmp_path / "a.txt", "".join(f"sentence number {i}\n" for i in range(5000)))
    with ThreadPoolExecutor(6) as pool:
        corpora = list(pool.map(lambda _: read(path, use_cache=False), range(6)))
    assert {corpus.dataset[4999]["text"] for corpus in corpora} == {"sentence number 4999"}
    assert {len(corpus.dataset) for corpus in corpora} == {5000}
    assert sorted(path.name for path in read.cache.rglob("*.*")) == ["corpus.arrow", "corpus.json"]


def test_nothing_is_written_beside_the_data_or_where_one_stands(tmp_path, read, monkeypatch):
    data, here = tmp_path / "data", tmp_path / "here"
    data.mkdir(), here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    read_corpus(write(data / "a.txt", "alpha\n"))
    assert [path.name for path in data.iterdir()] == ["a.txt"]
    assert not list(here.iterdir())
    assert list((tmp_path / "cache" / "simcse_weince").glob("*/corpus.arrow"))


def test_a_cache_folder_that_cannot_be_is_refused(tmp_path):
    path = write(tmp_path / "a.txt", "alpha\n")
    with pytest.raises(InputError, match="choose another folder with --cache_dir"):
        read_corpus(path, cache_dir=path)


def test_the_report_is_saved_without_paths(case_inputs, tmp_path, read):
    corpus = read(case_inputs / "train_blank_lines.txt")
    path = corpus.report.save(tmp_path / "out")
    saved = json.loads(path.read_text())
    assert path.name == "corpus_report.json"
    assert (saved["read"], saved["kept"], saved["dropped"]) == (11, 4, {"empty": 7})
    assert saved["files"][0]["bytes"] == 136
    assert len(saved["files"][0]["sha256"]) == 64


# ---- streaming and hub ----


def test_streaming_is_declared_split_by_file_and_resumed(tmp_path, read):
    for name in "abcd":
        write(tmp_path / f"{name}.txt", f"{name} one\n\n{name} two\n")
    corpus = read(tmp_path, streaming=True)
    assert corpus.dataset.features == datasets.Features({"text": datasets.Value("string")})
    assert corpus.dataset.num_shards == 4
    assert texts(corpus) == texts(read(tmp_path))
    halves = [[row["text"] for row in corpus.dataset.shard(2, index)] for index in range(2)]
    assert sorted(sum(halves, [])) == sorted(texts(corpus))
    iterator = iter(corpus.dataset)
    seen = [next(iterator)["text"] for _ in range(3)]
    state = corpus.dataset.state_dict()
    resumed = read(tmp_path, streaming=True).dataset
    resumed.load_state_dict(state)
    assert seen + [row["text"] for row in resumed] == texts(corpus)
    assert texts(read(tmp_path, streaming=True, max_samples=3)) == texts(corpus)[:3]
    assert "kept" not in corpus.report.to_dict()
    assert corpus.report.summary().startswith("streaming 4 source(s)")


def test_streaming_refuses_a_bad_row_when_it_is_reached(tmp_path, read):
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n{"text": 3}\n{"text": null}\n')
    rows = iter(read(path, streaming=True).dataset)
    assert next(rows) == {"text": "fine"}
    with pytest.raises(InputError, match=r"a\.jsonl: not usable: line 2 \('text' is not text\);"):
        next(rows)
    assert texts(read(path, streaming=True, skip_bad=True)) == ["fine"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_data_set_passes_the_same_cleaning(read, monkeypatch, streaming):
    rows = datasets.Dataset.from_dict({"id": [1, 2, 3], "sentence": [" a b ", "", "c"]})
    asked = []

    def load_dataset(path, name, split, streaming):
        asked.append((path, name, split))
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = read("someone/sentences", config_name="en", split="train[:3]", streaming=streaming)
    assert texts(corpus) == ["a b", "c"]
    assert asked == [("someone/sentences", "en", "train[:3]")]
    if not streaming:
        assert corpus.report.files[0].first == {"empty": [2]}
        assert corpus.report.summary() == "read 3 rows, kept 2, dropped 1 empty"


def test_an_endless_line_is_cut_and_counted(read, tmp_path):
    path = write(tmp_path / "a.txt", "a" * 99_999 + " " + "b" * 50_000 + "\nshort\n" + "c" * 100_000 + "\n")
    for corpus in (read(path), read(path)):  # read, then from the cache
        assert [len(text) for text in texts(corpus)] == [99_999, 5, 100_000]
        assert corpus.report.files[0].cut == 1
        assert corpus.report.summary() == "read 3 lines, kept 3, cut 1 at 100,000 characters"
    assert [len(text) for text in texts(read(path, max_characters=None))] == [150_000, 5, 100_000]
    streamed = read(path, max_characters=4, streaming=True)
    assert [row["text"] for row in streamed.dataset] == ["aaaa", "shor", "cccc"]
    with pytest.raises(ValueError, match="max_characters"):
        read(path, max_characters=0)


def test_one_column_asks_which_and_reads_no_other(read, tmp_path):
    rows = [{"sent0": f"text {i}", "sent1": None, "n": i} for i in range(2)]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="several columns hold text; name one with --text_column: 'sent0', 'sent1'"):
        read(path, one_column=True)
    assert texts(read(path, one_column=True, text_columns="sent0")) == ["text 0", "text 1"]
    with pytest.raises(InputError) as caught:
        read(path, text_columns="n", keep_blank=True)
    assert "not text" in str(caught.value) and "--skip_bad" not in str(caught.value)


def test_names_that_are_not_utf8_are_escaped_in_the_report(tmp_path, read):
    file = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")
    Path(file).write_text("a red door\na blue lamp\n")
    saved = json.loads(read(file).report.save(tmp_path / "out").read_text())
    assert saved["files"][0]["name"] == os.path.basename(file)


def test_an_encoding_that_refuses_everything_is_none(tmp_path, read):
    (tmp_path / "a.txt").write_text("a red door\n")
    with pytest.raises(InputError, match="--encoding undefined: Python knows no such"):
        read(tmp_path / "a.txt", encoding="undefined")
