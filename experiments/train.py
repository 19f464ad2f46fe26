"""Trains one model.

python -m experiments.train --config=configs/tiny.py --workdir=DIR

The same command continues a run that was interrupted, with the same losses:
from the last checkpoint after Ctrl-C, from the step at hand after SIGTERM.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import math
from pathlib import Path
import signal
import statistics
import threading
import time
from typing import Any

import jax
from ml_collections import ConfigDict

from experiments import checkpoint
from experiments import cli
from experiments import config as config_lib
from experiments import data
from experiments import errors
from experiments import files
from experiments import memory
from experiments import metrics
from experiments import models
from experiments import recipe
from experiments import state as state_lib
from experiments import tasks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """What a finished run leaves in ``result.json``.

  Attributes:
    recipe: its name.
    validation_loss: at the end, nats a token or image; NaN if not finite.
    unigram_entropy: of the training tokens or labels, nats.
    parameters: number of parameters.
    steps: steps taken.
    tokens: tokens trained on; of images, patches.
    skipped_steps: steps whose loss or gradient was not finite.
    tokens_per_second: median over the run, compilation left out.
    compile_seconds: of the train steps.
    seconds: of the whole run; of its last part, if it was interrupted.
    residual_bytes: kept for the backward pass of a micro-batch, by dtype;
      before healing.
    peak_bytes: allocated on the device at most, in the life of this process;
      0 where the device does not tell.
    coverage: every contraction and what became of it, before healing and in
      it.
    sample: text that the model wrote; None where it writes none.
    validation_accuracy: share of the held-out images whose label the model
      gets right; None where it labels none.
  """

  recipe: str
  validation_loss: float
  unigram_entropy: float
  parameters: int
  steps: int
  tokens: int
  skipped_steps: int
  tokens_per_second: float
  compile_seconds: float
  seconds: float
  residual_bytes: dict[str, int]
  peak_bytes: int
  coverage: str
  sample: str | None = None
  validation_accuracy: float | None = None

  def to_dict(self) -> dict[str, Any]:
    """The fields that apply, as JSON holds them."""
    fields = dataclasses.asdict(self)
    return {name: x for name, x in fields.items() if x is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
  """The functions that train and validate from a step on.

  Attributes:
    first: the step.
    apply: the model, as ``recipe.quantised`` gives it.
    loss: in training.
    validation_loss: without what a model adds in training.
    train_step: of ``state.make_train_step``.
  """

  first: int
  apply: Callable
  loss: state_lib.ModelLoss
  validation_loss: state_lib.ModelLoss
  train_step: Callable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
  """A configuration made concrete: functions and shapes, nothing computed.

  Attributes:
    config: the configuration.
    phases: at least one, from step 0; healing adds the second.
    initialise: gives the state before step 0.
    batch: of a step, as shapes and dtypes.
  """

  config: ConfigDict
  phases: tuple[Phase, ...]
  initialise: Callable[[], state_lib.State]
  batch: Any

  @property
  def task(self) -> tasks.Task:
    """What the model learns."""
    return tasks.of(self.config.model.name)

  @property
  def tokens(self) -> jax.ShapeDtypeStruct:
    """The batch, of a model that reads tokens."""
    return self.batch

  def at(self, step: int) -> Phase:
    """The phase of the step that follows ``step`` others."""
    return [phase for phase in self.phases if phase.first <= step][-1]

  @property
  def apply(self) -> Callable:
    """The model as the first step trains it."""
    return self.phases[0].apply

  @property
  def loss(self) -> state_lib.ModelLoss:
    """The loss of the first step."""
    return self.phases[0].loss

  @property
  def validation_loss(self) -> state_lib.ModelLoss:
    """What the first phase validates with."""
    return self.phases[0].validation_loss

  @property
  def train_step(self) -> Callable:
    """The first step."""
    return self.phases[0].train_step

  @functools.cached_property
  def shapes(self) -> state_lib.State:
    """The state, as shapes and dtypes."""
    return jax.eval_shape(self.initialise)

  @property
  def micro_batch(self) -> Any:
    """One micro-batch."""
    return _of_examples(
      self.batch, self.config.train.batch // self.config.train.accumulate
    )

  @functools.cached_property
  def coverage(self) -> str:
    """What is quantised; raises if the policy does not fit the model."""
    inputs, _ = jax.eval_shape(self.loss.split, self.micro_batch)
    tables = [
      recipe.coverage(phase.apply, self.config, self.shapes.params, inputs)
      for phase in self.phases
    ]
    later = [
      f"\nfrom step {phase.first} on:\n{table}"
      for phase, table in zip(self.phases[1:], tables[1:], strict=True)
    ]
    return "\n".join([tables[0], *later])

  def residual_bytes(self) -> dict[str, int]:
    """Bytes kept for the backward pass of one micro-batch, by dtype."""
    key = jax.random.key(0)
    return memory.residual_bytes(
      self.loss, self.shapes.params, self.micro_batch, key
    )


def make_experiment(config: ConfigDict) -> Experiment:
  """The experiment of a configuration, after checking all of its fields."""
  config_lib.check(config)
  model, task = models.from_config(config), tasks.of(config.model.name)
  batch = task.batch(config)
  inputs, _ = jax.eval_shape(task.loss.split, _of_examples(batch, 1))
  schedule = state_lib.make_schedule(config.optimizer, config.train.steps)
  optimizer = state_lib.make_optimizer(config.optimizer, schedule)

  def make_phase(first, policy):
    apply = recipe.under(model, policy)
    loss = task.loss(apply, auxiliary=model.auxiliary)
    return Phase(
      first=first,
      apply=apply,
      loss=loss,
      validation_loss=task.loss(apply),
      train_step=state_lib.make_train_step(
        loss,
        optimizer,
        schedule,
        seed=config.seed,
        accumulate=config.train.accumulate,
      ),
    )

  return Experiment(
    config=config,
    phases=tuple(make_phase(*phase) for phase in recipe.make_phases(config)),
    initialise=functools.partial(
      state_lib.initialise,
      model,
      optimizer,
      config.seed,
      inputs,
    ),
    batch=batch,
  )


def _of_examples(batch: Any, count: int) -> Any:
  """The shapes of a batch of another number of examples."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), batch
  )


def read_corpus(config: ConfigDict, workdir: Path, runs: Sequence[Path]) -> Any:
  """The text of an experiment, or its images.

  Args:
    config: of the experiment.
    workdir: its folder.
    runs: folders of runs, which may not exist, that have to read the same text.
  """
  data.check_apart(config.data.path, workdir, "--workdir")
  task = tasks.of(config.model.name)
  text = task.read(config)
  for folder in runs:
    config_lib.check_text(config, text.identity, folder)
  cache = Path(config.data.cache or workdir / "data")
  return task.prepare(config, cache, text)


def run(
  config: ConfigDict,
  workdir: str | Path,
  *,
  corpus: Any = None,
  brief: bool = False,
  name: str = "",
) -> Result:
  """Trains, or continues, or returns what is finished.

  Args:
    config: of ``configs/``.
    workdir: a folder, new or of this very experiment.
    corpus: what ``read_corpus`` returned, if it was called already.
    brief: whether to print the coverage's count instead of its table.
    name: what the run is called in what it prints; "" is its recipe.

  Returns:
    The result.

  Raises:
    UserError: the configuration, the data or the workdir cannot be used;
      nothing is then written.
    Stopped: Ctrl-C, or SIGTERM after which a checkpoint was saved.
    fp4jax.PolicyError: the policy does not fit the model.
    fp4jax.UnsupportedError: this device cannot serve the recipe.
  """
  began, workdir = time.perf_counter(), Path(workdir)
  name = name or config.recipe
  experiment = make_experiment(config)
  config_lib.check_workdir(config, workdir)
  if (workdir / "runs").exists():
    raise errors.UserError(
      f"--workdir={workdir} holds a comparison; give another --workdir."
    )
  finished = workdir / "result.json"
  if finished.exists():
    print(f"{name}: already finished, in {workdir}")
    return Result(**metrics.from_json(finished.read_text()))
  table = experiment.coverage
  size = _bytes(experiment.shapes)
  files.require_space(workdir, size * (config.train.keep + 1), "checkpoints")
  corpus = corpus or read_corpus(config, workdir, [workdir])
  config_lib.save(config, corpus.identity, workdir)
  files.write(workdir / "coverage.txt", f"{table}\n")
  shown = table
  if brief:
    lines = table.split("\n\nfrom step")[0].splitlines()
    count = [x for x in lines if not x.startswith("backend ")][-1]
    shown = f"{count}: {workdir / 'coverage.txt'}"
  print(_describe(name, experiment, corpus), shown, sep="\n", flush=True)

  params, compile_seconds = _train(name, experiment, corpus, workdir)
  records = metrics.read(workdir / "metrics.jsonl")
  last = {name: value for r in records for name, value in r.items()}
  loss = last["validation_loss"]
  rates = [r["tokens_per_second"] for r in records if "tokens_per_second" in r]
  result = Result(
    recipe=config.recipe,
    validation_loss=math.nan if loss is None else loss,
    validation_accuracy=last.get("validation_accuracy"),
    unigram_entropy=corpus.unigram_entropy,
    parameters=_parameters(experiment),
    steps=config.train.steps,
    tokens=config.train.steps * _tokens_per_step(config),
    skipped_steps=last["skipped_steps"],
    tokens_per_second=statistics.median(rates),
    compile_seconds=compile_seconds,
    seconds=time.perf_counter() - began,
    residual_bytes=experiment.residual_bytes(),
    peak_bytes=_peak_bytes(),
    coverage=table,
    sample=experiment.task.sample(
      config, corpus, experiment.phases[-1].apply, params
    ),
  )
  files.write(finished, metrics.to_json(result.to_dict()))
  return result


def _train(
  name: str, experiment: Experiment, corpus: Any, workdir: Path
) -> tuple[Any, float]:
  """The trained parameters, and the seconds that the step took to compile."""
  config, train = experiment.config, experiment.config.train
  batches = experiment.task.training_batches(config, corpus)
  held_out = experiment.task.validation_batches(config, corpus)
  # Read by recipes alone that round the forward pass stochastically.
  key = state_lib.make_key(config.seed)

  def evaluate(measures, params):
    found = [jax.device_get(measures(params, batch, key)) for batch in held_out]
    return jax.tree.map(lambda *x: statistics.fmean(map(float, x)), *found)

  with checkpoint.Checkpoints(workdir / "checkpoints", train.keep) as saved:
    if saved.latest is None:
      state = jax.jit(experiment.initialise)()
    else:
      state, _ = saved.restore(experiment.shapes, batches)
      print(f"{name}: continues from step {saved.latest}")
    step, phase, compile_seconds = int(state.step), None, 0.0
    with (
      metrics.Writer(workdir, step) as writer,
      metrics.Progress(name, step, train.steps) as progress,
      _interruptible(name, saved) as terminated,
    ):
      log = Log(config, writer, progress, step)
      while step < train.steps:
        if experiment.at(step) is not phase:
          log.flush()
          phase = experiment.at(step)
          train_step, seconds = _compile(experiment, phase)
          compile_seconds += seconds
          measures = jax.jit(phase.validation_loss.measures)
          log.pause()
        state, measured = train_step(state, next(batches))
        step += 1
        log.add(measured)
        last = step == train.steps
        stops = terminated.is_set()
        evaluates = last or step % train.eval_every == 0
        saves = last or stops or step % train.checkpoint_every == 0
        if evaluates or saves or step % train.log_every == 0:
          log.flush()
        if evaluates:
          log.pause(step, evaluate(measures, state.params))
        if saves:
          saved.save(state, batches, {"seed": config.seed})
          log.pause()
        if stops:
          raise errors.Stopped(
            f"{name}: terminated; {saved.outlook()}",
            128 + signal.SIGTERM,
          )
  return state.params, compile_seconds


@contextlib.contextmanager
def _interruptible(
  name: str, saved: checkpoint.Checkpoints
) -> Iterator[threading.Event]:
  """Gives an event that SIGTERM sets; says what is saved after Ctrl-C."""
  terminated = threading.Event()
  main = threading.current_thread() is threading.main_thread()
  if main:  # No other thread may.
    before = signal.signal(signal.SIGTERM, lambda *_: terminated.set())
  try:
    yield terminated
  except errors.Stopped:
    raise
  except KeyboardInterrupt as error:
    raise errors.Stopped(
      f"{name}: interrupted; {saved.outlook()}", 128 + signal.SIGINT
    ) from error
  finally:
    if main:
      signal.signal(signal.SIGTERM, before)


def _compile(experiment: Experiment, phase: Phase) -> tuple[Callable, float]:
  """The train step, compiled for good: other shapes raise, never recompile."""
  began = time.perf_counter()
  jitted = jax.jit(phase.train_step, donate_argnums=0)
  compiled = jitted.lower(experiment.shapes, experiment.batch).compile()
  return compiled, time.perf_counter() - began


class Log:
  """Collects the metrics of steps, and writes them when asked to.

  Between flushes nothing waits for the device.
  """

  def __init__(self, config, writer, progress, step):
    self._config = config
    self._writer = writer
    self._progress = progress
    self._step = step
    self._pending: list[dict] = []
    self._since = time.perf_counter()

  def add(self, measured: dict) -> None:
    """The metrics of the next step, on the device."""
    self._pending.append(measured)

  def flush(self) -> None:
    """Writes what is pending; raises after too many skipped steps."""
    if not self._pending:
      return
    train = self._config.train
    measured = jax.device_get(self._pending)
    now = time.perf_counter()
    seconds, self._since = now - self._since, now
    per_step = seconds / len(measured)
    records = [
      {"step": step, **{name: x.item() for name, x in values.items()}}
      for step, values in enumerate(measured, self._step + 1)
    ]
    tokens = _tokens_per_step(self._config)
    records[-1]["tokens_per_second"] = tokens / per_step
    self._writer.write(records)
    self._step += len(records)
    self._pending.clear()
    self._progress.update(
      self._step,
      records[-1]["loss"],
      tokens / per_step,
      (train.steps - self._step) * per_step,
    )
    worst = max(record["skipped_in_a_row"] for record in records)
    if worst >= train.max_skips:
      raise errors.UserError(
        f"loss or gradient was not finite in {worst} steps in a row up to"
        f" step {self._step}; the parameters are as before them. Lower"
        " config.optimizer.peak_lr, or leave more blocks in BF16."
      )

  def pause(self, step: int | None = None, record: dict | None = None) -> None:
    """Writes a record, and leaves the time since the last flush out."""
    if record is not None:
      self._writer.write([{"step": step, **record}])
      values = "  ".join(f"{k} {v:.4f}" for k, v in record.items())
      self._progress.say(f"step {step}  {values}")
    self._since = time.perf_counter()


def _describe(name: str, experiment: Experiment, corpus: Any) -> str:
  config = experiment.config
  lines = [
    f"{name}: {_parameters(experiment):,} parameters; parameters,"
    f" gradients and moments float32, arithmetic {config.model.dtype}",
    *experiment.task.describe(config, corpus),
  ]
  return "\n".join(lines)


def _tokens_per_step(config: ConfigDict) -> int:
  return config.train.batch * tasks.of(config.model.name).length(config)


def _peak_bytes() -> int:
  stats = jax.devices()[0].memory_stats()
  return stats["peak_bytes_in_use"] if stats else 0


def _parameters(experiment: Experiment) -> int:
  shapes = jax.tree.leaves(experiment.shapes.params)
  return sum(math.prod(x.shape) for x in shapes)


def _bytes(shapes) -> int:
  leaves = jax.tree.leaves(shapes)
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def command(config: ConfigDict, workdir: Path) -> None:
  """Trains, and prints what came out."""
  result = run(config, workdir)
  loss = metrics.shown(result.validation_loss, ".4f")
  accuracy = ""
  if result.validation_accuracy is not None:
    accuracy = f", accuracy {result.validation_accuracy:.2%}"
  print(
    f"validation loss {loss}{accuracy},"
    f" {tasks.of(config.model.name).baseline}"
    f" {result.unigram_entropy:.4f}, {result.tokens_per_second:,.0f}"
    f" tokens/s, {result.seconds:.0f} s"
  )
  if result.sample is not None:
    print(f"sample:\n{result.sample}")


if __name__ == "__main__":
  cli.main(command)
