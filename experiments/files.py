"""Files that are either whole or not there."""

from collections.abc import Iterator
import contextlib
import errno
import os
from pathlib import Path
import shutil
import tempfile

from experiments import errors


def write(path: Path, content: str | bytes) -> None:
  """Writes a file at once: a reader sees the old one or the new one."""
  path.parent.mkdir(parents=True, exist_ok=True)
  if isinstance(content, str):
    content = content.encode()
  handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
  try:
    with os.fdopen(handle, "wb") as file:
      file.write(content)
    os.chmod(name, 0o644)
    os.replace(name, path)
  except BaseException:
    Path(name).unlink(missing_ok=True)
    raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
  """A folder to fill, which takes its name when the block ends well."""
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
  try:
    yield temporary
    temporary.chmod(0o755)
    try:
      temporary.rename(path)
    except OSError as error:
      # Another process filled it with the same content: keep that one.
      if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
        raise
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def require_folder(path: Path, flag: str) -> None:
  """Raises unless ``path`` is a folder, or can become one."""
  existing = path.absolute()
  while not existing.exists():
    existing = existing.parent
  if not existing.is_dir():
    raise errors.UserError(
      f"{flag}={path}: {existing} is a file; give a folder, new or of this"
      " experiment."
    )


def require_space(folder: Path, needed: int, what: str) -> None:
  """Raises unless ``needed`` bytes are free where ``folder`` is or will be."""
  existing = folder.absolute()
  while not existing.exists():
    existing = existing.parent
  free = shutil.disk_usage(existing).free
  if free < needed:
    raise errors.UserError(
      f"{folder}: {free / 1e6:.1f} MB are free, but {what} need"
      f" {needed / 1e6:.1f} MB; free some space, or give another --workdir."
    )
