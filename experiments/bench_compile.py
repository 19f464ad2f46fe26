"""What ``fp4jax.quantize`` adds to tracing and compiling a train step.

python -m experiments.bench_compile --layers=12 --width=256

Prints, for the model as written and under some recipes, the seconds that it
takes to trace and to compile one scanned train step (forward, backward, AdamW):
CPU time and wall-clock time, medians over fresh compilations, and the median
ratio to the model as written, compiled in turn with it.
"""

from collections.abc import Callable
from collections.abc import Sequence
import gc
import json
import statistics
import time

from absl import app
from absl import flags
import jax
import jax.numpy as jnp

from experiments import bench
from experiments.models import transformer
import fp4jax
from fp4jax import policies
from fp4jax import recipes

_LAYERS = flags.DEFINE_integer("layers", 12, "Layers of the scanned model.")
_WIDTH = flags.DEFINE_integer("width", 256, "Width of the model.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Fresh compilations.")
_RECIPES = flags.DEFINE_list("recipes", ["fp8", "nvfp4"], "Recipes to measure.")


def model(layers: int, width: int) -> tuple[transformer.Transformer, dict]:
  """A scanned Transformer and the shapes of its parameters."""
  net = transformer.Transformer(
    vocab=1024,
    layers=layers,
    d=width,
    heads=width // 64,
    kv_heads=width // 64,
    ffn=4 * width,
    activation="swiglu",
    scan=True,
  )
  tokens = jax.ShapeDtypeStruct((4, 128), jnp.int32)
  return net, jax.eval_shape(net.init, jax.random.key(0), tokens)


def compilation(apply_of: Callable, variables, keyed: bool):
  """CPU and wall-clock seconds to trace and compile a train step."""
  opt_state = jax.eval_shape(bench.OPTIMIZER.init, variables)
  tokens = jax.ShapeDtypeStruct((4, 128), jnp.int32)
  key = jax.eval_shape(lambda: jax.random.key(0))
  step = jax.jit(bench.train_step(apply_of(), keyed))
  gc.collect()
  start = time.process_time(), time.perf_counter()
  step.lower(variables, opt_state, tokens, key).compile()
  return time.process_time() - start[0], time.perf_counter() - start[1]


def main(argv: Sequence[str]) -> None:
  """Prints one JSON line a recipe."""
  del argv
  net, variables = model(_LAYERS.value, _WIDTH.value)
  functions: dict = {"none": lambda: net.apply}
  for name in _RECIPES.value:
    policy = policies.all_linear(getattr(recipes, name)())
    functions[name] = lambda policy=policy: fp4jax.quantize(net.apply, policy)
  seconds: dict = {name: [] for name in functions}
  for repeat in range(_REPEATS.value + 1):
    for name, apply_of in functions.items():
      taken = compilation(apply_of, variables, name != "none")
      if repeat:  # the first warms the compiler up
        seconds[name].append(taken)
  for name, taken in seconds.items():
    line: dict = {"recipe": name}
    for i, clock in enumerate(("cpu", "wall")):
      own, plain = ([t[i] for t in times] for times in (taken, seconds["none"]))
      ratios = sorted(a / b for a, b in zip(own, plain, strict=True))
      line[f"{clock}_s"] = round(statistics.median(own), 3)
      line[f"{clock}_ratio"] = round(statistics.median(ratios), 3)
      line[f"{clock}_ratios"] = [round(r, 3) for r in (ratios[0], ratios[-1])]
    line |= {
      "layers": _LAYERS.value,
      "width": _WIDTH.value,
      "repeats": _REPEATS.value,
      "device": jax.devices()[0].device_kind,
      "jax": jax.__version__,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
  app.run(main)
