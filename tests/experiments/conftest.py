"""Runs that several test files look at; each is trained once."""

import contextlib
import io
from pathlib import Path
from typing import NamedTuple

import jax
from ml_collections import ConfigDict
import pytest

from experiments import compare
from experiments import report
from tests.experiments.helpers import make_config


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
  """Equal programs compile once in a test session."""
  folder = str(tmp_path_factory.mktemp("compilation"))
  values = {
    "jax_compilation_cache_dir": folder,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
  }
  before = {name: getattr(jax.config, name) for name in values}
  for name, value in values.items():
    jax.config.update(name, value)
  yield folder
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> str:
  """A folder of tokens that all runs share."""
  return str(tmp_path_factory.mktemp("tokens"))


class Compared(NamedTuple):
  """A finished comparison, its folder and what it printed."""

  comparison: report.Comparison
  workdir: Path
  config: ConfigDict
  output: str


@pytest.fixture(scope="session")
def compared(tmp_path_factory, cache) -> Compared:
  """The model as written, under the BF16 policy, and under NVFP4."""
  workdir = tmp_path_factory.mktemp("compared")
  config = make_config(data__cache=cache, compare__recipes="none,bf16,nvfp4")
  output = io.StringIO()
  with contextlib.redirect_stdout(output):
    comparison = compare.run(
      config,
      workdir,
      ["--config=configs/tiny.py", "--config.seed=0", "--workdir=A B"],
    )
  return Compared(comparison, workdir, config, output.getvalue())


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items):
  """One worker runs the tests of what is trained once a session."""
  for item in items:
    if "compared" in getattr(item, "fixturenames", ()):
      item.add_marker(pytest.mark.xdist_group("compared"))
