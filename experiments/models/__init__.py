"""Models that experiments train.

Each model has a module here, whose ``from_config(config)`` gives a linen
module, or an NNX module as ``functional.Functional``, that computes logits: of
tokens, or of images where ``OF_IMAGES`` names it. ``auxiliary`` says whether
it also sows terms of the training loss into the collection "losses".
"""

import importlib
from typing import Any

from ml_collections import ConfigDict

OF_IMAGES = ("vit",)
"""Models that read images."""

NAMES = ("transformer", "hybrid", *OF_IMAGES)
"""What ``config.model.name`` may be: modules of this package."""


def from_config(config: ConfigDict) -> Any:
  """The model that a configuration describes."""
  module = importlib.import_module(f"{__name__}.{config.model.name}")
  return module.from_config(config)
