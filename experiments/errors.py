"""What a user did wrong, said in one sentence."""

from collections.abc import Callable
import errno
import functools
import signal
import sys

from absl import flags

import fp4jax

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


class UserError(Exception):
  """One sentence: what, got, needed, and how to fix it."""


class Stopped(KeyboardInterrupt):
  """A signal ended a run: what is saved and how to go on, in one sentence.

  Attributes:
    code: the exit code that says so, 128 and the signal's number.
  """

  def __init__(self, sentence: str, code: int):
    super().__init__(sentence)
    self.code = code


def explained(main: Callable) -> Callable:
  """Turns a user's mistakes into one sentence on stderr and exit code 2.

  An interrupted run is one sentence too, and the exit code of its signal.
  """

  @functools.wraps(main)
  def wrapper(*args, **kwargs):
    try:
      return main(*args, **kwargs)
    except Stopped as stopped:
      print(stopped, file=sys.stderr)
      sys.exit(stopped.code)
    except KeyboardInterrupt:
      print(
        "interrupted; the same command continues from what is saved.",
        file=sys.stderr,
      )
      sys.exit(128 + signal.SIGINT)
    except _MISTAKES as error:
      sentence = str(error)
    except OSError as error:
      if error.errno not in _DISK:
        raise
      sentence = f"{error}; free some space, or give another --workdir."
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)

  return wrapper


_MISTAKES = (
  UserError,
  fp4jax.PolicyError,
  fp4jax.UnsupportedError,
  flags.Error,
)
