"""What a user did wrong, said in one sentence."""

from collections.abc import Callable
import errno
import functools
import sys

from absl import flags

import fp4jax

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


class UserError(Exception):
  """One sentence: what, got, needed, and how to fix it."""


def explained(main: Callable) -> Callable:
  """Turns a user's mistakes into one sentence on stderr and exit code 2."""

  @functools.wraps(main)
  def wrapper(*args, **kwargs):
    try:
      return main(*args, **kwargs)
    except KeyboardInterrupt:
      sys.exit("interrupted; the same command continues from the last save.")
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
