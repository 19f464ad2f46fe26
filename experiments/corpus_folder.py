"""The folder that ``experiments.build_corpus`` writes and the runner reads.

train.npy and validation.npy hold [n] uint16 tokens, tokenizer.json what gives
them a meaning, corpus.json how they came about and the SHA-256 of the others.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers

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
