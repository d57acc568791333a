"""The encoder: every pooling against hidden states, on several architectures; saving, dropout, tokenizers."""

import json
import logging
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Dropout, WeightedLayerPooling
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    AlbertConfig,
    AutoModel,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    T5Config,
    set_seed,
)

from simcse_weince.errors import InputError
from simcse_weince.sentence.encoder import (
    PoolerType,
    SimCSEEncoder,
    build_encoder,
    check_dropout,
    position_limit,
    read_model_config,
    view_cosine,
)
from tests.tiny_models import write_tiny_bert

POOLER_TYPES = get_args(PoolerType)
WORDS = "a the man dog runs plays red green house city music rain one two three four five six".split()
VOCABULARY = {word: index for index, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS])}
SENTENCES = ["the dog runs", "a man plays music in the green house of the red city one two three four", "rain"]
SIZES = {"vocab_size": len(VOCABULARY), "pad_token_id": 1}
BERT_LIKE = {
    **SIZES, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64
}  # fmt: skip
CONFIGS = {
    "albert": AlbertConfig(**BERT_LIKE, embedding_size=16, max_position_embeddings=40),
    "bert": BertConfig(**BERT_LIKE, max_position_embeddings=40),
    "distilbert": DistilBertConfig(**SIZES, dim=32, n_layers=3, n_heads=2, hidden_dim=64, max_position_embeddings=40),
    "gpt2": GPT2Config(vocab_size=len(VOCABULARY), n_embd=32, n_layer=3, n_head=2, n_positions=40, eos_token_id=2),
    "modernbert": ModernBertConfig(
        **BERT_LIKE, max_position_embeddings=40, bos_token_id=0, eos_token_id=2, cls_token_id=0, sep_token_id=2,
        local_attention=8,
    ),
    "mpnet": MPNetConfig(**BERT_LIKE, max_position_embeddings=34),
    "roberta": RobertaConfig(**BERT_LIKE, max_position_embeddings=34),
    "t5": T5Config(**SIZES, d_model=32, d_kv=16, num_layers=3, num_heads=2, d_ff=64, eos_token_id=2),
}  # fmt: skip
USABLE_POSITIONS = {**dict.fromkeys(CONFIGS, 40), "mpnet": 32, "roberta": 32, "t5": None}


def write_model(folder: Path, architecture: str, *, pad: bool = True, padding_side: str = "right") -> str:
    """A random three-layer model with a word tokenizer that knows no length limit."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    padding = {"pad_token": "<pad>"} if pad else {}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", padding_side=padding_side, **padding
    ).save_pretrained(folder)
    set_seed(0)
    AutoModel.from_config(CONFIGS[architecture]).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name, name, pad=name != "gpt2") for name in CONFIGS}


def pooled_by_hand(encoder: SimCSEEncoder, text: str, pooler_type: str) -> torch.Tensor:
    """SimCSE's pooling of one unpadded text, from the hidden states of the backbone alone."""
    backbone = encoder[0].model
    ids = encoder.tokenizer(text, return_tensors="pt", truncation=True).input_ids
    with torch.no_grad():
        states = backbone(input_ids=ids, output_hidden_states=True, return_dict=True).hidden_states
    if pooler_type == "cls_before_pooler":
        return states[-1][0, 0]
    if pooler_type == "cls":
        return torch.tanh(encoder[2].linear(states[-1][0, 0]))
    layers = {"avg": [-1], "avg_top2": [-1, -2], "avg_first_last": [1, -1]}[pooler_type]
    return torch.stack([states[layer][0].mean(0) for layer in layers]).mean(0)


@pytest.mark.parametrize("pooler_type", POOLER_TYPES)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_tr01_embeddings_follow_the_formula_and_survive_a_plain_reload(
    architecture: str, pooler_type: str, folders: dict[str, str], tmp_path: Path
):
    encoder = build_encoder(folders[architecture], pooler_type=pooler_type, device="cpu")
    embeddings = encoder.encode(SENTENCES)
    by_hand = torch.stack([pooled_by_hand(encoder, text, pooler_type) for text in SENTENCES]).detach()
    np.testing.assert_allclose(embeddings, by_hand, atol=1e-5)
    assert encoder.get_embedding_dimension() == embeddings.shape[1] == 32

    encoder.save(str(tmp_path / "saved"))
    plain = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_array_equal(plain.encode(SENTENCES), embeddings)
    again = build_encoder(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_array_equal(again.encode(SENTENCES), embeddings)
    assert plain.max_seq_length == encoder.max_seq_length

    types = [module["type"] for module in json.loads((tmp_path / "saved/modules.json").read_text())]
    assert all(name.startswith("sentence_transformers.") for name in types)
    texts = [path for path in (tmp_path / "saved").rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert [path.name for path in texts if str(tmp_path.parent) in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "modernbert", "roberta"])
def test_tk07_embedding_does_not_depend_on_its_batch(architecture: str, padding_side: str, tmp_path: Path):
    folder = write_model(tmp_path / "model", architecture, padding_side=padding_side)
    for pooler_type in POOLER_TYPES:
        encoder = build_encoder(folder, pooler_type=pooler_type, device="cpu")
        alone = np.stack([encoder.encode(text) for text in SENTENCES])
        np.testing.assert_allclose(encoder.encode(SENTENCES), alone, atol=1e-5)


def test_tk06_tokenizer_without_pad_token(folders: dict[str, str], caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        encoder = build_encoder(folders["gpt2"], pooler_type="avg", device="cpu")
    assert "padding" in caplog.text
    assert encoder.tokenizer.pad_token == "</s>" and encoder.config.pad_token_id == 2
    padded = encoder.encode(SENTENCES)
    np.testing.assert_allclose(padded, np.stack([encoder.encode(text) for text in SENTENCES]), atol=1e-5)


def test_tk06_tokenizer_without_pad_and_end_token_is_refused(folders: dict[str, str], tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="neither a padding nor an end token"):
        build_encoder(folders["gpt2"], pooler_type="avg", tokenizer_name=str(tmp_path), device="cpu")


@pytest.mark.parametrize("architecture", CONFIGS)
def test_tk01_positions_that_a_text_may_use(architecture: str, folders: dict[str, str]):
    limit = USABLE_POSITIONS[architecture]
    assert position_limit(read_model_config(folders[architecture])) == limit
    encoder = build_encoder(folders[architecture], pooler_type="cls_before_pooler", device="cpu")
    long_text = " ".join(["dog"] * 100)
    assert np.isfinite(encoder.encode(long_text)).all()
    assert encoder.preprocess([long_text])["input_ids"].shape[1] == (limit or 102)


def test_tk01_long_prefix_without_a_tokenizer_limit(case_inputs: Path, tmp_path: Path):
    texts = (case_inputs / "train_long_prefix.txt").read_text(encoding="utf-8").splitlines()
    encoder = build_encoder(write_tiny_bert(tmp_path, max_position_embeddings=40), pooler_type="avg", device="cpu")
    assert encoder.max_seq_length == 40
    assert np.isfinite(encoder.encode(texts)).all()


def test_head_trains_and_is_absent_elsewhere(tiny_bert: str, tmp_path: Path):
    encoder = build_encoder(tiny_bert, mlp_only_train=True, device="cpu")
    without_head = build_encoder(tiny_bert, pooler_type="cls_before_pooler", device="cpu")
    head = encoder.train_only_head
    assert head is not None and without_head.train_only_head is None
    np.testing.assert_array_equal(encoder.encode(SENTENCES), without_head.encode(SENTENCES))
    assert encoder.get_embedding_dimension() == 32

    encoder.train()
    encoder(encoder.preprocess(SENTENCES))["sentence_embedding"].sum().backward()
    assert head.linear.weight.grad.abs().sum() > 0

    encoder.save(str(tmp_path / "saved"))
    assert encoder.train_only_head is head
    assert not [path for path in (tmp_path / "saved").rglob("*") if "Head" in path.name]
    assert "Head" not in (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    plain = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert len(plain) == 2
    np.testing.assert_array_equal(plain.encode(SENTENCES), encoder.encode(SENTENCES))
    with pytest.raises(RuntimeError, match="train-only"):
        head.save(str(tmp_path / "head"))


def test_model_card_names_the_saved_class_and_the_base_without_its_place(tiny_bert: str, tmp_path: Path):
    build_encoder(tiny_bert, pooler_type="cls", device="cpu").save(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    assert "# SentenceTransformer based on tiny_bert" in card and "\nSentenceTransformer(\n" in card
    assert "SimCSEEncoder" not in card and str(tmp_path) not in card


def test_head_keeps_its_weights_where_a_state_has_none(tiny_bert: str):
    encoder = build_encoder(tiny_bert, mlp_only_train=True, device="cpu")
    head = encoder.train_only_head.linear.weight.clone()
    encoder.load_state_dict(build_encoder(tiny_bert, pooler_type="cls_before_pooler", device="cpu").state_dict())
    torch.testing.assert_close(encoder.train_only_head.linear.weight, head)
    with pytest.raises(RuntimeError, match="Missing key"):
        encoder.load_state_dict({})


def test_head_goes_with_cls_only(tiny_bert: str):
    with pytest.raises(InputError, match="--mlp_only_train"):
        build_encoder(tiny_bert, pooler_type="avg", mlp_only_train=True, device="cpu")


@pytest.mark.parametrize("architecture", ["albert", "bert", "roberta"])
def test_mlp_of_cls_stays_the_pooler_of_the_backbone(architecture: str, folders: dict[str, str], tmp_path: Path):
    encoder = build_encoder(folders[architecture], pooler_type="cls", device="cpu")
    np.testing.assert_allclose(encoder.encode(SENTENCES), pooler_outputs(encoder), atol=1e-6)
    for trip in ("once", "twice"):
        encoder.train()
        optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
        encoder(encoder.preprocess(SENTENCES))["sentence_embedding"].sum().backward()
        optimizer.step()
        encoder.save(str(tmp_path / trip))
        np.testing.assert_allclose(encoder.encode(SENTENCES), pooler_outputs(encoder), atol=1e-6)
        converted = build_encoder(str(tmp_path / trip), pooler_type="cls", device="cpu")
        np.testing.assert_array_equal(converted.encode(SENTENCES), encoder.encode(SENTENCES))
        encoder = build_encoder(str(tmp_path / trip), device="cpu")


def pooler_outputs(encoder: SimCSEEncoder) -> np.ndarray:
    encoder.eval()
    features = encoder.tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        return encoder[0].model(**features).pooler_output.numpy()


@pytest.mark.parametrize("options", [{"pooler_type": name} for name in POOLER_TYPES] + [{"mlp_only_train": True}])
@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert"])
def test_dd07_every_weight_that_wants_a_gradient_gets_one(
    architecture: str, options: dict, folders: dict[str, str], tmp_path: Path
):
    encoder = build_encoder(folders[architecture], device="cpu", **options)
    encoder.save(str(tmp_path))
    for candidate in (encoder, build_encoder(str(tmp_path), device="cpu")):
        candidate.train()
        candidate(candidate.preprocess(SENTENCES))["sentence_embedding"].square().sum().backward()
        idle = [name for name, weight in candidate.named_parameters() if weight.requires_grad and weight.grad is None]
        assert idle == []
        layers = [module for module in candidate if isinstance(module, WeightedLayerPooling)]
        assert all(module.layer_weights.grad is None for module in layers)


def test_stored_pooling_length_and_casing_are_kept(tiny_bert: str, tmp_path: Path):
    encoder = build_encoder(tiny_bert, pooler_type="avg", device="cpu")
    encoder.max_seq_length = 20
    encoder.save(str(tmp_path / "stored"))
    other = write_tiny_bert(tmp_path / "other")
    for options in ({}, {"tokenizer_name": other}, {"tokenizer_name": other, "pooler_type": "avg"}):
        again = build_encoder(str(tmp_path / "stored"), device="cpu", **options)
        assert again[1].pooling_mode == "mean"
        np.testing.assert_array_equal(again.encode(SENTENCES), encoder.encode(SENTENCES))
    assert build_encoder(str(tmp_path / "stored"), device="cpu").max_seq_length == 20
    assert build_encoder(str(tmp_path / "stored"), pooler_type="cls", device="cpu").max_seq_length == 20
    assert build_encoder(str(tmp_path / "stored"), tokenizer_name=other, device="cpu").max_seq_length == 20


def test_model_without_stored_pooling_says_what_it_uses(tiny_bert: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        encoder = build_encoder(tiny_bert, device="cpu")
    assert encoder[1].pooling_mode == "cls" and len(encoder) == 2
    assert "cls_before_pooler" in caplog.text


def test_tr09_weights_in_bfloat16(tiny_bert: str, tmp_path: Path):
    reference = build_encoder(tiny_bert, pooler_type="cls", device="cpu").encode(SENTENCES)
    for options in ({"pooler_type": "cls"}, {"mlp_only_train": True}, {"pooler_type": "avg_first_last"}):
        encoder = build_encoder(tiny_bert, torch_dtype="bfloat16", device="cpu", **options)
        assert {weight.dtype for weight in encoder.parameters()} == {torch.bfloat16}
        encoder.train()
        assert encoder(encoder.preprocess(SENTENCES))["sentence_embedding"].isfinite().all()
        embeddings = encoder.encode(SENTENCES)
        encoder.save(str(tmp_path / "saved"))
        plain = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
        np.testing.assert_allclose(plain.encode(SENTENCES), embeddings, atol=1e-6)
        if options.get("pooler_type") == "cls":
            np.testing.assert_allclose(embeddings, reference, atol=0.05)


@pytest.mark.parametrize("architecture", ["bert", "modernbert", "distilbert"])
def test_ln02_dropout_reaches_modules_configuration_and_attention(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(CONFIGS, "bert", BertConfig(**BERT_LIKE, hidden_dropout_prob=0, attention_probs_dropout_prob=0))
    monkeypatch.setitem(
        CONFIGS, "distilbert", DistilBertConfig(**SIZES, dim=32, n_layers=2, n_heads=2, dropout=0, attention_dropout=0)
    )
    folder = write_model(tmp_path / "model", architecture)
    without = build_encoder(folder, pooler_type="cls_before_pooler", device="cpu")
    assert view_cosine(without, SENTENCES) == pytest.approx(1, abs=1e-6)
    with pytest.raises(InputError, match=r"--dropout 0\.1"):
        check_dropout(without, SENTENCES)

    encoder = build_encoder(folder, pooler_type="cls_before_pooler", dropout=0.1, device="cpu")
    assert check_dropout(encoder, SENTENCES) < 0.9999
    # ModernBERT has nn.Identity where its configuration says 0: what was set must be what was built.
    rates = [module.p for module in encoder.modules() if isinstance(module, nn.Dropout)]
    assert len(rates) >= 3 and set(rates) == {0.1}
    attention_rates = []

    def scaled_dot_product_attention(*args, dropout_p: float = 0.0, **kwargs):
        attention_rates.append(dropout_p)
        return original(*args, dropout_p=dropout_p, **kwargs)

    original = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", scaled_dot_product_attention)
    encoder.train()
    encoder(encoder.preprocess(SENTENCES))
    assert encoder.config._attn_implementation == "sdpa"
    assert len(attention_rates) == encoder.config.num_hidden_layers and set(attention_rates) == {0.1}

    encoder.save(str(tmp_path / "saved"))
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    names = {
        "bert": ["hidden_dropout_prob", "attention_probs_dropout_prob"],
        "modernbert": ["attention_dropout", "mlp_dropout", "embedding_dropout"],
        "distilbert": ["dropout", "attention_dropout"],
    }[architecture]
    assert [saved[name] for name in names] == [0.1] * len(names)
    assert saved.get("qa_dropout", 0.1) == 0.1 and saved.get("seq_classif_dropout", 0.2) == 0.2


def test_dropout_reaches_modules_that_no_configuration_of_transformers_names(tiny_bert: str, tmp_path: Path):
    stored = build_encoder(tiny_bert, pooler_type="avg", device="cpu")
    stored.append(Dropout(0.0))
    stored.save(str(tmp_path / "stored"))
    encoder = build_encoder(str(tmp_path / "stored"), dropout=0.2, device="cpu")
    assert [module.p for module in encoder[2].modules() if isinstance(module, nn.Dropout)] == [0.2]


def test_dropout_out_of_range_is_refused(tiny_bert: str):
    for dropout in (-0.1, 1.0, float("nan")):
        with pytest.raises(InputError, match="--dropout"):
            build_encoder(tiny_bert, pooler_type="avg", dropout=dropout, device="cpu")


def test_tr02_views_have_masks_of_their_own_and_looking_changes_nothing(tiny_bert: str):
    encoder = build_encoder(tiny_bert, pooler_type="avg", device="cpu")
    encoder.train()
    encoder[0].model.embeddings.eval()
    modes = [module.training for module in encoder.modules()]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    cosine = view_cosine(encoder, SENTENCES)
    assert 0 < cosine < 0.9999
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in encoder.modules()] == modes
    # Four copies of one text in one batch: no two rows share a mask.
    rows = encoder(encoder.preprocess([SENTENCES[0]] * 4))["sentence_embedding"].detach()
    assert torch.cdist(rows, rows)[~torch.eye(4, dtype=torch.bool)].min() > 1e-3


def test_tr02_evaluation_is_free_of_dropout(tiny_bert: str):
    encoder = build_encoder(tiny_bert, mlp_only_train=True, device="cpu")
    encoder.train()
    first = encoder.encode(SENTENCES)
    encoder.train()
    np.testing.assert_array_equal(encoder.encode(SENTENCES), first)


def test_training_length_is_the_collators_not_the_models(tiny_bert: str):
    encoder = build_encoder(tiny_bert, pooler_type="avg", device="cpu")
    long_text = " ".join(["dog"] * 50)
    assert encoder.preprocess([long_text], max_length=32)["input_ids"].shape[1] == 32
    assert encoder.preprocess([long_text])["input_ids"].shape[1] == 52
    assert encoder.max_seq_length == 64


def test_unusable_models_are_refused_in_one_sentence(tiny_bert: str, tmp_path: Path):
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = write_tiny_bert(tmp_path / "broken")
    weights = Path(broken) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    shape = write_tiny_bert(tmp_path / "shape")
    config = json.loads((Path(shape) / "config.json").read_text())
    (Path(shape) / "config.json").write_text(json.dumps({**config, "vocab_size": 7}))
    half = tmp_path / "half"  # its modules.json names folders that are not there
    build_encoder(tiny_bert, pooler_type="avg", device="cpu").save(str(half))
    lengthless, pooled = shutil.copytree(half, tmp_path / "lengthless"), shutil.copytree(half, tmp_path / "pooled")
    shutil.rmtree(half / "1_Pooling")
    (lengthless / "sentence_bert_config.json").write_text('{"max_seq_length": -3}')
    (pooled / "modules.json").write_text(json.dumps(json.loads((pooled / "modules.json").read_text())[:1]))
    for name, options, words in [
        (str(empty), {}, "no config.json"),
        (str(tmp_path / "absent"), {}, "absent"),
        (broken, {"pooler_type": "avg"}, "cannot be loaded"),
        (shape, {"pooler_type": "avg"}, "cannot be loaded"),
        (tiny_bert, {"torch_dtype": "float33"}, "--torch_dtype float33"),
        (tiny_bert, {"torch_dtype": "nn"}, "--torch_dtype nn"),
        (tiny_bert, {"attn_implementation": "flash_attention_2"}, "cannot be loaded"),
        (tiny_bert, {"attn_implementation": "fastest"}, "cannot be loaded"),
        (str(half), {}, "cannot be loaded"),
        (str(lengthless), {}, "cannot be loaded"),
        (str(pooled), {}, "cannot be loaded"),
        (tiny_bert, {"device": "meta", "pooler_type": "avg"}, "cannot be loaded"),
        (tiny_bert, {"device": "meta:x"}, "--device meta:x cannot be used"),
        (tiny_bert, {"device": "cuda:99"}, "--device cuda:99 cannot be used"),
    ]:
        with pytest.raises(InputError, match=words) as caught:
            build_encoder(name, **{"device": "cpu", **options})
        assert "\n" not in str(caught.value)


def test_folders_of_early_sentence_transformers_are_read(tiny_bert: str, tmp_path: Path):
    early = tmp_path / "early"
    build_encoder(tiny_bert, pooler_type="avg", device="cpu").save(str(early))
    kept = ("modules.json", "1_Pooling", "README.md", "config_sentence_transformers.json")
    (early / "0_Transformer").mkdir()
    for path in [path for path in early.iterdir() if path.name not in (*kept, "0_Transformer")]:
        path.rename(early / "0_Transformer" / path.name)
    modules = json.loads((early / "modules.json").read_text())
    (early / "modules.json").write_text(json.dumps([{**modules[0], "path": "0_Transformer"}, *modules[1:]]))
    expected = SentenceTransformer(str(early), device="cpu").encode(SENTENCES)
    np.testing.assert_array_equal(build_encoder(str(early), device="cpu").encode(SENTENCES), expected)


def test_model_without_its_tokenizer_is_refused(tiny_bert: str, tmp_path: Path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_bert, bare, ignore=shutil.ignore_patterns("tokenizer*", "vocab*"))
    with pytest.raises(InputError, match="--tokenizer_name"):
        build_encoder(str(bare), pooler_type="avg", device="cpu")
    named = build_encoder(str(bare), pooler_type="avg", tokenizer_name=tiny_bert, device="cpu")
    np.testing.assert_array_equal(
        named.encode(SENTENCES), build_encoder(tiny_bert, pooler_type="avg", device="cpu").encode(SENTENCES)
    )


def test_encoder_that_gives_nan_is_refused_at_the_start(tiny_bert: str):
    encoder = build_encoder(tiny_bert, pooler_type="avg", device="cpu")
    with torch.no_grad():
        encoder[0].model.embeddings.LayerNorm.weight[0] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        check_dropout(encoder, SENTENCES)


def test_pretrained_encoder_keeps_its_values(minilm: str):
    encoder = build_encoder(minilm, device="cpu")
    reference = SentenceTransformer(minilm, device="cpu")
    assert isinstance(encoder, SimCSEEncoder)
    np.testing.assert_array_equal(encoder.encode(SENTENCES), reference.encode(SENTENCES))
    assert build_encoder(minilm, pooler_type="avg", device="cpu").max_seq_length == reference.max_seq_length
    dense = [module for module in build_encoder(minilm, pooler_type="cls", device="cpu") if isinstance(module, Dense)]
    assert len(dense) == 1
