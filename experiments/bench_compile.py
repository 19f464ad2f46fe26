"""What ``fp4jax.quantize`` adds to tracing and compiling a train step.

python -m experiments.bench_compile --layers=12 --width=256

Prints, for the model as written and under some recipes, the seconds that it
takes to trace and to compile one scanned train step (forward, backward, AdamW):
CPU time and wall-clock time, medians over fresh compilations, and the ratio to
the model as written.
"""

from collections.abc import Callable
from collections.abc import Sequence
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
_REPEATS = flags.DEFINE_integer("repeats", 3, "Fresh compilations.")
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


def measure(apply_of: Callable, variables, keyed: bool, repeats: int):
  """Median CPU and wall-clock seconds to trace and compile a train step."""
  opt_state = jax.eval_shape(bench.OPTIMIZER.init, variables)
  tokens = jax.ShapeDtypeStruct((4, 128), jnp.int32)
  key = jax.eval_shape(lambda: jax.random.key(0))
  cpu, wall = [], []
  for _ in range(repeats):
    step = jax.jit(bench.train_step(apply_of(), keyed))
    start = time.process_time(), time.perf_counter()
    step.lower(variables, opt_state, tokens, key).compile()
    cpu.append(time.process_time() - start[0])
    wall.append(time.perf_counter() - start[1])
  return statistics.median(cpu), statistics.median(wall)


def main(argv: Sequence[str]) -> None:
  """Prints one JSON line a recipe."""
  del argv
  net, variables = model(_LAYERS.value, _WIDTH.value)
  measure(lambda: net.apply, variables, False, 1)  # warms the compiler up
  device = jax.devices()[0].device_kind
  plain = measure(lambda: net.apply, variables, False, _REPEATS.value)

  def report(recipe, seconds):
    line = {
      "recipe": recipe,
      "cpu_s": round(seconds[0], 3),
      "wall_s": round(seconds[1], 3),
      "cpu_ratio": round(seconds[0] / plain[0], 3),
      "wall_ratio": round(seconds[1] / plain[1], 3),
      "layers": _LAYERS.value,
      "width": _WIDTH.value,
      "repeats": _REPEATS.value,
      "device": device,
      "jax": jax.__version__,
    }
    print(json.dumps(line), flush=True)

  report("none", plain)
  for name in _RECIPES.value:
    policy = policies.all_linear(getattr(recipes, name)())
    report(
      name,
      measure(
        lambda policy=policy: fp4jax.quantize(net.apply, policy),
        variables,
        True,
        _REPEATS.value,
      ),
    )


if __name__ == "__main__":
  app.run(main)
