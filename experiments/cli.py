"""The command lines: ``--config`` and ``--workdir`` of both runners, and others
of what evaluates.

Flags are defined when a runner starts, never on import, so importing it clashes
with nobody's.
"""

from collections.abc import Callable
import difflib
from pathlib import Path
import re
import signal
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


def evaluate(
  command: Callable[[flags.FlagValues], object],
  define: Callable[[], list[str]] = list,
) -> None:
  """Runs a command that evaluates a run.

  Args:
    command: of the flags.
    define: defines more of them, and returns their names.
  """
  flags.DEFINE_string("workdir", None, "Folder of the run.")
  flags.DEFINE_string(
    "recipe", "", "To evaluate under; empty is the one that it trained under."
  )
  flags.DEFINE_integer("step", 0, "Of the checkpoint; 0 is the end of the run.")
  flags.DEFINE_integer("fewshot", 5, "Examples before each question.")
  flags.DEFINE_integer("batch", 16, "Rows of a forward pass.")
  flags.DEFINE_integer("seed", 0, "Of all choices.")
  flags.DEFINE_integer("questions", 500, "Of the cloze tasks, at most.")
  flags.DEFINE_integer(
    "context", 0, "Tokens of a cloze's text; 0 lets all shots fit."
  )
  flags.DEFINE_integer("answer", 0, "Tokens of an option; 0 is 4 to 16.")
  names = ["workdir", "recipe", "step", "fewshot", "batch", "seed"]
  names += ["questions", "context", "answer", *define()]
  for name in names:  # so that --help shows it
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])

  def run(argv):
    if len(argv) > 1:
      raise errors.UserError(
        f"argument {argv[1]!r} is no flag; write --workdir=DIR."
      )
    if not flags.FLAGS.workdir:
      raise errors.UserError("--workdir is missing; give the folder of a run.")
    if not flags.FLAGS["verbosity"].present:
      logging.set_verbosity(logging.FATAL)
    try:
      command(flags.FLAGS)
    except KeyboardInterrupt as error:
      raise errors.Stopped(
        "interrupted; nothing is written, the same command starts anew.",
        128 + signal.SIGINT,
      ) from error

  app.run(errors.explained(run), flags_parser=errors.explained(flags.FLAGS))


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
