"""The folder that ``experiments.build_corpus`` writes and the runner reads.

train.npy and validation.npy hold [n] uint16 tokens, tokenizer.json what gives
them a meaning, corpus.json how they came about and the SHA-256 of the others.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers

from experiments import errors

RECORD = "corpus.json"
TRAIN = "train.npy"
VALIDATION = "validation.npy"
TOKENIZER = "tokenizer.json"
FORMAT = 1
LARGEST_VOCABULARY = 2**16  # of uint16


class Built(NamedTuple):
  """What is in such a folder.

  Attributes:
    train: [n] uint16, memory-mapped.
    validation: [m] uint16, memory-mapped.
    tokenizer: between text and tokens.
    record: of corpus.json.
    hash: of corpus.json, and so of all else.
  """

  train: np.ndarray
  validation: np.ndarray
  tokenizer: tokenizers.Tokenizer
  record: dict
  hash: str


def sha256(path: Path) -> str:
  """The SHA-256 of a file, in hexadecimal."""
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def holds(path: str) -> bool:
  """Whether a folder is such a one, whole or not, rather than of text."""
  names = (RECORD, TRAIN, VALIDATION, TOKENIZER)
  return sum(Path(path, name).is_file() for name in names) > 1


def read(path: str, vocab: int) -> Built:
  """What is in a folder, after checking all of it.

  Args:
    path: the folder, ``config.data.path``.
    vocab: number of the model's tokens, ``config.data.vocab``.

  Returns:
    Its tokens, memory-mapped, and all else.

  Raises:
    UserError: a file is missing or not the one that corpus.json tells of, or
      the model has fewer tokens.
  """
  folder = Path(path)
  record = _record(folder)
  for name in (TRAIN, VALIDATION, TOKENIZER):
    if not (folder / name).is_file():
      raise _broken(folder, f"{name} is missing")
    got, needed = sha256(folder / name), record["sha256"][name]
    if got != needed:
      raise _broken(
        folder, f"{name} has SHA-256 {got}, and {RECORD} says {needed}"
      )
  if record["vocab"] > vocab:
    raise errors.UserError(
      f"config.data.vocab={vocab}, but the tokens of config.data.path={path}"
      f" are of {record['vocab']}; give"
      f" --config.data.vocab={record['vocab']}."
    )
  tokenizer = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
  tokenizer.encode_special_tokens = True
  if tokenizer.get_vocab_size() != record["vocab"]:
    raise _broken(
      folder,
      f"{TOKENIZER} has {tokenizer.get_vocab_size()} tokens, and {RECORD} says"
      f" {record['vocab']}",
    )
  return Built(
    train=_tokens(folder, TRAIN, record),
    validation=_tokens(folder, VALIDATION, record),
    tokenizer=tokenizer,
    record=record,
    hash=sha256(folder / RECORD)[:16],
  )


def _record(folder: Path) -> dict:
  path = folder / RECORD
  if not path.is_file():
    raise _broken(folder, f"{RECORD} is missing")
  try:
    record = json.loads(path.read_bytes())
    version = record["format"]
    _ = [record["sha256"][name] for name in (TRAIN, VALIDATION, TOKENIZER)]
    _ = [record["parts"][name]["documents"] for name in (TRAIN, VALIDATION)]
    _ = record["vocab"]
  except (ValueError, KeyError, TypeError) as error:
    raise _broken(
      folder, f"{RECORD} cannot be read ({type(error).__name__}: {error})"
    ) from error
  if version != FORMAT:
    raise _broken(folder, f"{RECORD} has format {version}, not {FORMAT}")
  return record


def _tokens(folder: Path, name: str, record: dict) -> np.ndarray:
  try:
    tokens = np.load(folder / name, mmap_mode="r")
  except ValueError as error:
    raise _broken(folder, f"{name} is no array ({error})") from error
  if tokens.dtype != np.uint16 or tokens.ndim != 1 or not len(tokens):
    raise _broken(
      folder, f"{name} is {tokens.dtype} {list(tokens.shape)}, not uint16 [n]"
    )
  if tokens.max() >= record["vocab"]:
    raise _broken(
      folder, f"{name} holds token {tokens.max()} of {record['vocab']}"
    )
  return tokens


def _broken(folder: Path, what: str) -> errors.UserError:
  return errors.UserError(
    f"config.data.path={folder}: {what}; build it again with python -m"
    " experiments.build_corpus, or give a folder of text."
  )
