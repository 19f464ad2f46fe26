"""The command line of both runners: ``--config`` and ``--workdir``.

Flags are defined when a runner starts, never on import, so importing it clashes
with nobody's.
"""

from collections.abc import Callable
import difflib
from pathlib import Path
import re
import sys

from absl import app
from absl import flags
from absl import logging
from ml_collections import ConfigDict
from ml_collections import config_flags

from configs import base
from experiments import config as config_lib
from experiments import errors


def main(command: Callable[[ConfigDict, Path], object]) -> None:
  """Runs ``command`` with what the command line says."""
  config_flags.DEFINE_config_file(
    "config", None, "A file of configs/; its fields are flags too."
  )
  flags.DEFINE_string(
    "workdir", None, "Folder of the results; an existing one is continued."
  )
  for name in ("config", "workdir"):  # so that --help of a runner shows them
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])

  def run(argv):
    del argv
    if not flags.FLAGS["verbosity"].present:
      # What goes wrong in a library comes as an exception too.
      logging.set_verbosity(logging.FATAL)
    command(flags.FLAGS.config, Path(flags.FLAGS.workdir))

  app.run(errors.explained(run), flags_parser=errors.explained(_parse))


def _parse(argv: list[str]) -> list[str]:
  """Parses the flags; a mistake is a ``UserError`` or an absl error."""
  try:
    rest = flags.FLAGS(argv)
  except flags.Error:
    raise
  except Exception as error:
    raise errors.UserError(_explain(argv, error)) from error
  if len(rest) > 1:
    raise errors.UserError(
      f"argument {rest[1]!r} is no flag; write --config.FIELD=VALUE."
    )
  if not flags.FLAGS.workdir:
    raise errors.UserError(
      "--workdir is missing; give a folder for the results."
    )
  if not isinstance(flags.FLAGS.config, ConfigDict):
    raise errors.UserError(_explain(argv, None))
  return rest


def _explain(argv: list[str], error: Exception | None) -> str:
  """Why there is no configuration."""
  known = config_lib.field_names(base.get_config())
  asked = [re.match(r"--?config\.([\w.]+)", arg) for arg in argv]
  for name in [match[1] for match in asked if match]:
    if not any(f"{field}.".startswith(f"{name}.") for field in known):
      close = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
      return (
        f"--config.{name}: the configuration has no such field; did you mean"
        f" {', '.join(close) or 'one of configs/base.py'}?"
      )
  given = [arg for arg in argv if re.match(r"--?config(=|$)", arg)]
  if not given:
    return "--config is missing; give a file of configs/."
  if error is None:
    return (
      f"{given[-1]}: there is no such file, or it has no get_config(); give a"
      " file of configs/."
    )
  reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
  return f"{given[-1]} does not run ({reason}); correct it."
