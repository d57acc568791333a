"""Training sentences from files, folders, Wikipedia dumps and the Hugging Face hub: cleaned, counted and cached.

The kept rows lie in an Arrow file that `datasets` maps into memory, under a key made of the bytes read and the options:
the same content is not read twice, and an edited file is never mistaken for its old self.
"""

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, Value

from simcse_weince.errors import InputError
from simcse_weince.outputs import replacing, write_text
from simcse_weince.sentence.rows import INVISIBLE, Refused, Source, checksum, find_sources, read_rows

logger = logging.getLogger(__name__)

_READER_VERSION = 3  # part of every cache key: raise it whenever the same bytes and options give other rows
_BATCH_ROWS = 10_000
_LISTED = 10

# Column names that say what they hold: anchor, then its positive, then its hard negative; the longest first.
_CONVENTIONS = [names.split() for names in (
    "sent0 sent1 hard_neg", "anchor positive negative", "query positive negative",
    "sent0 sent1", "anchor positive", "query positive", "sentence1 sentence2", "text", "sentence",
)]  # fmt: skip


@dataclass(frozen=True)
class CorpusOptions:
    """How training sentences are read.

    Attributes:
        text_columns: Columns to use, in the order anchor, positive, negative. Default: the only column, or columns
            named by convention (text; sentence; sent0, sent1, hard_neg; anchor, positive, negative; ...).
        encoding: Of text files. A UTF-8 byte order mark is never part of the text.
        dedupe: Drop rows that equal an earlier one after cleaning (some 100 bytes of memory for each distinct row).
        keep_blank: Keep empty texts, and blank lines as such.
        one_column: Refuse a table of which several columns would be read.
        column_option: What messages call the option that chooses columns.
        max_characters: Cut longer texts, None for none: an endless line would be tokenized whole, minutes for each
            10 MB, to keep its first tokens. The default is far more than a position table of 8,192 tokens holds.
        skip_bad: Drop and count bad rows instead of refusing the file.
        max_samples: Keep the first so many rows and read no further.
        streaming: Read while training, split between workers by file. Bad rows are then found only when reached,
            and duplicates are neither counted nor, outside one worker's dumps, dropped.
        config_name: Configuration of a hub data set.
        split: Split of a hub data set.
        cache_dir: Folder of the Arrow files. Default: ``simcse_weince`` in the cache folder of `datasets`.
        use_cache: False reads a source again even where its content was read before.
    """

    text_columns: str | Sequence[str] | None = None
    encoding: str = "utf-8"
    dedupe: bool = False
    keep_blank: bool = False
    one_column: bool = False
    column_option: str = "--text_column"
    max_characters: int | None = 100_000
    skip_bad: bool = False
    max_samples: int | None = None
    streaming: bool = False
    config_name: str | None = None
    split: str = "train"
    cache_dir: str | Path | None = None
    use_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("max_samples", "max_characters"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.streaming and self.dedupe:
            raise ValueError("dedupe needs streaming=False: duplicates are found by looking at all rows")
        columns = [self.text_columns] if isinstance(self.text_columns, str) else self.text_columns
        object.__setattr__(self, "text_columns", tuple(columns or ()))

    def cleaning(self) -> dict[str, Any]:
        """Return the options that decide which rows are kept, as JSON types."""
        names = ("text_columns", "encoding", "dedupe", "keep_blank", "max_characters", "skip_bad", "max_samples")
        return {name: getattr(self, name) for name in names}


@dataclass
class FileReport:
    """What was read from one file or hub data set, and what became of it.

    Attributes:
        name: File name without its folder.
        bytes: Size on disk.
        sha256: Of the bytes on disk; for a hub data set its fingerprint; "" when streaming.
        columns: Columns of the file that hold the text; "text" where it has no columns.
        unit: What is counted: "lines" of plain text, "rows" of tables, "sentences" of a dump.
        read: Units read, blank ones included; `kept` of them became rows of the data set.
        dropped: Units left out, by rule: "empty", "bad", "duplicate" and the rules of a dump.
        first: By rule the first ten numbers, as `read_rows` gives them.
        pages: Pages of a dump, by kind.
        cut: Kept rows of which a text was cut to `max_characters`.
    """

    name: str
    bytes: int = 0
    sha256: str = ""
    columns: list[str] = field(default_factory=list)
    unit: str = "rows"
    read: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[int]] = field(default_factory=dict)
    pages: dict[str, int] = field(default_factory=dict)
    cut: int = 0

    def drop(self, rule: str, number: int) -> None:
        """Count one row left out."""
        self.dropped[rule] = self.dropped.get(rule, 0) + 1
        if self.dropped[rule] <= _LISTED:
            self.first.setdefault(rule, []).append(number)


@dataclass
class CorpusReport:
    """What was read, kept and dropped: the log line and the ``corpus_report.json`` of a run.

    Attributes:
        files: One report for each file, in the order read.
        columns: Text columns of the data set.
        options: The options that decided what is kept.
        distinct: Different rows among the kept ones; None when streaming, as nothing is counted then.
        ignored: Names of files in the folder that hold no training text.
    """

    files: list[FileReport]
    columns: list[str]
    options: dict[str, Any]
    distinct: int | None = None
    ignored: list[str] = field(default_factory=list)

    @property
    def unit(self) -> str:
        """Say what is counted: "lines", "rows" or "sentences"."""
        units = {file.unit for file in self.files}
        return units.pop() if len(units) == 1 else "rows"

    @property
    def read(self) -> int:
        """Lines, rows or sentences read."""
        return sum(file.read for file in self.files)

    @property
    def kept(self) -> int:
        """Rows of the data set."""
        return sum(file.kept for file in self.files)

    @property
    def dropped(self) -> dict[str, int]:
        """Rows left out, by rule."""
        return dict(sum((Counter(file.dropped) for file in self.files), Counter()))

    @property
    def duplicates(self) -> int:
        """Kept rows that repeat an earlier one."""
        return 0 if self.distinct is None else self.kept - self.distinct

    def summary(self) -> str:
        """Say it in one line, as in ``read 11 lines, kept 4, dropped 7 empty``."""
        if self.distinct is None:
            return f"streaming {len(self.files)} source(s): rows are checked as they are read, not counted"
        line = f"read {self.read} {self.unit}, kept {self.kept}"
        if self.dropped:
            rules = {"bad": "skipped as bad", "duplicate": "duplicates"}
            line += ", dropped " + ", ".join(f"{n} {rules.get(rule, rule)}" for rule, n in self.dropped.items())
        if cut := sum(file.cut for file in self.files):
            line += f", cut {cut} at {self.options['max_characters']:,} characters"
        if self.duplicates:
            line += f"; {self.duplicates} of the kept repeat an earlier one ({self.duplicates / self.kept:.2%})"
        return line

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types, with the totals unless streaming."""
        everything = {"summary": self.summary(), **asdict(self)}
        if self.distinct is None:
            everything["files"] = [{"name": file.name, "bytes": file.bytes} for file in self.files]
            return everything
        totals = {"read": self.read, "kept": self.kept, "dropped": self.dropped, "duplicates": self.duplicates}
        return {**everything, **totals, "duplicate_rate": self.duplicates / self.kept}

    def save(self, folder: str | Path) -> Path:
        """Write ``corpus_report.json`` into a folder, which is made if need be, and return its path."""
        path = Path(folder) / "corpus_report.json"
        write_text(path, json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n")
        return path


class Corpus(NamedTuple):
    """Training sentences and the account of how they were read.

    Attributes:
        dataset: Memory mapped `Dataset`, or `IterableDataset` with declared features when streaming. One column
            "text", or several under their own names in the order anchor, positive, negative.
        report: What was read, kept and dropped.
    """

    dataset: Dataset | IterableDataset
    report: CorpusReport


def read_corpus(source: str | Path | Sequence[str | Path], **options: Any) -> Corpus:
    r"""Read training sentences.

    Formats: ``.txt`` (one sentence a line, which ends at ``\n`` or ``\r\n`` and nowhere else), ``.csv`` (quoting as in
    RFC 4180), ``.tsv`` (no quoting), ``.jsonl``, ``.parquet``, a Wikipedia dump ``.xml``; each also compressed as
    ``.gz``, ``.bz2`` or ``.xz``. Tables need a header. A cell is always the text as written: 007, NA, null are text.

    Cleaning: every line separator inside a text becomes a space, white space and zero-width characters are trimmed
    from both ends, lone surrogates become U+FFFD. A blank line, or an empty cell of a single text column, is dropped
    as "empty". What else is no text (a number, null, a missing key, broken JSON, a wrong number of fields, an empty
    cell beside others) is bad: an error, unless `skip_bad`. Sentences of a dump follow
    `simcse_weince.sentence.wikipedia.dropping_rule`, and their duplicates are always dropped.

    Args:
        source: A file, several files, a folder of files (in the order of their names; sub-folders are not entered)
            or, where no such path exists, the id of a data set on the Hugging Face hub.
        options: Fields of `CorpusOptions`.

    Returns:
        The data set and its report.

    Raises:
        InputError: The source cannot be used; the message names file, line and remedy.
        ValueError: An option is out of range.
    """
    settings = CorpusOptions(**options)
    given = [source] if isinstance(source, str | Path) else source
    hub_options = {"name": settings.config_name, "split": settings.split, "streaming": settings.streaming}
    sources, ignored = find_sources(given, **hub_options)
    sources = [_pick_columns(item, settings) for item in sources]
    first = sources[0].columns
    for item in sources:
        if len(item.columns) != len(first) or (len(first) > 1 and item.columns != first):
            raise InputError(
                f"{item.name}: its text columns ({', '.join(item.columns)}) are not those of {sources[0].name} "
                f"({', '.join(first)}); choose columns that all files have with --text_column"
            )
    columns = list(first) if len(first) > 1 else ["text"]
    features = Features({name: Value("string") for name in columns})
    reports = [_file_report(item, settings.streaming) for item in sources]
    report = CorpusReport(reports, columns, settings.cleaning(), ignored=ignored)
    dataset = (_stream if settings.streaming else _cached)(sources, settings, features, report)
    names = ", ".join(item.name for item in sources[:3])
    if not report.kept:
        raise InputError(f"{names}: no usable sentences ({report.read} {report.unit} read, 0 kept)")
    logger.info("%s: %s", names, report.summary())
    return Corpus(dataset, report)


def _pick_columns(source: Source, options: CorpusOptions) -> Source:
    """Choose the text columns of a source by its first rows: in .jsonl one row may lack a key."""
    wanted, option = tuple(options.text_columns or ()), options.column_option
    if source.kind in ("txt", "xml"):
        if wanted not in ((), ("text",)):
            raise InputError(f"{source.name}: plain text has no columns {', '.join(wanted)}; use a table")
        return replace(source, columns=("text",))
    rows = (row for _, row in islice(read_rows(source, options.encoding), 100) if isinstance(row, dict))
    header = list(dict.fromkeys(chain.from_iterable(rows)))
    if not header:  # nothing to be read: reading it will say so
        return replace(source, columns=wanted or ("text",))
    listed = ", ".join(map(repr, header[:_LISTED]))
    if source.kind == "csv" and len(header) == 1 and re.search("[;\t]", header[0]):
        raise InputError(f"{source.name}: line 1: one column {listed}; separate by commas, or by tabs in a .tsv")
    if not wanted:
        named = [names for names in _CONVENTIONS if set(names) <= set(header)]
        if len(header) == 1:
            wanted = (header[0],)
            if header not in _CONVENTIONS:
                logger.warning(
                    "%s: %s is taken for the name of the only column, not for a sentence", source.name, listed
                )
        elif not named or not all(set(names) <= set(named[0]) for names in named):
            raise InputError(f"{source.name}: which column holds the text? Name it with {option}: {listed}")
        elif options.one_column and len(named[0]) > 1:
            raise InputError(f"{source.name}: several columns hold text; name one with {option}: {listed}")
        else:
            wanted = tuple(named[0])
    if unknown := [name for name in wanted if name not in header]:
        raise InputError(f"{source.name}: no column {unknown[0]!r}; choose with {option} among {listed}")
    return replace(source, columns=wanted)


def _file_report(source: Source, streaming: bool) -> FileReport:
    """Begin the report of a source with its size and the hash of its content."""
    if source.kind == "hub":
        return FileReport(source.name, 0, "" if streaming else source.hub._fingerprint, list(source.columns))
    unit = {"txt": "lines", "xml": "sentences"}.get(source.kind, "rows")
    sha256 = "" if streaming else checksum(source)
    return FileReport(source.name, os.path.getsize(source.path), sha256, list(source.columns), unit)


def _clean(row: dict[str, Any], columns: Sequence[str], options: CorpusOptions) -> tuple[str, ...] | Refused:
    """Return the cleaned texts of a row, or why it is not used."""
    texts = []
    for name in columns:
        cell = row.get(name)
        if not isinstance(cell, str):
            wrong = "not text" if cell is not None else "null" if name in row else "missing"
            return Refused("bad", f"{name!r} is {wrong}")
        text = " ".join(cell.splitlines()).strip(INVISIBLE)
        if not text and not options.keep_blank:
            return Refused("empty") if len(columns) == 1 else Refused("bad", f"{name!r} is empty")
        texts.append(text)
    return tuple(texts)


def _kept(sources: Sequence[Source], options: CorpusOptions, reports: list[FileReport]) -> Iterator[tuple[str, ...]]:
    """Yield the texts of all rows that are used, and count the others. Bad rows of one file share one message."""
    seen: set[int] = set()
    total = 0
    for source, report in zip(sources, reports, strict=True):
        bad: list[str] = []
        for number, row in read_rows(source, options.encoding, report.pages):
            report.read += 1
            texts = _clean(row, source.columns, options) if isinstance(row, dict) else row
            if texts == Refused("empty") and options.keep_blank:  # a blank line, whatever its format
                texts = ("",) * len(source.columns)
            if not isinstance(texts, Refused) and (options.dedupe or source.kind == "xml"):
                key = hash(texts)
                texts = Refused("duplicate") if key in seen else texts
                seen.add(key)
            if isinstance(texts, Refused):
                report.drop(texts.rule, number)
                if texts.rule == "bad" and not options.skip_bad:
                    bad.append(f"{source.place} {number} ({texts.reason})")
                    if options.streaming or len(bad) == _LISTED:
                        break
                continue
            report.kept += 1
            if options.max_characters and max(map(len, texts)) > options.max_characters:
                report.cut += 1
                texts = tuple(text[: options.max_characters].rstrip(INVISIBLE) for text in texts)
            total += 1
            yield texts
            if total == options.max_samples:
                break
        if bad:
            more = ", and maybe more" if len(bad) == _LISTED else ""
            # With blank lines kept, row i of the result is row i of the file, and none can be dropped.
            remedy = "correct this" if options.keep_blank else "correct this or drop such rows with --skip_bad"
            raise InputError(f"{source.name}: not usable: {', '.join(bad)}{more}; {remedy}")
        if total == options.max_samples:
            return


def _cached(sources: list[Source], options: CorpusOptions, features: Features, report: CorpusReport) -> Dataset:
    """Map the Arrow file of these bytes and options into memory; without one, read the sources first."""
    content = [
        [source.kind, source.compression, source.columns, file.sha256]
        for source, file in zip(sources, report.files, strict=True)
    ]
    key = hashlib.sha256(json.dumps([_READER_VERSION, options.cleaning(), content]).encode()).hexdigest()[:32]
    folder = Path(options.cache_dir or Path(datasets.config.HF_DATASETS_CACHE) / "simcse_weince") / key
    arrow, account = folder / "corpus.arrow", folder / "corpus.json"
    if options.use_cache and arrow.exists() and account.exists():
        known = json.loads(account.read_text(encoding="utf-8"))
        report.distinct = known["distinct"]
        for file, counts in zip(report.files, known["files"], strict=True):
            vars(file).update(counts, name=file.name)  # the same bytes may have another name by now
        return Dataset.from_file(str(arrow))
    try:
        # Several processes may do this at once: each replaces the files by equal ones. The account marks the end.
        with replacing(arrow) as temporary:
            report.distinct = _write_arrow(_kept(sources, options, report.files), features, temporary)
        known = {"distinct": report.distinct, "files": [asdict(file) for file in report.files]}
        write_text(account, json.dumps(known))
    except OSError as error:
        raise InputError(
            f"{folder.parent}: {error.strerror or error}; choose another folder with --cache_dir"
        ) from None
    return Dataset.from_file(str(arrow))


def _write_arrow(rows: Iterator[tuple[str, ...]], features: Features, path: Path) -> int:
    """Write rows to an Arrow stream, and return how many are distinct, told apart by a hash of 64 bits."""
    schema = features.arrow_schema
    hashes = [np.empty(0, np.int64)]
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        while batch := list(islice(rows, _BATCH_ROWS)):
            columns = [pa.array(texts, pa.string()) for texts in zip(*batch, strict=True)]
            writer.write_batch(pa.record_batch(columns, schema=schema))
            hashes.append(np.fromiter(map(hash, batch), np.int64, len(batch)))
    return len(np.unique(np.concatenate(hashes)))


def _stream(sources: list[Source], options: CorpusOptions, features: Features, report: CorpusReport) -> IterableDataset:
    """Read while training. The first usable row is looked for at once, so that a useless source is refused here."""
    next(_kept(sources, options, report.files), None)
    keywords = {"sources": sources, "options": options, "columns": tuple(features)}
    dataset = IterableDataset.from_generator(_generate, features=features, gen_kwargs=keywords)
    return dataset.take(options.max_samples) if options.max_samples else dataset


def _generate(sources: list[Source], options: CorpusOptions, columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    for texts in _kept(sources, options, [FileReport(source.name) for source in sources]):
        yield dict(zip(columns, texts, strict=True))
