"""Two augmented views of each image, made for the whole batch at once on the device where the images are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional

from simcse_weince.errors import InputError

_LUMA = (0.299, 0.587, 0.114)
_ASPECT = (3 / 4, 4 / 3)
_TRIES = 10
_BLUR_SIGMA = (0.1, 2.0)


@dataclass(frozen=True)
class ViewOptions:
    """How a view is drawn; the defaults are the recipe of the paper.

    Attributes:
        crop_scale: Smallest and largest area of the random crop, as a share of the image; its aspect is log-uniform in
            3/4 to 4/3. The crop is resized to the square.
        flip: Probability of a horizontal flip.
        jitter: Strength of brightness, contrast, saturation (factors in 1 - s to 1 + s) and hue (shift in -s to s, in
            turns of the colour circle, s at most 0.5), applied in an order drawn for each image.
        jitter_probability: Probability of the jitter.
        gray_probability: Probability of a view in grey.
        blur_probability: Probability of a Gaussian blur with a sigma uniform in 0.1 to 2 pixels.
        normalize: Mean and standard deviation of each channel, or None to leave the pixels in [0, 1].
    """

    crop_scale: Sequence[float] = (0.08, 1.0)
    flip: float = 0.5
    jitter: Sequence[float] = (0.8, 0.8, 0.8, 0.2)
    jitter_probability: float = 0.8
    gray_probability: float = 0.2
    blur_probability: float = 0.0
    normalize: Sequence[Sequence[float]] | None = None

    def __post_init__(self) -> None:
        for name in ("flip", "jitter_probability", "gray_probability", "blur_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a probability, not {getattr(self, name)}")
        if len(self.crop_scale) != 2 or not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"crop_scale must be two shares 0 < smallest <= largest <= 1, not {self.crop_scale}")
        if len(self.jitter) != 4 or not all(0 <= value < math.inf for value in self.jitter) or self.jitter[3] > 0.5:
            raise ValueError(f"jitter must be four strengths, the last at most 0.5, not {self.jitter}")
        if self.normalize is not None:
            finite = all(math.isfinite(value) for values in self.normalize for value in values)
            if [len(values) for values in self.normalize] != [3, 3] or not finite or min(self.normalize[1]) <= 0:
                raise ValueError(f"normalize must be three means and three deviations above 0, not {self.normalize}")


class TwoViews:
    """Draw two views of each image.

    Args:
        options: How a view is drawn.
        image_size: Side of the square views, in pixels.

    Raises:
        InputError: Views of one pixel are to be blurred.
    """

    def __init__(self, options: ViewOptions, image_size: int) -> None:
        if options.blur_probability and image_size < 2:
            raise InputError("blur_probability: views of 1 pixel cannot be blurred; name a larger --image_size")
        self.options = options
        self.image_size = image_size

    def __call__(self, images: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return two views of each image, independent of each other and of the other images.

        Args:
            images: uint8, (N, 3, H, W), on any device.
            generator: Source of all randomness, on any device; default the global one of the images' device. The
                numbers are drawn where the generator is, so a CPU generator gives the same views on every device.

        Returns:
            Two float32 tensors (N, 3, image_size, image_size) with values in [0, 1] unless normalised.
        """
        options = self.options
        pixels = torch.cat([images, images]).float() / 255
        device = images.device if generator is None else generator.device
        columns = [2 * _TRIES, 2, 1, 1, 4, 4, 1, 1, 1]
        draws = torch.rand(len(pixels), sum(columns), generator=generator, device=device).to(images.device)
        tries, place, flip, jitter, strength, order, gray, blur, sigma = draws.split(columns, dim=1)
        pixels = _crop(pixels, tries, place, flip < options.flip, options.crop_scale, self.image_size)
        pixels = _jitter(pixels, strength, order, jitter < options.jitter_probability, options.jitter)
        pixels = torch.where(_rows(gray) < options.gray_probability, _gray(pixels), pixels)
        if options.blur_probability:
            pixels = torch.where(_rows(blur) < options.blur_probability, _blur(pixels, sigma), pixels)
        first, second = _normalized(pixels, options.normalize).chunk(2)
        return first, second


def evaluation_view(images: Tensor, image_size: int, normalize: Sequence[Sequence[float]] | None = None) -> Tensor:
    """Resize images to the square and change nothing else.

    Args:
        images: uint8, (N, 3, H, W).
        image_size: Side of the square, in pixels.
        normalize: As in `ViewOptions`; must be that of the training.

    Returns:
        float32, (N, 3, image_size, image_size), in [0, 1] unless normalised.
    """
    pixels = images.float() / 255
    if pixels.shape[2:] != (image_size, image_size):
        pixels = functional.interpolate(pixels, (image_size, image_size), mode="bilinear", antialias=True)
        pixels = pixels.clamp(0, 1)
    return _normalized(pixels, normalize)


def _rows(column: Tensor) -> Tensor:
    """Give (N, 1) numbers the shape (N, 1, 1, 1), to act on images."""
    return column[:, :, None, None]


def _crop(
    pixels: Tensor, tries: Tensor, place: Tensor, flip: Tensor, scale: Sequence[float], image_size: int
) -> Tensor:
    """Cut a random rectangle, perhaps mirror it, and resize it to the square: one bilinear sampling for all three.

    As in torchvision's RandomResizedCrop the first of ten drawn rectangles that fits into the image is taken, and the
    largest central one of an allowed aspect where none fits.
    """
    height, width = pixels.shape[2:]
    area, aspect = tries.chunk(2, dim=1)
    area = (scale[0] + (scale[1] - scale[0]) * area) * height * width
    low, high = math.log(_ASPECT[0]), math.log(_ASPECT[1])
    aspect = torch.exp(low + (high - low) * aspect)
    largest = min(max(width / height, _ASPECT[0]), _ASPECT[1])
    central = pixels.new_tensor([[min(width, height * largest), min(height, width / largest)]])
    sides = torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()], dim=2)
    sides = torch.cat([sides, central.expand(len(pixels), 1, 2)], dim=1)
    bounds = pixels.new_tensor([width, height])
    chosen = (sides <= bounds).all(dim=2).int().argmax(dim=1)
    share = sides[torch.arange(len(sides), device=sides.device), chosen] / bounds
    centre = torch.where((chosen == _TRIES)[:, None], 0.0, (2 * place - 1) * (1 - share))
    theta = torch.diag_embed(share)
    theta[:, :, 0] *= torch.where(flip, -1.0, 1.0)
    # Where a crop may be larger than the view, sample finer and average: bilinear sampling alone would alias.
    finer = math.ceil(max(height, width) / image_size)
    size = finer * image_size
    grid = functional.affine_grid(torch.cat([theta, centre[:, :, None]], dim=2), [len(pixels), 3, size, size], False)
    views = functional.grid_sample(pixels, grid, padding_mode="border", align_corners=False)
    return functional.avg_pool2d(views, finer) if finer > 1 else views


def _gray(pixels: Tensor) -> Tensor:
    """Return the brightness of each pixel: (N, 3, H, W) to (N, 1, H, W)."""
    return (pixels * pixels.new_tensor(_LUMA)[:, None, None]).sum(dim=1, keepdim=True)


def _jitter(pixels: Tensor, strength: Tensor, order: Tensor, apply: Tensor, limits: Sequence[float]) -> Tensor:
    """Change brightness, contrast, saturation and hue of each image, in its own order."""
    change = (2 * strength - 1) * pixels.new_tensor(limits) * apply
    order = order.argsort(dim=1)
    for step in order.split(1, dim=1):
        amount, step = _rows(change.gather(1, step)), _rows(step)
        gray = _gray(pixels)
        # Brightness blends with black, contrast with the mean grey, saturation with the grey image.
        other = torch.where(step == 0, 0.0, torch.where(step == 1, gray.mean(dim=(2, 3), keepdim=True), gray))
        factor = torch.where(step == 3, 1.0, (1 + amount).clamp(min=0))
        pixels = torch.lerp(other.expand_as(pixels), pixels, factor).clamp(0, 1)
        pixels = torch.where(step == 3, _shift_hue(pixels, amount), pixels)
    return pixels


def _shift_hue(pixels: Tensor, turns: Tensor) -> Tensor:
    """Turn the hue of HSV, leaving value and chroma."""
    red, green, blue = pixels.unbind(dim=1)
    value, brightest = pixels.max(dim=1)
    chroma = value - pixels.amin(dim=1)
    difference = torch.stack([green - blue, blue - red, red - green], dim=1)
    difference = difference.gather(1, brightest[:, None])[:, 0] / chroma.clamp(min=1e-8)
    hue = difference + 2 * brightest + 6 * turns[:, 0]
    corners = (hue[:, None] + hue.new_tensor([5.0, 3.0, 1.0])[:, None, None]).remainder(6)
    return value[:, None] - chroma[:, None] * torch.minimum(corners, 4 - corners).clamp(0, 1)


def _blur(pixels: Tensor, sigma: Tensor) -> Tensor:
    """Blur each image with a Gaussian of its own width, over a tenth of the side as SimCLR does."""
    radius = max(1, pixels.shape[3] // 20)
    offsets = torch.arange(-radius, radius + 1, device=pixels.device)
    deviation = _BLUR_SIGMA[0] + (_BLUR_SIGMA[1] - _BLUR_SIGMA[0]) * sigma
    kernel = torch.softmax(-0.5 * (offsets / deviation) ** 2, dim=1).repeat_interleave(3, dim=0)
    blurred = functional.pad(pixels, [radius] * 4, mode="reflect").flatten(0, 1)[None]
    blurred = functional.conv2d(blurred, kernel[:, None, None, :], groups=len(kernel))
    return functional.conv2d(blurred, kernel[:, None, :, None], groups=len(kernel)).view_as(pixels)


def _normalized(pixels: Tensor, normalize: Sequence[Sequence[float]] | None) -> Tensor:
    if normalize is None:
        return pixels
    mean, deviation = pixels.new_tensor(normalize)[:, None, :, None, None]
    return (pixels - mean) / deviation
