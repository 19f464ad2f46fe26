"""Models that experiments train.

Each model has a module here, whose ``from_config(config)`` gives a linen module
that computes logits of tokens. Its ``auxiliary`` says whether it also sows
terms of the training loss into the collection "losses".
"""

import importlib

from flax import linen as nn
from ml_collections import ConfigDict

NAMES = ("transformer", "hybrid")
"""What ``config.model.name`` may be: modules of this package."""


def from_config(config: ConfigDict) -> nn.Module:
  """The model that a configuration describes."""
  module = importlib.import_module(f"{__name__}.{config.model.name}")
  return module.from_config(config)
