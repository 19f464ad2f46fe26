"""One training step: tokens a second, memory, compile time, by recipe.

python -m experiments.bench_step --layers=24 --d=2048 --ffn=8192 --heads=16 \
  --sequence=2048 --batch=8 --vocab=32768 --recipes=none,nvfp4

Prints a JSON line a variant: the model as written ("none"), and under recipes
with every linear layer of the blocks quantised. Times are medians over steps of
random tokens; the optimizer is AdamW in float32. ``--profile`` adds, on a GPU,
the milliseconds and launches a step of each kernel.
"""

from collections.abc import Sequence
import json
import statistics
import sys
import time

from absl import app
from absl import flags
import jax

from experiments import bench
from experiments.models import transformer
import fp4jax
from fp4jax import recipes

_LAYERS = flags.DEFINE_integer("layers", 4, "Layers of the scanned model.")
_D = flags.DEFINE_integer("d", 256, "Width.")
_FFN = flags.DEFINE_integer("ffn", 1024, "Width of the feed-forward.")
_HEADS = flags.DEFINE_integer("heads", 4, "Attention heads.")
_SEQUENCE = flags.DEFINE_integer("sequence", 128, "Tokens of a sequence.")
_BATCH = flags.DEFINE_integer("batch", 4, "Sequences of a batch.")
_VOCAB = flags.DEFINE_integer("vocab", 1024, "Tokens there are.")
_CUDNN = flags.DEFINE_bool("cudnn", False, "Attention by cuDNN.")
_REMAT = flags.DEFINE_bool("remat", False, "Recompute blocks.")
_STEPS = flags.DEFINE_integer("steps", 10, "Steps that are timed.")
_RECIPES = flags.DEFINE_list("recipes", ["none", "nvfp4"], "Variants.")
_PROFILE = flags.DEFINE_bool("profile", False, "Time of each kernel.")
_BACKEND = flags.DEFINE_string("backend", None, "Backend of the recipes.")

_PROFILED = 2  # steps


def variant(name: str, net) -> tuple:
  """The model's function under a recipe, and what a call adds to it."""
  if name == "none":
    return net.apply, False
  policy = fp4jax.Policy(
    rules=(fp4jax.Rule(path="**/lm_head/**", recipe=None),),
    default=getattr(recipes, name)(),
  )
  return fp4jax.quantize(net.apply, policy, backend=_BACKEND.value), True


def measure(name: str, net) -> dict:
  """Compiles and runs a train step."""
  apply, keyed = variant(name, net)
  step = bench.train_step(apply, keyed)
  shape = _BATCH.value, _SEQUENCE.value
  tokens = jax.random.randint(jax.random.key(1), shape, 0, _VOCAB.value)
  params = jax.jit(net.init)(jax.random.key(0), tokens)
  opt_state = jax.jit(bench.OPTIMIZER.init)(params)
  start = time.perf_counter()
  compiled = (
    jax.jit(step, donate_argnums=(0, 1))
    .lower(params, opt_state, tokens, jax.random.key(2))
    .compile()
  )
  compile_s = time.perf_counter() - start
  memory = compiled.memory_analysis()
  assert memory is not None
  seconds, losses = [], []
  for i in range(_STEPS.value + 2):
    start = time.perf_counter()
    loss, params, opt_state = compiled(
      params, opt_state, tokens, jax.random.key(i)
    )
    losses.append(float(loss))
    seconds.append(time.perf_counter() - start)
  median = statistics.median(seconds[2:])
  stats = jax.devices()[0].memory_stats() or {}
  kernels = None
  if _PROFILE.value:

    def run():
      nonlocal params, opt_state
      for i in range(_PROFILED):
        loss, params, opt_state = compiled(
          params, opt_state, tokens, jax.random.key(i)
        )
      jax.block_until_ready(loss)

    kernels = bench.profile(run, _PROFILED)
  return {
    "recipe": name,
    "step_ms": round(1e3 * median, 2),
    "tokens_per_s": round(tokens.size / median),
    "temporaries_gib": round(memory.temp_size_in_bytes / 2**30, 3),
    "arguments_gib": round(memory.argument_size_in_bytes / 2**30, 3),
    "peak_gib": round(stats.get("peak_bytes_in_use", 0) / 2**30, 3),
    "compile_s": round(compile_s, 2),
    "first_loss": losses[0],
    "last_loss": losses[-1],
    "backend": _BACKEND.value if keyed else None,
    "steps": _STEPS.value,
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "kernels": kernels,
  }


def main(argv: Sequence[str]) -> None:
  """Prints a JSON line a variant."""
  del argv
  device = jax.devices()[0]
  if _PROFILE.value and device.platform != "gpu":
    sys.exit(
      f"bench_step: --profile needs an NVIDIA GPU, the device is"
      f" {device.device_kind!r}; leave it out."
    )
  net = transformer.Transformer(
    vocab=_VOCAB.value,
    layers=_LAYERS.value,
    d=_D.value,
    heads=_HEADS.value,
    kv_heads=_HEADS.value,
    ffn=_FFN.value,
    scan=True,
    remat=_REMAT.value,
    attention="cudnn" if _CUDNN.value else "xla",
  )
  for name in _RECIPES.value:
    print(json.dumps(measure(name, net)), flush=True)


if __name__ == "__main__":
  app.run(main)
