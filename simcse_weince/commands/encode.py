"""``simcse-weince encode``."""

import io
import sys
from collections.abc import Sequence

from simcse_weince.commands.shared_options import CommandParser, add_encoder_options, check_output, load_encoder
from simcse_weince.errors import InputError


def run(arguments: Sequence[str]) -> None:
    """Encode the sentences of a file, in their order, into a .npy array of shape (sentences, d), float32."""
    parser = CommandParser(prog="simcse-weince encode", description="Turn sentences into an array of embeddings.")
    parser.add_argument("model", metavar="MODEL", help="folder or Hugging Face id of the encoder")
    parser.add_argument("input", metavar="INPUT", help="sentences: .txt .csv .tsv .jsonl .parquet, also .gz")
    parser.add_argument("--output", metavar="FILE.npy", required=True, help="where the array goes")
    parser.add_argument("--text_column", help="column of the sentences in a table")
    parser.add_argument("--encoding", default="utf-8", help="encoding of INPUT")
    parser.add_argument("--normalize", action="store_true", help="scale every embedding to length 1")
    add_encoder_options(parser)
    options = parser.parse(arguments)
    check_output(options.output, inputs=[options.input, options.model, options.tokenizer_name])

    import numpy as np

    from simcse_weince.outputs import replacing
    from simcse_weince.sentence.corpus import read_corpus
    from simcse_weince.sentence.encoder import encode_distinct

    # Blank lines are kept: row i of the array is line i of the file.
    corpus = read_corpus(options.input, text_columns=options.text_column, encoding=options.encoding, keep_blank=True,
                         one_column=True, max_characters=None, cache_dir=options.cache_dir)  # fmt: skip
    model = load_encoder(options.model, options)
    sentences = list(corpus.dataset[corpus.dataset.column_names[0]])
    vectors = encode_distinct(model, sentences, options.batch_size, normalize_embeddings=options.normalize)(sentences)
    if not (finite := np.isfinite(vectors).all(axis=1)).all():
        raise InputError(
            f"{options.input}: sentence {1 + int(np.argmin(finite))}: its embedding is not finite; nothing was "
            "written; the model's weights are damaged or --torch_dtype is too narrow"
        )
    array = io.BytesIO()  # a pipe takes bytes, but no array: NumPy asks a file for its position
    np.save(array, np.asarray(vectors, dtype=np.float32), allow_pickle=False)
    with replacing(options.output) as temporary:
        temporary.write_bytes(array.getbuffer())
    sys.stdout.write(f"{vectors.shape[0]} embeddings of width {vectors.shape[1]} in {options.output}\n")
