"""What test files of the experiments share."""

from pathlib import Path

import jax
from ml_collections import ConfigDict
import numpy as np

from configs import base
from configs import tiny
from experiments import metrics
from experiments import train


def make_config(**fields) -> ConfigDict:
  """configs/tiny.py with dotted fields, dots written as ``__``."""
  config = tiny.get_config()
  flat = {name.replace("__", "."): value for name, value in fields.items()}
  config.update_from_flattened_dict(flat)
  return config


def losses(workdir: Path) -> list[tuple[int, float]]:
  """Step and loss of every training record, in the file's order."""
  records = metrics.read(workdir / "metrics.jsonl")
  return [(r["step"], r["loss"]) for r in records if "loss" in r]


def make_hybrid(**fields) -> ConfigDict:
  """``make_config`` of the smallest hybrid, with all letters."""
  small = {
    "model__name": "hybrid",
    "model__layers": base.get_config().model.layers,
    "model__scan": False,
    "model__pattern": "ME*-M",
    "model__mamba_head": 16,
    "model__mamba_state": 16,
    "model__mamba_groups": 2,
    "model__mamba_chunk": 8,
    "model__experts": 4,
    "model__expert_ffn": 32,
    "optimizer__peak_lr": 1e-2,
    "train__steps": 15,
  }
  return make_config(**(small | fields))


def make_vit(**fields) -> ConfigDict:
  """``make_config`` of the smallest Vision Transformer, on drawn shapes."""
  small = {
    "model__name": "vit",
    "data__path": "shapes:count=400",
    "data__image": 16,
    "train__batch": 8,
  }
  return make_config(**(small | fields))


def train_losses(config: ConfigDict) -> np.ndarray:
  """The cross-entropy of each step on a text that repeats itself."""
  experiment = train.make_experiment(config)
  step = jax.jit(experiment.train_step)
  state = jax.jit(experiment.initialise)()
  rng = np.random.default_rng(0)
  batch, length = experiment.tokens.shape
  text = np.tile(rng.integers(0, 16, 7), length)
  losses = []
  for _ in range(config.train.steps):
    starts = rng.integers(0, 7, batch)
    tokens = np.stack([text[i : i + length] for i in starts])
    state, measured = step(state, tokens.astype(np.int32))
    losses.append(float(measured["loss"]))
  assert int(state.opt_state.total_notfinite) == 0
  return np.array(losses)
