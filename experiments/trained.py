"""A trained model, to be evaluated, and where what came out is written.

A workdir is one of ``experiments.train``, or ``runs/NAME`` in one of
``experiments.compare``.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import hashlib
import json
from pathlib import Path
import shlex
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from configs import base
from experiments import checkpoint
from experiments import config as config_lib
from experiments import data
from experiments import errors
from experiments import files
from experiments import metrics
from experiments import recipe as recipe_lib
from experiments import state
from experiments import tasks
from experiments import train


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
  """A model, its text, and what it is evaluated under.

  Attributes:
    workdir: of its run.
    config: of the run, with the recipe that it is evaluated under.
    trained_recipe: that it was trained under.
    step: of the checkpoint.
    finished: whether that is the end of its run.
    apply: f(variables, tokens [b, t]) → logits [b, t, vocab].
    params: float32 tree.
    corpus: what it has read, and the held-out part that it has not.
    coverage: how many contractions are quantised, in one line.
  """

  workdir: Path
  config: ConfigDict
  trained_recipe: str
  step: int
  finished: bool
  apply: Callable
  params: Any
  corpus: data.Corpus
  coverage: str

  def record(self) -> dict:
    """What tells this evaluation's model from another's, for JSON."""
    return {
      "workdir": str(self.workdir),
      "trained_recipe": self.trained_recipe,
      "recipe": self.config.recipe,
      "step": self.step,
      "finished": self.finished,
      "coverage": self.coverage,
      "text": self.corpus.identity,
      "config": config_lib.identity(self.config),
    }


def load(workdir: str | Path, recipe: str = "", step: int = 0) -> Trained:
  """The model of a run.

  Args:
    workdir: the run's folder.
    recipe: to evaluate under, on the layers of the run's own policy and without
      healing; "" is as the step that led to the checkpoint, healed or not.
    step: of the checkpoint; 0 is the last of a finished run.

  Returns:
    The model.

  Raises:
    UserError: there is no such run, recipe or checkpoint, the run has not
      finished and no step is given, or its text has changed.
  """
  workdir = Path(workdir)
  config = _config(workdir)
  folder = workdir / "checkpoints"
  steps = checkpoint.steps(folder)
  finished = (workdir / "result.json").exists()
  kept = ", ".join(map(str, steps)) or "none"
  if not finished and not step:
    raise errors.UserError(
      f"--workdir={workdir} holds a run that has not finished; continue it, or"
      f" give --step of a checkpoint (there are: {kept})."
    )
  step = step or config.train.steps
  if step not in steps:
    raise errors.UserError(
      f"--workdir={workdir} has no checkpoint of step {step}; give --step of"
      f" one that is there ({kept})."
    )
  if tasks.of(config.model.name) is not tasks.NEXT_TOKEN:
    raise errors.UserError(
      f"--workdir={workdir} holds a model of images, which reads no text; give"
      " the run of a language model."
    )
  trained_recipe = config.recipe
  if recipe:
    config.recipe, config.policy.heal.fraction = recipe, 0.0
  recipe_lib.check(config)
  experiment = train.make_experiment(config)
  apply = experiment.at(step - 1).apply
  inputs = jax.ShapeDtypeStruct((1, config.data.sequence), jnp.int32)
  table = recipe_lib.coverage(apply, config, experiment.shapes.params, inputs)
  lines = table.splitlines()
  coverage = [line for line in lines if not line.startswith("backend ")][-1]
  corpus = train.read_corpus(config, workdir, [workdir])
  return Trained(
    workdir=workdir,
    config=config,
    trained_recipe=trained_recipe,
    step=step,
    finished=step == config.train.steps,
    # The key is read by recipes alone that round the forward pass so.
    apply=functools.partial(apply, fp4_key=state.make_key(config.seed)),
    params=checkpoint.restore_params(folder, step, experiment.shapes.params),
    corpus=corpus,
    coverage=coverage,
  )


def _config(workdir: Path) -> ConfigDict:
  """The configuration of a run, with the folder of its tokens."""
  runs = sorted(path.name for path in workdir.glob("runs/[!.]*"))
  if runs:
    raise errors.UserError(
      f"--workdir={workdir} holds a comparison; give one of its runs, as"
      f" --workdir={workdir / 'runs' / runs[0]} (there are:"
      f" {', '.join(runs)})."
    )
  path = workdir / "config.json"
  if not path.exists():
    raise errors.UserError(
      f"--workdir={workdir} holds no run; give the folder of one of"
      " experiments.train, or runs/NAME in one of experiments.compare."
    )
  saved = json.loads(path.read_text())
  config = base.get_config()
  here = set(config_lib.field_names(ConfigDict(config_lib.identity(config))))
  there = set(config_lib.field_names(ConfigDict(saved["config"])))
  if here != there:
    name = sorted(here ^ there)[0]
    raise errors.UserError(
      f"--workdir={workdir}: config.{name} is"
      f" {'missing' if name in here else 'unknown'}; the run is of another"
      f" version ({saved['versions']['fp4jax']}), evaluate it with that one."
    )
  config.update(saved["config"])
  if workdir.absolute().parent.name == "runs":  # runs share their tokens
    config.data.cache = str(workdir.absolute().parents[1] / "data")
  return config


def save(
  trained: Trained,
  *,
  name: str,
  settings: dict,
  results: dict,
  versions: dict[str, str],
  command: Sequence[str],
) -> Path:
  """Writes what came out into ``evaluations`` of the run's folder.

  Args:
    trained: the model.
    name: of what was evaluated.
    settings: that the results depend on; others get another file.
    results: of the evaluation.
    versions: of packages besides those that every run records.
    command: the module and its arguments.

  Returns:
    The file.
  """
  settings = {"recipe": trained.config.recipe, **settings}
  plain = json.dumps([trained.step, settings], sort_keys=True).encode()
  digest = hashlib.sha256(plain).hexdigest()[:8]
  stem = f"{trained.config.recipe}-{name}-{digest}"
  path = trained.workdir / "evaluations" / f"{stem}.json"
  content = {
    "results": results,
    "settings": settings,
    "run": trained.record(),
    "versions": config_lib.versions() | versions,
    "command": f"python -m {shlex.join(command)}",
  }
  files.write(path, metrics.to_json(content))
  return path
