"""Compiles every kernel to machine code for a GPU that is not there.

python tests/aot.py sm_90a

Run by test_aot.py, one process a GPU: Mosaic keeps the first it compiles for.
Prints each kernel's name, then what MOSAIC_GPU_DUMP_PTX and
MOSAIC_GPU_DUMP_PTXAS ask for.
"""

import dataclasses
import sys

import jax
from jax.experimental import topologies
import jax.numpy as jnp
import numpy as np

import fp4jax
from pallas_kernels import amax
from pallas_kernels import block_scaled_matmul
from pallas_kernels import decode
from pallas_kernels import errors
from pallas_kernels import matmul
from pallas_kernels import quantize

SIGNS = 0xD7E8
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_core}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: 1.9
  device_memory_size: 100000000000
  shared_memory_per_block_optin: {shared}
  cuda_compute_capability {{ major: {major} minor: 0 {feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
runtime_version {{ major: 13 minor: 0 }}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{name}"
"""
_LARGE = {"shared_core": 233472, "shared": 232448, "feature": ""}
GPUS = {
  "sm_90a": {
    "name": "NVIDIA H200",
    "major": 9,
    "cores": 132,
    "bandwidth": 4800000000000,
    "l2": 52428800,
    **_LARGE,
  },
  "sm_100a": {
    "name": "NVIDIA B200",
    "major": 10,
    "cores": 148,
    "bandwidth": 7672320000000,
    "l2": 132644864,
    **_LARGE,
  },
  "sm_120a": {
    "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "major": 12,
    "cores": 188,
    "bandwidth": 1597000000000,
    "l2": 134217728,
    "shared_core": 102400,
    "shared": 101376,
    "feature": "feature_extension: ACCELERATED_FEATURES",
  },
}

NATIVE: dict = {"sm_90a": (), "sm_100a": ("rne", "sr8"), "sm_120a": ("rne",)}


def struct(shape, dtype):
  return jax.ShapeDtypeStruct(shape, dtype)


def _quantise(rows, columns, native=(), decoded=None, packed=True):
  """A kernel of one direction or both, as a function of its arrays."""

  def run(x, scalars, stream):
    def operand(config):
      random = stream if config.rounding == "sr" else None
      return quantize.Operand(
        config, scalars, random, packed=packed, decoded=decoded
      )

    return quantize.quantize(
      x,
      rows and operand(rows),
      columns and operand(columns),
      native=native,
    )

  return run


def _rematerialised(x, w, key):
  """The gradient of a rematerialised quantised product."""

  def product(x, w):
    return fp4jax.dot(
      x,
      w,
      (((1,), (1,)), ((), ())),
      recipe=fp4jax.recipes.nvfp4(),
      key=key,
      backend="pallas",
    ).astype(jnp.float32)

  return jax.grad(lambda *a: jax.checkpoint(product)(*a).sum(), (0, 1))(x, w)


def _scanned(x, ws, key):
  """The gradient of scanned layers whose outputs are used, and kept."""

  def layer(x, w):
    y = fp4jax.dot(
      x,
      w,
      (((1,), (0,)), ((), ())),
      recipe=fp4jax.recipes.nvfp4(),
      key=key,
      backend="pallas",
    )
    return jax.checkpoint(lambda y: jnp.square(jax.nn.relu(y)))(y), None

  def loss(x, ws):
    return jax.lax.scan(layer, x, ws)[0].astype(jnp.float32).sum()

  return jax.grad(loss, (0, 1))(x, ws)


def _matmul(contract, dtype=jnp.bfloat16, result=jnp.bfloat16, **options):
  """A product of which programs compute several tiles."""
  m, n, k = 4096, 8192, 1024
  config = matmul.Config(**options) if options else None

  def run(lhs, rhs, scales):
    return matmul.matmul(
      lhs, rhs, scales, contract=contract, dtype=result, config=config
    )

  lhs, rhs = (
    struct((size, k) if axis == -1 else (k, size), dtype)
    for size, axis in zip((m, n), contract, strict=True)
  )
  return run, lhs, rhs, struct((2,), jnp.float32)


def _products() -> dict:
  """Products in the orders and shapes that the library may ask for."""
  return {
    "matmul": _matmul((-1, -1)),
    "matmul_tn": _matmul((-2, -1)),
    "matmul_nt": _matmul((-1, -2)),
    "matmul_tt_f32": _matmul((-2, -2), result=jnp.float32),
    "matmul_e4m3": _matmul((-1, -1), jnp.float8_e4m3fn),
    "matmul_columns": _matmul((-1, -1), split="n", cluster="n"),
    "matmul_tall": _matmul((-2, -1), tile_m=256, tile_n=128, cluster="n"),
    "matmul_alone": _matmul((-1, -1), tile_n=128, stages=6, cluster=None),
    "matmul_vmap": (
      jax.vmap(lambda lhs, rhs: matmul.matmul(lhs, rhs, dtype=jnp.float32)),
      struct((3, 256, 128), jnp.bfloat16),
      struct((3, 512, 128), jnp.bfloat16),
    ),
  }


def _block_scaled(m, n, k, batch=(), scaled=True, **options):
  """A product of packed operands, alone or under ``jax.vmap``."""
  arrays = [
    struct((*batch, *shape), jnp.uint8)
    for size in (m, n)
    for shape in ((size, k // 2), (size // 128, k // 64, 32, 16))
  ]

  def run(*arrays):
    return block_scaled_matmul.matmul(*arrays, **options)

  run = jax.vmap(run) if batch else run
  return run, *arrays, *([struct((2,), jnp.float32)] if scaled else [])


def _block_scaled_products() -> dict:
  """By a pair of programs, by programs apart, and of a batch."""
  apart = block_scaled_matmul.Config(pair=False, tile_n=128, width=1)
  return {
    "block_scaled": _block_scaled(4096, 8192, 1024),
    "block_scaled_apart": _block_scaled(
      384, 640, 1024, config=apart, dtype=jnp.float32
    ),
    "block_scaled_vmap": _block_scaled(256, 384, 384, (3,), scaled=False),
  }


def kernels(gpu: str) -> dict:
  """Kernels in the variants that recipes use: functions and arguments."""
  native = NATIVE[gpu]
  config = quantize.Config
  rne, sr = config(), config(rounding="sr")
  rotated = config(signs=SIGNS)
  rotated_sr = config(signs=SIGNS, rounding="sr")
  exact = config(scale="restricted", scale_max=64.0, four_over_six=True)
  exact_sr = config(scale="restricted", scale_max=64.0, rounding="sr")
  bf16, f32 = (struct((512, 1024), d) for d in (jnp.bfloat16, jnp.float32))
  six = config(scale_max=256.0, four_over_six=True)
  small = struct((16, 256), jnp.bfloat16)
  two_deep = struct((32, 128), jnp.bfloat16)
  broken = struct((528, 1040), jnp.bfloat16)  # tiles overlap
  rest = struct((4,), jnp.float32), struct((6,), jnp.uint32)
  codes = struct((512, 512), jnp.uint8), struct((512, 64), jnp.uint8)
  tops = struct((512, 64), jnp.float32)  # amax of the block of sixteen elements

  def square(config):
    return lambda x, scalars, tops: quantize.quantize(
      x, quantize.Operand(config, scalars, block_amax=tops), None
    )

  found = {
    "rows": (_quantise(rne, None), bf16, *rest),
    "rows_f32": (_quantise(rne, None), f32, *rest),
    "rows_sr": (_quantise(sr, None), bf16, *rest),
    "rows_sr8": (
      _quantise(config(rounding="sr", sr_bits=8), None),
      bf16,
      *rest,
    ),
    "rows_decoded": (_quantise(rne, None, (), jnp.bfloat16), bf16, *rest),
    "rows_exact": (_quantise(exact, None), bf16, *rest),
    "rows_exact_sr": (_quantise(exact_sr, None), bf16, *rest),
    "columns": (_quantise(None, rne), bf16, *rest),
    "columns_rht_one_block": (_quantise(None, rotated), small, *rest),
    "columns_rht": (_quantise(None, rotated), f32, *rest),
    "columns_rht_sr": (_quantise(None, rotated_sr), bf16, *rest),
    "both_rht": (_quantise(rne, rotated), bf16, *rest),
    "both_rht_sr": (_quantise(sr, rotated_sr), bf16, *rest),
    "both_exact_rht": (
      _quantise(exact, dataclasses.replace(exact, signs=SIGNS)),
      bf16,
      *rest,
    ),
    "both_six_rht": (
      _quantise(six, dataclasses.replace(six, signs=SIGNS)),
      bf16,
      *rest,
    ),
    "both_exact_rht_sr": (
      _quantise(exact_sr, dataclasses.replace(exact_sr, signs=SIGNS)),
      bf16,
      *rest,
    ),
    "columns_sr8": (
      _quantise(None, config(rounding="sr", sr_bits=8)),
      bf16,
      *rest,
    ),
    "columns_rht_decoded": (
      _quantise(None, rotated, (), jnp.bfloat16, packed=False),
      bf16,
      *rest,
    ),
    "columns_rht_two_deep": (_quantise(None, rotated), two_deep, *rest),
    "both_overlapping_rht_sr": (_quantise(sr, rotated_sr), broken, *rest),
    "rows_square": (square(rne), bf16, rest[0], tops),
    "rows_square_exact": (square(exact), bf16, rest[0], tops),
    "errors_six": (
      lambda *args: errors.errors(*args, six),
      bf16,
      rest[0],
      tops,
    ),
    "errors_exact": (
      lambda *args: errors.errors(*args, exact),
      f32,
      rest[0],
      tops,
    ),
    "errors_columns": (
      lambda *args: errors.errors(*args, exact, axis=-2),
      bf16,
      rest[0],
      struct((32, 1024), jnp.float32),
    ),
    "rows_vmap": (
      jax.vmap(_quantise(rne, None), in_axes=(0, None, None)),
      struct((3, 64, 128), jnp.bfloat16),
      *rest,
    ),
    "dot_remat": (_rematerialised, bf16, bf16, struct((4,), jnp.uint32)),
    "amax": (amax.amax, bf16),
    "amax_rht": (lambda x: amax.amax(x, signs=SIGNS), bf16),
    "rows_decoded_e4m3": (
      _quantise(exact, None, (), jnp.float8_e4m3fn),
      bf16,
      *rest,
    ),
    "decode": (decode.decode, *codes),
    "decode_e4m3": (
      lambda *a: decode.decode(*a, dtype=jnp.float8_e4m3fn),
      *codes,
    ),
  }
  if gpu == "sm_90a":
    found |= _products()
    square = struct((3, 512, 512), jnp.bfloat16)
    found["dot_scan"] = (
      _scanned,
      struct((512, 512), jnp.bfloat16),
      square,
      struct((4,), jnp.uint32),
    )
  if gpu == "sm_100a":
    found |= _block_scaled_products()
  if "rne" in native:
    found["rows_native"] = (_quantise(rne, None, native), bf16, *rest)
    found["columns_rht_native"] = (
      _quantise(None, rotated, native),
      bf16,
      *rest,
    )
  if "sr8" in native:
    sr8 = config(rounding="sr", sr_bits=8)
    found["rows_native_sr8"] = (_quantise(sr8, None, native), bf16, *rest)
  return found


def main(gpu: str) -> None:
  """Compiles the kernels for one GPU."""
  topology = topologies.get_topology_desc(
    "aot", "cuda", target_config=_TARGET.format(**GPUS[gpu]), topology="1x1x1"
  )
  mesh = jax.sharding.Mesh(np.array(topology.devices).reshape(1), ("x",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  # Mosaic compiles for the default device.
  with jax.set_mesh(mesh), jax.default_device(topology.devices[0]):
    for name, (function, *avals) in kernels(gpu).items():
      args = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in avals
      ]
      print(f"== {name}", flush=True)
      program = jax.jit(function).lower(*args).compile().as_text()
      print(f"launches {program.count('custom_call_target="mosaic_gpu')}")


if __name__ == "__main__":
  main(sys.argv[1])
