"""What test files of the experiments share."""

from pathlib import Path

from ml_collections import ConfigDict

from configs import tiny
from experiments import metrics


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
