"""Models that experiments train.

Each module here has a ``from_config(config)`` that gives a linen module, whose
``apply`` takes what the runner's loss passes to it.
"""

import importlib

from flax import linen as nn
from ml_collections import ConfigDict

NAMES = ("transformer",)
"""What ``config.model.name`` may be: modules of this package."""


def from_config(config: ConfigDict) -> nn.Module:
  """The model that a configuration describes."""
  module = importlib.import_module(f"{__name__}.{config.model.name}")
  return module.from_config(config)
