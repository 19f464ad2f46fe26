"""Contract: sources become one dataset of tokens, the same bytes every time.

Which texts are kept, their split and their order follow from their bytes and
the seed, not from names or the order in which they are found. The tokenizer
has seen training texts alone. What cannot be used is refused in a sentence, and
nothing is then written.
"""

import json
import math
import os
from pathlib import Path
import random
import shutil
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import tokenizers

from experiments import build_corpus
from experiments import config as config_lib
from experiments import corpus_folder
from experiments import data
from experiments import errors
from experiments import sources
from experiments import train
from tests.experiments.helpers import make_config

ROOT = Path(__file__).parents[2]
_WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta")


def _texts(count: int) -> list[str]:
  generator = random.Random(0)
  return [
    f"{i}: " + " ".join(generator.choices(_WORDS, k=40)) for i in range(count)
  ]


def _write(root: Path, contents: dict[str, str | bytes]) -> Path:
  for name, content in contents.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
      content = content.encode()
    path.write_bytes(content)
  return root


def _folder(root: Path, count: int = 40) -> Path:
  return _write(
    root, {f"{i % 3}/{i}.txt": text for i, text in enumerate(_texts(count))}
  )


def _build(specs, output: Path, **settings) -> dict:
  settings = {"vocab": 300, "validation": 0.2, **settings}
  return build_corpus.build([str(x) for x in specs], output, **settings)


def _bytes(folder: Path) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def _documents(folder: Path, name: str) -> list[str]:
  """The texts of a part, each without the mark after it."""
  tokenizer = tokenizers.Tokenizer.from_file(
    str(folder / corpus_folder.TOKENIZER)
  )
  tokens = np.load(folder / name)
  ends = np.flatnonzero(tokens == tokenizer.token_to_id(data.END)) + 1
  return [
    tokenizer.decode(part.tolist(), skip_special_tokens=True)
    for part in np.split(tokens, ends)
    if len(part)
  ]


def test_every_document_once_in_one_part(tmp_path):
  folder = _folder(tmp_path / "text")
  record = _build([f"folder:{folder}"], tmp_path / "out")
  train = _documents(tmp_path / "out", corpus_folder.TRAIN)
  held_out = _documents(tmp_path / "out", corpus_folder.VALIDATION)
  assert sorted(train + held_out) == sorted(_texts(40))
  assert 0 < len(held_out) < len(train)
  for name, texts in (("train.npy", train), ("validation.npy", held_out)):
    tokens = np.load(tmp_path / "out" / name, mmap_mode="r")
    assert tokens.dtype == np.uint16 and tokens.max() < record["vocab"] == 300
    assert record["parts"][name] == {
      "tokens": len(tokens),
      "documents": len(texts),
      "bytes": sum(len(text.encode()) for text in texts),
    }
    digest = corpus_folder.sha256(tmp_path / "out" / name)
    assert record["sha256"][name] == digest
  assert json.loads((tmp_path / "out/corpus.json").read_text()) == record
  assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "text"]


def test_same_bytes_whatever_the_order_and_the_names(tmp_path, monkeypatch):
  """Other names, and a file system that lists them the other way round."""
  folder = _folder(tmp_path / "text")
  spec = f"folder:{folder}"
  _build([spec], tmp_path / "one")
  for number, path in enumerate(sorted(folder.rglob("*.txt"))):
    path.rename(folder / f"{1000 - number}.md")
  walk = os.walk

  def backwards(*args, **kwargs):
    for root, folders, names in walk(*args, **kwargs):
      folders.reverse()
      yield root, folders, sorted(names, reverse=True)

  monkeypatch.setattr(sources.os, "walk", backwards)
  _build([spec], tmp_path / "two")
  assert _bytes(tmp_path / "one") == _bytes(tmp_path / "two")


def test_split_follows_from_a_document_alone(tmp_path):
  """More documents do not move one to the other part; another seed does."""
  folder = _folder(tmp_path / "text")
  _build([f"folder:{folder}"], tmp_path / "some", seed=1)
  _write(folder, {f"new/{i}": f"new {i} " * 20 for i in range(40)})
  _build([f"folder:{folder}"], tmp_path / "more", seed=1)
  _build([f"folder:{folder}"], tmp_path / "other", seed=2)
  some, more, other = (
    set(_documents(tmp_path / name, corpus_folder.VALIDATION))
    for name in ("some", "more", "other")
  )
  old = set(_texts(40))
  assert some == more & old
  assert more != other


def test_tokenizer_has_not_seen_the_validation_text(tmp_path):
  """What it would be from the training texts alone, and in their order."""
  folder = _folder(tmp_path / "text")
  _build([f"folder:{folder}"], tmp_path / "out")
  train = _documents(tmp_path / "out", corpus_folder.TRAIN)
  expected = data.train_tokenizer(train, 300)
  got = (tmp_path / "out" / corpus_folder.TOKENIZER).read_text()
  assert json.loads(got) == json.loads(expected.to_str())


def test_what_is_no_text_and_what_is_there_twice_is_counted(tmp_path):
  folder = _folder(tmp_path / "text")
  _write(
    folder,
    {
      "copy.txt": _texts(1)[0],
      "zero.bin": b"text\0text",
      "latin.txt": "ü".encode("latin-1") + b" text",
      "empty.txt": " \n",
      "large.txt": "x" * 1001,
      ".git/config": "hidden",
      "a/tests/b.txt": "excluded",
    },
  )
  record = _build(
    [f"folder:{folder}"] * 2,
    tmp_path / "out",
    largest=1000,
    exclude=["*/tests/*"],
  )
  first, second = record["sources"]
  left_out = {
    "duplicates": 1,
    "binary": 2,
    "empty": 1,
    "large": 1,
    "excluded": 2,
  }
  assert first | left_out == first and first["documents"] == 40
  assert second["documents"] == 0 and second["duplicates"] == 41


def test_token_limit_cuts_both_parts(tmp_path):
  folder = _folder(tmp_path / "text")
  _build([f"folder:{folder}"], tmp_path / "all")
  record = _build([f"folder:{folder}"], tmp_path / "cut", tokens=1000)
  assert record["parts"]["train.npy"]["tokens"] == 1000
  assert record["parts"]["validation.npy"]["tokens"] == 200
  for name in (corpus_folder.TRAIN, corpus_folder.VALIDATION):
    cut = _documents(tmp_path / "cut", name)
    whole = _documents(tmp_path / "all", name)
    assert len(cut) == record["parts"][name]["documents"] < len(whole)
    assert "".join(whole).startswith("".join(cut))


def _tar(path: Path, folder: Path, mode: str) -> Path:
  with tarfile.open(path, mode) as tar:
    tar.add(folder, ".")
  return path


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.bz2", "tar.xz"])
def test_archive_is_the_folder_that_is_in_it(tmp_path, suffix):
  folder = _folder(tmp_path / "text")
  mode = "w:" + suffix.partition(".")[2]
  path = _tar(tmp_path / f"text.{suffix}", folder, mode)
  one = _build([f"tar:{path}"], tmp_path / "one")
  two = _build([f"folder:{folder}"], tmp_path / "two")
  assert one["sha256"] == two["sha256"]
  assert one["sources"][0]["sha256"] == two["sources"][0]["sha256"]


@pytest.mark.skipif(not shutil.which("zstd"), reason="zstd is not installed")
def test_archive_of_zstd(tmp_path):
  path = _tar(tmp_path / "text.tar", _folder(tmp_path / "text"), "w:")
  subprocess.run(["zstd", "-q", str(path)], check=True)
  one = _build([f"tar:{path}.zst"], tmp_path / "one")
  assert one["sources"][0]["documents"] == 40


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_archive_that_is_cut_is_refused(tmp_path, mode):
  path = _tar(tmp_path / "text.tar", _folder(tmp_path / "text"), mode)
  content = path.read_bytes()
  path.write_bytes(content[: len(content) // 2])
  with pytest.raises(errors.UserError, match="is no whole tar archive"):
    _build([f"tar:{path}"], tmp_path / "out")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["text", "text.tar"]


def test_python_source_holds_library_and_packages(tmp_path):
  names = {file.name for file in sources.resolve("python:", tmp_path).files}
  assert {"argparse.py", "json/decoder.py", "numpy/__init__.py"} <= names
  assert all(name.endswith(".py") for name in names)
  assert not any("site-packages/" in name for name in names)


_FAKE_APT = """#!/bin/sh
# apt-get -qq download NAME | source --download-only NAME
case "$2 $3 $4" in
  "download linux-source "*) cp {root}/linux-source_6.1_all.deb . ;;
  "download linux-source-6.1=6.1 "*) cp {root}/linux-source-6.1_6.1_all.deb . ;;
  "source --download-only hello"*) cp {root}/hello.tar.xz {root}/hello.dsc . ;;
  *) echo "E: Unable to locate package" >&2; exit 100 ;;
esac
"""


@pytest.fixture
def apt(tmp_path, monkeypatch) -> Path:
  """A mirror of three packages, and an apt-get that copies them."""
  mirror = tmp_path / "mirror"
  folder = _folder(tmp_path / "text")
  for name, depends in (
    ("linux-source-6.1", "xz-utils"),
    ("linux-source", "linux-source-6.1 (= 6.1)"),
  ):
    root = tmp_path / name
    control = f"""Package: {name}
Version: 6.1
Architecture: all
Maintainer: nobody <nobody@example.org>
Depends: {depends}
Description: x
"""
    _write(root, {"DEBIAN/control": control, "usr/share/doc/x/copyright": "no"})
    mirror.mkdir(exist_ok=True)
    if name.endswith("6.1"):
      (root / "usr/src").mkdir()
      _tar(root / "usr/src/linux-source-6.1.tar.xz", folder, "w:xz")
    path = mirror / f"{name}_6.1_all.deb"
    subprocess.run(
      ["dpkg-deb", "--build", "--root-owner-group", str(root), str(path)],
      check=True,
      capture_output=True,
    )
  _tar(mirror / "hello.tar.xz", folder, "w:xz")
  (mirror / "hello.dsc").write_text("Source: hello")
  command = tmp_path / "bin" / "apt-get"
  command.parent.mkdir()
  command.write_text(_FAKE_APT.format(root=mirror))
  command.chmod(0o755)
  monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
  return mirror


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb")
@pytest.mark.parametrize(
  "package, archive",
  [
    ("linux-source", "linux-source-6.1_6.1_all.deb"),
    ("linux-source-6.1=6.1", "linux-source-6.1_6.1_all.deb"),
    ("hello", "hello.tar.xz"),
  ],
)
def test_debian_package_is_the_archive_in_it(tmp_path, apt, package, archive):
  record = _build([f"debian:{package}"], tmp_path / "out")
  (source,) = record["sources"]
  assert source["documents"] == 40
  digest = corpus_folder.sha256(apt / archive)
  assert source["downloaded"] == {archive: digest}


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb")
def test_debian_package_that_is_not_there(tmp_path, apt):
  with pytest.raises(errors.UserError, match="Unable to locate.*deb-src"):
    _build(["debian:absent"], tmp_path / "out")
  assert not (tmp_path / "out").exists()


def test_debian_package_without_apt(tmp_path, monkeypatch):
  monkeypatch.setattr(sources.shutil, "which", lambda _: None)
  with pytest.raises(errors.UserError, match="needs apt-get and.*tar:PATH"):
    _build(["debian:linux-source"], tmp_path / "out")


@pytest.mark.parametrize(
  "spec, settings, words",
  [
    ("text", {}, "needed folder:PATH, python:, tar:PATH or debian:PACKAGE"),
    ("web:x", {}, "needed folder:PATH"),
    ("python:x", {}, "only python: has nothing"),
    ("folder:", {}, "only python: has nothing"),
    ("folder:{}/absent", {}, "absent is no folder"),
    ("tar:{}/text", {}, "text is no file"),
    ("tar:{}/text/0/0.txt", {}, "is no whole tar archive"),
    ("debian:-o=x", {}, "'-o=x' is no name of a package"),
    ("folder:{}/text", {"exclude": ["*"]}, "holds no text that counts"),
    ("folder:{}", {}, "lies inside --source"),
    ("folder:{}/text", {"validation": 1e-9}, "and 0 to validate on"),
    ("folder:{}/text", {"validation": 1.0}, "--validation=1.0; needed"),
    ("folder:{}/text", {"vocab": 256}, "--vocab=256; needed at least 257"),
    ("folder:{}/text", {"vocab": 65537}, "at most 65536"),
    ("folder:{}/text", {"seed": -1}, "--seed=-1"),
    ("folder:{}/text", {"tokens": -1}, "--tokens=-1"),
  ],
)
def test_what_cannot_be_used_writes_nothing(tmp_path, spec, settings, words):
  _folder(tmp_path / "text")
  with pytest.raises(errors.UserError) as error:
    _build([spec.format(tmp_path)], tmp_path / "out", **settings)
  assert words in str(error.value)
  assert [p.name for p in tmp_path.iterdir()] == ["text"]


def test_nothing_is_overwritten(tmp_path):
  folder = _folder(tmp_path / "text")
  _build([f"folder:{folder}"], tmp_path / "out")
  before = _bytes(tmp_path / "out")
  with pytest.raises(errors.UserError, match="exists, and is not overwritten"):
    _build([f"folder:{folder}"], tmp_path / "out", seed=1)
  assert _bytes(tmp_path / "out") == before


def test_command_line(tmp_path):
  folder = _folder(tmp_path / "text")
  command = [
    sys.executable,
    "-m",
    "experiments.build_corpus",
    f"--source=folder:{folder}",
    f"--output={tmp_path / 'out'}",
    "--vocab=300",
    "--validation=0.2",
  ]
  outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert outcome.returncode == 0, outcome.stderr
  assert "40 documents" in outcome.stdout
  outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert outcome.returncode == 2
  assert outcome.stderr.startswith("error: --output=")
  assert outcome.stderr.count("\n") == 1


@pytest.fixture
def built(tmp_path) -> Path:
  """A dataset of 300 tokens."""
  _build([f"folder:{_folder(tmp_path / 'text')}"], tmp_path / "built")
  return tmp_path / "built"


def test_runner_reads_it_memory_mapped(tmp_path, built):
  config = make_config(data__path=str(built))
  corpus = data.prepare(config, tmp_path / "cache")
  record = json.loads((built / "corpus.json").read_text())
  for tokens, name in (
    (corpus.train, corpus_folder.TRAIN),
    (corpus.validation, corpus_folder.VALIDATION),
  ):
    assert isinstance(tokens, np.memmap)
    np.testing.assert_array_equal(tokens, np.load(built / name))
  assert corpus.documents == 40
  assert corpus.identity["tokens"] == sum(
    part["tokens"] for part in record["parts"].values()
  )
  assert not (tmp_path / "cache").exists()  # nothing to cache


def test_runner_trains_on_it(tmp_path, built):
  config = make_config(data__path=str(built), recipe="none")
  result = train.run(config, tmp_path / "run")
  # The words are ten, so context is worth much; at the start it is ln 320.
  assert result.validation_loss < math.log(320)
  text = json.loads((tmp_path / "run/config.json").read_text())["text"]
  assert text == data.read(config).identity


def _reseal(folder: Path, name: str) -> None:
  """Makes corpus.json tell of a file as it is now."""
  path = folder / "corpus.json"
  record = json.loads(path.read_text())
  record["sha256"][name] = corpus_folder.sha256(folder / name)
  path.write_text(json.dumps(record))


def _flip(folder: Path) -> None:
  content = bytearray((folder / "train.npy").read_bytes())
  content[-1] ^= 1
  (folder / "train.npy").write_bytes(content)


def _other_type(folder: Path) -> None:
  np.save(folder / "train.npy", np.zeros(999, np.int32))
  _reseal(folder, "train.npy")


def _token_too_large(folder: Path) -> None:
  np.save(folder / "validation.npy", np.full(999, 300, np.uint16))
  _reseal(folder, "validation.npy")


def _other_tokenizer(folder: Path) -> None:
  data.train_tokenizer(_texts(9), 290).save(str(folder / "tokenizer.json"))
  _reseal(folder, "tokenizer.json")


@pytest.mark.parametrize(
  "damage, words",
  [
    (_flip, "train.npy has SHA-256"),
    (_other_type, r"train.npy is int32 \[999\], not uint16 \[n\]"),
    (_token_too_large, "validation.npy holds token 300 of 300"),
    (_other_tokenizer, "tokenizer.json has 285 tokens, and corpus.json says"),
    (lambda f: (f / "corpus.json").unlink(), "corpus.json is missing"),
    (lambda f: (f / "train.npy").unlink(), "train.npy is missing"),
    (lambda f: (f / "corpus.json").write_text("{"), "cannot be read"),
    (lambda f: (f / "corpus.json").write_text("{}"), "KeyError: 'format'"),
  ],
)
def test_runner_refuses_what_is_damaged(built, damage, words):
  damage(built)
  with pytest.raises(errors.UserError, match=words):
    data.read(make_config(data__path=str(built)))


def test_runner_refuses_a_model_of_fewer_tokens(built):
  config = make_config(data__path=str(built), data__vocab=299)
  with pytest.raises(errors.UserError, match=r"--config.data.vocab=300\."):
    data.read(config)


def test_another_dataset_is_another_experiment(tmp_path, built):
  config = make_config(data__path=str(built))
  config_lib.save(config, data.read(config).identity, tmp_path / "run")
  config_lib.check_text(config, data.read(config).identity, tmp_path / "run")
  shutil.rmtree(built)
  _build([f"folder:{tmp_path / 'text'}"], built, seed=1)
  with pytest.raises(errors.UserError, match=r"40 documents, [\d,]+ tokens"):
    config_lib.check_text(config, data.read(config).identity, tmp_path / "run")
