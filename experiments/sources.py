"""Where text comes from: folders, Python, tar archives, Debian packages.

A source yields files one at a time, in any order. Archives are read as a
stream: nothing is unpacked to disk.
"""

import bz2
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import gzip
import lzma
import os
from pathlib import Path
import re
import shutil
import site
import subprocess
import sysconfig
import tarfile
from typing import IO
from typing import NamedTuple
import zlib

from experiments import corpus_folder
from experiments import errors

KINDS = "folder:PATH, python:, tar:PATH or debian:PACKAGE"
_INSTALLED = ("site-packages", "dist-packages")
_TAR = re.compile(r"\.(tar(\.\w+)?|tgz|tbz2?|txz)$")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(=[\w.+:~-]+)?")
_OPENERS: dict[bytes, Callable] = {
  b"\x1f\x8b": gzip.open,
  b"BZh": bz2.open,
  b"\xfd7zXZ\0": lzma.open,
  b"\x5d\0\0\x80": lzma.open,
}
_ZSTD = b"\x28\xb5\x2f\xfd"
_DAMAGED = (
  tarfile.TarError,
  EOFError,
  lzma.LZMAError,
  zlib.error,
  gzip.BadGzipFile,
)


class File(NamedTuple):
  """A file of a source.

  Attributes:
    name: its path inside of the source.
    size: in bytes.
    read: gives its content, until the next file is asked for.
  """

  name: str
  size: int
  read: Callable[[], bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """What ``KIND:VALUE`` stands for.

  Attributes:
    spec: as it was given.
    files: an iterator over all of them; it can be used once.
    downloaded: SHA-256 of each archive that was fetched, by its name.
  """

  spec: str
  files: Iterator[File]
  downloaded: dict[str, str]


def resolve(spec: str, scratch: Path) -> Source:
  """The source that a string stands for.

  Args:
    spec: as ``KINDS`` says. PACKAGE may have a version, ``name=version``; one
      that begins with linux-source is a binary package, all others are source
      packages.
    scratch: an empty folder, for what has to be downloaded.

  Returns:
    The source.

  Raises:
    UserError: there is no such kind, path or package, or apt is not installed.
  """
  kind, colon, value = spec.partition(":")
  if not colon or kind not in ("folder", "python", "tar", "debian"):
    raise errors.UserError(f"--source={spec!r}; needed {KINDS}.")
  if (kind == "python") == bool(value):
    raise errors.UserError(
      f"--source={spec!r}; needed {KINDS}, where only python: has nothing"
      " after the colon."
    )
  downloaded: dict[str, str] = {}
  if kind == "folder":
    if not Path(value).is_dir():
      raise errors.UserError(
        f"--source={spec}: {value} is no folder; give one, or tar:PATH for an"
        " archive."
      )
    files = _walk(Path(value))
  elif kind == "python":
    files = _python()
  elif kind == "tar":
    if not Path(value).is_file():
      raise errors.UserError(
        f"--source={spec}: {value} is no file; give a tar archive, or"
        " folder:PATH for a folder."
      )
    files = _archive(Path(value))
  else:
    archives = _download(value, spec, scratch)
    downloaded = {path.name: corpus_folder.sha256(path) for path in archives}
    files = _package(archives, spec)
  return Source(spec=spec, files=files, downloaded=downloaded)


def _walk(
  root: Path, suffix: str = "", left_out: tuple[str, ...] = ()
) -> Iterator[File]:
  """The regular files below a folder; links to folders are not followed."""

  def refuse(error: OSError):
    raise _unreadable(error)

  for folder, folders, names in os.walk(root, onerror=refuse):
    folders[:] = sorted(name for name in folders if name not in left_out)
    for name in sorted(names):
      path = Path(folder, name)
      if name.endswith(suffix) and path.is_file():
        yield File(
          path.relative_to(root).as_posix(),
          path.stat().st_size,
          functools.partial(_content, path),
        )


def _content(path: Path) -> bytes:
  try:
    return path.read_bytes()
  except OSError as error:
    raise _unreadable(error) from error


def _unreadable(error: OSError) -> errors.UserError:
  return errors.UserError(
    f"{error.filename}: {error.strerror}; make it readable, or give a source"
    " without it."
  )


def _python() -> Iterator[File]:
  """The .py files of the standard library and of the installed packages."""
  paths = sysconfig.get_paths()
  library = {Path(paths[key]).resolve() for key in ("stdlib", "platstdlib")}
  packages = [*site.getsitepackages(), paths["purelib"], paths["platlib"]]
  for root in sorted(library):
    if root.is_dir() and root.name.startswith("python"):
      yield from _walk(root, ".py", _INSTALLED)
  for root in sorted({Path(path).resolve() for path in packages}):
    if root.is_dir():
      yield from _walk(root, ".py")


def _archive(path: Path) -> Iterator[File]:
  with path.open("rb") as stream:
    yield from _members(stream, path)


def _members(stream: IO[bytes], path: Path, inner: bool = False):
  """The regular files of a tar stream.

  Args:
    stream: of any compression; it has ``peek``.
    path: what it is read from, for errors.
    inner: whether to read the archives in it instead of its own files.

  Yields:
    Each as a ``File``.
  """
  with (
    _whole(path),
    _decompressed(stream, path) as plain,
    tarfile.open(fileobj=plain, mode="r|") as tar,
  ):
    for member in tar:
      if not member.isfile():
        continue
      content = tar.extractfile(member)
      assert content is not None  # of a regular file it never is
      if not inner:
        name = member.name.removeprefix("./")
        yield File(name, member.size, functools.partial(_read, content, path))
      elif _TAR.search(member.name):
        yield from _members(content, path)


def _read(content: IO[bytes], path: Path) -> bytes:
  with _whole(path):
    return content.read()


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[None]:
  """Says of which archive an error is."""
  try:
    yield
  except _DAMAGED as error:
    raise errors.UserError(
      f"{path} is no whole tar archive ({type(error).__name__}: {error}); get"
      " it again."
    ) from error


@contextlib.contextmanager
def _decompressed(stream: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
  start = stream.peek(6)[:6]  # type: ignore[attr-defined]
  if start.startswith(_ZSTD):
    if not shutil.which("zstd"):
      raise errors.UserError(
        f"{path} is compressed with zstd, which is not installed; install it,"
        " or give an archive of another compression."
      )
    with _output(["zstd", "-dcq", str(path)], path) as plain:
      yield plain
    return
  for magic, opener in _OPENERS.items():
    if start.startswith(magic):
      with opener(stream, "rb") as plain:
        yield plain
      return
  yield stream


@contextlib.contextmanager
def _output(command: list[str], path: Path) -> Iterator[IO[bytes]]:
  """What a command writes; raises if it fails."""
  process = subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
  )
  assert process.stdout is not None
  try:
    yield process.stdout
    while process.stdout.read(1 << 20):  # what follows the end of a tar
      pass
    if process.wait():
      raise errors.UserError(
        f"{path}: {command[0]} could not read it (exit code"
        f" {process.returncode}); get it again."
      )
  finally:
    process.kill()
    process.stdout.close()
    process.wait()


def _download(package: str, spec: str, scratch: Path) -> list[Path]:
  """The archives of a Debian package, fetched through apt."""
  if not _PACKAGE.fullmatch(package):
    raise errors.UserError(
      f"--source={spec}: {package!r} is no name of a package; needed name or"
      " name=version."
    )
  if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
    raise errors.UserError(
      f"--source={spec} needs apt-get and dpkg-deb, which are not installed;"
      " run it on Debian or Ubuntu, or download the package's sources and give"
      " tar:PATH."
    )
  if not package.startswith("linux-source"):
    _apt(["source", "--download-only", package], spec, scratch)
    return sorted(path for path in scratch.iterdir() if _TAR.search(path.name))
  _apt(["download", package], spec, scratch)
  (path,) = scratch.glob("*.deb")
  # linux-source itself is empty; it depends on the package of one version.
  inside = re.search(r"linux-source-\d[\w.]*", _field(path, "Depends"))
  if inside:
    version = _field(path, "Version")
    path.unlink()
    _apt(["download", f"{inside[0]}={version}"], spec, scratch)
  return sorted(scratch.glob("*.deb"))


def _field(path: Path, name: str) -> str:
  return subprocess.run(
    ["dpkg-deb", "--field", str(path), name],
    capture_output=True,
    check=True,
    text=True,
  ).stdout.strip()


def _apt(arguments: list[str], spec: str, scratch: Path) -> None:
  outcome = subprocess.run(
    ["apt-get", "-qq", *arguments],
    cwd=scratch,
    capture_output=True,
    text=True,
    env=os.environ | {"LC_ALL": "C"},
  )
  if outcome.returncode:
    said = [x for x in outcome.stderr.splitlines() if x.startswith("E:")]
    raise errors.UserError(
      f"--source={spec}: apt-get {' '.join(arguments)} failed"
      f" ({' '.join(said) or outcome.stderr.strip()}); run apt-get update,"
      " check the name, and for a source package have a deb-src entry in apt's"
      " sources."
    )


def _package(archives: list[Path], spec: str) -> Iterator[File]:
  for path in archives:
    if path.suffix == ".deb":
      with _output(["dpkg-deb", "--fsys-tarfile", str(path)], path) as stream:
        yield from _members(stream, path, inner=True)
    else:
      yield from _archive(path)
