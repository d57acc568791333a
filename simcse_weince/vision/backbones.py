"""Image encoders: the paper's backbones from the classes of transformers, any other one, and the projection head."""

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel, ResNetConfig, ResNetModel, ViTConfig, ViTModel
from transformers.models.resnet.modeling_resnet import ResNetConvLayer

from simcse_weince.errors import InputError, first_line
from simcse_weince.outputs import replacing_files_of

logger = logging.getLogger(__name__)

BACKBONES = ("resnet18", "resnet50", "vit-small")
# Kind of layer, layers and channels of the four stages.
_RESNETS: dict[str, tuple[str, list[int], list[int]]] = {
    "resnet18": ("basic", [2, 2, 2, 2], [64, 128, 256, 512]),
    "resnet50": ("bottleneck", [3, 4, 6, 3], [256, 512, 1024, 2048]),
}
_LARGEST_SMALL_IMAGE = 64
_HEAD_FILE = "projection_head.safetensors"


class SmallImageResNetConfig(ResNetConfig):
    """A `ResNetConfig` whose type tells ``AutoModel`` to build a `SmallImageResNetModel`."""

    model_type = "resnet_small_image"


class SmallImageResNetModel(ResNetModel):
    """A ResNet whose stem is one 3x3 convolution of stride 1 without max-pool, for images of 32 to 64 pixels.

    `ResNetConfig` knows only the stem for 224 pixels (7x7, stride 2, max-pool), which leaves 1x1 of a 32-pixel image
    after the last stage; hence a model type of its own. Names of the weights are those of `ResNetModel`.

    Source: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", appendix B.9.
    """

    config_class = SmallImageResNetConfig

    def __init__(self, config: SmallImageResNetConfig) -> None:
        super().__init__(config)
        self.embedder.embedder = ResNetConvLayer(
            config.num_channels, config.embedding_size, kernel_size=3, stride=1, activation=config.hidden_act
        )
        self.embedder.pooler = nn.Identity()  # type: ignore[assignment]
        self.post_init()


AutoConfig.register(SmallImageResNetConfig.model_type, SmallImageResNetConfig, exist_ok=True)
AutoModel.register(SmallImageResNetConfig, SmallImageResNetModel, exist_ok=True)


def build_backbone(name_or_path: str, *, image_size: int, width: float = 1.0) -> PreTrainedModel:
    """Build an image encoder of transformers, whose ``pooler_output`` holds the features.

    "resnet18" and "resnet50" have a 3x3 stem of stride 1 without max-pool up to 64 pixels and the standard stem above.
    "vit-small" has 12 layers, 384 channels and 6 heads, with patches of 4 pixels up to 32 and of 8 above; its
    ``pooler_output`` is the normalised [CLS] token. Their weights are random, drawn from torch's global generator.

    Args:
        name_or_path: One of the names above, or the folder or Hugging Face id of any image encoder of transformers.
        image_size: Side of the square images, in pixels.
        width: Factor on the number of channels of a named backbone, such as 0.25 for runs on a CPU.

    Returns:
        The encoder in float32.

    Raises:
        InputError: Nothing can be loaded there, or it is no image encoder.
        ValueError: `width` is not positive, or given for an encoder that is loaded.
    """
    if width <= 0:
        raise ValueError(f"width must be positive, not {width}")
    if name_or_path in _RESNETS:
        layer_type, depths, channels = _RESNETS[name_or_path]
        sizes = [max(8, round(width * size)) for size in (64, *channels)]
        kind: Any = SmallImageResNetModel if image_size <= _LARGEST_SMALL_IMAGE else ResNetModel
        shape = {"layer_type": layer_type, "depths": depths, "embedding_size": sizes[0], "hidden_sizes": sizes[1:]}
        return kind(kind.config_class(**shape))
    if name_or_path == "vit-small":
        patch, heads, head_size = 4 if image_size <= 32 else 8, 6, max(8, round(64 * width))
        if image_size % patch:
            raise InputError(f"vit-small: {image_size} pixels are no multiple of its patches of {patch}")
        config = ViTConfig(
            image_size=image_size,
            patch_size=patch,
            hidden_size=heads * head_size,
            intermediate_size=4 * heads * head_size,
            num_hidden_layers=12,
            num_attention_heads=heads,
        )
        return _features_from_cls(ViTModel(config))
    if width != 1:
        raise ValueError(f"width can be chosen for {', '.join(BACKBONES)} only, not for {name_or_path}")
    return _load_backbone(name_or_path, f"one of {', '.join(BACKBONES)}, or ")


def _load_backbone(name_or_path: str, or_else: str = "") -> PreTrainedModel:
    try:
        backbone, loading = AutoModel.from_pretrained(name_or_path, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # a damaged folder makes the host library stumble in every way there is
        raise InputError(
            f"{name_or_path}: no image encoder can be loaded there ({first_line(error)}); "
            f"name {or_else}the folder or Hugging Face id of a model"
        ) from error
    if backbone.main_input_name != "pixel_values":
        raise InputError(f"{name_or_path}: a {type(backbone).__name__} takes {backbone.main_input_name}, not images")
    if hasattr(backbone.config, "mask_ratio"):
        backbone.config.mask_ratio = 0.0  # a masked autoencoder hides patches at random, in evaluation too
    if any(key.startswith("pooler.dense") for key in loading["missing_keys"]):
        return _features_from_cls(backbone)
    if getattr(backbone.config, "pooler_act", None) == "linear":
        backbone.pooler.requires_grad_(False)
    return backbone


def _features_from_cls(backbone: PreTrainedModel) -> PreTrainedModel:
    """Make ``pooler_output`` of a ViT its normalised [CLS] token: the pooler is the identity, and stays so.

    What is saved then gives the same features by plain ``AutoModel``, which adds a random pooler where there is none.
    """
    pooler: Any = backbone.pooler
    with torch.no_grad():
        nn.init.eye_(pooler.dense.weight)
        nn.init.zeros_(pooler.dense.bias)
    pooler.activation = nn.Identity()
    pooler.requires_grad_(False)
    backbone.config.pooler_act = "linear"
    return backbone


class VisionEncoder(nn.Module):
    """A backbone and the projection head of SimCLR (linear, ReLU, linear, no bias), which training uses alone.

    Args:
        backbone: An image encoder of transformers; its pooled output of width h is what is evaluated.
        image_size: Side of the square images, in pixels.
        projection_size: Width of the head's output.

    Attributes:
        head_is_trained: Whether the head was loaded with its weights.
    """

    head_is_trained = False

    def __init__(self, backbone: PreTrainedModel, image_size: int, projection_size: int = 64) -> None:
        super().__init__()
        if projection_size < 1:
            raise ValueError(f"projection_size must be at least 1, not {projection_size}")
        self.backbone = backbone
        self.image_size = image_size
        names = (name.rpartition(".")[2] for name, _ in backbone.named_parameters())
        self._has_class_token = not {"cls_token", "class_token", "class_embedding"}.isdisjoint(names)
        mode = backbone.training
        try:
            with torch.no_grad():
                width = self.eval().features(torch.zeros(1, 3, image_size, image_size)).shape[1]
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"this encoder does not take images of {image_size} x {image_size} ({first_line(error)})"
            ) from error
        self.train(mode)
        self.head = nn.Sequential(
            nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, projection_size, bias=False)
        )

    def features(self, pixels: Tensor) -> Tensor:
        """Return the pooled output before the head: (N, 3, H, W) in [0, 1] to (N, h).

        Where the backbone does not pool: its class token, or the mean over the tokens of one that has none.
        """
        output = self.backbone(pixel_values=pixels)
        pooled = getattr(output, "pooler_output", None)
        if pooled is None:
            hidden = output.last_hidden_state
            if hidden.ndim == 4:
                pooled = hidden.mean((2, 3))
            else:
                pooled = hidden[:, 0] if self._has_class_token else hidden.mean(1)
        return pooled.flatten(1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the projection that the criterion compares: (N, 3, H, W) in [0, 1] to (N, projection_size)."""
        return self.head(self.features(pixels))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the backbone as a transformers folder, and the head beside it as ``projection_head.safetensors``."""
        weights = {name: value.contiguous() for name, value in self.head.state_dict().items()}
        with replacing_files_of(folder) as temporary:
            self.backbone.save_pretrained(temporary)
            save_file(weights, temporary / _HEAD_FILE, metadata={"image_size": str(self.image_size)})

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, *, image_size: int | None = None) -> "VisionEncoder":
        """Load a saved encoder, or any image encoder of transformers, which gets a head with random weights.

        Args:
            name_or_path: Folder or Hugging Face id.
            image_size: Side of the images, in pixels. Default: that of the training, else that of the configuration.

        Raises:
            InputError: No image encoder or a damaged head is there, or the image size is not known.
        """
        head = Path(name_or_path, _HEAD_FILE)
        backbone = _load_backbone(str(name_or_path))
        if not head.is_file():
            size = getattr(backbone.config, "image_size", None) if image_size is None else image_size
            if not isinstance(size, int):
                raise InputError(f"{name_or_path}: for images of which size is this encoder? Name it with --image_size")
            logger.warning("%s has no %s: the projection head starts at random", name_or_path, _HEAD_FILE)
            return cls(backbone, size)
        try:
            with safe_open(head, "pt") as stored:
                size = int(stored.metadata()["image_size"]) if image_size is None else image_size
            weights = load_file(head)
            encoder = cls(backbone, size, projection_size=len(weights["2.weight"]))
            encoder.head.load_state_dict(weights)
        except InputError:
            raise
        except Exception as error:  # as above
            raise InputError(
                f"{head}: damaged, or not the head of this encoder ({first_line(error)}); remove it, and name "
                "--image_size, to use the features alone"
            ) from error
        encoder.head_is_trained = True
        return encoder
