"""Graded sentence pairs: one's own csv, tsv and jsonl files, and the STS sets, read without losing a row.

Nothing here loads a model or, with a local folder, touches the network.
"""

import csv
import gzip
import hashlib
import io
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from simcse_weince.errors import InputError

logger = logging.getLogger(__name__)

# Task -> column of the table that SimCSE's evaluation prints, in its order.
TASKS = {f"sts{year}": f"STS{year}" for year in range(12, 17)} | {"stsb": "STSBenchmark", "sickr": "SICKRelatedness"}
_SIZES = {"sts12": 3108, "sts13": 1500, "sts14": 3750, "sts15": 3000, "sts16": 1186, "sickr": 4927}
_STSB_SIZES = {"train": 5749, "dev": 1500, "test": 1379}

# Folders in which the files of a task are looked for ("" is the given folder itself).
_ROOTS = ("", "STS", "senteval/STS", "senteval")

_NAMES = ("sentence1", "sentence2", "score")
_SYNONYMS = (
    ("sentence1", "sentencea", "sent1", "s1", "text1", "texta"),
    ("sentence2", "sentenceb", "sent2", "s2", "text2", "textb"),
    ("score", "scores", "label", "labels", "similarity", "similarityscore", "relatednessscore", "gold"),
)

# Line number with sentence 1, sentence 2 and score as they stand there, or with what is wrong in that line.
_Row = tuple[int, Sequence[object] | str]


@dataclass(frozen=True, eq=False)
class GradedPairs:
    """Sentence pairs with a human similarity score.

    Attributes:
        name: Task (``"stsb"``) or file name.
        first: First sentences, one per pair.
        second: Second sentences, one per pair.
        scores: Scores as they stand in the file, on any scale, never clipped. Shape: (pairs,), float64.
        files: File name (relative to the data folder) or hub id -> SHA-256 of its content.
        split: ``"train"``, ``"dev"``, ``"test"``, ``"all"``, or empty for one's own file.
        parts: Name and slice of each part of a multi-part set; empty for a set in one piece.
        note: What a reader of a figure must know, for example which SICK-R this is.
    """

    name: str
    first: list[str]
    second: list[str]
    scores: np.ndarray
    files: dict[str, str]
    split: str = ""
    parts: tuple[tuple[str, slice], ...] = ()
    note: str = ""

    def __len__(self) -> int:
        """Count the pairs."""
        return len(self.scores)

    @property
    def sha256(self) -> str:
        """Checksum of the data: that of its file, or of the checksums of its files in order."""
        sums = list(self.files.values())
        return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()

    @property
    def scale(self) -> tuple[float, float]:
        """Smallest and largest score seen."""
        return float(self.scores.min()), float(self.scores.max())

    @property
    def positives(self) -> np.ndarray:
        """Pairs scored above 4 of 5, or above 0.8 of a scale that ends at 1, 10 or 100. Shape: (pairs,), bool."""
        highest = self.scale[1]
        return self.scores > 0.8 * next((top for top in (1, 5, 10, 100) if highest <= top), highest)


def read_pairs(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    delimiter: str | None = None,
    decimal: str | None = None,
    encoding: str = "utf-8",
    skip_bad: bool = False,
) -> GradedPairs:
    r"""Read graded pairs from a csv, tsv or jsonl file (optionally ``.gz``) with named columns, or in STS-B's layout.

    Tab separated files have no quoting: a line is a row. Other delimiters follow RFC 4180. Lines end at ``\n`` or
    ``\r\n`` only. STS-B's original layout (tab separated whatever the file is called, no header, 7 or more fields, of
    which the fifth is the score and the next two are the sentences) is recognised by itself.

    Args:
        path: The file.
        columns: Names of the columns with sentence 1, sentence 2 and score. By default the usual names are recognised
            (sentence1, sentence_A, s1, text1; score, label, similarity, ...).
        delimiter: Separator; by default tab for ``.tsv``, otherwise the one of ``,``, ``;`` and tab that separates
            the names in the header.
        decimal: Decimal sign of the scores; by default ``,`` in files separated by semicolons and ``.`` elsewhere.
        encoding: Text encoding; a UTF-8 byte order mark is always dropped.
        skip_bad: Leave unusable rows out and log how many, instead of refusing the file.

    Raises:
        InputError: The file is missing or not decodable, its columns are not found, it holds no pair, or (without
            `skip_bad`) a row has a wrong number of fields, no sentence, or a score that is not a finite number.
        ValueError: `columns` does not have three names, or `delimiter` is not one character.
    """
    if columns is not None and len(columns) != 3:
        raise ValueError(f"columns must name sentence 1, sentence 2 and score, got {list(columns)}")
    if delimiter is not None and len(delimiter) != 1:
        raise ValueError(f"delimiter must be one character, got {delimiter!r}")
    path = Path(path)
    text, digest = _read_text(path, encoding)
    suffix = Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower()
    if suffix in (".jsonl", ".json", ".ndjson"):
        rows = _jsonl_rows(text, columns)
    else:
        separators = [delimiter] if delimiter else ["\t"] if suffix == ".tsv" else [",", ";", "\t"]
        separator, fields, header = _read_layout(path, text, columns, separators)
        if separator == ";" and delimiter is None:
            logger.warning("%s: read with delimiter ';' and decimal sign '%s'", path.name, decimal or ",")
        decimal = decimal or ("," if separator == ";" else ".")
        rows = _delimited_rows(path, text, separator, fields, header)
    return _collect(path, rows, len(_lines(text)), {path.name: digest}, decimal or ".", skip_bad)


def load_sts(
    task: str,
    split: str = "test",
    data_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | None = None,
) -> GradedPairs:
    """Load one set of the STS suite from a local folder or, without one, from the Hugging Face hub.

    These are looked for in `data_dir` and its folders ``STS``, ``senteval/STS`` and ``senteval``, the first found wins:

    * stsb: ``STSBenchmark/sts-{split}.csv``, ``sts-{split}.csv``, ``stsb/sts-{split}.csv``
    * sts12 ... sts16: ``STS12-en-test/``, ``sts_original/STS12-en-test/`` with ``*.input.*.txt`` and ``*.gs.*.txt``
    * sickr: ``SICK/SICK_test_annotated.txt``, ``SICK_test_annotated.txt``, ``../SICK/SICK_test_annotated.txt``

    As in SentEval, pairs without a score and the SMT part of STS13 (not free) are left out. The hub's copies are
    sentence-transformers/stsb, mteb/sts12-sts ... mteb/sts16-sts and mteb/sickr-sts, each in one part.

    Args:
        task: One of ``TASKS``.
        split: ``"train"``, ``"dev"`` or ``"test"`` for stsb, ``"test"`` for the others.
        data_dir: Local folder; with it nothing is downloaded.
        cache_dir: Cache folder of the hub's data sets.

    Raises:
        InputError: Unknown task or split, files not found or not readable, or the hub cannot be reached.
    """
    if task not in TASKS:
        raise InputError(f"unknown STS task {task!r}: choose from {', '.join(TASKS)}")
    if split not in (_STSB_SIZES if task == "stsb" else ("test",)):
        raise InputError(f"{task} has no {split!r} split: only stsb has train and dev, every task has test")
    pairs = _load_from_hub(task, split, cache_dir) if data_dir is None else _load_local(task, split, Path(data_dir))
    expected = _STSB_SIZES[split] if task == "stsb" else _SIZES[task]
    if pairs.split == split and len(pairs) != expected:
        logger.warning("%s %s has %d pairs, the published set has %d", task, split, len(pairs), expected)
    return pairs


def concatenate(name: str, sets: Sequence[GradedPairs], split: str = "") -> GradedPairs:
    """Join sets into one that remembers its parts; a warning is logged when their scores seem to differ in scale."""
    tops = [pairs.scale[1] for pairs in sets]
    if 2 * min(tops) < max(tops):
        ranges = ", ".join(f"{pairs.name} {pairs.scale[0]:g}..{pairs.scale[1]:g}" for pairs in sets)
        logger.warning("%s: the joined files have different score ranges (%s)", name, ranges)
    ends = np.cumsum([len(pairs) for pairs in sets]).tolist()
    return GradedPairs(
        name,
        first=[sentence for pairs in sets for sentence in pairs.first],
        second=[sentence for pairs in sets for sentence in pairs.second],
        scores=np.concatenate([pairs.scores for pairs in sets]),
        files={file: digest for pairs in sets for file, digest in pairs.files.items()},
        split=split,
        parts=tuple((pairs.name, slice(end - len(pairs), end)) for pairs, end in zip(sets, ends, strict=True)),
    )


def _read_text(path: Path, encoding: str = "utf-8") -> tuple[str, str]:
    """Return the file's text with plain line ends, and the SHA-256 of its bytes."""
    try:
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).hexdigest()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
        text = raw.decode("utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}: line {line} is not {encoding}; name its encoding, such as latin-1 or utf-16"
        ) from None
    except (OSError, EOFError, LookupError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    # A lone carriage return is white space inside a sentence, not the end of a row.
    return text.replace("\r\n", "\n").replace("\r", " "), digest


def _lines(text: str) -> list[str]:
    """Split at line feeds only: str.splitlines also splits at U+2028, U+0085, form feeds and more."""
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _find_columns(names: Iterable[str], columns: Sequence[str] | None) -> tuple[int, ...] | None:
    """Return the positions of sentence 1, sentence 2 and score, or None if one of them is absent."""

    def plain(name: str) -> str:
        return re.sub(r"[\s_-]", "", name).lower()

    found = [plain(name) for name in names]
    wanted = _SYNONYMS if columns is None else [(plain(name),) for name in columns]
    positions = tuple(next((found.index(name) for name in group if name in found), -1) for group in wanted)
    return None if -1 in positions else positions


def _read_layout(
    path: Path, text: str, columns: Sequence[str] | None, separators: Sequence[str]
) -> tuple[str, tuple[int, ...], list[str] | None]:
    """Return separator, positions of the three fields, and header; the header is None in STS-B's original layout."""
    line = text.lstrip("\n").split("\n", 1)[0]
    if not line.strip():
        raise InputError(f"{path}: no usable pairs ({len(_lines(text))} lines read, 0 kept)")
    if columns is None and re.match(r"(?:[^\t]*\t){4}\s*\d+(?:\.\d+)?\s*\t[^\t]*\t", line):
        return "\t", (5, 6, 4), None
    for separator in separators:
        header = next(csv.reader([line], delimiter=separator))
        if fields := _find_columns(header, columns):
            return separator, fields, header
    raise InputError(f"{path}: line 1 does not name the columns {', '.join(columns or _NAMES)}; it is {line[:80]!r}")


def _delimited_rows(
    path: Path, text: str, separator: str, fields: tuple[int, ...], header: list[str] | None
) -> Iterator[_Row]:
    # strict: an unclosed quotation mark is an error instead of a field that swallows the rest of the file.
    reader = csv.reader(
        io.StringIO(text, newline="\n"),
        delimiter=separator,
        quoting=csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL,
        strict=True,
    )
    last_line, rows_seen = 0, 0
    try:
        for row in reader:
            line, last_line = last_line + 1, reader.line_num
            rows_seen += bool(row)
            if not row or (header and rows_seen == 1):
                continue
            if len(row) != len(header) if header else len(row) < 7:
                yield line, f"fields: {len(row)} instead of {len(header) if header else '7 or more'}"
            else:
                yield line, [row[field] for field in fields]
    except csv.Error as error:
        raise InputError(f"{path}: the row that begins in line {last_line + 1} is broken ({error})") from error


def _jsonl_rows(text: str, columns: Sequence[str] | None) -> Iterator[_Row]:
    for number, line in enumerate(_lines(text), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            yield number, f"not JSON: {error.msg}"
            continue
        keys = list(record) if isinstance(record, dict) else []
        if fields := _find_columns(keys, columns):
            yield number, [record[keys[field]] for field in fields]
        else:
            yield number, f"no keys {', '.join(columns or _NAMES)}"


def _sentence(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"sentence {value!r} is not text" if value else "empty sentence")
    # JSON can carry half of a surrogate pair, which no tokenizer accepts.
    return value.strip().encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _score(value: object, decimal: str) -> float:
    score = math.nan
    try:
        if isinstance(value, str):
            score = float(value.strip().replace(decimal, "."))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            score = float(value)
    except ValueError:
        pass
    if not math.isfinite(score):
        raise ValueError(f"score {value!r} is not a number")
    return score


def _collect(
    path: Path, rows: Iterable[_Row], lines: int, files: dict[str, str], decimal: str = ".", skip_bad: bool = False
) -> GradedPairs:
    """Check every row, and refuse or report the unusable ones with their line numbers."""
    kept: list[tuple[str, str, float]] = []
    bad: list[str] = []
    for line, row in rows:
        try:
            if isinstance(row, str):
                raise ValueError(row)
            kept.append((_sentence(row[0]), _sentence(row[1]), _score(row[2], decimal)))
        except ValueError as problem:
            bad.append(f"line {line}: {problem}")
    if bad:
        shown = "; ".join(bad[:10]) + ("; ..." if len(bad) > 10 else "")
        if not skip_bad:
            raise InputError(f"{path}: unusable rows, correct or skip them: {len(bad)} ({shown})")
        logger.warning("%s: unusable rows skipped: %d (%s)", path.name, len(bad), shown)
    if not kept:
        raise InputError(f"{path}: no usable pairs ({lines} line{'' if lines == 1 else 's'} read, 0 kept)")
    logger.info("%s: %d pairs", path.resolve(), len(kept))
    first, second, scores = zip(*kept, strict=True)
    return GradedPairs(path.name, list(first), list(second), np.array(scores, dtype=np.float64), files)


def _load_local(task: str, split: str, data_dir: Path) -> GradedPairs:
    if task == "stsb":
        names = [f"{folder}sts-{split}.csv" for folder in ("STSBenchmark/", "", "stsb/")]
    elif task == "sickr":
        names = [f"{folder}SICK_test_annotated.txt" for folder in ("SICK/", "", "../SICK/")]
    else:
        names = [f"{folder}{TASKS[task]}-en-test" for folder in ("", "sts_original/")]
    found = next((Path(root, name) for name in names for root in _ROOTS if (data_dir / root / name).exists()), None)
    if found is None:
        places = f"{', '.join(names)} in this folder and in {', '.join(_ROOTS[1:])}"
        raise InputError(f"{data_dir}: the {split} split of {task} is not there; looked for {places}")
    if (data_dir / found).is_dir():
        parts = [*_read_parts(data_dir, found)]
        if not parts:
            raise InputError(f"{data_dir / found}: no STS*.gs.*.txt files; they belong beside STS*.input.*.txt")
        return concatenate(task, parts, split)
    pairs = read_pairs(data_dir / found)
    note = "SICK-R test split, 4,927 pairs, not the 9,927 of mteb/sickr-sts" if task == "sickr" else ""
    return replace(pairs, name=task, files={found.as_posix(): pairs.sha256}, split=split, note=note)


def _read_parts(data_dir: Path, folder: Path) -> Iterator[GradedPairs]:
    """Read the input and gs files of one year's STS folder."""
    for gold_path in sorted((data_dir / folder).glob("STS*.gs.*.txt")):
        part = gold_path.name.split(".gs.")[1].removesuffix(".txt")
        # ALL repeats the other files; SMT has scores but sentences that are not free, and papers leave it out.
        if part in ("ALL", "SMT"):
            continue
        path = gold_path.with_name(gold_path.name.replace(".gs.", ".input."))
        (text, text_digest), (gold_text, gold_digest) = _read_text(path), _read_text(gold_path)
        lines, gold = _lines(text), _lines(gold_text)
        if len(lines) != len(gold):
            raise InputError(f"{path}: {len(lines)} lines, but {gold_path.name} has {len(gold)}; get both files anew")
        rows: list[_Row] = [
            (number, [*line.split("\t")[:2], score] if "\t" in line else "no tab between two sentences")
            for number, (line, score) in enumerate(zip(lines, gold, strict=True), start=1)
            if score.strip()
        ]
        files = {(folder / path.name).as_posix(): text_digest, (folder / gold_path.name).as_posix(): gold_digest}
        yield replace(_collect(path, rows, len(lines), files), name=part)


def _load_from_hub(task: str, split: str, cache_dir: str | None) -> GradedPairs:
    from datasets import load_dataset

    repository = "sentence-transformers/stsb" if task == "stsb" else f"mteb/{task}-sts"
    try:
        rows = load_dataset(repository, split="validation" if split == "dev" else split, cache_dir=cache_dir)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{repository} cannot be had from the Hugging Face hub ({type(error).__name__}); name a local folder with "
            "--data_dir that holds STSBenchmark/sts-*.csv, STS12-en-test/ ... STS16-en-test/ and SICK/"
        ) from error
    columns = [list(rows[name]) for name in _NAMES]
    digest = hashlib.sha256(json.dumps(columns).encode()).hexdigest()
    pairs = _collect(Path(repository), enumerate(zip(*columns, strict=True), 1), len(columns[0]), {repository: digest})
    if task == "sickr":
        note = f"SICK-R of mteb/sickr-sts, {len(pairs):,} pairs of all splits, not the 4,927 of the papers"
        return replace(pairs, name=task, split="all", note=note)
    return replace(pairs, name=task, split=split)
