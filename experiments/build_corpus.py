"""Turns folders, archives and packages into one dataset of tokens.

python -m experiments.build_corpus --source=python: --output=DIR

Give DIR to the runner as --config.data.path. The same texts and flags give the
same bytes, in whatever order the texts are found.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import fnmatch
import hashlib
import json
from pathlib import Path
import platform
import shutil
import signal
import sys
import tempfile
from typing import IO
from typing import NamedTuple

from absl import app
from absl import flags
import numpy as np
import tokenizers

from experiments import config as config_lib
from experiments import corpus_folder
from experiments import data
from experiments import errors
from experiments import files
from experiments import sources

_BATCH = 1 << 22  # bytes of text tokenised at once
# Bytes of text that a token is taken to hold at most, when it is chosen how
# much text the tokenizer learns from.
_BYTES_PER_TOKEN = 4


class Entry(NamedTuple):
  """A document in the spool; entries in order of their keys are shuffled."""

  key: bytes
  start: int
  size: int


@dataclasses.dataclass
class Counts:
  """What became of the files of a source.

  Attributes:
    documents: that are kept.
    bytes: of the documents.
    duplicates: with the very bytes of another document, here or before.
    binary: that hold a zero byte, or are no UTF-8.
    empty: of white space only.
    large: of more bytes than asked for.
    excluded: by name: hidden, or as asked for.
  """

  documents: int = 0
  bytes: int = 0
  duplicates: int = 0
  binary: int = 0
  empty: int = 0
  large: int = 0
  excluded: int = 0


def build(
  specs: Sequence[str],
  output: Path,
  *,
  tokens: int = 0,
  vocab: int = 8192,
  seed: int = 0,
  validation: float = 0.01,
  largest: int = 1_000_000,
  exclude: Sequence[str] = (),
) -> dict:
  """Writes a dataset of tokens.

  A document's key is a hash of the seed and its bytes. It says whether the
  document is for validation, whatever other documents there are, and the
  documents follow each other in the order of their keys. The tokenizer learns
  from training documents alone.

  Args:
    specs: sources, as ``sources.resolve`` takes them.
    output: a new folder.
    tokens: training tokens at most, and ``validation`` times as many for
      validation; 0 takes all there are.
    vocab: size of the vocabulary.
    seed: of split and order.
    validation: the fraction of documents for validation.
    largest: documents of more bytes are left out.
    exclude: patterns of names that are left out.

  Returns:
    What is in its corpus.json.

  Raises:
    UserError: an argument cannot be used, or there is too little text; nothing
      is then written.
  """
  _check(specs, output, tokens, vocab, seed, validation, largest)
  output.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(
    dir=output.parent, prefix=f".{output.name}.spool."
  ) as scratch:
    spool = Path(scratch, "text")
    seen: dict[bytes, Entry] = {}
    found = []
    with spool.open("wb") as file:
      for spec in specs:
        folder = Path(scratch, "download")
        folder.mkdir()
        source = sources.resolve(spec, folder)
        keep = _Keep(file, seen, seed, largest, exclude)
        found.append(keep.all(source))
        shutil.rmtree(folder)
    limit = int(validation * 2**64)
    held_out: list[Entry] = []
    train: list[Entry] = []
    for entry in sorted(seen.values()):
      chosen = int.from_bytes(entry.key[:8], "big") < limit
      (held_out if chosen else train).append(entry)
    if not held_out or not train:
      raise errors.UserError(
        f"{len(seen)} documents give {len(train)} to train on and"
        f" {len(held_out)} to validate on; needed some of both: give more"
        " sources, another --seed, or another --validation."
      )
    with files.new_folder(output) as new, spool.open("rb") as text:
      budget = _BYTES_PER_TOKEN * tokens or sys.maxsize
      print(f"training a tokenizer of {vocab} tokens", flush=True)
      learned = data.train_tokenizer(_texts(text, _first(train, budget)), vocab)
      learned.save(str(new / corpus_folder.TOKENIZER))
      print("tokenising", flush=True)
      parts = {
        corpus_folder.TRAIN: (train, tokens or sys.maxsize),
        corpus_folder.VALIDATION: (
          held_out,
          max(1, round(tokens * validation)) if tokens else sys.maxsize,
        ),
      }
      record = {
        "format": corpus_folder.FORMAT,
        "sources": found,
        "seed": seed,
        "validation": validation,
        "tokens": tokens,
        "largest": largest,
        "exclude": list(exclude),
        "vocab": learned.get_vocab_size(),
        "parts": {
          name: _write_tokens(new / name, learned, _texts(text, entries), most)
          for name, (entries, most) in parts.items()
        },
        "sha256": {
          path.name: corpus_folder.sha256(path)
          for path in sorted(new.iterdir())
        },
        "versions": {
          "python": platform.python_version(),
          "numpy": np.__version__,
          "tokenizers": tokenizers.__version__,
        },
      }
      files.write(
        new / corpus_folder.RECORD, json.dumps(record, indent=2) + "\n"
      )
  return record


def _check(specs, output, tokens, vocab, seed, validation, largest) -> None:
  if not specs:
    raise errors.UserError(f"--source is missing; give {sources.KINDS}.")
  files.require_folder(output.parent, "--output")
  if output.exists():
    raise errors.UserError(
      f"--output={output} exists, and is not overwritten; remove it, or give"
      " another folder."
    )
  for spec in specs:
    root = Path(spec.removeprefix("folder:")).resolve()
    if spec.startswith("folder:") and output.resolve().is_relative_to(root):
      raise errors.UserError(
        f"--output={output} lies inside --source={spec}, and would become text"
        " of the next; give a folder outside."
      )
  smallest, most = (
    config_lib.SMALLEST_VOCABULARY,
    corpus_folder.LARGEST_VOCABULARY,
  )
  if not smallest <= vocab <= most:
    raise errors.UserError(
      f"--vocab={vocab}; needed at least {smallest}, 256 bytes and the mark"
      f" between documents, and at most {most}, which uint16 holds."
    )
  if not 0 < validation < 1:
    raise errors.UserError(
      f"--validation={validation}; needed more than 0 and less than 1."
    )
  if not 0 <= seed < 2**32:
    raise errors.UserError(f"--seed={seed}; needed at least 0 and below 2**32.")
  if tokens < 0:
    raise errors.UserError(f"--tokens={tokens}; needed at least 0.")
  if largest < 1:
    raise errors.UserError(f"--largest={largest}; needed more than 0.")


@dataclasses.dataclass(frozen=True)
class _Keep:
  """Copies documents into the spool, each once.

  Attributes:
    spool: where to.
    seen: the documents in it, by the SHA-256 of their bytes.
    seed: of ``build``.
    largest: of ``build``.
    exclude: of ``build``.
  """

  spool: IO[bytes]
  seen: dict[bytes, Entry]
  seed: int
  largest: int
  exclude: Sequence[str]

  def all(self, source: sources.Source) -> dict:
    """Keeps the documents of a source; gives what corpus.json says of it."""
    print(f"reading {source.spec}", flush=True)
    counts = Counts()
    kept: list[bytes] = []
    for file in source.files:
      what = self._one(file, kept)
      setattr(counts, what, getattr(counts, what) + 1)
    counts.bytes = sum(self.seen[digest].size for digest in kept)
    if not counts.documents + counts.duplicates:
      raise errors.UserError(
        f"--source={source.spec} holds no text that counts"
        f" ({dataclasses.asdict(counts)}); give another, or change --exclude"
        " or --largest."
      )
    return {
      "source": source.spec,
      **dataclasses.asdict(counts),
      # Of the documents' own, in order.
      "sha256": hashlib.sha256(b"".join(sorted(kept))).hexdigest(),
      "downloaded": source.downloaded,
    }

  def _one(self, file: sources.File, kept: list[bytes]) -> str:
    """Keeps a document; gives the name of what to count."""
    hidden = any(part.startswith(".") for part in file.name.split("/"))
    if hidden or any(
      fnmatch.fnmatchcase(file.name, pattern) for pattern in self.exclude
    ):
      return "excluded"
    if file.size > self.largest:
      return "large"
    content = file.read()
    if b"\0" in content or not _is_utf8(content):
      return "binary"
    if not content.strip():
      return "empty"
    digest = hashlib.sha256(content).digest()
    if digest in self.seen:
      return "duplicates"
    key = hashlib.sha256(self.seed.to_bytes(8, "little") + digest).digest()
    self.seen[digest] = Entry(key, self.spool.tell(), len(content))
    self.spool.write(content)
    kept.append(digest)
    return "documents"


def _is_utf8(content: bytes) -> bool:
  try:
    content.decode()
  except UnicodeDecodeError:
    return False
  return True


def _first(entries: Iterable[Entry], size: int) -> Iterator[Entry]:
  """The first documents that have so many bytes together."""
  for entry in entries:
    if size <= 0:
      return
    size -= entry.size
    yield entry


def _texts(spool: IO[bytes], entries: Iterable[Entry]) -> Iterator[str]:
  for entry in entries:
    spool.seek(entry.start)
    yield spool.read(entry.size).decode()


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
  batch, size = [], 0
  for text in texts:
    batch.append(text)
    size += len(text)
    if size >= _BATCH:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch


def _write_tokens(
  path: Path,
  tokenizer: tokenizers.Tokenizer,
  texts: Iterable[str],
  most: int,
) -> dict[str, int]:
  """Writes [n] uint16, n <= ``most``; the last document may be cut there."""
  end = tokenizer.token_to_id(data.END)
  sizes = _token_sizes(tokenizer)
  count = documents = size = 0
  last = end
  with path.open("wb") as file:
    _write_header(file, 0)
    for batch in _batches(texts):
      tokens = data.encode(tokenizer, batch)[: most - count].astype("<u2")
      file.write(tokens.tobytes())
      count += len(tokens)
      documents += int(np.sum(tokens == end))
      size += int(np.sum(sizes[tokens]))
      last = int(tokens[-1])
      if count == most:
        break
    file.seek(0)
    _write_header(file, count)
  documents += last != end
  return {"tokens": count, "documents": documents, "bytes": size}


def _write_header(file: IO[bytes], count: int) -> None:
  """The header of a .npy file; NumPy pads it, so any count has one size."""
  header = {"descr": "<u2", "fortran_order": False, "shape": (count,)}
  np.lib.format.write_array_header_1_0(file, header)


def _token_sizes(tokenizer: tokenizers.Tokenizer) -> np.ndarray:
  """[vocab] int64: bytes of each token. Byte-level BPE writes one character
  for each; the mark between documents has none.
  """
  vocab = tokenizer.get_vocab_size()
  names = [tokenizer.id_to_token(i) or "" for i in range(vocab)]
  return np.array([0 if name == data.END else len(name) for name in names])


def summary(record: dict) -> str:
  """A few lines on what was built."""
  lines = []
  for source in record["sources"]:
    left_out = ", ".join(
      f"{source[name]:,} {name}"
      for name in ("duplicates", "binary", "empty", "large", "excluded")
    )
    lines.append(
      f"{source['source']}: {source['documents']:,} documents,"
      f" {source['bytes']:,} bytes; left out {left_out}"
    )
  for name, part in record["parts"].items():
    lines.append(
      f"{name}: {part['tokens']:,} tokens of {part['documents']:,} documents,"
      f" {part['bytes'] / part['tokens']:.3f} bytes a token"
    )
  lines.append(f"vocabulary {record['vocab']}")
  return "\n".join(lines)


def main() -> None:
  """The command line."""
  flags.DEFINE_multi_string("source", [], f"{sources.KINDS}; repeatable.")
  flags.DEFINE_string("output", None, "A new folder.")
  flags.DEFINE_integer("tokens", 0, "Training tokens at most; 0 takes all.")
  flags.DEFINE_integer("vocab", 8192, "Size of the vocabulary.")
  flags.DEFINE_integer("seed", 0, "Of the split and the order.")
  flags.DEFINE_float("validation", 0.01, "Fraction of documents held out.")
  flags.DEFINE_integer("largest", 1_000_000, "Bytes of a document at most.")
  flags.DEFINE_multi_string(
    "exclude", [], "Pattern of names to leave out, as */tests/*; repeatable."
  )
  own = "source", "output", "tokens", "vocab", "seed"
  for name in (*own, "validation", "largest", "exclude"):  # so --help shows it
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])
  app.run(errors.explained(_run), flags_parser=errors.explained(flags.FLAGS))


def _run(argv: list[str]) -> None:
  if len(argv) > 1:
    raise errors.UserError(
      f"argument {argv[1]!r} is no flag; write --source=KIND:VALUE."
    )
  values = flags.FLAGS
  if not values.output:
    raise errors.UserError("--output is missing; give a new folder.")
  try:
    record = build(
      values.source,
      Path(values.output),
      tokens=values.tokens,
      vocab=values.vocab,
      seed=values.seed,
      validation=values.validation,
      largest=values.largest,
      exclude=values.exclude,
    )
  except KeyboardInterrupt as error:
    raise errors.Stopped(
      "interrupted; nothing is kept, the same command starts anew.",
      128 + signal.SIGINT,
    ) from error
  print(f"{summary(record)}\n{values.output} is written")


if __name__ == "__main__":
  main()
