"""Trains one model under several recipes, and reports how they differ.

python -m experiments.compare --config=configs/quickstart.py --workdir=DIR

Model, data, order, initialisation and schedule are the same in all runs. The
same command continues where it was interrupted; finished runs are not repeated.
"""

from collections.abc import Sequence
from pathlib import Path
import shlex
import sys
import time
from typing import Any

from ml_collections import ConfigDict

from experiments import cli
from experiments import config as config_lib
from experiments import errors
from experiments import files
from experiments import metrics
from experiments import recipe as recipe_lib
from experiments import report
from experiments import train


def run(
  config: ConfigDict, workdir: str | Path, arguments: Sequence[str] = ()
) -> report.Comparison:
  """Trains under each of ``config.compare.recipes`` and writes the report.

  Args:
    config: of ``configs/``; ``config.recipe`` is not read.
    workdir: a folder, new or of this very comparison.
    arguments: of the command line, for the report.

  Returns:
    What the report shows; it is in ``workdir/report.html``.

  Raises:
    UserError: as ``train.run``, before any run has started.
  """
  began, workdir = time.perf_counter(), Path(workdir)
  recipes = _recipes(config)
  configs = {name: _with_recipe(config, name, workdir) for name in recipes}
  # Whatever is wrong with the last run is said before the first one starts.
  for name in recipes:
    _ = train.make_experiment(configs[name]).coverage
  corpus = _check_workdir(config, recipes, workdir)
  runs = []
  for name in recipes:
    folder = _folder(workdir, name)
    result = train.run(configs[name], folder, corpus=corpus, brief=True)
    records = metrics.read(folder / "metrics.jsonl")
    runs.append(report.Run(result=result, records=records))
  comparison = report.Comparison(
    runs=tuple(runs),
    config=config_lib.identity(config),
    commands=_commands(arguments, workdir, recipes),
    versions=config_lib.versions(),
    seconds=time.perf_counter() - began,
  )
  report.write(comparison, workdir)
  return comparison


def _check_workdir(
  config: ConfigDict, recipes: Sequence[str], workdir: Path
) -> Any:
  """Raises unless all runs in ``workdir`` are of this very comparison.

  Returns:
    The data that all of them read; None if all that are asked have finished.
  """
  files.require_folder(workdir, "--workdir")
  if (workdir / "config.json").exists():
    raise errors.UserError(
      f"--workdir={workdir} holds a single run; give another --workdir."
    )
  there = [n for n in recipe_lib.NAMES if _folder(workdir, n).exists()]
  names = dict.fromkeys([*recipes, *there])
  configs = {name: _with_recipe(config, name, workdir) for name in names}
  for name, one in configs.items():
    config_lib.check_workdir(one, _folder(workdir, name))
  if all((_folder(workdir, n) / "result.json").exists() for n in recipes):
    return None
  folders = [_folder(workdir, name) for name in configs]
  return train.read_corpus(configs[recipes[0]], workdir, folders)


def _recipes(config: ConfigDict) -> tuple[str, ...]:
  """The recipes to compare; a flag gives bf16,nvfp4 as one string."""
  asked = config.compare.recipes
  recipes = tuple(x.strip() for item in asked for x in str(item).split(","))
  unknown = [name for name in recipes if name not in recipe_lib.NAMES]
  if not recipes or unknown or len(set(recipes)) < len(recipes):
    raise errors.UserError(
      f"config.compare.recipes={','.join(recipes)!r}; needed some of"
      f" {', '.join(recipe_lib.NAMES)}, each once, as in"
      " --config.compare.recipes=bf16,nvfp4."
    )
  return recipes


def _folder(workdir: Path, recipe: str) -> Path:
  return workdir / "runs" / recipe


def _with_recipe(config: ConfigDict, recipe: str, workdir: Path) -> ConfigDict:
  config = config.copy_and_resolve_references()
  config.recipe = recipe
  config.data.cache = config.data.cache or str(workdir / "data")
  return config


def _commands(
  arguments: Sequence[str], workdir: Path, recipes: Sequence[str]
) -> tuple[str, ...]:
  """This comparison's command, and the command of each of its runs alone."""
  if not arguments:
    return ()
  commands = ["python -m experiments.compare " + shlex.join(arguments)]
  shared = _without_workdir(arguments)
  for recipe in recipes:
    alone = f"--config.recipe={recipe}", f"--workdir={workdir}-{recipe}"
    alone_command = shlex.join([*shared, *alone])
    commands.append(f"python -m experiments.train {alone_command}")
  return tuple(commands)


def _without_workdir(arguments: Sequence[str]) -> list[str]:
  kept, skip = [], False
  for argument in arguments:
    if skip:
      skip = False
    elif argument in ("--workdir", "-workdir"):
      skip = True
    elif not argument.lstrip("-").startswith("workdir="):
      kept.append(argument)
  return kept


def command(config: ConfigDict, workdir: Path) -> None:
  """Compares, and prints what came out."""
  comparison = run(config, workdir, sys.argv[1:])
  print(report.summary(comparison))
  print(f"report: {(workdir / 'report.html').absolute()}")


if __name__ == "__main__":
  cli.main(command)
