"""``simcse-weince search``."""

import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from simcse_weince.commands.shared_options import (
    CommandParser,
    add_encoder_options,
    at_least,
    check_finite,
    check_installed,
    check_outputs,
    load_encoder,
)
from simcse_weince.errors import InputError

if TYPE_CHECKING:
    import numpy as np


def run(arguments: Sequence[str]) -> None:
    """Measure how well an encoder searches; print the report and write the files asked for."""
    parser = CommandParser(prog="simcse-weince search", description="How many negatives, and which temperature.")
    parser.add_argument("model", metavar="MODEL", help="folder or Hugging Face id of the encoder")
    parser.add_argument("pairs", metavar="PAIRS", nargs="+", help="files of (anchor, positive) rows, or graded pairs")
    parser.add_argument("--min_score", type=float, help="PAIRS are graded: keep those scored at least this")
    parser.add_argument("--text_columns", nargs=2, metavar=("ANCHOR", "POSITIVE"), help="columns of PAIRS")
    parser.add_argument("--pool", nargs="+", action="extend", metavar="CORPUS", help="sentences like those that will "
                        "be searched; default: the sentences of the graded pairs that are not kept")  # fmt: skip
    parser.add_argument("--pool_column", help="column of the sentences in CORPUS")
    parser.add_argument("--encoding", default="utf-8", help="encoding of PAIRS and CORPUS")
    parser.add_argument("--skip_bad", action="store_true", help="leave out and count unusable rows of tables")
    parser.add_argument("--temperature", type=float, default=0.05, help="of the loss that is judged")
    parser.add_argument("--tolerance", type=float, default=0.01, help="distance from the search objective, in nats")
    parser.add_argument("--max_k", type=at_least(1), default=16_384, help="most negatives of the curve")
    parser.add_argument("--max_pairs", type=at_least(10), default=2000, help="random sample of more pairs")
    parser.add_argument("--max_pool", type=at_least(20), default=16_384, help="random sample of a larger pool")
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of the samples")
    parser.add_argument("--faiss_index", metavar="FACTORY", help="retrieval through faiss, for example IVF4096,Flat")
    parser.add_argument("--json", metavar="FILE.json", help="write every figure with its provenance")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curves")
    parser.add_argument("--report", metavar="FILE.html", help="write a page")
    add_encoder_options(parser)
    options = parser.parse(arguments)
    _check(options)

    import numpy as np

    generator = np.random.default_rng(options.seed)
    anchors, positives, pool = _read(options, generator)

    import torch

    from simcse_weince.outputs import replacing, shown_name, versions, write_json
    from simcse_weince.search.report import SMALLEST_POOL, draw, format_report, measure_search, write_page
    from simcse_weince.sentence.encoder import encode_distinct

    model = load_encoder(options.model, options)
    sentences = [*anchors, *positives, *pool]
    ids = model.tokenizer(sentences, truncation=True, max_length=model.max_seq_length)["input_ids"]
    tokens = dict(zip(sentences, map(tuple, ids), strict=True))
    paired = {tokens[text] for text in (*anchors, *positives)}
    kept = [text for text in pool if tokens[text] not in paired]
    if len(kept) < SMALLEST_POOL:
        raise InputError(f"{len(kept)} pool sentences are left without those of the pairs; give a larger --pool")
    vectors = encode_distinct(model, [*anchors, *positives, *kept], options.batch_size, normalize_embeddings=True)
    device = model.device if model.device.type == "cuda" else "cpu"  # Apple's GPUs have no float64
    parts = [torch.from_numpy(vectors(side)).to(device).float() for side in (anchors, positives, kept)]
    check_finite(options.model, all(bool(part.isfinite().all()) for part in parts))
    report = measure_search(*parts, temperature=options.temperature, tolerance=options.tolerance, max_k=options.max_k,
                            faiss_index=options.faiss_index)  # fmt: skip
    sys.stdout.write(format_report(report) + "\n")
    name = shown_name(options.model)
    source = {"pairs": [Path(path).name for path in options.pairs], "min_score": options.min_score,
              "pool": [Path(path).name for path in options.pool or ()], "equal_to_a_pair": len(pool) - len(kept),
              "seed": options.seed, "faiss_index": options.faiss_index}  # fmt: skip
    if options.json:
        write_json(options.json, {"model": name, "versions": versions(), "data": source, **report.to_dict()})
    if options.plot:
        with replacing(options.plot) as temporary:
            draw(report).savefig(temporary, format="png", dpi=150)
    if options.report:
        place = ", ".join(source["pool"]) or "the other pairs"
        note = f"{report.pairs:,} pairs of {', '.join(source['pairs'])} against {report.pool:,} sentences of {place}."
        write_page(report, options.report, name, [note])


def _check(options: Namespace) -> None:
    for name in ("temperature", "tolerance"):
        if not 0 < getattr(options, name) < math.inf:
            raise InputError(f"--{name} must be a positive number, not {getattr(options, name)}")
    if options.temperature < 0.0034:
        raise InputError("--temperature must be at least 0.0034: below, the loss leaves double precision")
    if options.tolerance < 1e-12:
        raise InputError("--tolerance must be at least 1e-12: no loss is known more exactly in double precision")
    if options.max_k > 2**53:
        raise InputError("--max_k must be at most 2^53: beyond, double precision does not hold every whole number")
    if options.min_score is None and not options.pool:
        raise InputError("give --pool CORPUS, sentences like those that will be searched")
    if options.min_score is not None and not math.isfinite(options.min_score):
        raise InputError(f"--min_score must be a finite number, not {options.min_score}")
    if options.min_score is not None and options.text_columns:
        raise InputError("--text_columns does not go with --min_score; leave one of them out")
    if options.pool_column and not options.pool:
        raise InputError("--pool_column goes with --pool; give both, or leave it out")
    outputs = {f"--{name}": getattr(options, name) for name in ("json", "plot", "report")}
    check_outputs(outputs, [*options.pairs, *(options.pool or []), options.model, options.tokenizer_name])
    if options.plot or options.report:
        check_installed("matplotlib", "simcse-weince[report]")
    if options.faiss_index is not None:
        check_installed("faiss", "faiss-cpu")
        from simcse_weince.search.report import check_index

        check_index(options.faiss_index)


def _read(options: Namespace, generator: "np.random.Generator") -> tuple[list[str], list[str], list[str]]:
    """Anchors, positives and pool: random samples, in their order, of what the files hold."""
    from simcse_weince.search.report import FEWEST_PAIRS
    from simcse_weince.sentence.corpus import read_corpus
    from simcse_weince.sentence.pairs import read_pair_files

    how = {"cache_dir": options.cache_dir, "encoding": options.encoding, "skip_bad": options.skip_bad}
    rest: list[str] = []
    if options.min_score is None:
        table = read_corpus(options.pairs, text_columns=options.text_columns, column_option="--text_columns",
                            **how).dataset  # fmt: skip
        if len(table.column_names) != 2:
            raise InputError(f"{options.pairs[0]}: columns {', '.join(table.column_names)}, but pairs have two; name "
                             "them with --text_columns, or give --min_score for graded pairs")  # fmt: skip
        pairs = list(zip(*(table[name] for name in table.column_names), strict=True))
    else:
        graded = read_pair_files(options.pairs, encoding=options.encoding, skip_bad=options.skip_bad)
        both = list(zip(graded.first, graded.second, strict=True))
        good = (graded.scores >= options.min_score).tolist()
        pairs = [pair for pair, keep in zip(both, good, strict=True) if keep]
        rest = [text for pair, keep in zip(both, good, strict=True) if not keep for text in pair]
    if len(pairs) < FEWEST_PAIRS:
        raise InputError(f"{options.pairs[0]}: {len(pairs)} pairs to search with, needed are {FEWEST_PAIRS}")

    def sample(size: int, most: int) -> list[int]:
        return sorted(generator.choice(size, most, replace=False).tolist()) if size > most else list(range(size))

    if options.pool:
        corpus = read_corpus(options.pool, text_columns=options.pool_column, column_option="--pool_column",
                             one_column=True, **how).dataset  # fmt: skip
        chosen = corpus.select(sample(len(corpus), options.max_pool))
        pool = list(chosen[chosen.column_names[0]])
    else:
        rest = list(dict.fromkeys(rest))
        pool = [rest[row] for row in sample(len(rest), options.max_pool)]
    used = [pairs[row] for row in sample(len(pairs), options.max_pairs)]
    return [first for first, _ in used], [second for _, second in used], pool
