"""Every kernel compiles to machine code for Hopper and Blackwell, without one.

Contract: for sm_90a, sm_100a and sm_120a, ptxas assembles every kernel, no
register spills, and the program holds what quantises: E4M3 scales are rounded
and codes packed. (XLA:GPU deletes plain cast pairs; a kernel's cannot be.)
Products run on Hopper's tensor cores, those of packed operands on Blackwell's.
"""

import importlib.util
import json
import math
import os
from pathlib import Path
import re
import subprocess
import sys

import aot
import pytest

ROOT = Path(__file__).parent.parent
COLUMNS = {  # of an instruction, where they are not the 256 of most products
  "matmul_columns": 128,
  "matmul_tall": 128,
  "matmul_alone": 128,
  "matmul_vmap": 64,
}

# Of products of packed operands: programs that multiply together, terms of a
# step, columns of a tile.
BLOCK_SCALED = {
  "block_scaled": (2, 256, 256),
  "block_scaled_apart": (1, 256, 128),
  "block_scaled_vmap": (2, 128, 128),
}

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec("jax_cuda13_plugin") is None,
  reason="needs JAX's CUDA plugin: pip install -e '.[aot]'",
)


def run(script: str, *args: str, **environment: str) -> str:
  """What a script in this folder prints, in a process of its own."""
  path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
  done = subprocess.run(
    [sys.executable, "-u", ROOT / "tests" / script, *args],
    env={
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
      "PYTHONPATH": path,
      **environment,
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  assert done.returncode == 0, done.stdout[-3000:]
  return done.stdout


@pytest.fixture(scope="module", params=sorted(aot.GPUS))
def compiled(request):
  """The GPU, and each kernel's PTX and the words of ptxas."""
  dumped = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
  output = run("aot.py", request.param, **dumped)
  parts = re.split(r"^== (\w+)\n", output, flags=re.M)
  return request.param, dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_kernel_is_assembled_without_spills(compiled):
  gpu, outputs = compiled
  assert set(outputs) == set(aot.kernels(gpu))
  for name, output in outputs.items():
    assert f".target {gpu}" in output, name
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", output)
    assert spills and set(spills) == {"0"}, (name, spills)
    registers = map(int, re.findall(r"Used (\d+) registers", output))
    most = 232 if "exact" in name or "six" in name else 168
    assert max(registers) <= most, name  # two and three programs a processor


def test_quantisation_is_in_the_program(compiled):
  gpu, outputs = compiled
  for name, output in outputs.items():
    if name.startswith(("amax", "block_scaled", "decode", "dot", "matmul")):
      continue
    assert "cvt.rn.satfinite.e4m3x2.f32" in output, name
    assert "rcp.rn.f32" in output, name
    native = "native" in name
    random = native and "sr8" in name
    nearest = native and not random
    assert ("cvt.rn.satfinite.e2m1x2.f32" in output) == nearest, name
    assert ("cvt.rs.satfinite.e2m1x4.f32" in output) == random, name
    codes = name != "columns_rht_decoded" and not name.startswith("errors")
    packs = codes and not native
    assert ("shf.l.wrap.b32" in output) == packs, name
    # Philox multiplies twenty times a draw of eight elements.
    assert (output.count("mul.wide.u32") >= 30) == ("_sr" in name), name
    rounds = "rht" in name or name.endswith("_decoded")
    assert ("cvt.rn.bf16x2.f32" in output) == rounds, name
  assert ("rows_native" in outputs) == ("rne" in aot.NATIVE[gpu])
  assert ("rows_native_sr8" in outputs) == ("sr8" in aot.NATIVE[gpu])


def test_kernels_follow_the_shardings_of_eight_gpus():
  """Nothing travels that does not in BF16, but scalars and FP32 sums.

  A sharded weight is gathered for fprop and for dgrad, as two operands.
  """
  lines = [
    json.loads(x) for x in run("aot_mesh.py").splitlines() if x[0] == "{"
  ]
  assert len(lines) == 8
  for plain, quantised in zip(lines[::2], lines[1::2], strict=True):
    assert not plain["quantised"] and quantised["quantised"]
    # Seven operands of two layers, each with an amax or an amax of XLA's own.
    assert (plain["kernels"], quantised["kernels"]) == (0, 14)
    name = plain["sharding"]
    for kind, times in (
      ("all-gather", 2),
      ("reduce-scatter", 1),
      ("all-reduce", 1),
      ("all-to-all", 1),
      ("collective-permute", 1),
    ):
      before, after = (
        elements(m["collectives"], kind) for m in (plain, quantised)
      )
      assert after == times * before, (name, kind, plain, quantised)


def elements(collectives: list[str], kind: str) -> int:
  """What the collectives of a kind give, but scalars of up to 16 operands."""
  shapes = (c.split("[")[1][:-1] for c in collectives if c.startswith(kind))
  sizes = (math.prod(int(n) for n in s.split(",") if n) for s in shapes)
  return sum(size for size in sizes if size > 16)


def test_products_run_on_the_tensor_cores(compiled):
  gpu, outputs = compiled
  products = [name for name in outputs if name.startswith("matmul")]
  assert bool(products) == (gpu == "sm_90a")
  hopper = [*products, "dot_remat", "dot_scan"] if products else []
  for name, output in outputs.items():
    assert ("wgmma.mma_async" in output) == (name in hopper), name
  for name in products:
    output = outputs[name]
    dtype = "e4m3.e4m3" if "e4m3" in name else "bf16.bf16"
    terms = 32 if "e4m3" in name else 16
    shape = f"m64n{COLUMNS.get(name, 256)}k{terms}"
    assert f"wgmma.mma_async.sync.aligned.{shape}.f32.{dtype}" in output, name
    # One step may be multiplied while the next is waited for.
    assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+1;", output), name
    assert "wgmma.mma_async instructions are serialized" not in output, name
    assert "cp.async.bulk.tensor" in output, name
    shared = ".multicast::cluster" in output
    assert shared == (name != "matmul_alone"), name
    assert ("mul.f32" in output) == (name != "matmul_vmap"), name


def test_no_kernel_runs_twice(compiled):
  """Nor where its result is used, and kept by a scan for the backward pass.

  Forwards a rotated amax, two quantised operands and a product; backwards an
  amax, one quantised, two decoded, and two products.
  """
  gpu, outputs = compiled
  if gpu == "sm_90a":
    (launches,) = re.findall(r"^launches (\d+)$", outputs["dot_scan"], re.M)
    assert int(launches) == 4 + 6


def test_packed_operands_are_multiplied_on_blackwell(compiled):
  """Codes and scales as they are, of both operands, at each step."""
  gpu, outputs = compiled
  products = {n for n in outputs if n.startswith("block_scaled")}
  assert products == (set(BLOCK_SCALED) if gpu == "sm_100a" else set())
  dots = {*products, "dot_remat"} if products else set()
  for name, output in outputs.items():
    assert ("tcgen05" in output) == (name in dots), name
  for name in products:
    group, terms, columns = BLOCK_SCALED[name]
    group, output = f"cta_group::{group}", outputs[name]
    kind = "kind::mxf4nvf4.block_scale.scale_vec::4X"
    scales = re.findall(
      rf"tcgen05\.mma\.{group}\.{kind} \[%r\d+\], a_desc, b_desc, %r\d+,"
      r" \[(%r\d+)\], \[(%r\d+)\]",
      output,
    )
    copied = re.findall(
      rf"tcgen05\.cp\.{group}\.32x128b\.warpx4 \[(%r\d+)\]", output
    )
    # 64 terms by an instruction, whose scales are a tile of each 128 rows.
    tiles = terms // 64
    steps = len(scales) // tiles  # that the compiler has unrolled
    assert len(scales) == steps * tiles > 0, name
    assert len(copied) == steps * tiles * (1 + columns // 128), name
    lhs, rhs = copied[:tiles], copied[tiles : 2 * tiles]
    assert scales[:tiles] == list(zip(lhs, rhs, strict=True)), name
    assert output.count("tcgen05.mma") == len(scales), name
    pair = group == "cta_group::2"
    commit = "multicast::cluster.b64" if pair else "shared::cluster.b64"
    assert f"tcgen05.commit.{group}.mbarrier::arrive::one" in output, name
    assert commit in output, name
    loads = re.findall(r"cp\.async\.bulk\.tensor\S+complete_tx\S+", output)
    assert {x.endswith(group) for x in loads} == {pair}, name
    # Scales of rhs go to both programs of a pair.
    shared = [x for x in loads if "multicast" in x]
    assert pair == bool(shared) and len(shared) < len(loads) / 2, name
    scaled = output.count("mul.f32")
    assert bool(scaled) == (name != "block_scaled_vmap"), name
