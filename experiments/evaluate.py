"""Evaluates a trained model with EleutherAI's lm-evaluation-harness.

python -m experiments.evaluate --workdir=DIR --tasks=mmlu_pro --fewshot=5

DIR is a run of ``experiments.train``, or ``runs/NAME`` in one of
``experiments.compare``. ``--recipe=bf16`` evaluates in BF16 what was trained in
NVFP4. The tasks are those of ``lm_eval ls tasks``, and ``cloze_text`` and
``cloze_letter`` of the run's own held-out text, which need no network.
``pip install -e '.[eval]'`` installs the harness.
"""

from collections.abc import Sequence
import dataclasses
from importlib import util
from pathlib import Path
import sys
from typing import Any

from absl import flags

from experiments import cli
from experiments import cloze as cloze_lib
from experiments import errors
from experiments import scoring
from experiments import trained as trained_lib

PACKAGE = "lm_eval"


def require_harness() -> Any:
  """``experiments.harness``.

  Raises:
    UserError: lm-evaluation-harness is not installed.
  """
  if util.find_spec(PACKAGE) is None:
    raise errors.UserError(
      "experiments.evaluate needs lm-evaluation-harness, which is not"
      " installed; run pip install -e '.[eval]' (python -m experiments.cloze"
      " does without)."
    )
  from experiments import harness

  return harness


def run(values: flags.FlagValues, arguments: Sequence[str] = ()) -> Path:
  """Evaluates a run, and writes the results.

  Args:
    values: the flags.
    arguments: of the command line, for the results.

  Returns:
    The file of the results.

  Raises:
    UserError: the harness, the run, a task or its data are not there, or a flag
      has a value that cannot be used.
  """
  tasks = [task.strip() for task in values.tasks if task.strip()]
  if not tasks or len(set(tasks)) < len(tasks):
    raise errors.UserError(
      f"--tasks={','.join(values.tasks)}; needed names, each once, as in"
      " --tasks=cloze_text,mmlu_pro."
    )
  if values.limit < 0 or values.fewshot < -1:
    name = "limit" if values.limit < 0 else "fewshot"
    raise errors.UserError(
      f"--{name}={getattr(values, name)}; needed at least 0."
    )
  harness = require_harness()
  trained = trained_lib.load(values.workdir, values.recipe, values.step)
  print(trained.coverage, flush=True)
  settings = {
    "tasks": tasks,
    "fewshot": values.fewshot,
    "limit": values.limit,
    "seed": values.seed,
    "batch": values.batch,
  }
  include = [Path(folder) for folder in values.include]
  if set(tasks) & set(cloze_lib.NAMES):
    cloze = cloze_lib.of_run(trained, values)
    print(cloze.summary(), flush=True)
    settings |= {"cloze": dataclasses.asdict(cloze.settings)}
    include.append(cloze_lib.write_tasks(cloze, trained.workdir))
  own = set(tasks) <= set(cloze_lib.NAMES)
  manager = harness.find_tasks(include, own)
  for task in tasks:
    harness.check_task(manager, task)
  scorer = scoring.Scorer(
    trained.apply,
    trained.params,
    trained.corpus.tokenizer,
    trained.config.data.sequence,
    batch=values.batch,
    seed=values.seed,
  )
  results = {}
  for task in tasks:
    found = harness.evaluate(
      scorer,
      task,
      manager=manager,
      fewshot=None if values.fewshot < 0 else values.fewshot,
      limit=values.limit or None,
      seed=values.seed,
    )
    truncation = scorer.reset()
    print("\n".join(summary(found, values.fewshot)), flush=True)
    print(f"{task}: {truncation}", flush=True)
    results[task] = {**found, "truncation": dataclasses.asdict(truncation)}
  path = trained_lib.save(
    trained,
    name="+".join(tasks)[:80],
    settings=settings,
    results=results,
    versions={"lm_eval": harness.VERSION},
    command=("experiments.evaluate", *arguments),
  )
  print(f"results: {path}")
  return path


def summary(found: dict, fewshot: int) -> list[str]:
  """A line for each task and metric of the harness's results.

  Args:
    found: of ``harness.evaluate``.
    fewshot: that was asked for; -1 for what the task says.

  >>> metrics = {"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "a"}
  >>> summary({"results": {"a": metrics}, "n-shot": {"a": 0}}, 5)
  ['a: acc 0.5000 ± 0.1000, 0 shots (the task takes no 5)']
  """
  lines = []
  for task, metrics in found["results"].items():
    shots = found["n-shot"].get(task)
    suffix = "" if shots is None else f", {shots} shots"
    if shots is not None and fewshot not in (-1, shots):
      suffix += f" (the task takes no {fewshot})"
    for name, value in metrics.items():
      metric, _, kind = name.partition(",")
      if not isinstance(value, float) or metric.endswith("_stderr"):
        continue
      label = metric if kind == "none" else f"{metric} ({kind})"
      error = metrics.get(f"{metric}_stderr,{kind}")
      spread = f" ± {error:.4f}" if isinstance(error, float) else ""
      lines.append(f"{task}: {label} {value:.4f}{spread}{suffix}")
  return lines


def _define() -> list[str]:
  flags.DEFINE_list("tasks", [], "Of lm-evaluation-harness, or cloze_*.")
  flags.DEFINE_integer("limit", 0, "Questions of a task at most; 0 is all.")
  flags.DEFINE_multi_string(
    "include", [], "A folder with tasks of your own; repeatable."
  )
  return ["tasks", "limit", "include"]


if __name__ == "__main__":
  cli.evaluate(lambda values: run(values, sys.argv[1:]), _define)
