"""The last layer for the first token alone: the same embeddings and gradients, for less."""

from contextlib import nullcontext

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel

from simcse_weince.sentence.encoder import build_encoder
from simcse_weince.sentence.first_token import first_token_only

SENTENCES = ["a cat sat", "the river froze early that year and nobody crossed it", "", "a dog"]


def embed(model, **options):
    features = model.preprocess(SENTENCES, **options)
    with FlopCounterMode(display=False) as counter:
        embedding = model(features)["sentence_embedding"]
    return embedding, counter.get_total_flops()


def other_backbone(model, name):
    """Put a tiny backbone of another type, with the same vocabulary, in place of BERT."""
    config = AutoConfig.for_model(
        name, vocab_size=model.transformers_model.config.vocab_size, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=64, embedding_size=32, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model[0].model = AutoModel.from_config(config)


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "camembert", "electra"])
def test_embeddings_and_gradients_are_the_same_for_less(tiny_bert, name):
    model = build_encoder(tiny_bert, pooler_type="cls", mlp_only_train=True, dropout=0.0, device="cpu")
    if name != "bert":
        other_backbone(model, name)
    model.eval()
    weights, found = list(model.transformers_model.parameters()), []
    for block in (nullcontext(), first_token_only(model)):
        model.zero_grad()
        with block:
            embedding, flops = embed(model)
            embedding.square().sum().backward()
        found.append((embedding, [torch.zeros_like(w) if w.grad is None else w.grad for w in weights], flops))
    (plain, plain_gradients, all_flops), (cut, cut_gradients, fewer) = found
    torch.testing.assert_close(cut, plain, rtol=1e-5, atol=1e-6)
    for one, other in zip(cut_gradients, plain_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert fewer < 0.85 * all_flops
    assert model(model.preprocess(SENTENCES))["token_embeddings"].shape[1] > 1


def test_gradient_checkpointing_recomputes_the_same(tiny_bert):
    model = build_encoder(tiny_bert, pooler_type="cls_before_pooler", dropout=0.0, device="cpu").train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.transformers_model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        with first_token_only(model):
            embed(model)[0].square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients)


def unchanged(model):
    with torch.no_grad():
        plain, flops = embed(model)
        with first_token_only(model):
            return torch.equal(embed(model)[0], plain) and embed(model)[1] == flops


def test_what_needs_more_than_the_first_token_is_left_alone(tiny_bert):
    assert unchanged(build_encoder(tiny_bert, pooler_type="avg", device="cpu").eval())
    assert unchanged(build_encoder(tiny_bert, pooler_type="avg_first_last", device="cpu").eval())
    model = build_encoder(tiny_bert, pooler_type="cls_before_pooler", device="cpu").eval()
    assert not unchanged(model)
    model.tokenizer.padding_side = "left"
    assert unchanged(model)
    model.tokenizer.padding_side = "right"
    model[1].include_prompt = False
    assert unchanged(model)
    model[1].include_prompt = True
    model.transformers_model.config.output_hidden_states = True
    assert unchanged(model)
    assert unchanged(SentenceTransformer(modules=[model[0], Pooling(32, pooling_mode=["cls", "mean"])], device="cpu"))


def test_a_backbone_of_another_library_is_left_alone(tiny_bert):
    class Wrapped(torch.nn.Module):  # as those of peft and ONNX, which have the configuration but not the layers
        def __init__(self, backbone):
            super().__init__()
            self.config, self.backbone = backbone.config, backbone

        def forward(self, *args, **kwargs):
            return self.backbone(*args, **kwargs)

    model = build_encoder(tiny_bert, pooler_type="cls_before_pooler", device="cpu").eval()
    model[0].model = Wrapped(model[0].model)
    assert unchanged(model)


def test_what_is_no_sentence_transformer_is_left_alone():
    with first_token_only(torch.nn.Linear(2, 2)) as nothing:
        assert nothing is None
