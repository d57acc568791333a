"""Tiny encoders with random weights, written as ordinary Hugging Face folders: nothing is downloaded."""

import string
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizerFast,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    set_seed,
)

_WORDS = (
    "a an the is are was were he she it they and or not in on at to of for with by from this that one two three four "
    "five six man woman dog cat red blue green door house river city train plays plan sleeps runs rain falls music ##s "
    "##ing ##ed ##er ##ly alpha beta gamma delta still number parcel arrived lamp people water year world first"
).split()


def write_tiny_bert(
    folder: Path,
    *,
    dropout: float = 0.1,
    max_position_embeddings: int = 64,
    hidden_size: int = 32,
    layers: int = 2,
    model_max_length: int | None = None,
    seed: int = 0,
) -> str:
    """Write a random BERT (about 60,000 weights) with an uncased WordPiece tokenizer that can spell any ASCII text."""
    folder.mkdir(parents=True, exist_ok=True)
    characters = string.ascii_lowercase + string.digits + string.punctuation
    pieces = [*characters, *(f"##{c}" for c in string.ascii_lowercase + string.digits), *_WORDS]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(pieces)]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    limit = {} if model_max_length is None else {"model_max_length": model_max_length}
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"), do_lower_case=True, **limit)
    tokenizer.save_pretrained(folder)
    set_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * hidden_size,
        max_position_embeddings=max_position_embeddings,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    with torch.no_grad():
        BertModel(config).save_pretrained(folder)
    return str(folder)


def write_tiny_clip(folder: Path) -> str:
    """Write a random CLIP for images of 16 x 16 pixels and texts of up to 14 letters: two towers, 16 wide."""
    pieces = [
        "<|startoftext|>",
        "<|endoftext|>",
        *string.ascii_lowercase,
        *(c + "</w>" for c in string.ascii_lowercase),
    ]
    tokenizer = CLIPTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])
    tokenizer.model_max_length = 16
    pixels = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPProcessor(pixels, tokenizer).save_pretrained(folder)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": len(pieces), "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
    vision = {"image_size": 16, "patch_size": 8}
    set_seed(0)
    config = CLIPConfig(text_config={**tower, **text}, vision_config={**tower, **vision}, projection_dim=16)
    CLIPModel(config).save_pretrained(folder)
    return str(folder)
