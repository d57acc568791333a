"""``simcse-weince diagnose``."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from simcse_weince.commands.shared_options import (
    CommandParser,
    add_encoder_options,
    at_least,
    check_installed,
    check_output,
    check_outputs,
    chosen_device,
    load_encoder,
)
from simcse_weince.errors import InputError

if TYPE_CHECKING:
    from simcse_weince.page import Page

_PAGE = {"report", "json", "plots", "seed"}
_SHARED = _PAGE | {"model", "compare", "max_samples", "quantile", "train_batch_size", "bootstrap"}
_ENCODED = _SHARED | {"view_anchors", "batch_size", "device", "cache_dir"}
# What has an effect, by what is looked at.
_EFFECTIVE = {
    "--noise_floor": _PAGE | {"noise_floor"},
    "images": _ENCODED | {"images", "split", "image_size"},
    "a .npy": _SHARED | {"data"},
    "sentences": _ENCODED | {"data", "text_column", "encoding", "skip_bad", "max_seq_length"}
    | {"pooler_type", "tokenizer_name", "torch_dtype", "model_revision", "trust_remote_code"},
}  # fmt: skip


def run(arguments: Sequence[str]) -> None:
    """Tell whether an encoder's hard negatives behave as the correction supposes, and what to set."""
    purpose = "Ask of an encoder whether the tail of its cosines supports the correction."
    parser = CommandParser(prog="simcse-weince diagnose", description=purpose)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="encoder, or a .npy of embeddings (N, d)")
    parser.add_argument("data", metavar="DATA", nargs="?", help="sentences, or pairs in two columns; for a .npy: "
                        "nothing, or the .npy of the positives of its rows")  # fmt: skip
    parser.add_argument(
        "--images", metavar="SOURCE", help="instead of DATA, for an encoder of images: as in vision-eval"
    )
    parser.add_argument("--split", choices=["train", "test", "unlabeled"], default="train", help="images to look at")
    parser.add_argument("--image_size", type=at_least(1), help="side of images in pixels; default: as the encoder says")
    parser.add_argument(
        "--compare", nargs="+", action="extend", default=[], metavar="MODEL", help="further encoders on the same page"
    )
    parser.add_argument("--noise_floor", action="store_true", help="instead: what the wrong link costs, by simulation")
    parser.add_argument("--report", metavar="FILE.html", help="write the page")
    parser.add_argument("--json", metavar="FILE.json", help="write the numbers")
    parser.add_argument("--plots", metavar="DIR", help="write the figures as PNG")
    parser.add_argument("--text_column", action="append", help="column of the sentences; twice for pairs")
    parser.add_argument("--encoding", default="utf-8", help="encoding of DATA")
    parser.add_argument("--skip_bad", action="store_true", help="leave out and count unusable rows of tables")
    parser.add_argument("--max_samples", type=at_least(2), help="use the first so many sentences, images or rows")
    parser.add_argument("--max_seq_length", type=at_least(3), default=32, help="cut sentences, as training does")
    parser.add_argument("--view_anchors", type=at_least(2), default=5000,
                        help="how many get two views, by dropout or as images, for what needs positives")  # fmt: skip
    parser.add_argument("--quantile", type=float, default=0.99, help="cosines above this quantile are fitted")
    parser.add_argument("--train_batch_size", type=at_least(2),
                        help="batch that is thought of; default: that of the trainer")  # fmt: skip
    parser.add_argument("--bootstrap", type=at_least(2), default=200, help="samples for the intervals")
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of dropout, samples and bootstrap")
    add_encoder_options(parser)
    parser.set_defaults(batch_size=32)
    options = parser.parse(arguments)
    outputs = {f"--{name}": getattr(options, name) for name in ("report", "json")}
    read = [options.model, options.data, options.images, options.tokenizer_name, *options.compare]
    check_outputs(outputs, read)
    check_output(options.plots and f"{options.plots}/figure.png", "--plots")
    if not 0.9 <= options.quantile <= 0.9995:
        raise InputError(f"--quantile {options.quantile} is not between 0.9 and 0.9995")
    if not (options.model or options.noise_floor):
        raise InputError(
            "name a MODEL and DATA, a MODEL and --images, or a .npy of embeddings; see simcse-weince diagnose --help"
        )

    arrays = [model.endswith(".npy") for model in (options.model, *options.compare) if model]
    if options.images and (options.data or any(arrays)):
        raise InputError(f"--images {options.images}: leave out DATA, and name encoders of images, not a .npy")

    if options.compare and any(arrays) and (options.data or not all(arrays)):
        raise InputError("--compare: a .npy stands beside other .npy alone, and without positives: leave out DATA")

    kind = "images" if options.images else "a .npy" if any(arrays) else "sentences"
    kind = "--noise_floor" if options.noise_floor else kind
    chosen = (name for name, value in vars(options).items() if value != parser.get_default(name))
    names = {"model": "MODEL", "data": "DATA"}
    if idle := [names.get(name, f"--{name}") for name in chosen if name not in _EFFECTIVE[kind]]:
        raise InputError(f"{', '.join(idle)}: without effect on {kind}; leave it out")

    drawn = options.report or options.plots
    if drawn or options.noise_floor:
        check_installed("matplotlib", "simcse-weince[report]")

    from simcse_weince.extremes.report import build_page, diagnose, noise_floor_page, summary
    from simcse_weince.outputs import shown_names, versions, write_json

    page: Page | None
    if options.noise_floor:
        page, record = noise_floor_page(options.seed)
        lead = page.lead
    else:
        found, (batch_size, temperature) = [], _training_defaults(bool(options.images))
        models = [options.model, *options.compare]
        for model, name in zip(models, shown_names(models), strict=True):
            if model.endswith(".npy"):
                embedded = _embeddings(model, options.data, options.max_samples)
            else:
                embedded = (_encode_images if options.images else _encode)(model, options)
            try:
                found.append(diagnose(name, *embedded, tail_quantile=options.quantile, seed=options.seed,
                                      batch_size=options.train_batch_size or batch_size, temperature=temperature,
                                      layout="both_views" if options.images else "cross_view",
                                      bootstrap=options.bootstrap))  # fmt: skip
            except ValueError as error:
                raise InputError(f"{model}: {error}") from error
        lead, page = summary(found), build_page(found) if drawn else None
        record = {"diagnoses": [diagnosis.to_json() for diagnosis in found]}
    sys.stdout.write(f"{lead}\n")
    if page and options.report:
        page.write(options.report)
    if page and options.plots:
        page.write_figures(options.plots)
    if options.json:
        write_json(options.json, {**record, "seed": options.seed, "versions": versions()})


def _training_defaults(images: bool) -> tuple[int, float]:
    """Batch and temperature of the trainer of such encoders."""
    if images:
        from simcse_weince.vision.arguments import VisionArguments, VisionLossArguments

        return VisionArguments.per_device_train_batch_size, VisionLossArguments.temperature
    from simcse_weince.sentence.arguments import LossArguments, SimCSEArguments

    return SimCSEArguments.per_device_train_batch_size, LossArguments.temperature


def _embeddings(path: str, positives: str | None, limit: int | None) -> tuple[Any, Any, Any]:
    import numpy as np

    embeddings = _load(path, limit)
    if positives is None:
        return embeddings, None, None
    others = _load(positives, limit)
    if others.shape != embeddings.shape:
        raise InputError(
            f"{positives}: holds {others.shape}, not the positive of each row of {path} {embeddings.shape}"
        )
    # Equal embeddings are taken for equal texts, in both files alike.
    keys, other_keys = np.unique(np.concatenate([embeddings, others]), axis=0, return_inverse=True)[1].reshape(2, -1)
    return embeddings, keys, (embeddings, others, keys, other_keys)


def _load(path: str, limit: int | None) -> Any:
    import numpy as np

    try:
        array = np.lib.format.open_memmap(path, mode="r")  # a header may lie about how much there is to read
    except (OSError, ValueError, EOFError, OverflowError) as error:
        raise InputError(f"{path}: no array can be read there ({error}); name a .npy of numbers") from None
    if array.ndim != 2 or array.dtype.kind != "f":
        raise InputError(f"{path}: holds {array.dtype} of shape {array.shape}; give floats in 2 dimensions")
    return np.array(array[:limit], np.float32)  # in which cosines are computed; torch has fewer types than NumPy


def _encode(model: str, options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Embeddings, their keys, and views: the given pairs, or dropout views of some of the sentences."""
    import numpy as np
    import torch

    from simcse_weince.extremes.scores import encode_texts
    from simcse_weince.sentence.corpus import read_corpus

    if not options.data:
        raise InputError(f"{model}: name the sentences to look at, as DATA")
    dataset = read_corpus(options.data, text_columns=options.text_column, encoding=options.encoding,
                          skip_bad=options.skip_bad, max_samples=options.max_samples,
                          cache_dir=options.cache_dir).dataset  # fmt: skip
    texts, *others = ([*dataset[name]] for name in dataset.column_names[:2])
    encoder = load_encoder(model, options)
    encoder.max_seq_length = min(options.max_seq_length, encoder.max_seq_length or options.max_seq_length)
    size = options.batch_size
    embeddings, keys = encode_texts(encoder, texts, batch_size=size)
    if others:
        positives, positive_keys = encode_texts(encoder, others[0], batch_size=size)
        return embeddings, keys, (embeddings, positives, keys, positive_keys)
    rows = np.random.default_rng(options.seed).permutation(len(texts))[: options.view_anchors]
    chosen, seeds = [texts[row] for row in rows], (2 * options.seed, 2 * options.seed + 1)
    first, second = (encode_texts(encoder, chosen, batch_size=size, dropout_seed=seed)[0] for seed in seeds)
    if torch.equal(first, second):  # dropout is off, and such views say nothing
        return embeddings, keys, None
    return embeddings, keys, (first, second, *2 * (None if keys is None else keys[rows],))


def _encode_images(model: str, options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """What the criterion compares: projections, or features of an encoder without a head; and two views of some."""
    import torch

    from simcse_weince.extremes.scores import encode_images
    from simcse_weince.run_folder import saved_options
    from simcse_weince.vision.arguments import ImageArguments
    from simcse_weince.vision.backbones import VisionEncoder
    from simcse_weince.vision.datasets import load_images

    view_options = ImageArguments(images=options.images, views=saved_options(model).get("views")).view_options()
    device = chosen_device(options.device)
    encoder = VisionEncoder.from_pretrained(model, image_size=options.image_size)
    images = load_images(
        options.images, options.split, image_size=encoder.image_size, cache_dir=options.cache_dir
    ).images
    images, on_device = images[: options.max_samples], encoder.to(device)
    keys = torch.tensor([hash(image.numpy().tobytes()) for image in images])
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))[: options.view_anchors]
    embeddings, first, second = (
        encode_images(on_device, part, view_options, batch_size=options.batch_size, view_seed=seed)
        for part, seed in ((images, None), (images[rows], 2 * options.seed), (images[rows], 2 * options.seed + 1))
    )
    return embeddings, keys, (first, second, keys[rows], keys[rows])
