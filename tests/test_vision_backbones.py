"""Backbones are those of the paper, and what is saved gives the same features by plain AutoModel."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    ConvNextConfig,
    ConvNextModel,
    Dinov2Config,
    Dinov2Model,
    IJepaConfig,
    IJepaModel,
    ResNetModel,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
)

import simcse_weince.vision  # noqa: F401 - registers the model type
from simcse_weince.errors import InputError
from simcse_weince.vision.backbones import VisionEncoder, build_backbone


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "parameters", "width"),
    # As in the literature for the small stem: 11.17 and 23.50 million without a classifier.
    [("resnet18", 11_168_832, 512), ("resnet50", 23_500_352, 2048)],
)
def test_resnets_for_small_images_have_a_3x3_stem_of_stride_1_without_pool(name, parameters, width):
    backbone = build_backbone(name, image_size=32)
    assert _parameters(backbone) == parameters
    convolution = backbone.embedder.embedder.convolution
    assert convolution.kernel_size == (3, 3) and convolution.stride == (1, 1) and convolution.padding == (1, 1)
    with torch.no_grad():
        output = backbone.eval()(torch.rand(1, 3, 32, 32))
        assert backbone.embedder(torch.rand(1, 3, 32, 32)).shape == (1, 64, 32, 32)
    assert output.last_hidden_state.shape == (1, width, 4, 4) and output.pooler_output.shape == (1, width, 1, 1)


@pytest.mark.parametrize(("side", "small"), [(32, True), (64, True), (65, False), (96, False)])
def test_the_stem_follows_the_image_size(side, small):
    backbone = build_backbone("resnet18", image_size=side, width=0.125)
    assert (backbone.config.model_type == "resnet_small_image") == small
    assert isinstance(backbone, ResNetModel) and (type(backbone) is ResNetModel) != small
    expected = side if small else -(-side // 4)
    assert backbone.embedder(torch.zeros(1, 3, side, side)).shape[2:] == (expected, expected)


def test_the_stem_is_initialised_as_every_other_convolution():
    torch.manual_seed(0)
    backbone = build_backbone("resnet18", image_size=32)
    for convolution in (
        backbone.embedder.embedder.convolution,
        backbone.encoder.stages[0].layers[0].layer[0].convolution,
    ):
        # Kaiming, fan out: variance 2 / (9 * 64).
        assert convolution.weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.05)


@pytest.mark.parametrize(("side", "patch"), [(32, 4), (64, 8), (96, 8)])
def test_vit_small(side, patch):
    backbone = build_backbone("vit-small", image_size=side)
    config = backbone.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (384, 12, 6)
    assert (config.patch_size, config.intermediate_size, config.image_size) == (patch, 1536, side)
    # Of timm's vit_small: 12 layers of 1.775 million, here without the pooler, patches and positions.
    assert (
        sum(_parameters(module) for name, module in backbone.named_children() if name in ("encoder", "layers"))
        == 12 * 1_774_464
    )


def test_features_of_vit_are_the_normalised_cls_token():
    encoder = VisionEncoder(build_backbone("vit-small", image_size=32, width=0.125), 32).eval()
    pixels = torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(encoder.features(pixels), encoder.backbone(pixels).last_hidden_state[:, 0])
    assert not any(parameter.requires_grad for parameter in encoder.backbone.pooler.parameters())


def test_a_vit_of_a_size_that_patches_do_not_fill_is_refused():
    with pytest.raises(InputError, match="multiple"):
        build_backbone("vit-small", image_size=60)


def test_width_scales_the_channels():
    assert build_backbone("resnet18", image_size=32, width=0.25).config.hidden_sizes == [16, 32, 64, 128]
    assert build_backbone("resnet50", image_size=32, width=0.25).config.hidden_sizes == [64, 128, 256, 512]
    vit = build_backbone("vit-small", image_size=32, width=0.25).config
    assert (vit.hidden_size, vit.num_attention_heads, vit.num_hidden_layers) == (96, 6, 12)
    with pytest.raises(ValueError, match="width"):
        build_backbone("resnet18", image_size=32, width=0)


def test_weights_are_those_of_the_seed():
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(build_backbone("resnet18", image_size=32, width=0.125).state_dict())
    name = "encoder.stages.0.layers.0.layer.0.convolution.weight"
    assert models[0][name].equal(models[1][name]) and not models[0][name].equal(models[2][name])


def test_the_head_is_linear_relu_linear_without_bias_to_64():
    encoder = VisionEncoder(build_backbone("resnet18", image_size=32, width=0.125), 32)
    first, activation, last = encoder.head
    assert (first.in_features, first.out_features, first.bias) == (64, 64, None) and isinstance(activation, nn.ReLU)
    assert (last.in_features, last.out_features, last.bias) == (64, 64, None)
    pixels = torch.rand(4, 3, 32, 32)
    assert encoder.training and encoder(pixels).shape == (4, 64)
    encoder.eval()
    torch.testing.assert_close(encoder(pixels), encoder.head(encoder.features(pixels)))
    assert VisionEncoder(encoder.backbone, 32, projection_size=16)(pixels).shape == (4, 16)


def test_building_an_encoder_leaves_the_running_statistics_alone():
    backbone = build_backbone("resnet18", image_size=32, width=0.125)
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    VisionEncoder(backbone, 32)
    assert all(value.equal(before[name]) for name, value in backbone.state_dict().items())


def _trained(encoder: VisionEncoder) -> VisionEncoder:
    """Take one step, so that weights and running statistics are not the initial ones."""
    optimizer = torch.optim.SGD(encoder.parameters(), 0.1)
    encoder.train()(torch.rand(4, 3, encoder.image_size, encoder.image_size)).square().mean().backward()
    optimizer.step()
    return encoder.eval()


@pytest.mark.parametrize(("name", "side"), [("resnet18", 32), ("resnet50", 64), ("resnet18", 96), ("vit-small", 32)])
def test_a_saved_folder_loads_by_automodel_with_the_same_features(tmp_path, name, side):
    encoder = _trained(VisionEncoder(build_backbone(name, image_size=side, width=0.125), side))
    encoder.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "projection_head.safetensors",
    ]
    assert "auto_map" not in (tmp_path / "config.json").read_text()
    pixels = torch.rand(4, 3, side, side)
    model, loading = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    again = VisionEncoder.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = encoder.features(pixels)
        assert model.eval()(pixels).pooler_output.flatten(1).equal(expected)
        assert again.features(pixels).equal(expected) and again(pixels).equal(encoder(pixels))
    assert again.image_size == side
    trainable = [[p.requires_grad for p in model.parameters()] for model in (encoder, again)]
    assert trainable[0] == trainable[1]


def test_a_failure_while_saving_leaves_the_encoder_before(tmp_path, monkeypatch):
    """Never the backbone of one encoder beside the head of another."""
    VisionEncoder(build_backbone("resnet18", image_size=16, width=0.125), 16).save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("simcse_weince.vision.backbones.save_file", full)
    with pytest.raises(OSError, match="No space"):
        VisionEncoder(build_backbone("resnet18", image_size=16, width=0.125), 16).save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


_HEAD = {"0.weight": torch.zeros(64, 64), "2.weight": torch.zeros(8, 64)}


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:50]),
        lambda path: path.write_bytes(path.read_bytes()[:-50]),
        lambda path: save_file(_HEAD, path),
        lambda path: save_file(_HEAD, path, metadata={"image_size": "big"}),
        lambda path: save_file({"x": torch.zeros(2)}, path, metadata={"image_size": "16"}),
        lambda path: save_file(_HEAD | {"0.weight": torch.zeros(2, 2)}, path, metadata={"image_size": "16"}),
        lambda path: save_file(_HEAD | {"2.weight": torch.zeros(0, 64)}, path, metadata={"image_size": "16"}),
    ],
)
def test_a_damaged_head_is_one_sentence(tmp_path, damage):
    VisionEncoder(build_backbone("resnet18", image_size=16, width=0.125), 16).save_pretrained(tmp_path)
    damage(tmp_path / "projection_head.safetensors")
    with pytest.raises(InputError, match=r"projection_head.safetensors: damaged, .*; remove it") as caught:
        VisionEncoder.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_another_process_loads_the_folder_after_one_import(tmp_path):
    VisionEncoder(build_backbone("resnet18", image_size=32, width=0.125), 32).save_pretrained(tmp_path)
    code = f"import simcse_weince.vision, transformers; transformers.AutoModel.from_pretrained({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_weights_have_the_names_of_the_stock_model(tmp_path):
    small = build_backbone("resnet18", image_size=32, width=0.125)
    stock = build_backbone("resnet18", image_size=96, width=0.125)
    assert list(small.state_dict()) == list(stock.state_dict())


def _tiny(kind: str) -> nn.Module:
    shape = {"image_size": 32, "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "vit": lambda: ViTModel(ViTConfig(**shape, intermediate_size=48)),
        "vit without pooler": lambda: ViTModel(ViTConfig(**shape, intermediate_size=48), add_pooling_layer=False),
        "dinov2": lambda: Dinov2Model(Dinov2Config(**shape)),
        "clip": lambda: CLIPVisionModel(CLIPVisionConfig(**shape, intermediate_size=48)),
        "convnext": lambda: ConvNextModel(ConvNextConfig(hidden_sizes=[8, 8, 16, 24], depths=[1, 1, 1, 1])),
        "swin": lambda: SwinModel(
            SwinConfig(image_size=32, patch_size=4, embed_dim=12, depths=[1, 1], num_heads=[2, 2], window_size=4)
        ),
    }[kind]()


@pytest.mark.parametrize("kind", ["vit", "vit without pooler", "dinov2", "clip", "convnext", "swin"])
def test_any_image_encoder_of_transformers(tmp_path, kind):
    _tiny(kind).save_pretrained(tmp_path / "model")
    encoder = VisionEncoder(build_backbone(str(tmp_path / "model"), image_size=32), 32).eval()
    pixels = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        features = encoder.features(pixels)
        assert features.shape == (2, 24) and features.std() > 0 and encoder(pixels).shape == (2, 64)
        encoder.save_pretrained(tmp_path / "again")
        assert VisionEncoder.from_pretrained(tmp_path / "again").eval().features(pixels).equal(features)
        if kind == "vit without pooler":
            stock = ViTModel.from_pretrained(tmp_path / "model", add_pooling_layer=False).eval()
            torch.testing.assert_close(features, stock(pixels).last_hidden_state[:, 0])


def test_a_model_without_a_head_gets_a_random_one_and_its_own_size(tmp_path, caplog):
    _tiny("vit").save_pretrained(tmp_path)
    assert VisionEncoder.from_pretrained(tmp_path).image_size == 32
    assert "starts at random" in caplog.text


def test_images_of_another_size_than_the_model_takes_are_refused(tmp_path):
    _tiny("vit").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="64 x 64"):
        VisionEncoder(build_backbone(str(tmp_path), image_size=64), 64)


def test_what_is_no_image_encoder_is_refused(tiny_bert, tmp_path):
    with pytest.raises(InputError, match="input_ids"):
        build_backbone(tiny_bert, image_size=32)
    with pytest.raises(InputError, match="name one of resnet18, .* or the folder"):
        build_backbone(str(tmp_path / "nowhere"), image_size=32)
    # What is to be evaluated is a folder or an id; a name alone has no weights.
    with pytest.raises(InputError, match=r"; name the folder or Hugging Face id"):
        VisionEncoder.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="width"):
        build_backbone(tiny_bert, image_size=32, width=0.5)


def test_a_model_in_half_precision_is_trained_in_float32(tmp_path):
    _tiny("vit").half().save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["layernorm.weight"].dtype == torch.float16
    assert {p.dtype for p in build_backbone(str(tmp_path), image_size=32).parameters()} == {torch.float32}


SMALL = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 8}  # fmt: skip


def test_a_masked_autoencoder_sees_the_whole_image(tmp_path):
    ViTMAEModel(ViTMAEConfig(**SMALL)).save_pretrained(tmp_path)
    encoder, image = VisionEncoder.from_pretrained(tmp_path).eval(), torch.rand(1, 3, 8, 8)
    with torch.no_grad():
        assert torch.allclose(encoder.features(image), encoder.features(image), atol=1e-6)


def test_tokens_without_a_class_token_are_averaged(tmp_path):
    IJepaModel(IJepaConfig(**SMALL)).save_pretrained(tmp_path)
    encoder, image = VisionEncoder.from_pretrained(tmp_path).eval(), torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(encoder.features(image), encoder.backbone(image).last_hidden_state.mean(1))
