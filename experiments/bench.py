"""The train step that the benchmarks time, and where its time goes."""

import collections
from collections.abc import Callable
from collections.abc import Iterable
from pathlib import Path
import re
import tempfile

import jax
import optax

OPTIMIZER = optax.adamw(1e-3)


def loss(apply: Callable, keyed: bool) -> Callable:
  """The loss of next-token prediction.

  Args:
    apply: variables and tokens [b, t] to logits [b, t, vocab].
    keyed: whether ``apply`` takes ``fp4_key``.

  Returns:
    A function of variables, tokens and a key to the mean cross entropy.
  """

  def mean_loss(variables, tokens, key):
    options = {"fp4_key": key} if keyed else {}
    logits = apply(variables, tokens, **options)
    return optax.softmax_cross_entropy_with_integer_labels(
      logits[:, :-1], tokens[:, 1:]
    ).mean()

  return mean_loss


def train_step(apply: Callable, keyed: bool) -> Callable:
  """Forward, backward and AdamW of next-token prediction, not jitted.

  Args:
    apply: as of ``loss``.
    keyed: as of ``loss``.

  Returns:
    A function of variables, the optimizer's state, tokens and a key to the
    loss, new variables and the new state.
  """

  def step(variables, opt_state, tokens, key):
    value_and_grad = jax.value_and_grad(loss(apply, keyed))
    value, grads = value_and_grad(variables, tokens, key)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, variables)
    return value, optax.apply_updates(variables, updates), opt_state

  return step


def profile(run: Callable[[], object], steps: int) -> dict:
  """``time_by_kernel`` of a GPU on which ``run`` takes some steps.

  Args:
    run: takes ``steps`` steps and waits for them.
    steps: how many.
  """
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      run()
    (trace,) = Path(folder).glob("**/*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(trace))
    events = [
      (event.name, event.duration_ns)
      for plane in data.planes
      if "GPU" in plane.name
      for line in plane.lines
      if "Stream" in line.name
      for event in line.events
    ]
  return time_by_kernel(events, steps)


def time_by_kernel(events: Iterable[tuple[str, float]], steps: int) -> dict:
  """Milliseconds and launches a step of each kernel, the longest first.

  Args:
    events: names of launches, and nanoseconds that they took.
    steps: steps that they were part of.
  """
  taken: dict[str, float] = collections.defaultdict(float)
  launches: collections.Counter[str] = collections.Counter()
  for name, nanoseconds in events:
    kernel = re.sub(r"[._]?\d*$", "", name)  # XLA numbers what it has copied
    taken[kernel] += nanoseconds
    launches[kernel] += 1
  return {
    kernel: {
      "ms": round(nanoseconds / 1e6 / steps, 4),
      "launches": launches[kernel] / steps,
    }
    for kernel, nanoseconds in sorted(taken.items(), key=lambda t: -t[1])
  }
