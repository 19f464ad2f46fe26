"""Trains one model under several recipes, and reports how they differ.

python -m experiments.compare --config=configs/quickstart.py --workdir=DIR

Model, data, order, initialisation and schedule are the same in all runs. The
same command continues where it was interrupted; finished runs are not repeated.
"""

import ast
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent import futures
import json
import multiprocessing
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
  """Trains each of ``config.compare.recipes`` and writes the report.

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
  names = _names(config)
  configs = {name: variant(config, name, workdir) for name in names}
  # Whatever is wrong with the last run is said before the first one starts.
  for name in names:
    _ = train.make_experiment(configs[name]).coverage
  corpus = _check_workdir(config, names, workdir)
  if config.compare.processes:
    _train_in_processes(configs, workdir, config.compare.processes)
  runs = []
  for name in names:
    folder = _folder(workdir, name)
    result = train.run(
      configs[name], folder, corpus=corpus, brief=True, name=name
    )
    records = metrics.read(folder / "metrics.jsonl")
    runs.append(report.Run(name=name, result=result, records=records))
  comparison = report.Comparison(
    runs=tuple(runs),
    config=config_lib.identity(config),
    commands=_commands(arguments, workdir, names),
    versions=_versions([_folder(workdir, name) for name in names]),
    seconds=time.perf_counter() - began,
    processes=config.compare.processes,
  )
  report.write(comparison, workdir)
  return comparison


def _versions(folders: Sequence[Path]) -> dict[str, str]:
  """What the runs were begun with; several of one are all named."""
  found: dict[str, dict[str, None]] = {}
  for folder in folders:
    versions = json.loads((folder / "config.json").read_text())["versions"]
    for name, version in versions.items():
      found.setdefault(name, {})[version] = None
  return {name: " and ".join(several) for name, several in found.items()}


def _train_in_processes(
  configs: Mapping[str, ConfigDict], workdir: Path, count: int
) -> None:
  """Trains in new processes, ``count`` at a time; they share the device.

  Each is one run alone, so what its process allocates is its own. What a run
  raises is raised here.
  """
  pool = futures.ProcessPoolExecutor(
    count,
    mp_context=multiprocessing.get_context("spawn"),
    max_tasks_per_child=1,
  )
  with pool:
    pending = [
      pool.submit(_train_alone, config.to_json(), _folder(workdir, name), name)
      for name, config in configs.items()
    ]
    try:
      for done in futures.as_completed(pending):
        done.result()
    except BaseException:
      for run in pending:
        run.cancel()
      raise


def _train_alone(config: str, folder: Path, name: str) -> None:
  """``train.run`` in a process of its own."""
  fields = ConfigDict(json.loads(config)).lock()
  train.run(fields, folder, brief=True, name=name)


def _check_workdir(
  config: ConfigDict, names: Sequence[str], workdir: Path
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
  there = sorted(path.name for path in (workdir / "runs").glob("[!.]*"))
  every = dict.fromkeys([*names, *there])
  configs = {name: variant(config, name, workdir) for name in every}
  for name, one in configs.items():
    config_lib.check_workdir(one, _folder(workdir, name))
  if all((_folder(workdir, n) / "result.json").exists() for n in names):
    return None
  folders = [_folder(workdir, name) for name in configs]
  return train.read_corpus(configs[names[0]], workdir, folders)


def _names(config: ConfigDict) -> tuple[str, ...]:
  """What to compare."""
  names = tuple(x.strip() for x in config.compare.recipes.split(","))
  unknown = [n for n in names if n.split("+")[0] not in recipe_lib.NAMES]
  if unknown or len(set(names)) < len(names):
    raise errors.UserError(
      f"config.compare.recipes={','.join(names)!r}; needed some of"
      f" {', '.join(recipe_lib.NAMES)}, each once, as in"
      " --config.compare.recipes=bf16,nvfp4; fields that differ may follow, as"
      " in nvfp4+policy.last=0."
    )
  return names


def _folder(workdir: Path, name: str) -> Path:
  return workdir / "runs" / name


def variant(config: ConfigDict, name: str, workdir: Path) -> ConfigDict:
  """The configuration of one run of a comparison.

  Args:
    config: of the comparison.
    name: a recipe, and after each + a field that differs from ``config``, as
      "nvfp4+policy.last=0".
    workdir: of the comparison.

  Raises:
    UserError: no such field, or a value that is none of its type.
  """
  config = config.copy_and_resolve_references().unlock()
  recipe, *fields = name.split("+")
  config.recipe = recipe
  config.data.cache = config.data.cache or str(workdir / "data")
  known = config_lib.field_names(config)
  for item in fields:
    field, _, text = item.partition("=")
    if field not in known or field.startswith(("compare.", "data.cache")):
      raise errors.UserError(
        f"config.compare.recipes: {name!r} sets {field!r}, which is no field"
        " of a run; write RECIPE+FIELD=VALUE with fields of configs/base.py, as"
        " nvfp4+policy.last=0."
      )
    before = config_lib.lookup(config)(field)
    config.update_from_flattened_dict({field: _parsed(before, text, item)})
  return config.lock()


def _parsed(before, text: str, item: str):
  """A value of the type of the one before it."""
  if isinstance(before, str):
    return text
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    value = None
  if isinstance(before, float) and type(value) is int:
    value = float(value)
  if type(value) is not type(before):
    raise errors.UserError(
      f"config.compare.recipes: {item!r}; needed a {type(before).__name__}, as"
      f" {before!r}."
    )
  return value


def _commands(
  arguments: Sequence[str], workdir: Path, names: Sequence[str]
) -> tuple[str, ...]:
  """This comparison's command, and the command of each of its runs alone."""
  if not arguments:
    return ()
  commands = ["python -m experiments.compare " + shlex.join(arguments)]
  shared = _without_workdir(arguments)
  for name in names:
    recipe, *fields = name.split("+")
    folder = f"{workdir}-{name}"
    alone = [f"--config.recipe={recipe}", *(f"--config.{x}" for x in fields)]
    command = shlex.join([*shared, *alone, f"--workdir={folder}"])
    commands.append(f"python -m experiments.train {command}")
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
