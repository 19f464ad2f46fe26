"""The benchmarks run, and say on what.

Contract: each line names device and JAX; what needs a GPU says so without one.
"""

import json
import subprocess
import sys

import jax
import pytest

from experiments import bench

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


def test_bench_step_learns_and_names_its_device():
  none, fp8 = lines(
    run("bench_step", *SMALL, "--steps=3", "--vocab=64", "--recipes=none,fp8")
  )
  assert (none["recipe"], fp8["recipe"]) == ("none", "fp8")
  for line in (none, fp8):
    assert line["last_loss"] < line["first_loss"]
    assert line["device"] == jax.devices()[0].device_kind
    assert line["jax"] == jax.__version__ and line["tokens_per_s"] > 0
  assert fp8["first_loss"] != none["first_loss"]


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
