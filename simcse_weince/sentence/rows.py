"""Files, folders, Wikipedia dumps and data sets of the Hugging Face hub as rows, each with its place in the source.

Nothing is cleaned or left out here: a reader either yields a row as it stands or says why there is none.
"""

import bz2
import codecs
import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
from pyarrow import parquet
from tqdm.auto import tqdm

from simcse_weince.errors import InputError, first_line
from simcse_weince.sentence import wikipedia

_ENDINGS = ".txt, .csv, .tsv, .jsonl, .parquet or .xml (a Wikipedia dump), each also .gz, .bz2 or .xz"
# The parts of a dump are named like enwiki-latest-pages-articles1.xml-p1p41242.bz2.
_ENDING = re.compile(r"\.(?:(txt|csv|tsv|jsonl|parquet)|(xml)(?:-p\d+p\d+[\w-]*)?)(?:\.(gz|bz2|xz))?$", re.IGNORECASE)
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_DECOMPRESS: dict[str, Any] = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}

# Nothing a reader sees: white space, zero-width space and joiners, word joiner, byte order mark.
INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff" + "".join(filter(str.isspace, map(chr, range(0x3001))))
# The csv module refuses cells of more than 131,072 characters unless it is told otherwise. One that runs on over
# millions of them has a quotation mark that nothing closes.
csv.field_size_limit(10_000_000)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Source:
    """One file or hub data set.

    Attributes:
        name: File name without its folder, or hub id.
        kind: Ending of the name without dot ("xml" for a dump), or "hub".
        path: Where the file is.
        compression: "gz", "bz2", "xz" or "".
        hub: The loaded data set.
        columns: The columns that hold text, once chosen; "text" where a source has no columns.
        delimiter: Between the cells of a "csv".
        header: Column names of a table whose first line is none; its rows may go on after the named cells.
    """

    name: str
    kind: str
    path: str = ""
    compression: str = ""
    hub: Any = None
    columns: tuple[str, ...] = ()
    delimiter: str = ","
    header: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Say what numbers a row in messages: its "line", or the "row" where there are no lines."""
        return "row" if self.kind in ("parquet", "hub") else "line"


class Refused(NamedTuple):
    """In the place of a row that cannot be used: "empty", "bad" or the rule of a dump, and for "bad" the reason."""

    rule: str
    reason: str = ""


Rows = Iterable[tuple[int, dict[str, Any] | Refused]]


def find_sources(given: Sequence[str | Path], **hub_options: Any) -> tuple[list[Source], list[str]]:
    """Find what is to be read.

    Args:
        given: Files, folders (without their sub-folders, in the order of names) and, where no such path exists, ids of
            data sets on the hub. Nothing else asks the network.
        hub_options: Arguments of `datasets.load_dataset`.

    Returns:
        The sources, and the names of files ignored in folders.

    Raises:
        InputError: Nothing readable goes by such a name.
    """
    found: list[Source] = []
    ignored: list[str] = []
    for item in map(str, given):
        if os.path.isdir(item):
            files = sorted(path for path in Path(item).iterdir() if path.is_file() and not path.name.startswith("."))
            usable = [local_source(path) for path in files if _ENDING.search(path.name)]
            if not usable:
                raise InputError(f"{Path(item).name}: no file in this folder ends in {_ENDINGS}")
            found += usable
            ignored += [path.name for path in files if not _ENDING.search(path.name)]
        elif os.path.exists(item) or _ENDING.search(item) or not _HUB_ID.fullmatch(item):
            found.append(local_source(item))
        else:
            try:
                hub = datasets.load_dataset(item, **hub_options)
            except Exception as error:  # the hub has some twenty kinds of failure; each only means: not to be had
                raise InputError(
                    f"{item}: no such file, and as a hub data set it cannot be loaded: {first_line(error)}"
                ) from None
            found.append(Source(item, "hub", hub=hub))
    if not found:
        raise InputError("no training file was named")
    return found, ignored


def local_source(path: str | os.PathLike[str]) -> Source:
    """Tell from its name how a file is to be read.

    Raises:
        InputError: There is no such file, or its name ends in something unknown.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if not (ending := _ENDING.search(path.name)):
        raise InputError(f"{path.name}: unknown kind of file; its name must end in {_ENDINGS}")
    table, dump, compression = ending.groups("")
    return Source(path.name, (table or dump).lower(), os.path.abspath(path), compression.lower())


@contextmanager
def open_source(source: Source) -> Iterator[Any]:
    """Open a file for reading bytes, decompressed; a dump with a progress bar."""
    try:
        with open(source.path, "rb") as raw:
            size = os.path.getsize(source.path)
            quiet = None if source.kind == "xml" else True  # None: unless on a terminal
            with tqdm.wrapattr(raw, "read", total=size, desc=source.name, disable=quiet) as counted:
                yield _DECOMPRESS[source.compression](counted) if source.compression else counted
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        whole = f"; is it a whole .{source.compression} file?" if source.compression else ""
        raise InputError(
            f"{source.name}: cannot be read ({getattr(error, 'strerror', None) or error}){whole}"
        ) from None


def checksum(source: Source) -> str:
    """SHA-256 of the bytes of a file as they lie on the disk."""
    digest = hashlib.sha256()
    with open_source(replace(source, compression="")) as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def read_lines(source: Source, encoding: str = "utf-8") -> Iterator[str]:
    r"""Decode a file and yield its lines, which end at ``\n`` or ``\r\n`` only; any other ``\r`` becomes a space.

    Raises:
        InputError: The file cannot be read or decoded, or there is no such encoding.
    """
    try:
        "a".encode(encoding)
    except (LookupError, UnicodeError):
        raise InputError(f"--encoding {encoding}: Python knows no such text encoding") from None
    name = codecs.lookup(encoding).name
    encoding = "utf-8-sig" if name == "utf-8" else name
    number = 0
    with open_source(source) as stream:
        start = stream.peek(4096)
        wide = encoding.startswith(("utf-16", "utf-32"))
        if not wide and start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise InputError(f"{source.name}: line 1: this is UTF-16; add --encoding utf-16")
        if not wide and b"\0" in start:
            line = 1 + start[: start.index(b"\0")].count(b"\n")
            raise InputError(
                f"{source.name}: line {line}: a byte 0, so this is not a text file, or it is UTF-16 without a mark; "
                "for that add --encoding utf-16-le"
            )
        text = io.TextIOWrapper(stream, encoding, newline="\n")
        try:
            for line in text:
                number += 1
                yield line.removesuffix("\n").removesuffix("\r").replace("\r", " ")
        except UnicodeDecodeError as error:  # in a block that begins in the line after the last one
            number += 1 + error.object[: error.start].decode(encoding, errors="replace").count("\n")
            byte = stream.tell() - len(error.object) + error.start
            raise InputError(
                f"{source.name}: line {number}: byte {byte} is not {encoding.removesuffix('-sig')}; "
                "name the encoding of the file, such as --encoding latin-1"
            ) from None
        except UnicodeError as error:  # UTF-16 or UTF-32 without a mark
            raise InputError(f"{source.name}: {error}; try --encoding {encoding}-le") from None


def read_rows(source: Source, encoding: str = "utf-8", pages: dict[str, int] | None = None) -> Rows:
    """Read the rows of a source, one after the other.

    Args:
        source: The source. If it names its text columns, others may be left out.
        encoding: Of text files; UTF-8 is read with or without a byte order mark.
        pages: Counts the pages of a dump by kind.

    Yields:
        A number, and the row by column name or why there is none. The number is that of the line, from 1 and counting
        the header; of the row in parquet and hub data sets; of the page in a dump.

    Raises:
        InputError: The source cannot be read or decoded.
    """
    if source.kind == "xml":
        return _dump_rows(source, {} if pages is None else pages)
    if source.kind == "txt":
        return enumerate(({"text": line} for line in read_lines(source, encoding)), start=1)
    if source.kind in ("csv", "tsv"):
        return _table_rows(source, encoding)
    if source.kind == "jsonl":
        return enumerate(map(_json_row, read_lines(source, encoding)), start=1)
    return enumerate(_parquet_rows(source) if source.kind == "parquet" else _hub_rows(source), start=1)


def _dump_rows(source: Source, pages: dict[str, int]) -> Rows:
    with open_source(source) as stream:
        for page, sentence, rule in wikipedia.read_sentences(stream, source.name, pages):
            yield page, Refused(rule) if rule else {"text": sentence}


def _table_rows(source: Source, encoding: str) -> Rows:
    lines = (line + "\n" for line in read_lines(source, encoding))
    if source.kind == "csv":
        reader = csv.reader(lines, delimiter=source.delimiter, strict=True)
    else:
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    number, header = 1, source.header
    try:
        for record in reader:
            if not record:
                yield number, Refused("empty")
            elif not header:
                header = tuple(name.strip(INVISIBLE) for name in record)
                named = [name for name in header if name]  # spreadsheets leave empty columns at the end
                if len(set(named)) < len(named):
                    raise InputError(f"{source.name}: line {number}: two columns have the same name; rename one")
            elif len(record) < len(header) or (len(record) > len(header) and not source.header):
                expected = f"{len(header)} or more are needed" if source.header else f"the header has {len(header)}"
                yield number, Refused("bad", f"{len(record)} fields, {expected}")
            else:
                yield number, dict(zip(header, record, strict=False))
            number = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"{source.name}: line {number}: {error}; double quotation marks inside a quoted cell, or use a .tsv"
        ) from None


def _json_row(line: str) -> dict[str, Any] | Refused:
    if not line.strip(INVISIBLE):
        return Refused("empty")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return Refused("bad", "broken JSON")
    if not isinstance(row, dict):
        return Refused("bad", "not a JSON object")
    # Only an escape can bring in half of a surrogate pair, which no tokenizer accepts.
    return {name: _SURROGATE.sub("\ufffd", cell) if isinstance(cell, str) else cell for name, cell in row.items()}


def _parquet_rows(source: Source) -> Iterator[dict[str, Any]]:
    with open_source(source) as stream, tempfile.TemporaryFile() as unpacked:
        if source.compression:  # parquet is read from its end, which a compressed stream cannot reach
            shutil.copyfileobj(stream, unpacked)
        try:
            table = parquet.ParquetFile(unpacked if source.compression else stream)
            # Dates are no text, and some that parquet can hold are none that Python can.
            names = [column.name for column in table.schema_arrow if not pa.types.is_temporal(column.type)]
            for batch in table.iter_batches(1000, columns=list(source.columns) or names):
                yield from batch.to_pylist()
        except (pa.ArrowException, OverflowError) as error:
            raise InputError(f"{source.name}: not a whole parquet file ({first_line(error)})") from None


def _hub_rows(source: Source) -> Iterator[dict[str, Any]]:
    hub = source.hub.select_columns(list(source.columns)) if source.columns else source.hub
    for batch in hub.with_format("arrow").iter(1000):
        yield from batch.to_pylist()
