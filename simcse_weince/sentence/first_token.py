"""The last layer of an encoder that pools its first token, computed for that token alone.

Of the last layer such an encoder needs the keys and values of all tokens, but what follows attention, three quarters of
the layer's matrix products, of the first token only: one product in eight of a model of six layers, one in sixteen of
twelve.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn

# Model types whose layers hand the attention's result and its input to `attention.output`, and all else on from there.
_LIKE_BERT = frozenset("bert roberta xlm-roberta camembert electra".split())


@contextmanager
def first_token_only(model: Any) -> Iterator[None]:
    """Compute, within the block, only what the first token needs, where it alone is pooled; sentence embeddings only.

    Embeddings and gradients are the same to rounding. Dropout draws masks for what is left, so a run is another than
    without this block, as a run with another seed is. Other encoders are left as they are: other poolings or layers,
    a pooling that skips prompts, padding on the left, or none.
    """
    module = _after_attention(model)
    if module is None:
        yield
        return
    config = model.transformers_model.config

    def cut(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if config.output_hidden_states:  # asked for on the way, by a loss that looks at all layers
            return None
        return tuple(states[:, :1] for states in arguments)

    handle = module.register_forward_pre_hook(cut)
    try:
        yield
    finally:
        handle.remove()


def _after_attention(model: Any) -> nn.Module | None:
    """What the last layer applies to the result of its attention, if nothing but the first token is needed of it."""
    modules = [*model.children()] if isinstance(model, SentenceTransformer) else []
    match modules:
        case [Transformer() as transformer, Pooling(pooling_mode="cls", include_prompt=True), *_]:
            backbone: Any = model.transformers_model
            # Not ONNX, nor a wrapper of peft, nor code from the hub; and batches that are no single long row.
            known = type(backbone).__module__.startswith("transformers.") and backbone.config.model_type in _LIKE_BERT
            if known and not transformer.can_flatten_inputs and model.tokenizer.padding_side == "right":
                return backbone.encoder.layer[-1].attention.output
    return None
