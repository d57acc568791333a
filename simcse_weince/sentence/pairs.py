"""Graded sentence pairs: one's own files, and the STS sets, read without losing a row.

Nothing here loads a model or, with a local folder, touches the network.
"""

import csv
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from simcse_weince.errors import InputError
from simcse_weince.sentence.rows import INVISIBLE, Refused, Rows, Source, checksum, local_source, read_lines, read_rows

logger = logging.getLogger(__name__)

# Task -> column of the table that SimCSE's evaluation prints, in its order.
TASKS = {f"sts{year}": f"STS{year}" for year in range(12, 17)} | {"stsb": "STSBenchmark", "sickr": "SICKRelatedness"}
_SIZES = {("stsb", "train"): 5749, ("stsb", "dev"): 1500, ("stsb", "test"): 1379, ("sickr", "test"): 4927} | {
    (f"sts{year}", "test"): pairs for year, pairs in zip(range(12, 17), (3108, 1500, 3750, 3000, 1186), strict=True)
}

# Folders in which the files of a task are looked for ("" is the given folder itself).
_ROOTS = ("", "STS", "senteval/STS", "senteval")

_NAMES = ("sentence1", "sentence2", "score")
_SYNONYMS = (
    ("sentence1", "sentencea", "sent1", "s1", "text1", "texta"),
    ("sentence2", "sentenceb", "sent2", "s2", "text2", "textb"),
    ("score", "scores", "label", "labels", "similarity", "similarityscore", "relatednessscore", "gold"),
)
# The original layout of STS-B has no header, and in some rows further fields.
_STSB = ("genre", "file", "year", "id", "score", "sentence1", "sentence2")
_STSB_LINE = re.compile(r"(?:[^\t]*\t){4}\s*\d+(?:\.\d+)?\s*\t[^\t]*\t")


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
    """Read graded pairs from a csv, tsv, txt, jsonl or parquet file, also compressed, whose columns have names.

    Lines, quoting, encodings and compression are those of training text, see `simcse_weince.sentence.corpus`; a file
    separated by tabs has no quoting, whatever it is called. STS-B's original layout (separated by tabs though called
    ``.csv``, no header, 7 or more fields, of which the fifth is the score and the next two are the sentences) is
    recognised by itself.

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
    source = local_source(path)
    if source.kind not in ("jsonl", "parquet"):
        source = _find_layout(source, encoding, columns, delimiter)
        if source.delimiter == ";":
            decimal = decimal or ","
            if delimiter is None:
                logger.warning("%s: read with delimiter ';' and decimal sign '%s'", source.name, decimal)
    rows = read_rows(source, encoding)
    return _collect(source, rows, {source.name: checksum(source)}, columns, decimal or ".", skip_bad)


def read_pair_files(paths: Sequence[str | os.PathLike[str]], **options: Any) -> GradedPairs:
    """Read one file with `read_pairs`, or join several; files of one name are told apart by their folders.

    Args:
        paths: The files.
        options: Of `read_pairs`, for every file.

    Raises:
        InputError: A file is named twice or cannot be used.
    """
    real = [Path(os.path.realpath(path)) for path in paths]
    for index, path in enumerate(real):
        if path in real[:index]:
            raise InputError(f"{paths[index]}: this file is named twice; name every file once")
    depths = range(1, max(len(path.parts) for path in real) + 1)
    names = next(names for depth in depths if len(set(names := _ends(real, depth))) == len(names))
    sets = [
        replace(pairs, name=name, files={name: pairs.sha256})
        for name, pairs in zip(names, (read_pairs(path, **options) for path in paths), strict=True)
    ]
    return concatenate("pairs", sets) if len(sets) > 1 else sets[0]


def _ends(paths: Sequence[Path], depth: int) -> list[str]:
    return ["/".join(path.relative_to(path.anchor).parts[-depth:]) for path in paths]


def load_sts(
    task: str, split: str = "test", data_dir: str | os.PathLike[str] | None = None, cache_dir: str | None = None
) -> GradedPairs:
    """Load one set of the STS suite from a local folder or, without one, from the Hugging Face hub.

    The first of these found in `data_dir` or its folders ``STS``, ``senteval/STS`` and ``senteval`` is read:

    * stsb: ``STSBenchmark/sts-{split}.csv``, ``sts-{split}.csv``, ``stsb/sts-{split}.csv``
    * sts12 ... sts16: ``STS12-en-test/``, ``sts_original/STS12-en-test/`` with ``*.input.*.txt`` and ``*.gs.*.txt``
    * sickr: ``SICK/SICK_test_annotated.txt``, ``SICK_test_annotated.txt``, ``../SICK/SICK_test_annotated.txt``

    As in SentEval, pairs without a score and the SMT part of STS13 (not free) are left out. The hub's copies are
    sentence-transformers/stsb, mteb/sts12-sts ... mteb/sts16-sts and mteb/sickr-sts, each in one part.

    Args:
        task: One of ``TASKS``.
        split: "test", and for stsb also "train" or "dev".
        data_dir: Local folder; with it nothing is downloaded.
        cache_dir: Cache folder of the hub's data sets.

    Raises:
        InputError: Unknown task or split, files not found or not readable, or the hub cannot be reached.
    """
    if task not in TASKS:
        raise InputError(f"unknown STS task {task!r}: choose from {', '.join(TASKS)}")
    if (task, split) not in _SIZES:
        raise InputError(f"{task} has no {split!r} split: only stsb has train and dev, every task has test")
    pairs = _load_from_hub(task, split, cache_dir) if data_dir is None else _load_local(task, split, Path(data_dir))
    if pairs.split == split and len(pairs) != _SIZES[task, split]:
        logger.warning("%s %s has %d pairs, the published set has %d", task, split, len(pairs), _SIZES[task, split])
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


def _find_layout(source: Source, encoding: str, columns: Sequence[str] | None, delimiter: str | None) -> Source:
    """Find out from its first line how the cells of a table are separated, and whether that line is a header."""
    line = next(filter(None, read_lines(source, encoding)), "")
    if columns is None and _STSB_LINE.match(line):
        return replace(source, kind="tsv", header=_STSB)
    for separator in delimiter or ("\t" if source.kind == "tsv" else ",;\t"):
        try:
            names = next(csv.reader([line], delimiter=separator)) if line else []
        except csv.Error as error:
            raise InputError(f"{source.name}: line 1: {error}; name its columns there") from None
        if not line or _find_columns(names, columns):
            return replace(source, kind="tsv" if separator == "\t" else "csv", delimiter=separator)
    wanted = ", ".join(columns or _NAMES)
    raise InputError(f"{source.name}: line 1 does not name the columns {wanted}; it is {line[:80]!r}")


def _find_columns(names: Collection[str], columns: Sequence[str] | None) -> list[str]:
    """Return the names of sentence 1, sentence 2 and score as they stand there; none of them if one is absent."""

    def plain(name: str) -> str:
        return re.sub(r"[\s_-]", "", name).lower()

    found = {plain(name): name for name in reversed(list(names))}
    if columns is not None and set(columns) <= set(names):
        return list(columns)
    wanted = _SYNONYMS if columns is None else [(plain(name),) for name in columns]
    chosen = [next((found[name] for name in group if name in found), "") for group in wanted]
    return chosen if all(chosen) else []


def _collect(
    source: Source,
    rows: Rows,
    files: dict[str, str],
    columns: Sequence[str] | None = None,
    decimal: str = ".",
    skip_bad: bool = False,
) -> GradedPairs:
    """Check every row, and refuse or report the unusable ones with their line numbers."""
    kept, bad, read = [], [], 0
    for number, row in rows:
        read += 1
        try:
            if row != Refused("empty"):
                kept.append(_pair(row, columns, decimal))
        except ValueError as problem:
            bad.append(f"{source.place} {number}: {problem}")
    if bad:
        shown = "; ".join(bad[:10]) + ("; ..." if len(bad) > 10 else "")
        if not skip_bad:
            raise InputError(
                f"{source.name}: unusable rows: {len(bad)} ({shown}); correct them or, in your own file, drop them "
                "with --skip_bad"
            )
        logger.warning("%s: unusable rows skipped: %d (%s)", source.name, len(bad), shown)
    if not kept:
        raise InputError(f"{source.name}: no usable pairs ({read} rows read, 0 kept)")
    logger.info("%s: %d pairs", source.path or source.name, len(kept))
    first, second, scores = zip(*kept, strict=True)
    return GradedPairs(source.name, list(first), list(second), np.array(scores, dtype=np.float64), files)


def _pair(row: dict | Refused, columns: Sequence[str] | None, decimal: str) -> tuple[str, str, float]:
    """Return the sentences and the score of a row; a ValueError says why it has none."""
    if isinstance(row, Refused):
        raise ValueError(row.reason)
    names = _find_columns(row, columns)
    if not names:
        raise ValueError(f"no {', '.join(columns or _NAMES)}")
    first, second, score = (row[name] for name in names)
    for sentence in (first, second):
        if not isinstance(sentence, str) or not sentence.strip(INVISIBLE):
            raise ValueError(f"sentence {sentence!r} is not text" if sentence else "empty sentence")
    try:
        value = float(score.strip().replace(decimal, ".") if isinstance(score, str) else score)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if isinstance(score, bool) or not math.isfinite(value):
        raise ValueError(f"score {score!r} is not a number")
    return first.strip(INVISIBLE), second.strip(INVISIBLE), value


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
    no_tab = Refused("bad", "no tab between two sentences")
    for path in sorted((data_dir / folder).glob("STS*.gs.*.txt")):
        part = path.name.split(".gs.")[1].removesuffix(".txt")
        # ALL repeats the other files; SMT has scores but sentences that are not free, and papers leave it out.
        if part in ("ALL", "SMT"):
            continue
        names = [(folder / path.name.replace(".gs.", kind)).as_posix() for kind in (".input.", ".gs.")]
        inputs, gold = (replace(local_source(data_dir / name), name=name) for name in names)
        texts, scores = list(read_lines(inputs)), list(read_lines(gold))
        if len(texts) != len(scores):
            raise InputError(f"{inputs.name}: {len(texts)} lines, but {path.name} has {len(scores)}; get both anew")
        rows = [
            (number, dict(zip(_NAMES, (*text.split("\t")[:2], score), strict=True)) if "\t" in text else no_tab)
            for number, (text, score) in enumerate(zip(texts, scores, strict=True), start=1)
            if score.strip()
        ]
        yield replace(_collect(inputs, rows, {source.name: checksum(source) for source in (inputs, gold)}), name=part)


def _load_from_hub(task: str, split: str, cache_dir: str | None) -> GradedPairs:
    repository = "sentence-transformers/stsb" if task == "stsb" else f"mteb/{task}-sts"
    try:
        hub = datasets.load_dataset(repository, split="validation" if split == "dev" else split, cache_dir=cache_dir)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{repository} cannot be had from the Hugging Face hub ({type(error).__name__}); name a local folder with "
            "--data_dir that holds STSBenchmark/sts-*.csv, STS12-en-test/ ... STS16-en-test/ and SICK/"
        ) from error
    source = Source(repository, "hub", hub=hub, columns=_NAMES)
    rows = list(read_rows(source))
    pairs = _collect(source, rows, {repository: hashlib.sha256(json.dumps(rows).encode()).hexdigest()})
    if task == "sickr":
        note = f"SICK-R of mteb/sickr-sts, {len(pairs):,} pairs of all splits, not the 4,927 of the papers"
        return replace(pairs, name=task, split="all", note=note)
    return replace(pairs, name=task, split=split)
