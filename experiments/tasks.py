"""What a model learns: the next token of a text, or the class of an image.

All that the runner does differently for the two is here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from typing import ClassVar
from typing import Protocol

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from experiments import data
from experiments import images
from experiments import models
from experiments import sample
from experiments import state


class Task(Protocol):
  """What the runner asks of a task.

  Attributes:
    loss: of a batch.
    example: what the loss is the mean over.
    unit: of the loss.
    target: what the model predicts of an example.
    baseline: the name of the targets' entropy.
  """

  loss: ClassVar[type[state.ModelLoss]]
  example: ClassVar[str]
  unit: ClassVar[str]
  target: ClassVar[str]
  baseline: ClassVar[str]

  def length(self, config: ConfigDict) -> int:
    """Tokens that the model reads of an example; of an image, patches."""

  def batch(self, config: ConfigDict) -> Any:
    """The batch of a step, as shapes and dtypes."""

  def read(self, config: ConfigDict) -> Any:
    """The data, or what they are made of; ``identity`` tells them apart."""

  def prepare(self, config: ConfigDict, cache: Path, found: Any) -> Any:
    """The data, from what ``read`` found; they have ``unigram_entropy``."""

  def training_batches(self, config: ConfigDict, corpus: Any) -> Any:
    """Grain's endless iterator."""

  def validation_batches(self, config: ConfigDict, corpus: Any) -> list:
    """The same batches every time."""

  def describe(self, config: ConfigDict, corpus: Any) -> list[str]:
    """Lines on the data, for people."""

  def sample(
    self, config: ConfigDict, corpus: Any, apply: Callable, params: Any
  ) -> str | None:
    """Text that the model writes; None if it writes none."""


class NextToken:
  """Text: every token but the first follows from those before it."""

  loss: ClassVar[type[state.ModelLoss]] = state.TokenLoss
  example: ClassVar[str] = "token"
  unit: ClassVar[str] = "nats a token"
  target: ClassVar[str] = "token"
  baseline: ClassVar[str] = "unigram entropy"
  read = staticmethod(data.read)
  prepare = staticmethod(data.prepare)
  training_batches = staticmethod(data.training_batches)
  validation_batches = staticmethod(data.validation_batches)

  def length(self, config: ConfigDict) -> int:
    """Of a sequence."""
    return config.data.sequence

  def batch(self, config: ConfigDict) -> jax.ShapeDtypeStruct:
    """[batch, sequence + 1]."""
    shape = (config.train.batch, config.data.sequence + 1)
    return jax.ShapeDtypeStruct(shape, jnp.int32)

  def describe(self, config: ConfigDict, corpus: data.Corpus) -> list[str]:
    """How much text, how predictable, and what is missing."""
    lines = [
      f"{corpus.documents} documents, {len(corpus.train):,} training and"
      f" {len(corpus.validation):,} validation tokens, unigram entropy"
      f" {corpus.unigram_entropy:.4f} nats",
    ]
    if corpus.entropy_rate is not None:
      lines.append(
        f"entropy rate {corpus.entropy_rate:.4f} nats, which no model goes"
        " below"
      )
    if corpus.skipped:
      shown = ", ".join(corpus.skipped[:5])
      more = ", ..." if len(corpus.skipped) > 5 else ""
      lines.append(f"skipped {len(corpus.skipped)} binary files: {shown}{more}")
    vocab = corpus.tokenizer.get_vocab_size()
    if vocab < config.data.vocab:
      lines.append(f"the text yields {vocab} of {config.data.vocab} tokens")
    return lines

  def sample(self, config, corpus, apply, params) -> str:
    """The configured prompt, continued."""
    return sample.text(apply, params, corpus.tokenizer, config)


class Labels:
  """Images: each is of one class."""

  loss: ClassVar[type[state.ModelLoss]] = state.ImageLoss
  example: ClassVar[str] = "image"
  unit: ClassVar[str] = "nats an image"
  target: ClassVar[str] = "label"
  baseline: ClassVar[str] = "label entropy"
  read = staticmethod(images.read)
  training_batches = staticmethod(images.training_batches)
  validation_batches = staticmethod(images.validation_batches)

  def length(self, config: ConfigDict) -> int:
    """Patches of an image."""
    return (config.data.image // config.model.patch) ** 2

  def batch(self, config: ConfigDict) -> dict[str, jax.ShapeDtypeStruct]:
    """[batch, s, s, 3] images and [batch] labels."""
    count, size = config.train.batch, config.data.image
    return {
      "images": jax.ShapeDtypeStruct((count, size, size, 3), jnp.uint8),
      "labels": jax.ShapeDtypeStruct((count,), jnp.int32),
    }

  def prepare(self, config, cache, found: images.Images) -> images.Images:
    """The images as they are: drawing and reading them needs no cache."""
    del config, cache
    return found

  def describe(self, config: ConfigDict, corpus: images.Images) -> list[str]:
    """How many images."""
    size = config.data.image
    return [
      f"{len(corpus.train):,} training and {len(corpus.validation):,}"
      f" validation images, {size} x {size}; {self.length(config)} patches"
      f" each are the tokens; {self.baseline}"
      f" {corpus.unigram_entropy:.4f} nats"
    ]

  def sample(self, config, corpus, apply, params) -> None:
    """Nothing."""


NEXT_TOKEN, LABELS = NextToken(), Labels()


def of(model: str) -> Task:
  """The task of ``config.model.name``."""
  return LABELS if model in models.OF_IMAGES else NEXT_TOKEN
