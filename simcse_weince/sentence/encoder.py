"""The sentence encoder: any Hugging Face backbone, SimCSE's poolings, and the head that exists in training only."""

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Module, Transformer
from sentence_transformers.sentence_transformer.model_card import SentenceTransformerModelCardData
from sentence_transformers.sentence_transformer.modules import Pooling, WeightedLayerPooling
from sentence_transformers.util import batch_to_device, is_sentence_transformer_model
from torch import nn
from tqdm.auto import trange
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from simcse_weince.errors import InputError, first_line
from simcse_weince.outputs import shown_name
from simcse_weince.sentence.first_token import first_token_only

logger = logging.getLogger(__name__)

PoolerType = Literal["cls", "cls_before_pooler", "avg", "avg_top2", "avg_first_last"]

# How configurations of transformers name a dropout probability, and which of them act on other heads only.
_DROPOUT_NAME, _HEAD_DROPOUT_NAME = re.compile("dropout|pdrop"), re.compile("classif|qa_|summary|pooler")
# Two views of one sentence closer than this carry no noise at all: float32 rounding alone gives 1 - 3e-7.
_SAME_VIEW_COSINE = 1 - 1e-6
# Model types whose position ids start after the padding id.
_POSITIONS_AFTER_PADDING = frozenset(
    "roberta xlm-roberta xlm-roberta-xl roberta-prelayernorm camembert mpnet longformer ibert data2vec-text luke "
    "xmod esm".split()
)


class TrainOnlyHead(Module):
    """SimCSE's MLP over the pooled vector (linear, tanh) that acts in training mode and is the identity in evaluation.

    Args:
        embedding_dimension: Width d of the embedding; input and output have shape (N, d).
        initializer_range: Standard deviation of the normal initial weights; the bias starts at 0.

    Source: Gao, Yao, Chen, "SimCSE", EMNLP 2021, section 6.3 (``--mlp_only_train``).
    """

    def __init__(self, embedding_dimension: int, initializer_range: float = 0.02) -> None:
        super().__init__()
        self.linear = nn.Linear(embedding_dimension, embedding_dimension)
        nn.init.normal_(self.linear.weight, std=initializer_range)
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Transform ``features["sentence_embedding"]`` in training mode; leave it alone otherwise."""
        if self.training:
            features["sentence_embedding"] = torch.tanh(self.linear(features["sentence_embedding"]))
        return features

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Refuse: what is saved never holds this head (see `SimCSEEncoder.save`)."""
        raise RuntimeError("a train-only head is not part of a saved model; use SimCSEEncoder, which leaves it out")


class _ModelCard(SentenceTransformerModelCardData):
    """The host's, which asks the hub about names of local folders: a folder is none of the hub's business."""

    def set_base_model(self, model_id: str, revision: str | None = None) -> bool:
        return not Path(model_id).is_dir() and super().set_base_model(model_id, revision)

    def try_to_set_base_model(self) -> None:
        backbone: Any = self.model and self.model.transformers_model
        if backbone is not None and not Path(backbone.config._name_or_path).is_dir():
            super().try_to_set_base_model()


class SimCSEEncoder(SentenceTransformer):
    """A SentenceTransformer that may carry a `TrainOnlyHead`; it saves, and counts, as if the head were not there.

    The head is a module of the encoder, not of the loss, so that gradient clipping, DDP and FSDP treat it as every
    other weight. The saved folder is an ordinary sentence-transformers model.
    """

    model_card_data_class = _ModelCard

    def _get_name(self) -> str:
        """The name that the model card prints: what is saved is an ordinary SentenceTransformer."""
        return SentenceTransformer.__name__

    @property
    def train_only_head(self) -> TrainOnlyHead | None:
        """The head, or None for an encoder without one."""
        return next((module for module in self.children() if isinstance(module, TrainOnlyHead)), None)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights; a state without the head, such as a checkpoint's, leaves the head as it is."""
        names = [f"{name}." for name, module in self.named_children() if isinstance(module, TrainOnlyHead)]
        head = {key: value for key, value in self.state_dict().items() if key.startswith(tuple(names))}
        return super().load_state_dict({**head, **state_dict}, strict, assign)

    def save(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Save everything but the head, taken out of the modules for as long; see ``SentenceTransformer.save``."""
        modules = dict(self._modules)
        for name, module in modules.items():
            if isinstance(module, TrainOnlyHead):
                del self._modules[name]
        try:
            super().save(path, *args, **kwargs)
        finally:
            self._modules.clear()
            self._modules.update(modules)


def build_encoder(
    model_name_or_path: str,
    *,
    pooler_type: PoolerType | None = None,
    mlp_only_train: bool = False,
    dropout: float | None = None,
    tokenizer_name: str | None = None,
    torch_dtype: str | None = None,
    attn_implementation: str | None = None,
    cache_dir: str | None = None,
    model_revision: str | None = None,
    trust_remote_code: bool = False,
    device: str | None = None,
) -> SimCSEEncoder:
    """Build an encoder from a Hugging Face model (id or folder) or a sentence-transformers folder.

    Args:
        model_name_or_path: Hub id or local folder. A local folder never touches the network.
        pooler_type: How token vectors become one sentence vector, with SimCSE's meaning. ``cls``: the first token
            followed by an MLP (linear, tanh) that starts from the backbone's own pooler; ``cls_before_pooler``: the
            first token alone; ``avg``: mean of the last layer; ``avg_top2``: mean of the last two layers;
            ``avg_first_last``: mean of the last layer and of transformer layer 1 (not the word embeddings, SimCSE
            issue 285). Default: what the model stores; a model that stores none gets ``cls_before_pooler``.
        mlp_only_train: The MLP of ``cls`` starts at random, acts in training only and is never saved.
        dropout: Probability in [0, 1) set in every dropout of the backbone; default: as the model has it.
        tokenizer_name: Another tokenizer than the model's own.
        torch_dtype: Type of the weights, for example ``bfloat16``; default: as stored.
        attn_implementation: ``sdpa``, ``eager``, ``flash_attention_2``, ...; default: transformers' choice.
        cache_dir: Where hub downloads are kept.
        model_revision: Branch, tag or commit on the hub.
        trust_remote_code: Allow model code from the hub to run.
        device: Device to load on; default: the first GPU if there is one.

    Raises:
        InputError: The model cannot be read, or an option does not fit it.
    """
    config = read_model_config(
        model_name_or_path, cache_dir=cache_dir, revision=model_revision, trust_remote_code=trust_remote_code
    )
    if mlp_only_train and pooler_type not in (None, "cls"):
        raise InputError(f"--mlp_only_train is the MLP of --pooler_type cls and does not go with {pooler_type}")
    pooler_type = "cls" if mlp_only_train else pooler_type
    if torch_dtype not in (None, "auto") and not isinstance(getattr(torch, torch_dtype, None), torch.dtype):
        raise InputError(f"--torch_dtype {torch_dtype} is not a type of torch; use float32, bfloat16 or float16")
    weights = {"dtype": torch_dtype, "attn_implementation": attn_implementation}
    options: dict[str, Any] = {
        "cache_folder": cache_dir,
        "revision": model_revision,
        "trust_remote_code": trust_remote_code,
        "model_kwargs": {key: value for key, value in weights.items() if value is not None},
        "config_kwargs": _dropout_options(config, dropout),
    }
    _check_device(device)
    try:
        stored = is_sentence_transformer_model(model_name_or_path, cache_folder=cache_dir, revision=model_revision)
        if pooler_type is None and stored:
            encoder = SimCSEEncoder(model_name_or_path, device=device, **options)
            if tokenizer_name is not None:
                first_module: Any = encoder[0]
                first_module.processor = AutoTokenizer.from_pretrained(
                    tokenizer_name, cache_dir=cache_dir, model_max_length=encoder.max_seq_length
                )
        else:
            if pooler_type is None:
                logger.warning(
                    "%s stores no pooling; using the first token (--pooler_type cls_before_pooler)", model_name_or_path
                )
            options["config_kwargs"]["output_hidden_states"] = pooler_type in ("avg_top2", "avg_first_last")
            # Transformer.load, not the constructor: it reads the length and casing that a stored encoder has.
            transformer = Transformer.load(
                model_name_or_path, init_defaults={"tokenizer_name_or_path": tokenizer_name}, **options
            )
            pooling = _pooling_modules(transformer, pooler_type or "cls_before_pooler", mlp_only_train)
            encoder = SimCSEEncoder(modules=[transformer, *pooling], device=device, trust_remote_code=trust_remote_code)
        if dropout is not None:
            for module in encoder.modules():
                if isinstance(module, nn.Dropout):
                    module.p = dropout
        _settle_layers(encoder)
        _fit_tokenizer(encoder, config)
        with torch.inference_mode():
            encoder(batch_to_device(encoder.preprocess(["a"]), encoder.device))["sentence_embedding"].tolist()
    except InputError:
        raise
    except Exception as error:  # a damaged folder makes the host libraries stumble in every way there is
        raise InputError(f"{model_name_or_path}: the model cannot be loaded ({first_line(error)})") from error
    encoder.model_card_data.model_name = f"{SentenceTransformer.__name__} based on {shown_name(model_name_or_path)}"
    if not Path(model_name_or_path).is_dir():  # the card links to the hub only
        encoder.model_card_data.base_model = model_name_or_path
    return encoder


def read_model_config(model_name_or_path: str, **hub_options: Any) -> PretrainedConfig:
    """Read the configuration alone: a wrong name or folder is found before any weight is loaded."""
    if Path(model_name_or_path).is_dir() and not Path(model_name_or_path, "config.json").is_file():
        backbone = Path(model_name_or_path, "0_Transformer")  # where sentence-transformers once kept it
        if not (backbone / "config.json").is_file():
            raise InputError(f"{model_name_or_path}: no config.json in it, so it is not a model; name its folder")
        model_name_or_path = str(backbone)
    try:
        return AutoConfig.from_pretrained(model_name_or_path, **hub_options)
    except Exception as error:
        raise InputError(
            f"{model_name_or_path}: no model can be read there ({first_line(error)}); "
            "give an existing folder or a Hugging Face id that this machine can reach"
        ) from error


def _check_device(device: str | None) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch that was built without this backend
        raise InputError(f"--device {device} cannot be used ({first_line(error)}); leave it out or say cpu") from None


def position_limit(config: PretrainedConfig) -> int | None:
    """The longest input in tokens that the position table can hold, or None where there is no table.

    RoBERTa and its relatives keep the rows up to the padding id for themselves: of 514 positions 512 are usable.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    return positions - (config.pad_token_id + 1) if config.model_type in _POSITIONS_AFTER_PADDING else positions


def _fit_tokenizer(encoder: SimCSEEncoder, config: PretrainedConfig) -> None:
    """Bound the length by the position table and make padding possible."""
    limits = [limit for limit in (encoder.max_seq_length, position_limit(config)) if limit]
    encoder.max_seq_length = min(limits, default=None)
    tokenizer = encoder.tokenizer
    # Without its files transformers makes a tokenizer that knows the special tokens alone.
    if 2 * len(tokenizer) < (getattr(config, "vocab_size", None) or 0):
        raise InputError(
            f"the tokenizer knows {len(tokenizer)} tokens and the model {config.vocab_size}, so the tokenizer's files "
            "are missing or another model's; name the right ones with --tokenizer_name"
        )
    if tokenizer.padding_side == "left" and getattr(config, "rope_parameters", None) is None:
        logger.warning("padding on the right instead of the left, which would shift the positions of shorter texts")
        tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise InputError("the tokenizer has neither a padding nor an end token; add one with tokenizer.add_tokens")
        logger.warning("the tokenizer has no padding token; padding with its end token %r", tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    if encoder.config is not None and encoder.config.pad_token_id is None:
        encoder.config.pad_token_id = tokenizer.pad_token_id


def _pooling_modules(transformer: Transformer, pooler_type: PoolerType, mlp_only_train: bool) -> list[Module]:
    """The modules that follow the backbone, all of them sentence-transformers' own but for the train-only head."""
    width = transformer.get_embedding_dimension()
    config = transformer.config
    if pooler_type in ("cls", "cls_before_pooler"):
        modules: list[Module] = [Pooling(width, pooling_mode="cls")]
        if pooler_type == "cls" and mlp_only_train:
            modules.append(TrainOnlyHead(width, getattr(config, "initializer_range", 0.02)))
        elif pooler_type == "cls":
            modules.append(Dense(width, width, activation_function=nn.Tanh()))
            pooler = _pooler_layer(transformer.model)
            if pooler is None:
                logger.warning("this backbone has no pooler: the MLP of --pooler_type cls starts at random")
            else:
                modules[-1].linear.load_state_dict(pooler.state_dict())
        return modules
    if pooler_type == "avg":
        return [Pooling(width, pooling_mode="mean")]
    layers = config.num_hidden_layers
    # all_layer_embeddings starts with the word embeddings, so layer k of the backbone has index k.
    start = 1 if pooler_type == "avg_first_last" else layers - 1
    weights = torch.zeros(layers + 1 - start)
    weights[[0, -1]] = 1
    return [WeightedLayerPooling(width, layers, start, nn.Parameter(weights)), Pooling(width, pooling_mode="mean")]


def _pooler_layer(backbone: Any) -> nn.Linear | None:
    """The backbone's own [CLS] MLP, where converted SimCSE checkpoints keep the trained one."""
    pooler = getattr(backbone, "pooler", None)
    layer = getattr(pooler, "dense", pooler)
    return layer if isinstance(layer, nn.Linear) else None


def _settle_layers(encoder: SimCSEEncoder) -> None:
    """Make one layer of the two copies of the ``cls`` MLP, and freeze what is no part of the graph or not to be learnt.

    One layer: ``pooler_output`` of the saved backbone then is the sentence embedding, too, and the trained MLP is found
    there. Frozen: DDP waits for the gradient of every other weight.
    """
    pooler = _pooler_layer(encoder.transformers_model)
    if pooler is not None:
        pooler.requires_grad_(False)
    for module in encoder:
        if isinstance(module, WeightedLayerPooling):
            module.requires_grad_(False)
        elif isinstance(module, Dense) and pooler is not None:
            if all(map(torch.equal, module.linear.parameters(), pooler.parameters())):
                module.linear = pooler.requires_grad_(True)


def _dropout_options(config: PretrainedConfig, dropout: float | None) -> dict[str, float]:
    if dropout is None:
        return {}
    if not 0 <= dropout < 1:
        raise InputError(f"--dropout {dropout} is not a probability in [0, 1)")
    return {
        name: dropout
        for name, value in config.to_dict().items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        if _DROPOUT_NAME.search(name) and not _HEAD_DROPOUT_NAME.search(name)
    }


def encode_distinct(
    model: SentenceTransformer, sentences: Iterable[str], batch_size: int, **options: Any
) -> Callable[[Sequence[str]], np.ndarray]:
    """Encode each distinct sentence once, without touching the train or eval mode of any module.

    Args:
        model: The encoder; its truncation, prompt and pooling are used as they are.
        sentences: The sentences, repetitions allowed.
        batch_size: Sentences encoded at a time.
        options: Further ones of ``SentenceTransformer.encode``.

    Returns:
        The function from sentences to embeddings, (sentences, width).
    """
    distinct = list(dict.fromkeys(sentences))
    if isinstance(tokenizer := getattr(model, "tokenizer", None), PreTrainedTokenizerBase):
        # encode itself sorts by characters, which leaves a third more padding on the STS suite.
        ids = tokenizer(distinct, verbose=False).input_ids
        tokens = {text: len(row) for text, row in zip(distinct, ids, strict=True)}
        distinct.sort(key=tokens.__getitem__, reverse=True)
    chunk = 8 * batch_size
    with keeping_modes(model), first_token_only(model):  # encode leaves every module in eval mode
        vectors = np.concatenate(
            [
                model.encode(distinct[start : start + chunk], batch_size=batch_size, show_progress_bar=False, **options)
                for start in trange(0, len(distinct), chunk, desc="Encoding", disable=None)
            ]
        )
    rows = {sentence: row for row, sentence in enumerate(distinct)}
    return lambda wanted: vectors[[rows[sentence] for sentence in wanted]]


@contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Leave the train or eval mode of every module as it was before the block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def view_cosine(encoder: SentenceTransformer, sentences: list[str], max_length: int | None = None) -> float:
    """Mean cosine of the two views of a few sentences, with the dropout of training and without touching its state.

    Exactly 1 (to float32 rounding) means that no dropout is active and both views are the same vector.
    """
    devices = [encoder.device] if encoder.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), keeping_modes(encoder):
        encoder.train()
        options: dict[str, Any] = {} if max_length is None else {"max_length": max_length}
        features = batch_to_device(encoder.preprocess(2 * sentences, **options), encoder.device)
        first, second = encoder(features)["sentence_embedding"].double().chunk(2)
    return torch.cosine_similarity(first, second).mean().item()


def check_dropout(encoder: SentenceTransformer, sentences: list[str], max_length: int | None = None) -> float:
    """Make sure that dropout makes two views of a sentence differ, and return their mean cosine.

    Raises:
        InputError: Dropout is off, so that every positive would sit on the endpoint and nothing would be learnt
            (sentence-transformers issues 1139 and 2634; ModernBERT and most decoders ship with dropout 0). Or the
            encoder gives NaN or infinity.
    """
    cosine = view_cosine(encoder, sentences, max_length)
    if not math.isfinite(cosine):
        raise InputError(
            "this encoder gives values that are not finite; its weights are damaged or their type too narrow"
        )
    if cosine > _SAME_VIEW_COSINE:
        raise InputError(
            "dropout is off in this encoder, so the two views of a sentence are identical and nothing would be learnt; "
            "set it with --dropout 0.1, or train on pairs"
        )
    rates = sorted({module.p for module in encoder.modules() if isinstance(module, nn.Dropout)})
    logger.info("dropout rates %s; cosine of two views before training: %.4f", rates, cosine)
    return cosine
