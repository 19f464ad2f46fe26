"""The benchmarks run, and say on what.

Contract: each line names device and JAX; what needs a GPU says so without one.
"""

import json
import subprocess
import sys

import jax
import pytest

from experiments import bench
from experiments import bench_step

SMALL = ["--layers=2", "--d=64", "--ffn=64", "--heads=1", "--sequence=32"]


def run(module, *flags):
  return subprocess.run(
    [sys.executable, "-m", f"experiments.{module}", *flags],
    capture_output=True,
    text=True,
  )


def lines(done):
  assert done.returncode == 0, done.stderr[-2000:]
  return [json.loads(x) for x in done.stdout.splitlines() if x[:1] == "{"]


def check_step(lines, variants):
  """What holds of every line of ``bench_step``."""
  assert [line["variant"] for line in lines] == variants
  for line in lines:
    assert line["last_loss"] < line["first_loss"]
    assert line["device"] == jax.devices()[0].device_kind
    assert line["jax"] == jax.__version__ and line["tokens_per_s"] > 0
    assert line["ratios"][0] <= line["ratio"] <= line["ratios"][1]
    assert line["peak_gib"] >= line["temporaries_gib"]
    assert sum(line["residual_bytes"].values()) > 0
  return {line["variant"]: line for line in lines}


def check_losses(by_name, quantised):
  """Four bits are not sixteen, nor far away, and less from one another."""
  plain = by_name["none"]["first_loss"]
  losses = [by_name[name]["first_loss"] for name in quantised]
  assert all(1e-5 < abs(loss - plain) < 0.02 for loss in losses), losses
  assert max(losses) - min(losses) < 0.02


def test_bench_step_of_feed_forwards():
  """The library keeps 4.5 bits an input and 4 + 1/32 a weight; BF16 16."""
  variants = ["none", "nvfp4"]
  flags = *SMALL, "--batch=4", "--vocab=64", "--heads=0", "--rounds=3"
  done = run("bench_step", *flags, "--variants=" + ",".join(variants))
  by_name = check_step(lines(done), variants)
  check_losses(by_name, ["nvfp4"])
  layers, d, ffn, tokens = 2, 64, 64, 4 * 32
  inputs, weights = tokens * (d + ffn), 2 * d * ffn
  scales = 4 * 4  # of the operands
  assert sum(by_name["nvfp4"]["linears_bytes"].values()) == layers * (
    inputs * 9 / 16 + weights * (1 / 2 + 1 / 256) + scales
  )
  kept = [
    by_name[name]["residual_bytes"]["bfloat16"] for name in ("none", "nvfp4")
  ]
  assert kept[0] - kept[1] >= layers * inputs * 2
  assert by_name["none"]["linears_bytes"] is None
  said = done.stdout[done.stdout.rindex("JAX ") :]
  for fact in (jax.__version__, "layers=2", "random tokens", "3 rounds"):
    assert fact in said


@pytest.mark.slow  # nightly: nine compilations
def test_bench_step_of_everything():
  names = "none", "fp8", "handwritten", "nvfp4", "nvfp4_fp8_exact"
  remat = "none+full", "none+linears", "nvfp4+full", "nvfp4+packed"
  variants = [*names, *remat, "nvfp4+linears"]
  flags = *SMALL, "--vocab=64", "--rounds=2", "--steps=2", "--nocudnn"
  done = run("bench_step", *flags, "--variants=" + ",".join(variants))
  by_name = check_step(lines(done), variants)
  check_losses(by_name, ["fp8", "handwritten", "nvfp4", "nvfp4_fp8_exact"])
  kept = {k: sum(v["residual_bytes"].values()) for k, v in by_name.items()}
  order = "nvfp4+full", "nvfp4+packed", "nvfp4+linears", "nvfp4", "none"
  assert [kept[name] for name in order] == sorted(kept[name] for name in order)
  assert by_name["nvfp4+full"]["linears_bytes"] == {}
  for line in by_name.values():  # what is recomputed is what was
    name = line["variant"].partition("+")[0]
    expected = by_name[name]["first_loss"]
    assert line["first_loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("variant", ["nvfp5", "nvfp4+some", "nvfp4+"])
def test_bench_step_refuses_what_it_does_not_know(variant):
  with pytest.raises(ValueError, match="none, handwritten, bf16.*linears"):
    bench_step.split(variant)


def test_time_by_kernel():
  """Copies of a kernel are one; the longest first, in ms a step."""
  events = [("gemm_1", 3e6), ("copy", 1e6), ("gemm_22", 5e6), ("copy.3", 2e6)]
  assert bench.time_by_kernel(events, steps=2) == {
    "gemm": {"ms": 4.0, "launches": 1.0},
    "copy": {"ms": 1.5, "launches": 1.0},
  }


@pytest.mark.skipif(
  jax.devices()[0].platform == "gpu", reason="without a GPU it is refused"
)
def test_bench_step_profiles_a_gpu_alone():
  done = run("bench_step", *SMALL, "--profile")
  assert done.returncode == 1 and not done.stdout
  assert "--profile needs an NVIDIA GPU" in done.stderr


@pytest.mark.slow  # nightly: six compilations
def test_bench_compile_gives_ratios():
  flags = "--layers=2", "--width=64", "--repeats=1", "--recipes=fp8"
  none, fp8 = lines(run("bench_compile", *flags))
  assert none["cpu_ratio"] == 1.0
  taken = fp8["cpu_s"] / none["cpu_s"]
  assert fp8["cpu_ratio"] == pytest.approx(taken, rel=0.01)
  assert none["device"] == jax.devices()[0].device_kind


@pytest.mark.skipif(
  jax.devices()[0].platform == "gpu", reason="a GPU is what it needs"
)
def test_bench_kernels_needs_a_gpu():
  done = run("bench_kernels")
  assert done.returncode == 1 and not done.stdout
  assert "needed an NVIDIA GPU" in done.stderr
