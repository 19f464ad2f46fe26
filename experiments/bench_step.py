"""One training step: tokens a second, memory, what waits for the backward pass.

python -m experiments.bench_step --model=1.3b \
  --variants=none,fp8,handwritten,nvfp4,nvfp4_fp8_exact

Variants of one model, in one process: all are compiled first, then each takes a
turn in every round, and a ratio is of two turns of one round. They train one
state, which goes from one to the next; the optimizer is AdamW in float32, the
tokens are random. A variant is a name, and what blocks recompute:

  none          the model as written (BF16)
  handwritten   NVFP4 by plain ``jax.numpy`` (``experiments.handwritten``)
  a recipe      every linear layer of the blocks quantised by ``fp4jax``
  +full         recomputes everything in the backward pass
  +packed       all but packed residuals (``checkpoint_policies``)
  +linears      what is between linear layers

Prints a JSON line a variant, a table, and what it was measured on; on a GPU
``--profile`` adds the milliseconds and launches a step of each kernel.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import json
import statistics
import sys
import time
from typing import Any

from absl import app
from absl import flags
import jax
from rich.console import Console
from rich.table import Table

from experiments import bench
from experiments import handwritten
from experiments import memory
from experiments import recipe
from experiments.models import transformer
import fp4jax
from fp4jax import checkpoint_policies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
  """A scanned Transformer and its batch.

  Attributes:
    layers: blocks.
    d: width.
    ffn: width of the feed-forward.
    heads: attention heads; 0 leaves attention out.
    sequence: tokens of a sequence.
    batch: sequences of a batch.
    vocab: tokens there are.
  """

  layers: int = 4
  d: int = 256
  ffn: int = 1024
  heads: int = 4
  sequence: int = 128
  batch: int = 4
  vocab: int = 1024

  def elements(self) -> int:
    """Inputs and weights of the blocks' linear layers, each counted once."""
    d, ffn = self.d, self.ffn
    inputs, weights = d + ffn, 2 * d * ffn
    if self.heads:
      inputs, weights = inputs + 2 * d, weights + 4 * d * d
    return self.layers * (self.batch * self.sequence * inputs + weights)


_LARGE = Size(
  layers=24, d=2048, ffn=8192, heads=16, sequence=2048, batch=8, vocab=32768
)
MODELS = {
  "tiny": Size(),
  "110m": Size(
    layers=12, d=768, ffn=3072, heads=12, sequence=1024, batch=64, vocab=32768
  ),
  "1.3b": _LARGE,
  "mlp": dataclasses.replace(_LARGE, heads=0),
}

HANDWRITTEN = "handwritten"
NAMES = (recipe.NONE, HANDWRITTEN, *recipe.RECIPES)
REMAT = {
  "full": None,
  "packed": checkpoint_policies.packed_saveable,
  "linears": checkpoint_policies.linears_saveable,
}

_MODEL = flags.DEFINE_enum("model", "tiny", list(MODELS), "Sizes.")
_SIZES = {
  field.name: flags.DEFINE_integer(
    field.name, None, f"{field.name}, in place of the model's."
  )
  for field in dataclasses.fields(Size)
}
_CUDNN = flags.DEFINE_bool("cudnn", None, "Attention by cuDNN; None: on a GPU.")
_VARIANTS = flags.DEFINE_list("variants", ["none", "nvfp4"], "What to compare.")
_ROUNDS = flags.DEFINE_integer("rounds", 10, "Turns of each variant.", 1)
_STEPS = flags.DEFINE_integer("steps", 1, "Steps of a turn.", 1)
_PROFILE = flags.DEFINE_bool("profile", False, "Time of each kernel.")
_BACKEND = flags.DEFINE_string("backend", None, "Backend of the recipes.")

_PROFILED = 2  # steps
_GIB = 2**30


def split(variant: str) -> tuple[str, str | None]:
  """Name and recomputation of a variant.

  >>> split("nvfp4+packed")
  ('nvfp4', 'packed')
  """
  name, plus, remat = variant.partition("+")
  if name not in NAMES or plus and remat not in REMAT:
    raise ValueError(
      f"bench_step: variant {variant!r} is not known; needed one of"
      f" {', '.join(NAMES)}, alone or with one of"
      f" {', '.join('+' + name for name in REMAT)}."
    )
  return name, remat or None


def chosen_size() -> Size:
  """The model's sizes, with those that flags replace."""
  given = {n: f.value for n, f in _SIZES.items() if f.value is not None}
  return dataclasses.replace(MODELS[_MODEL.value], **given)


def model(name: str, remat: str | None, size: Size) -> transformer.Transformer:
  """The network of a variant; all have the same parameters."""
  cudnn = _CUDNN.value
  if cudnn is None:
    cudnn = jax.devices()[0].platform == "gpu"
  kind: Any = ("cudnn" if cudnn else "xla") if size.heads else None
  return transformer.Transformer(
    vocab=size.vocab,
    layers=size.layers,
    d=size.d,
    heads=size.heads,
    kv_heads=size.heads,
    ffn=size.ffn,
    scan=True,
    remat=remat is not None,
    remat_policy=REMAT[remat] if remat else None,
    attention=kind,
    dot_general_cls=handwritten.DotGeneral if name == HANDWRITTEN else None,
  )


def forward(name: str, remat: str | None, size: Size) -> Callable:
  """f(variables, tokens, fp4_key) → logits of a variant."""
  net = model(name, remat, size)
  if name == recipe.NONE:
    return lambda variables, tokens, fp4_key: net.apply(variables, tokens)
  if name == HANDWRITTEN:
    return lambda variables, tokens, fp4_key: net.apply(
      variables, tokens, rngs={"rounding": fp4_key}
    )
  policy = fp4jax.Policy(
    rules=(fp4jax.Rule(path="**/lm_head/**", recipe=None),),
    default=recipe.RECIPES[name](),
  )
  return fp4jax.quantize(net.apply, policy, backend=_BACKEND.value)


def residuals(name: str, remat: str | None, size: Size, *shapes) -> dict:
  """Bytes by dtype that the gradient's backward pass keeps."""
  loss = bench.loss(forward(name, remat, size), True)
  return memory.residual_bytes(loss, *shapes)


def linears_residuals(
  name: str, remat: str | None, size: Size, *shapes
) -> dict | None:
  """Of these, what quantised layers keep; None for layers as written.

  It is what a policy that saves nothing else keeps more than one that saves
  nothing.
  """
  if name in (recipe.NONE, HANDWRITTEN) or not recipe.RECIPES[name]().quantises:
    return None
  if remat == "full":
    return {}
  named, nothing = (
    residuals(name, remat, size, *shapes) for remat in ("packed", "full")
  )
  added = {dtype: n - nothing.get(dtype, 0) for dtype, n in named.items()}
  return {dtype: n for dtype, n in added.items() if n}


class Variant:
  """A train step, compiled, and what was seen of it."""

  def __init__(self, variant: str, size: Size, *shapes):
    self.variant = variant
    name, remat = split(variant)
    step = bench.train_step(forward(name, remat, size), True)
    start = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*shapes)
    self.compiled = lowered.compile()
    self.compile_s = time.perf_counter() - start
    variables, _, tokens, key = shapes
    self.residuals = residuals(name, remat, size, variables, tokens, key)
    self.linears = linears_residuals(name, remat, size, variables, tokens, key)
    self.seconds: list[float] = []  # a step, of each turn
    self.losses: list[float] = []

  def turn(self, state, tokens, key, steps: int):
    """Takes some steps; returns the state after them."""
    start = time.perf_counter()
    for i in range(steps):
      loss, *state = self.compiled(*state, tokens, jax.random.fold_in(key, i))
    self.losses.append(float(loss))
    self.seconds.append((time.perf_counter() - start) / steps)
    return state

  def line(self, first: "Variant", size: Size) -> dict:
    """What is printed, compared with the first variant."""
    stats = self.compiled.memory_analysis()
    assert stats is not None
    arguments, temporaries = (
      stats.argument_size_in_bytes,
      stats.temp_size_in_bytes,
    )
    new = stats.output_size_in_bytes - stats.alias_size_in_bytes
    median = statistics.median(self.seconds[1:])
    pairs = zip(first.seconds[1:], self.seconds[1:], strict=True)
    ratios = sorted(a / b for a, b in pairs)
    linears = self.linears
    total = None if linears is None else sum(linears.values())
    return {
      "variant": self.variant,
      "step_ms": round(1e3 * median, 2),
      "tokens_per_s": round(size.batch * size.sequence / median),
      "ratio": round(statistics.median(ratios), 3),
      "ratios": [round(r, 3) for r in (ratios[0], ratios[-1])],
      "ratio_to": first.variant,
      "peak_gib": round((arguments + temporaries + new) / _GIB, 3),
      "arguments_gib": round(arguments / _GIB, 3),
      "temporaries_gib": round(temporaries / _GIB, 3),
      "residual_bytes": self.residuals,
      "linears_bytes": linears,
      "linears_bytes_an_element": (
        None if total is None else round(total / size.elements(), 4)
      ),
      "compile_s": round(self.compile_s, 2),
      "first_loss": self.losses[0],
      "last_loss": self.losses[-1],
    }


def measure(size: Size, names: Sequence[str]) -> list[dict]:
  """Compiles all variants, then steps them in turn."""
  tokens = jax.random.randint(
    jax.random.key(1), (size.batch, size.sequence), 0, size.vocab
  )
  net = model(recipe.NONE, None, size)

  @jax.jit
  def initial():
    variables = net.init(jax.random.key(0), tokens)
    return variables, bench.OPTIMIZER.init(variables)

  shapes = *jax.eval_shape(initial), tokens, jax.random.key(2)
  variants = [Variant(name, size, *shapes) for name in names]
  for variant in variants:  # warms it up, and gives losses to compare
    state: Any = None  # one at a time
    state = variant.turn(initial(), tokens, jax.random.key(3), 1)
  for i in range(_ROUNDS.value):
    key = jax.random.fold_in(jax.random.key(4), i)
    # To and fro, so that not always the same one goes before another.
    for variant in variants[:: -1 if i % 2 else 1]:
      state = variant.turn(state, tokens, key, _STEPS.value)
  lines = [variant.line(variants[0], size) for variant in variants]
  for variant, line in zip(variants, lines, strict=True):
    if _PROFILE.value:  # after the lines: its turns count for nothing

      def run(variant=variant):
        nonlocal state
        state = variant.turn(state, tokens, jax.random.key(5), _PROFILED)

      line["kernels"] = bench.profile(run, _PROFILED)
  return lines


def table(lines: Sequence[dict]) -> Table:
  """The lines to read."""
  out = Table()
  for column in (
    "variant",
    "tokens/s",
    f"of {lines[0]['variant']}",
    "ms a step",
    "peak GiB",
    "kept GiB",
    "by linears",
    "B an element",
    "compile s",
  ):
    out.add_column(column, no_wrap=True)
  for line in lines:
    low, high = line["ratios"]
    linears, each = line["linears_bytes"], line["linears_bytes_an_element"]
    out.add_row(
      line["variant"],
      f"{line['tokens_per_s']:,}",
      f"{line['ratio']:.2f} ({low:.2f} to {high:.2f})",
      f"{line['step_ms']:.1f}",
      f"{line['peak_gib']:.3g}",
      f"{sum(line['residual_bytes'].values()) / _GIB:.3g}",
      "" if linears is None else f"{sum(linears.values()) / _GIB:.3g}",
      "" if each is None else f"{each:.4f}",
      f"{line['compile_s']:.1f}",
    )
  return out


def main(argv: Sequence[str]) -> None:
  """Prints a JSON line a variant, a table and what it was measured on."""
  del argv
  device = jax.devices()[0]
  if _PROFILE.value and device.platform != "gpu":
    sys.exit(
      f"bench_step: --profile needs an NVIDIA GPU, the device is"
      f" {device.device_kind!r}; leave it out."
    )
  try:
    for name in _VARIANTS.value:
      split(name)
  except ValueError as error:
    sys.exit(str(error))
  size = chosen_size()
  lines = measure(size, _VARIANTS.value)
  measured_on = {
    "model": _MODEL.value,
    **dataclasses.asdict(size),
    "rounds": _ROUNDS.value,
    "steps": _STEPS.value,
    "backend": _BACKEND.value,
    "device": device.device_kind,
    "jax": jax.__version__,
  }
  for line in lines:
    print(json.dumps(line | measured_on), flush=True)
  Console(width=130).print(table(lines))
  print(
    f"{device.device_kind}, JAX {jax.__version__}; {_MODEL.value}: {size};"
    f" uniformly random tokens; medians of {_ROUNDS.value} rounds of"
    f" {_STEPS.value} steps, ratios within a round (lowest to highest). Peak:"
    " arguments, temporaries and new outputs, by the compiler. Kept: for the"
    " backward pass; an element is one of a linear layer's input or weight."
  )
  stats = device.memory_stats() or {}
  if "peak_bytes_in_use" in stats:
    peak = stats["peak_bytes_in_use"] / _GIB
    print(f"Peak of the device, all variants together: {peak:.2f} GiB.")


if __name__ == "__main__":
  app.run(main)
