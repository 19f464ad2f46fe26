"""What a model reads: documents, byte-level BPE, and resumable batches.

Everything follows from the text, the configuration and the seed: the split, the
tokens, the order. Tokens are cached under a hash of the text and the settings.
``config.data.path`` may also be a folder of ``experiments.build_corpus``, whose
tokens are read as they are, or a chain of ``experiments.synthetic``.
"""

import codecs
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import hashlib
import json
from pathlib import Path
import sysconfig
from typing import Any

import grain
import jax
from ml_collections import ConfigDict
import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

from experiments import corpus_folder
from experiments import errors
from experiments import files
from experiments import synthetic

END = "<|end|>"  # the token between documents
_FORMAT = 1  # of the cache
_PIECE = 1 << 18  # characters tokenised at once
_COUNTED = 1 << 22  # tokens counted at once: bincount makes them int64
# Not part of every installation, or not text that people wrote.
_LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "__pycache__")


@dataclasses.dataclass(frozen=True)
class Document:
  """A text and the name of its file."""

  name: str
  text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
  """Tokenised text.

  Attributes:
    train: [n] tokens.
    validation: [m] tokens of other documents.
    tokenizer: between text and tokens.
    unigram_entropy: of the training tokens, nats a token: what a model that
      ignores the context cannot go below.
    documents: number of documents.
    skipped: files that hold no text.
    identity: what tells it from another, as JSON reads it back.
    entropy_rate: nats a token, what no model goes below, where it is known.
  """

  train: np.ndarray
  validation: np.ndarray
  tokenizer: tokenizers.Tokenizer
  unigram_entropy: float
  documents: int
  skipped: tuple[str, ...]
  identity: dict
  entropy_rate: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
  """What a corpus is made of.

  Attributes:
    documents: in order.
    skipped: files that hold no text.
    hash: of the documents and of all else that their tokens follow from.
  """

  documents: tuple[Document, ...]
  skipped: tuple[str, ...]
  hash: str

  @property
  def identity(self) -> dict:
    """What tells one text from another, as JSON reads it back."""
    return {
      "hash": self.hash,
      "documents": len(self.documents),
      "characters": sum(len(document.text) for document in self.documents),
    }


def read_documents(
  path: str, max_bytes: int
) -> tuple[list[Document], list[str]]:
  """The documents of a file or folder, by name, up to a number of bytes.

  Args:
    path: a file, a folder, or "" for Python's standard library.
    max_bytes: where to stop; the last document is cut there.

  Returns:
    The documents, and the names of the files skipped as binary.

  Raises:
    UserError: there is no text.
  """
  root = Path(path or sysconfig.get_path("stdlib"))
  if not root.exists():
    raise errors.UserError(
      f"config.data.path={path} does not exist; give a file or a folder of"
      ' text, or "" for the sources of Python\'s standard library.'
    )
  documents, skipped, left = [], [], max_bytes
  for file in _files(root, "*" if path else "*.py"):
    if left <= 0:
      break
    name = file.name if file == root else file.relative_to(root).as_posix()
    text, size = _read(file, left)
    if text is None:
      skipped.append(name)
    elif text.strip():
      documents.append(Document(name, text))
      left -= size
  if not documents:
    binary = f" ({skipped[0]} is binary)" if skipped else ""
    raise errors.UserError(
      f"config.data.path={root} holds no text{binary}; give a file or a"
      " folder of UTF-8 text."
    )
  return documents, skipped


def check_apart(path: str, folder: Path, flag: str) -> None:
  """Raises ``UserError`` if what is written to ``folder`` would become text.

  Args:
    path: where the text is, as of ``read_documents``.
    folder: where a run writes.
    flag: which flag gave the folder.
  """
  root, folder = Path(path).resolve(), folder.resolve()
  if path and folder.is_relative_to(root) and not _hidden(folder, root):
    raise errors.UserError(
      f"{flag}={folder} lies inside config.data.path={path}: what the run"
      " writes would become text of the next; give a folder outside, or a"
      f" hidden one ({root / '.runs'})."
    )


def _hidden(file: Path, root: Path) -> bool:
  return any(part.startswith(".") for part in file.relative_to(root).parts)


def _files(root: Path, pattern: str) -> list[Path]:
  if root.is_file():
    return [root]
  found = []
  for file in root.rglob(pattern):
    folders = file.relative_to(root).parts
    left_out = pattern != "*" and set(folders) & set(_LEFT_OUT)
    if file.is_file() and not _hidden(file, root) and not left_out:
      found.append(file)
  return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _read(file: Path, limit: int) -> tuple[str | None, int]:
  """The text of a file and its size; no text if the file is binary."""
  with file.open("rb") as handle:
    content = handle.read(limit)
    whole = not handle.read(1)
  if b"\0" in content:
    return None, 0
  try:
    decode = codecs.getincrementaldecoder("utf-8")().decode
    return decode(content, final=whole), len(content)
  except UnicodeDecodeError:
    return None, 0


def split(
  documents: Sequence[Document], fraction: float
) -> tuple[list[str], list[str]]:
  """Texts to train on and to validate on.

  Every n-th document is for validation, n = 1 / fraction; where there are too
  few documents for that, the tail of each is.
  """
  n = max(2, round(1 / fraction))
  if len(documents) >= n:
    train = [d.text for i, d in enumerate(documents) if i % n != n - 1]
    return train, [d.text for d in documents[n - 1 :: n]]
  cuts = [round(len(d.text) * (1 - fraction)) for d in documents]
  pairs = list(zip(documents, cuts, strict=True))
  return [d.text[:cut] for d, cut in pairs], [d.text[cut:] for d, cut in pairs]


def train_tokenizer(texts: Iterable[str], vocab: int) -> tokenizers.Tokenizer:
  """Byte-level BPE: every text has tokens, every token has bytes."""
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab,
    special_tokens=[END],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(_pieces(texts), trainer)
  # A text that holds the characters of END does not end there.
  tokenizer.encode_special_tokens = True
  return tokenizer


def _pieces(texts: Iterable[str]) -> Iterator[str]:
  for text in texts:
    for start in range(0, len(text), _PIECE):
      yield text[start : start + _PIECE]


def encode(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> np.ndarray:
  """Tokens of all texts, with ``END`` after each."""
  end = tokenizer.token_to_id(END)
  small = np.min_scalar_type(tokenizer.get_vocab_size() - 1)
  tokens = []
  for text in texts:
    for encoding in tokenizer.encode_batch(
      list(_pieces([text])), add_special_tokens=False
    ):
      tokens.append(np.asarray(encoding.ids, small))
    tokens.append(np.asarray([end], small))
  return np.concatenate(tokens)


def unigram_entropy(tokens: np.ndarray) -> float:
  """-Σ p ln p over the tokens' frequencies, in nats.

  >>> round(unigram_entropy(np.array([0, 0, 1, 1])), 4)
  0.6931
  """
  most = int(tokens.max()) + 1
  counts = np.zeros(most, np.int64)
  for start in range(0, len(tokens), _COUNTED):
    counts += np.bincount(tokens[start : start + _COUNTED], minlength=most)
  p = counts[counts > 0] / len(tokens)
  return float(-np.sum(p * np.log(p)))


def read(config: ConfigDict) -> Text | Corpus:
  """The text of a configuration, or its corpus where the tokens are there.

  Raises:
    UserError: there is none, or it cannot be used.
  """
  if synthetic.is_chain(config.data.path):
    return _chain(config)
  if corpus_folder.holds(config.data.path):
    return _built(config)
  documents, skipped = read_documents(config.data.path, config.data.max_bytes)
  key = _key(documents, config.data)
  return Text(documents=tuple(documents), skipped=tuple(skipped), hash=key)


def _built(config: ConfigDict) -> Corpus:
  """The corpus of a folder that ``experiments.build_corpus`` wrote."""
  built = corpus_folder.read(config.data.path, config.data.vocab)
  parts = built.record["parts"].values()
  documents = sum(part["documents"] for part in parts)
  return Corpus(
    train=built.train,
    validation=built.validation,
    tokenizer=built.tokenizer,
    unigram_entropy=unigram_entropy(built.train),
    documents=documents,
    skipped=(),
    identity={
      "hash": built.hash,
      "documents": documents,
      "tokens": len(built.train) + len(built.validation),
    },
  )


def _chain(config: ConfigDict) -> Corpus:
  """The corpus of a Markov chain; its parts are independent of each other."""
  chain = synthetic.parse(config.data.path, config.data.vocab)
  fraction = config.data.validation_fraction
  train = chain.sample(chain.tokens, 0)
  validation = chain.sample(max(1, round(fraction * chain.tokens)), 1)
  digest = hashlib.sha256(train.tobytes() + validation.tobytes())
  return Corpus(
    train=train,
    validation=validation,
    tokenizer=chain.tokenizer(),
    unigram_entropy=unigram_entropy(train),
    documents=2,
    skipped=(),
    identity={
      "hash": digest.hexdigest()[:16],
      "documents": 2,
      "tokens": len(train) + len(validation),
    },
    entropy_rate=chain.entropy,
  )


def prepare(
  config: ConfigDict, cache: Path, text: Text | Corpus | None = None
) -> Corpus:
  """The corpus of a configuration, from the cache if it is there.

  Args:
    config: the whole configuration; ``config.data`` is read.
    cache: the folder of all cached corpora.
    text: what ``read`` returned, if it was called already.

  Returns:
    The corpus.

  Raises:
    UserError: there is no text, or too little; nothing is then written.
  """
  files.require_folder(cache, "config.data.cache")
  check_apart(config.data.path, cache, "config.data.cache")
  text = text or read(config)
  if isinstance(text, Corpus):
    _check_length(config, text.train, "training")
    _check_length(config, text.validation, "validation")
    return text
  folder = cache / text.hash
  if folder.is_dir():
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    train = np.load(folder / "train.npy", mmap_mode="r")
    validation = np.load(folder / "validation.npy", mmap_mode="r")
  else:
    texts = split(text.documents, config.data.validation_fraction)
    tokenizer = train_tokenizer(texts[0], config.data.vocab)
    train, validation = (encode(tokenizer, part) for part in texts)
  _check_length(config, train, "training")
  _check_length(config, validation, "validation")
  if not folder.is_dir():
    files.require_space(cache, 2 * (train.nbytes + validation.nbytes), "tokens")
    with files.new_folder(folder) as new:
      tokenizer.save(str(new / "tokenizer.json"))
      np.save(new / "train.npy", train)
      np.save(new / "validation.npy", validation)
  return Corpus(
    train=train,
    validation=validation,
    tokenizer=tokenizer,
    unigram_entropy=unigram_entropy(train),
    documents=len(text.documents),
    skipped=text.skipped,
    identity=text.identity,
  )


def _key(documents: Sequence[Document], settings: ConfigDict) -> str:
  digest = hashlib.sha256(
    json.dumps(
      [
        _FORMAT,
        tokenizers.__version__,
        settings.vocab,
        settings.validation_fraction,
      ]
    ).encode()
  )
  for document in documents:
    for part in (document.name, document.text):
      content = part.encode()
      digest.update(len(content).to_bytes(8, "little") + content)
  return digest.hexdigest()[:16]


def _check_length(config: ConfigDict, tokens: np.ndarray, part: str) -> None:
  needed = config.data.sequence + 1
  if len(tokens) < needed:
    raise errors.UserError(
      f"the {part} text is {len(tokens)} tokens long, shorter than one"
      f" sequence of {needed}; give more text with config.data.path, or a"
      " smaller config.data.sequence."
    )


class Sequences:
  """Tokens cut into sequences; neighbours share one token.

  Sequence i holds tokens i·length to (i+1)·length inclusive: ``length`` inputs,
  and the same shifted by one as targets.
  """

  def __init__(self, tokens: np.ndarray, length: int):
    self._tokens = tokens
    self._length = length

  def __len__(self) -> int:
    return (len(self._tokens) - 1) // self._length

  def __getitem__(self, index) -> np.ndarray:
    start = int(index) * self._length
    return self._tokens[start : start + self._length + 1].astype(np.int32)

  def __repr__(self) -> str:
    return f"Sequences(count={len(self)}, length={self._length})"


def training_batches(config: ConfigDict, corpus: Corpus):
  """Endless batches, [batch, sequence + 1] int32, every epoch in a new order.

  Each sequence comes once an epoch. Batch i is a function of the seed and i;
  the iterator's state goes into checkpoints.
  """
  return endless_batches(config, Sequences(corpus.train, config.data.sequence))


def endless_batches(config: ConfigDict, examples: Any):
  """Batches of a sequence of examples, as of ``training_batches``."""
  dataset = grain.MapDataset.source(examples).shuffle(seed=config.seed)
  dataset = dataset.repeat().batch(config.train.batch, drop_remainder=True)
  reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
  return iter(dataset.to_iter_dataset(reading))


def validation_batches(config: ConfigDict, corpus: Corpus) -> list[np.ndarray]:
  """The same batches every time, spread over the whole validation text."""
  return spread_batches(
    config, Sequences(corpus.validation, config.data.sequence)
  )


def spread_batches(config: ConfigDict, examples: Any) -> list:
  """Batches of a sequence of examples, as of ``validation_batches``."""
  batch = min(len(examples), config.train.batch // config.train.accumulate)
  count = min(config.train.eval_batches, len(examples) // batch)
  chosen = np.linspace(0, len(examples) - 1, batch * count).astype(int)
  return [
    jax.tree.map(
      lambda *x: np.stack(x),
      *[examples[i] for i in chosen[start : start + batch]],
    )
    for start in range(0, batch * count, batch)
  ]
