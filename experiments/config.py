"""Checks a configuration, and keeps a workdir to one experiment."""

from importlib import metadata
import json
import math
from pathlib import Path
import subprocess

import jax
from ml_collections import ConfigDict

from configs import base
from experiments import errors
from experiments import files
from experiments import images
from experiments import models
from experiments import recipe
from experiments import synthetic
from experiments.models import hybrid

_PACKAGES = (
  "fp4jax",
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "orbax-checkpoint",
  "grain",
  "tokenizers",
  "numpy",
)

# Fields of ``config.model`` that not all models read.
_OWN_FIELDS = {
  "transformer": ("layers", "activation", "qk_norm", "rope_base"),
  "hybrid": (
    "pattern",
    "repeat",
    "mamba_head",
    "mamba_state",
    "mamba_groups",
    "mamba_conv",
    "mamba_chunk",
    "mamba_expand",
    "experts",
    "experts_per_token",
    "expert_ffn",
    "balance",
  ),
  "vit": ("layers", "patch"),
}
_POSITIVE = (
  "model.layers",
  "model.repeat",
  "model.mamba_head",
  "model.mamba_state",
  "model.mamba_groups",
  "model.mamba_conv",
  "model.mamba_chunk",
  "model.mamba_expand",
  "model.experts",
  "model.experts_per_token",
  "model.expert_ffn",
  "model.patch",
  "model.d",
  "model.heads",
  "model.kv_heads",
  "model.ffn",
  "model.rope_base",
  "data.max_bytes",
  "data.sequence",
  "data.image",
  "data.classes",
  "optimizer.peak_lr",
  "optimizer.eps",
  "optimizer.clip",
  "train.steps",
  "train.batch",
  "train.accumulate",
  "train.log_every",
  "train.eval_every",
  "train.eval_batches",
  "train.checkpoint_every",
  "train.keep",
  "train.max_skips",
  "sample.length",
  "sample.temperature",
)
_CHOICES = {
  "model.name": models.NAMES,
  "model.activation": ("relu2", "swiglu"),
  "model.attention": ("xla", "cudnn"),
  "model.dtype": ("bfloat16", "float32"),
  "optimizer.schedule": ("cosine", "wsd"),
  "policy.heal.gemms": tuple(recipe.HEALED),
}
_FRACTIONS = (
  "policy.heal.fraction",
  "data.validation_fraction",
  "optimizer.final_lr_fraction",
  "optimizer.warmup_fraction",
  "optimizer.decay_fraction",
  "optimizer.b1",
  "optimizer.b2",
)
_MULTIPLES = (
  ("model.d", "model.heads"),
  ("model.heads", "model.kv_heads"),
  ("train.batch", "train.accumulate"),
)
# 256 bytes, and the mark between documents.
SMALLEST_VOCABULARY = 257


def field_names(config: ConfigDict, prefix: str = "") -> list[str]:
  """Dotted names of all fields."""
  names = []
  for name, value in config.items():
    if isinstance(value, ConfigDict):
      names += field_names(value, f"{prefix}{name}.")
    else:
      names.append(prefix + name)
  return names


def _check_numbers(config: ConfigDict, value) -> None:
  """Raises ``UserError`` for a number outside of its field's range."""
  for name in field_names(config):
    number = value(name)
    if isinstance(number, float) and not math.isfinite(number):
      raise errors.UserError(f"config.{name}={number}; needed a finite number.")
    if isinstance(number, int) and abs(number) >= 2**31 and name != "seed":
      raise errors.UserError(
        f"config.{name}={number}; needed a number below 2**31."
      )
  for name in _POSITIVE:
    if not value(name) > 0:
      raise errors.UserError(
        f"config.{name}={value(name)!r}; needed more than 0."
      )
  for name in _FRACTIONS:
    if not 0 <= value(name) < 1:
      raise errors.UserError(
        f"config.{name}={value(name)!r}; needed at least 0 and below 1."
      )
  if config.optimizer.weight_decay < 0:
    raise errors.UserError(
      f"config.optimizer.weight_decay={config.optimizer.weight_decay}; needed"
      " at least 0."
    )
  warmup = config.optimizer.warmup_fraction
  decay = config.optimizer.decay_fraction
  if config.optimizer.schedule == "wsd" and warmup + decay > 1:
    raise errors.UserError(
      f"config.optimizer.warmup_fraction={warmup} and"
      f" config.optimizer.decay_fraction={decay} are more than the whole run;"
      " lower one of them."
    )


def check(config: ConfigDict) -> None:
  """Raises ``UserError`` for a configuration that cannot be meant."""
  known, got = field_names(base.get_config()), field_names(config)
  for name in got:
    if name not in known:
      raise errors.UserError(
        f"config.{name} is no field; remove it (configs/base.py lists all)."
      )
  for name in known:
    if name not in got:
      raise errors.UserError(
        f"config.{name} is missing; start from configs.base.get_config()."
      )
  value = lookup(config)
  _check_numbers(config, value)
  for name, choices in _CHOICES.items():
    if value(name) not in choices:
      raise errors.UserError(
        f"config.{name}={value(name)!r}; needed one of {', '.join(choices)}."
      )
  for name, divisor in _MULTIPLES:
    if value(name) % value(divisor):
      raise errors.UserError(
        f"config.{name}={value(name)} is no multiple of"
        f" config.{divisor}={value(divisor)}; change one of them."
      )
  _check_model(config)
  of_images = config.model.name in models.OF_IMAGES
  if not config.data.validation_fraction:
    raise errors.UserError(
      "config.data.validation_fraction=0.0 leaves no"
      f" {'images' if of_images else 'text'} to validate on; needed more than"
      " 0, as 0.05."
    )
  if of_images:
    images.check(config)
  elif synthetic.is_chain(config.data.path):
    synthetic.parse(config.data.path, config.data.vocab)
  elif config.data.vocab < SMALLEST_VOCABULARY:
    raise errors.UserError(
      f"config.data.vocab={config.data.vocab} is too small; needed at least"
      f" {SMALLEST_VOCABULARY}: 256 bytes and the mark between documents."
    )
  device = jax.devices()[0]
  if config.model.attention == "cudnn" and device.platform != "gpu":
    raise errors.UserError(
      "config.model.attention='cudnn' needs an NVIDIA GPU, and the device is"
      f" {device.device_kind!r}; use 'xla'."
    )
  if not 0 <= config.seed < 2**32:
    raise errors.UserError(
      f"config.seed={config.seed}; needed at least 0 and below 2**32."
    )


def _check_model(config: ConfigDict) -> None:
  """Raises ``UserError`` for fields that do not make the named model."""
  model, usual = config.model, base.get_config().model
  for owner, fields in _OWN_FIELDS.items():
    others = [name for name in fields if name not in _OWN_FIELDS[model.name]]
    changed = [name for name in others if model[name] != usual[name]]
    if changed:
      name = changed[0]
      raise errors.UserError(
        f"config.model.{name}={model[name]!r} is a field of the model"
        f" {owner!r}, and config.model.name={model.name!r} reads none such;"
        f" leave it at {usual[name]!r}, or set config.model.name={owner!r}."
      )
  if model.name == "hybrid":
    _check_hybrid(model)
  elif model.name == "vit":
    if config.data.image % model.patch:
      raise errors.UserError(
        f"config.data.image={config.data.image} is no multiple of"
        f" config.model.patch={model.patch}; change one of them."
      )
  elif model.d // model.heads % 2:
    raise errors.UserError(
      f"config.model.d={model.d} gives {model.heads} heads an odd size, which"
      " RoPE cannot rotate; change one of them."
    )


def _check_hybrid(model: ConfigDict) -> None:
  unknown = [x for x in model.pattern if x not in hybrid.MIXERS]
  if unknown or not model.pattern:
    mixers = ", ".join(f"{x} ({name})" for x, name in hybrid.MIXERS.items())
    got = f" has the letter {unknown[0]!r}" if unknown else " is empty"
    raise errors.UserError(
      f"config.model.pattern={model.pattern!r}{got}; needed one letter a"
      f" block, of {mixers}, as 'M-M*-'."
    )
  inner = model.mamba_expand * model.d
  width = (
    f"an inner width of config.model.mamba_expand={model.mamba_expand} times"
    f" config.model.d={model.d}, {inner}"
  )
  if inner % model.mamba_head:
    raise errors.UserError(
      f"config.model.mamba_head={model.mamba_head} does not divide {width};"
      " needed a divisor of it, change one of them."
    )
  heads = inner // model.mamba_head
  if heads % model.mamba_groups:
    raise errors.UserError(
      f"config.model.mamba_groups={model.mamba_groups} does not divide"
      f" Mamba's {heads} heads of config.model.mamba_head={model.mamba_head} in"
      f" {width}; needed a divisor, change one of them."
    )
  if model.experts_per_token > model.experts:
    raise errors.UserError(
      f"config.model.experts_per_token={model.experts_per_token} is more than"
      f" config.model.experts={model.experts}; lower it, or raise the other."
    )
  if model.balance < 0:
    raise errors.UserError(
      f"config.model.balance={model.balance}; needed at least 0, as 0.01."
    )


def lookup(config: ConfigDict):
  """The function from a dotted name to the field's value."""

  def value(name):
    found = config
    for part in name.split("."):
      found = found[part]
    return found

  return value


def identity(config: ConfigDict) -> dict:
  """What makes two runs the same experiment, as JSON reads it back."""
  plain = config.to_dict()
  del plain["compare"]
  del plain["data"]["cache"]
  return json.loads(json.dumps(plain))


def versions() -> dict[str, str]:
  """Versions of what computes, and the device it computes on."""
  found = {name: metadata.version(name) for name in _PACKAGES}
  device = jax.devices()[0]
  return found | {
    "device": f"{jax.device_count()} x {device.device_kind}",
    "commit": commit(),
  }


def commit() -> str:
  """The commit of these files: git's, or that of ``git archive``.

  "unknown" outside of both; "+" follows where files differ from the commit.
  """
  root = Path(__file__).resolve().parents[1]
  if (root / ".git").exists():
    described = ["git", "-C", str(root), "describe", "--always", "--abbrev=40"]
    command = [*described, "--exclude=*", "--dirty=+"]
    try:
      done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
      return "unknown"
    return done.stdout.strip() or "unknown"
  archived = root / ".git_archival.txt"
  found = archived.read_text().strip() if archived.exists() else "$Format"
  return "unknown" if found.startswith("$Format") else found


def check_workdir(config: ConfigDict, workdir: Path) -> None:
  """Raises ``UserError`` if ``workdir`` holds another experiment.

  Args:
    config: this experiment.
    workdir: its folder, which need not exist.
  """
  files.require_folder(workdir, "--workdir")
  path = workdir / "config.json"
  if not path.exists():
    return
  there = ConfigDict(json.loads(path.read_text())["config"])
  here = ConfigDict(identity(config))
  if there == here:
    return
  old, new = lookup(there), lookup(here)
  names = sorted({*field_names(there), *field_names(here)})
  differing = [n for n in names if _get(old, n) != _get(new, n)]
  first = differing[0]
  raise errors.UserError(
    f"--workdir={workdir} holds another experiment: its config.{first} is"
    f" {_get(old, first)!r}, not {_get(new, first)!r}"
    + (f" (and {len(differing) - 1} more differ)" * (len(differing) > 1))
    + "; give another --workdir, or the configuration of this one."
  )


def check_text(config: ConfigDict, text: dict, workdir: Path) -> None:
  """Raises ``UserError`` if the run in ``workdir`` has read other data.

  Args:
    config: this experiment.
    text: ``identity`` of its text, corpus or images now.
    workdir: its folder, which need not exist.
  """
  path = workdir / "config.json"
  if not path.exists():
    return
  there = json.loads(path.read_text())["text"]
  if there == text:
    return
  kind, package = "another text", "tokenizers"
  if config.model.name in models.OF_IMAGES:
    kind, package = "other images", "numpy"
  raise errors.UserError(
    f"--workdir={workdir} holds a run on {kind}: config.data.path="
    f"{config.data.path!r} held {_size(there)} then, and {_size(text)} now;"
    f" restore the files (and the version of {package}), or give another"
    " --workdir."
  )


def _size(text: dict) -> str:
  sizes = [f"{size:,} {of}" for of, size in text.items() if of != "hash"]
  return f"{', '.join(sizes)} (hash {text['hash']})"


def _get(value, name):
  try:
    return value(name)
  except KeyError:
    return None


def save(config: ConfigDict, text: dict, workdir: Path) -> None:
  """Writes ``config.json``, unless it is there."""
  path = workdir / "config.json"
  if not path.exists():
    content = {
      "config": identity(config),
      "text": text,
      "versions": versions(),
    }
    files.write(path, json.dumps(content, indent=2) + "\n")
