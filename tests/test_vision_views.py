"""The two views follow the recipe: how often, how far, each image for itself, and the same for the same seed."""

import colorsys
import math

import pytest
import torch

from simcse_weince.errors import InputError
from simcse_weince.vision.views import TwoViews, ViewOptions, evaluation_view

STILL = {"crop_scale": (1, 1), "flip": 0, "jitter_probability": 0, "gray_probability": 0}


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _images(count: int, side: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=_generator(seed))


def _coordinates(count: int, height: int, width: int) -> torch.Tensor:
    """Images whose red is the column and whose green is the row, so that a view shows where it was cut."""
    images = torch.zeros(count, 3, height, width, dtype=torch.uint8)
    images[:, 0] = torch.arange(width)
    images[:, 1] = torch.arange(height)[:, None]
    return images


def test_two_views_are_float32_in_the_unit_interval_and_differ():
    images = _images(8)
    first, second = TwoViews(ViewOptions(), 16)(images, _generator())
    assert first.shape == second.shape == (8, 3, 16, 16) and first.dtype == torch.float32
    assert 0 <= min(first.min(), second.min()) and max(first.max(), second.max()) <= 1
    assert ((first - second).flatten(1).abs().amax(1) > 0.05).all()
    assert images.equal(_images(8))


def test_nothing_random_gives_the_image_itself():
    first, second = TwoViews(ViewOptions(**STILL), 16)(_images(4), _generator())
    torch.testing.assert_close(first, _images(4) / 255, atol=1e-6, rtol=0)
    assert first.equal(second)


def test_the_same_seed_gives_the_same_views():
    draw = TwoViews(ViewOptions(blur_probability=0.5), 16)
    one, again, other = (draw(_images(4), _generator(seed))[0] for seed in (1, 1, 2))
    assert one.equal(again) and not one.equal(other)
    torch.manual_seed(3)
    one = draw(_images(4))[1]
    torch.manual_seed(3)
    assert one.equal(draw(_images(4))[1])


def test_copies_of_one_image_in_a_batch_get_different_views():
    first, second = TwoViews(ViewOptions(), 16)(_images(1).expand(16, -1, -1, -1), _generator())
    views = torch.cat([first, second]).flatten(1)
    distances = torch.cdist(views, views) + 99 * torch.eye(len(views))
    assert distances.min() > 0.1


@pytest.mark.parametrize(("height", "width"), [(32, 32), (24, 32)])
def test_area_aspect_and_place_of_the_crop(height, width):
    size, count = 32, 1500
    options = ViewOptions(**STILL | {"crop_scale": (0.08, 1)})
    views = 255 * torch.cat(TwoViews(options, size)(_coordinates(count, height, width), _generator()))
    # Between two inner columns the coordinate grows by cut / size, whatever the border does.
    cut_width = (views[:, 0, 16, 20] - views[:, 0, 16, 12]) / 8 * size
    cut_height = (views[:, 1, 20, 16] - views[:, 1, 12, 16]) / 8 * size
    area = cut_width * cut_height / (height * width)
    aspect = cut_width / cut_height
    assert 0.0795 < area.min() < 0.09 and 0.95 < area.max() <= 1.001
    assert 0.745 < aspect.min() < 0.78 and 1.29 < aspect.max() < 1.345
    centre = views[:, 0, 16, 15:17].mean(1) + 0.5
    assert (centre - cut_width / 2).min() > -0.6 and (centre + cut_width / 2).max() < width + 0.6
    if height == width:
        # Uniform areas, less those that fit in no place: the mean of torchvision's RandomResizedCrop by its own rule.
        assert area.mean().item() == pytest.approx(_mean_area_of_torchvision(20_000), abs=0.02)
        assert centre.mean().item() == pytest.approx(width / 2, abs=0.5)
        assert aspect.log().mean().item() == pytest.approx(0, abs=0.01)


def _mean_area_of_torchvision(count: int) -> float:
    """RandomResizedCrop.get_params for a square image, one crop at a time."""
    generator, total = _generator(5), 0.0
    for _ in range(count):
        for _ in range(10):
            draws = torch.rand(2, generator=generator).tolist()
            area, aspect = 0.08 + 0.92 * draws[0], math.exp(math.log(4 / 3) * (2 * draws[1] - 1))
            if max(area * aspect, area / aspect) <= 1:
                break
        else:
            area = 1.0
        total += area
    return total / count


def test_a_crop_never_larger_than_an_image_is_the_whole_central_part():
    views = 255 * TwoViews(ViewOptions(**STILL), 32)(_coordinates(2, 32, 96), _generator())[0]
    # Of 32 x 96 pixels no rectangle with an aspect below 4/3 has the whole area: 32 x 42.67 pixels in the middle.
    torch.testing.assert_close(views[:, 0, 16, 15:17].mean(1), torch.full((2,), 47.5))
    torch.testing.assert_close((views[:, 0, 16, 20] - views[:, 0, 16, 12]) / 8 * 32, torch.full((2,), 128 / 3))


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_flip(probability):
    draw = TwoViews(ViewOptions(**STILL | {"flip": probability}), 16)
    first, second = draw(_coordinates(1000, 16, 16), _generator())
    flipped = torch.stack([view[:, 0, 0, 0] > view[:, 0, 0, -1] for view in (first, second)]).float()
    assert flipped.mean().item() == pytest.approx(probability, abs=0.05)
    if probability == 0.5:
        assert (flipped[0] == flipped[1]).float().mean().item() == pytest.approx(0.5, abs=0.06)
    if probability == 1:
        torch.testing.assert_close(first, (_coordinates(1000, 16, 16) / 255).flip(3), atol=1e-6, rtol=0)


def test_gray_and_jitter_happen_as_often_as_said():
    image = _images(1, 4).expand(4000, -1, -1, -1)
    gray = TwoViews(ViewOptions(**STILL | {"gray_probability": 0.2}), 4)(image, _generator())[0]
    is_gray = (gray.amax(1) - gray.amin(1)).flatten(1).amax(1) < 1e-6
    assert is_gray.float().mean().item() == pytest.approx(0.2, abs=0.02)
    weights = torch.tensor([0.299, 0.587, 0.114])
    torch.testing.assert_close(gray[is_gray][0, 0], torch.einsum("chw,c->hw", image[0] / 255, weights))
    jittered = TwoViews(ViewOptions(**STILL | {"jitter_probability": 0.8}), 4)(image, _generator())[0]
    changed = (jittered - image / 255).flatten(1).abs().amax(1) > 1e-4
    assert changed.float().mean().item() == pytest.approx(0.8, abs=0.02)


def _jittered(images: torch.Tensor, *jitter: float) -> torch.Tensor:
    options = ViewOptions(**STILL | {"jitter_probability": 1, "jitter": jitter})
    return TwoViews(options, images.shape[3])(images, _generator())[0]


def test_brightness_is_a_factor_for_each_image():
    images = torch.full((2000, 3, 2, 2), 100, dtype=torch.uint8)
    factors = _jittered(images, 0.8, 0, 0, 0)[:, 0, 0, 0] / (100 / 255)
    assert 0.2 <= factors.min() < 0.21 and 1.79 < factors.max() <= 1.8001
    assert factors.mean().item() == pytest.approx(1, abs=0.03)


def test_contrast_and_saturation_blend_with_the_mean_grey_and_the_grey_image():
    images = (_images(1, 8) // 3 + 85).expand(500, -1, -1, -1)  # far from 0 and 255, so that nothing is clipped
    pixels = images / 255
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    gray = (pixels * weights).sum(1, keepdim=True)
    for jitter, other in [((0, 0.4, 0, 0), gray.mean((2, 3), keepdim=True)), ((0, 0, 0.4, 0), gray)]:
        change, direction = _jittered(images, *jitter) - other, pixels - other
        factor = (change * direction).sum((1, 2, 3), keepdim=True) / direction.square().sum((1, 2, 3), keepdim=True)
        torch.testing.assert_close(change, factor * direction, atol=1e-5, rtol=0)
        assert 0.6 <= factor.min() < 0.62 and 1.38 < factor.max() <= 1.4001


def test_hue_turns_as_colorsys_says():
    images = _images(300, 2)
    views, pixels = _jittered(images, 0, 0, 0, 0.2), images / 255
    turns = []
    for view, image in zip(views, pixels, strict=True):
        for after, before in zip(view.flatten(1).T.tolist(), image.flatten(1).T.tolist(), strict=True):
            (hue, saturation, value), (old_hue, old_saturation, old_value) = (
                colorsys.rgb_to_hsv(*colour) for colour in (after, before)
            )
            assert saturation == pytest.approx(old_saturation, abs=1e-4) and value == pytest.approx(old_value, abs=1e-5)
            turns.append((hue - old_hue + 0.5) % 1 - 0.5 if old_saturation > 0.05 else float("nan"))
    shifts = torch.tensor(turns).view(300, 4)
    assert (shifts - shifts.nanmean(1, keepdim=True)).abs().nan_to_num().max() < 1e-3  # one shift for each image
    assert -0.2 <= shifts.nanmean(1).min() < -0.19 and 0.19 < shifts.nanmean(1).max() <= 0.2001


def test_gray_pixels_have_no_hue_and_stay():
    images = torch.arange(0, 256, dtype=torch.uint8).view(1, 1, 16, 16).expand(8, 3, -1, -1)
    torch.testing.assert_close(_jittered(images, 0, 0, 0, 0.2), images / 255, atol=1e-6, rtol=0)


def test_the_order_of_the_jitter_is_drawn_for_each_image():
    # Bright pixels are clipped by a brighter image and then darkened by the contrast, or the other way round.
    image = torch.tensor([250, 10], dtype=torch.uint8).view(1, 1, 1, 2).expand(4000, 3, 2, 2)
    views = _jittered(image, 0.8, 0.8, 0, 0)
    brightness_first = views[:, 0, 0, 0] + views[:, 0, 0, 1] > 0
    spread = views[:, 0, 0, 0] - views[:, 0, 0, 1]
    assert brightness_first.any()
    clipped_to_white = (views[:, 0, 0, 0] == 1).float().mean()
    assert 0.1 < clipped_to_white < 0.9 and spread.std() > 0.1


def test_blur_keeps_flat_images_and_smooths_others():
    options = ViewOptions(**STILL | {"blur_probability": 1})
    flat = torch.full((4, 3, 32, 32), 77, dtype=torch.uint8)
    torch.testing.assert_close(TwoViews(options, 32)(flat, _generator())[0], flat / 255)
    images = _images(64, 32)
    blurred = TwoViews(options, 32)(images, _generator())[0]
    ratio = blurred.std((1, 2, 3)) / (images / 255).std((1, 2, 3))
    assert ratio.max() <= 1.001 and ratio.min() < 0.5 and ratio.std() > 0.1


def test_a_smaller_view_is_averaged_not_sampled():
    checkers = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    checkers[:, :, ::2, ::2] = checkers[:, :, 1::2, 1::2] = 255
    view = TwoViews(ViewOptions(**STILL), 8)(checkers, _generator())[0]
    torch.testing.assert_close(view, torch.full((1, 3, 8, 8), 0.5), atol=0.01, rtol=0)


def test_normalize_comes_last_and_is_the_same_at_evaluation():
    normalize = [[0.5, 0.4, 0.3], [0.2, 0.25, 0.5]]
    images = _images(4)
    view = TwoViews(ViewOptions(**STILL, normalize=normalize), 16)(images, _generator())[0]
    expected = (images / 255 - torch.tensor(normalize[0])[:, None, None]) / torch.tensor(normalize[1])[:, None, None]
    torch.testing.assert_close(view, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(evaluation_view(images, 16, normalize), expected)


def test_vi07_the_evaluation_view_is_the_image_and_nothing_random():
    images = _images(5, 12)
    assert evaluation_view(images, 12).equal(images / 255)
    once, twice = evaluation_view(images, 20), evaluation_view(images, 20)
    assert once.equal(twice) and once.shape == (5, 3, 20, 20) and once.dtype == torch.float32
    state = torch.get_rng_state()
    wide = evaluation_view(_coordinates(1, 12, 24), 12)
    assert torch.get_rng_state().equal(state)
    assert wide.shape == (1, 3, 12, 12) and wide[0, 0].max() > 20 / 255  # both ends are there: resized, not cut


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flip", 1.5),
        ("jitter_probability", -0.1),
        ("gray_probability", 2),
        ("blur_probability", -1),
        ("crop_scale", (0.5, 0.2)),
        ("crop_scale", (0, 1)),
        ("jitter", (0.8, 0.8, 0.8)),
        ("jitter", (0.8, 0.8, 0.8, 0.6)),
        ("jitter", (float("inf"), 0.8, 0.8, 0.2)),
        ("normalize", [[0.5, 0.5, 0.5]]),
        ("normalize", [[0.5, 0.5, 0.5], [0.2, 0, 0.2]]),
        ("normalize", [[0.5, 0.5, float("nan")], [0.2, 0.2, 0.2]]),
    ],
)
def test_options_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        ViewOptions(**{name: value})


def test_one_pixel_cannot_be_blurred():
    TwoViews(ViewOptions(), 1)
    with pytest.raises(InputError, match="blur_probability"):
        TwoViews(ViewOptions(blur_probability=0.5), 1)
