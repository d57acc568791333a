"""Image encoders trained with the same criterion: backbones, data sets and the two views of an image.

Importing this package registers the model type ``resnet_small_image``, so that ``AutoModel`` loads what was saved here.
"""

from simcse_weince.vision.backbones import VisionEncoder, build_backbone
from simcse_weince.vision.datasets import ImageSet, load_images
from simcse_weince.vision.views import TwoViews, ViewOptions, evaluation_view

__all__ = ["ImageSet", "TwoViews", "ViewOptions", "VisionEncoder", "build_backbone", "evaluation_view", "load_images"]
