"""Contract: real text becomes tokens and batches, the same every time.

Which texts are read, how they are split, tokenised and ordered follows from the
files, the configuration and the seed alone. What is no text is refused or
skipped by name. E07: across a resume each sequence still comes once an epoch.
"""

import collections
import math
from pathlib import Path

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments import data
from experiments import errors
from experiments import files
from tests.experiments.helpers import make_config


def _folder(tmp_path: Path, contents: dict[str, str | bytes]) -> str:
  for name, content in contents.items():
    path = tmp_path / "text" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
      content = content.encode()
    path.write_bytes(content)
  return str(tmp_path / "text")


def test_standard_library_is_the_default():
  documents, _ = data.read_documents("", 300_000)
  names = [document.name for document in documents]
  assert names == sorted(names) and len(names) > 3
  assert all(name.endswith(".py") for name in names)
  assert not any("site-packages" in name or "test/" in name for name in names)
  size = sum(len(document.text.encode()) for document in documents)
  assert 290_000 < size <= 300_000


def test_folder_is_read_in_order_of_names_without_binary_files(tmp_path):
  path = _folder(
    tmp_path,
    {
      "b.txt": "zwei",
      "a/z.md": "eins",
      "c.bin": b"text\0text",
      "latin.txt": "ü".encode("latin-1") + b" text",
      "empty.txt": "",
      ".hidden/secret.txt": "no",
    },
  )
  documents, skipped = data.read_documents(path, 10**6)
  assert [(d.name, d.text) for d in documents] == [
    ("a/z.md", "eins"),
    ("b.txt", "zwei"),
  ]
  assert skipped == ["c.bin", "latin.txt"]


def test_size_cap_cuts_between_characters(tmp_path):
  path = _folder(tmp_path, {"a.txt": "abc", "b.txt": "äöü", "c.txt": "rest"})
  documents, skipped = data.read_documents(path, 6)
  assert [d.text for d in documents] == ["abc", "ä"]
  assert not skipped


@pytest.mark.parametrize(
  "contents, name, words",
  [
    ({"a.txt": ""}, "", "holds no text"),
    ({"a.bin": b"\0\1"}, "a.bin", "a.bin is binary"),
    ({"a.bin": b"\xff\xfe"}, "", "a.bin is binary"),
    ({"a.txt": "x"}, "missing", "does not exist"),
  ],
)
def test_no_text_is_refused(tmp_path, contents, name, words):
  path = Path(_folder(tmp_path, contents)) / name
  with pytest.raises(errors.UserError, match=words):
    data.read_documents(str(path), 1000)


def test_split_is_by_document_or_by_tail():
  documents = [data.Document(str(i), f"text {i}") for i in range(10)]
  train, validation = data.split(documents, 0.2)
  assert validation == ["text 4", "text 9"]
  assert sorted(train + validation) == [d.text for d in documents]
  train, validation = data.split([data.Document("one", "0123456789")], 0.2)
  assert (train, validation) == (["01234567"], ["89"])


def test_tokens_are_lossless_and_deterministic():
  text = "def f(x):\n\treturn x + 1  # größer €\r\n" * 50 + "\x00\x7f🙂"
  one, two = (data.train_tokenizer([text], 280) for _ in range(2))
  assert one.to_str() == two.to_str()
  assert one.get_vocab_size() == 280
  for unseen in (text, "völlig anders: 漢字 \u202e"):
    assert one.decode(one.encode(unseen).ids) == unseen
  tokens = data.encode(one, [text + data.END, "b"])
  end = one.token_to_id(data.END)
  assert tokens[-1] == end and np.sum(tokens == end) == 2
  decoded = one.decode(tokens.tolist(), skip_special_tokens=True)
  assert decoded == text + data.END + "b"


def test_unigram_entropy_is_that_of_the_frequencies():
  tokens = np.array([0] * 4 + [3] * 2 + [7] + [9])
  expected = 0.5 * math.log(2) + 0.25 * math.log(4) + 0.25 * math.log(8)
  assert data.unigram_entropy(tokens) == pytest.approx(expected, abs=1e-12)


def test_cache_is_used_and_is_whole(tmp_path, monkeypatch):
  config = make_config(data__max_bytes=30_000)
  first = data.prepare(config, tmp_path)
  (folder,) = tmp_path.iterdir()
  assert sorted(p.name for p in folder.iterdir()) == [
    "tokenizer.json",
    "train.npy",
    "validation.npy",
  ]
  monkeypatch.setattr(data, "train_tokenizer", None)  # would raise
  second = data.prepare(config, tmp_path)
  np.testing.assert_array_equal(first.train, second.train)
  np.testing.assert_array_equal(first.validation, second.validation)
  assert first.unigram_entropy == second.unigram_entropy


@pytest.mark.parametrize(
  "field, value", [("data__vocab", 300), ("data__max_bytes", 29_000)]
)
def test_other_settings_or_text_are_cached_elsewhere(tmp_path, field, value):
  config = make_config(data__max_bytes=30_000)
  data.prepare(config, tmp_path)
  other = make_config(**{"data__max_bytes": 30_000, field: value})
  data.prepare(other, tmp_path)
  assert len(list(tmp_path.iterdir())) == 2


def test_interrupted_writing_leaves_nothing(tmp_path):
  folder = tmp_path / "a"
  with pytest.raises(KeyboardInterrupt), files.new_folder(folder) as new:
    (new / "half").write_text("half")
    raise KeyboardInterrupt
  assert not list(tmp_path.iterdir())


def test_short_text_is_refused_and_nothing_written(tmp_path):
  path = _folder(tmp_path, {"a.txt": "too short " * 3})
  config = make_config(data__path=path)
  with pytest.raises(errors.UserError, match="shorter than one sequence of 33"):
    data.prepare(config, tmp_path / "cache")
  assert not (tmp_path / "cache").exists()


def _corpus(batches: int, config) -> data.Corpus:
  """Tokens that count up: each sequence's first token is its number."""
  count = batches * config.train.batch
  length = config.data.sequence
  tokens = np.repeat(np.arange(count + 1), length)[: count * length + 1]
  return data.Corpus(
    train=tokens,
    validation=tokens,
    tokenizer=None,
    unigram_entropy=0.0,
    documents=1,
    skipped=(),
    identity={},
  )


def _ids(batch: np.ndarray) -> tuple[int, ...]:
  return tuple(batch[:, 0].tolist())


def test_targets_are_inputs_shifted_by_one():
  sequences = data.Sequences(np.arange(10), 3)
  assert [sequences[i].tolist() for i in range(len(sequences))] == [
    [0, 1, 2, 3],
    [3, 4, 5, 6],
    [6, 7, 8, 9],
  ]


def test_order_follows_from_the_seed():
  def order(seed):
    config = make_config(seed=seed)
    batches = data.training_batches(config, _corpus(20, config))
    return [_ids(next(batches)) for _ in range(40)]

  assert order(0) == order(0)
  assert order(0) != order(1)
  assert order(0)[:20] != order(0)[20:]  # another order in each epoch
  assert order(0)[:20] != sorted(order(0)[:20])


def test_validation_batches_are_fixed_and_spread_out():
  config = make_config(train__eval_batches=5)
  corpus = _corpus(20, config)
  chosen = [i for b in data.validation_batches(config, corpus) for i in _ids(b)]
  assert chosen == sorted(set(chosen))
  assert len(chosen) == 5 * config.train.batch
  assert chosen[0] == 0 and chosen[-1] == 20 * config.train.batch - 1


def _until(batches, count):
  return [_ids(next(batches)) for _ in range(count)]


@pytest.mark.parametrize("saved_at, total", [(7, 14), (17, 33), (20, 40)])
def test_e07_no_sequence_comes_twice_or_never_across_a_resume(
  tmp_path, saved_at, total
):
  """20 batches an epoch; the resumed iterator is a new one."""
  config = make_config()
  corpus = _corpus(20, config)
  straight = _until(data.training_batches(config, corpus), total)

  batches = data.training_batches(config, corpus)
  seen = _until(batches, saved_at)
  with ocp.CheckpointManager(tmp_path) as manager:
    manager.save(saved_at, args=grain.checkpoint.CheckpointSave(batches))
    manager.wait_until_finished()
  _until(batches, 2)  # of steps that a kill throws away
  resumed = data.training_batches(config, corpus)
  with ocp.CheckpointManager(tmp_path) as manager:
    manager.restore(saved_at, args=grain.checkpoint.CheckpointRestore(resumed))
  seen += _until(resumed, total - saved_at)

  assert seen == straight
  for epoch in range(0, total, 20):
    ids = [i for batch in seen[epoch : epoch + 20] for i in batch]
    assert max(collections.Counter(ids).values()) == 1
