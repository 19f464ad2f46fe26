"""The kernels against the reference under XLA and a device copy.

python -m experiments.bench_kernels --rows=8192 --columns=8192 \
  --json=/tmp/kernels.jsonl

Times kernels by CUPTI on the GPU it runs on, means over repetitions, operands
of random numbers. The byte floor of a kernel is what it must read and write, at
the bandwidth of --bandwidth. XLA's own amax and negation are timed in the same
run, and a device copy of 2 GiB.
"""

from collections.abc import Callable
from collections.abc import Sequence
import json
import sys
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from experiments import bench
import fp4jax
from fp4jax import Operand
from fp4jax import Rht
from fp4jax import block_scaled
from fp4jax import kernels
from fp4jax import rounding
from fp4jax import scaling
from pallas_kernels import amax
from pallas_kernels import decode
from pallas_kernels import quantize

_ROWS = flags.DEFINE_integer("rows", 8192, "Rows of the operand.")
_COLUMNS = flags.DEFINE_integer("columns", 8192, "Columns of the operand.")
_REPEATS = flags.DEFINE_integer("repeats", 20, "Runs of each kernel.")
_BANDWIDTH = flags.DEFINE_float("bandwidth", 4.3, "TB/s of a device copy.")
_JSON = flags.DEFINE_string("json", None, "File for a JSON line a kernel.")
_REFERENCE = flags.DEFINE_bool("reference", True, "Time the reference as well.")

BF16, CODES = 2.0, 0.5 + 1 / 16  # bytes an element


def cases(x) -> dict[str, tuple[Callable, tuple, float]]:
  """Functions, their arguments, and the bytes an element that they move."""
  stream = rounding.site_stream(jax.random.key(1))
  scalars = kernel_scalars(x)
  words = jnp.concatenate([stream, jnp.zeros(3, jnp.uint32)])
  config = quantize.Config
  rne, sr = config(), config(rounding="sr")
  rotated = config(signs=0xD7E8)
  rotated_sr = config(signs=0xD7E8, rounding="sr")
  exact = config(scale="restricted", scale_max=64.0, four_over_six=True)

  def both(rows, columns, decoded=None):
    def run(x, scalars, words):
      def operand(c):
        random = words if c.rounding == "sr" else None
        return c and quantize.Operand(
          c, scalars, random, packed=decoded is None, decoded=decoded
        )

      return quantize.quantize(
        x, rows and operand(rows), columns and operand(columns)
      )

    return run, (x, scalars, words)

  packed = block_scaled.quantize_array(x, Operand())
  codes = packed.codes, packed.scales
  bf16 = jnp.bfloat16
  found = {
    "negation, XLA": (jnp.negative, (x,), 2 * BF16),
    "amax, XLA": (lambda x: jnp.max(jnp.abs(x)), (x,), BF16),
    "amax": (amax.amax, (x,), BF16),
    "amax, RHT": (lambda x: amax.amax(x, signs=0xD7E8), (x,), BF16),
    "rows": (*both(rne, None), BF16 + CODES),
    "rows, SR": (*both(sr, None), BF16 + CODES),
    "rows, exact 4/6": (*both(exact, None), BF16 + CODES),
    "rows, decoded": (*both(rne, None, bf16), 2 * BF16),
    "columns": (*both(None, rne), BF16 + CODES),
    "columns, RHT": (*both(None, rotated), BF16 + CODES),
    "columns, RHT, SR": (*both(None, rotated_sr), BF16 + CODES),
    "both": (*both(rne, rne), BF16 + 2 * CODES),
    "both, RHT": (*both(rne, rotated), BF16 + 2 * CODES),
    "both, RHT, SR": (*both(sr, rotated_sr), BF16 + 2 * CODES),
    "decode": (decode.decode, codes, CODES + BF16),
    "decode to E4M3": (
      lambda *a: decode.decode(*a, dtype=jnp.float8_e4m3fn),
      codes,
      CODES + 1,
    ),
    "amax + both, RHT, SR": (
      operand_by_kernels,
      (x, stream),
      2 * BF16 + 2 * CODES,
    ),
  }
  if _REFERENCE.value:
    for name, operand in (
      ("rows, reference", Operand()),
      ("rows, SR, reference", Operand(rounding="sr")),
    ):
      found[name] = (by_reference(operand), (x, stream), 2 * BF16 + CODES)
  return found


def kernel_scalars(x):
  """What a kernel is told of an operand's amax."""
  scale = scaling.two_level_scale(
    jnp.max(jnp.abs(x)).astype(jnp.float32), Operand()
  )
  smallest = jnp.float32(2.0**-100)
  return jnp.stack([scale.per_block, scale.decode, scale.encode, smallest])


def operand_by_kernels(x, stream):
  """A gradient, as the backward pass of a linear layer quantises it."""
  rows = kernels.Request(Operand(rounding="sr"), packed=True)
  columns = kernels.Request(Operand(rounding="sr", rht=Rht()), packed=True)
  results = kernels.quantize(x, rows, columns, (stream, stream))
  return [r and r.codes for r in results]


def by_reference(operand):
  """The reference's quantiser, amax included."""

  def run(x, stream):
    quantised = fp4jax.quantize_array(x, operand, stream)
    return quantised.codes, quantised.scales

  return run


def microseconds(function, args) -> float:
  """Mean time on the GPU of all that a call launches."""
  function = jax.jit(function)
  jax.block_until_ready(function(*args))

  def run():
    for _ in range(_REPEATS.value):
      jax.block_until_ready(function(*args))

  taken = bench.profile(run, _REPEATS.value)
  if not taken:
    raise RuntimeError("bench_kernels: CUPTI saw no kernel; is it installed?")
  return 1e3 * sum(kernel["ms"] for kernel in taken.values())


def main(argv: Sequence[str]) -> None:
  """Prints a table, and writes a JSON line a kernel."""
  del argv
  device = jax.devices()[0]
  if device.platform != "gpu":
    sys.exit(
      f"bench_kernels: the device is {device.device_kind!r}, needed an NVIDIA"
      " GPU; run it on one."
    )
  shape = _ROWS.value, _COLUMNS.value
  x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
  run: dict[str, Any] = {
    "shape": shape,
    "distribution": "N(0,1), bfloat16",
    "repeats": _REPEATS.value,
    "device": device.device_kind,
    "jax": jax.__version__,
    "floor_tb_s": _BANDWIDTH.value,
  }
  title = ", ".join(f"{k} {v}" for k, v in run.items())
  table = Table("kernel", "µs", "TB/s", "% of the byte floor", title=title)
  lines: list[dict] = []
  large = jax.random.normal(jax.random.key(0), (2**30,), jnp.bfloat16)
  copy = {"device copy, 2 GiB": (jnp.copy, (large,), 2 * BF16)}
  for name, (function, args, width) in {**copy, **cases(x)}.items():
    us = microseconds(function, args)
    elements = large.size if name in copy else x.size
    rate = width * elements / us / 1e6
    share = 100 * rate / _BANDWIDTH.value
    table.add_row(name, f"{us:.1f}", f"{rate:.2f}", f"{share:.1f}")
    lines.append(
      {"kernel": name, "us": us, "tb_s": rate, "share": share, **run}
    )
  Console(width=100).print(table)
  if _JSON.value:
    with open(_JSON.value, "w") as file:
      file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
  app.run(main)
