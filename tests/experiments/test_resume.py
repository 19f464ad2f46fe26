"""Contract: a run that is killed and continued is the run that was not.

E05: losses after the resume are bit-identical, stochastic rounding on.
F09: a checkpoint holds plain numbers, no typed keys.
F11: it does not depend on the PRNG implementation of the process.
No record is written twice, none is missing.
"""

import json
import os
from pathlib import Path
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments import checkpoint
from experiments import data
from experiments import errors
from experiments import metrics
from experiments import train
from tests.experiments.helpers import losses
from tests.experiments.helpers import make_config


@pytest.fixture(scope="module")
def straight(compared) -> Path:
  """The NVFP4 run of the comparison: 10 steps, never interrupted."""
  return compared.workdir / "runs" / "nvfp4"


@pytest.fixture(scope="module")
def killed(cache, tmp_path_factory) -> Path:
  """The same run, killed at step 7; its last checkpoint is of step 4."""
  workdir = tmp_path_factory.mktemp("killed")
  with pytest.MonkeyPatch.context() as patch:
    written = metrics.Writer.write

    def write(self, records):
      written(self, records)
      if any(record["step"] >= 6 for record in records):
        raise KeyboardInterrupt

    patch.setattr(metrics.Writer, "write", write)
    with pytest.raises(errors.Stopped) as stopped:
      train.run(make_config(data__cache=cache), workdir)
  assert str(stopped.value) == (
    f"nvfp4: interrupted; the checkpoint of step 4 is saved in"
    f" {workdir}/checkpoints: the same command continues from it."
  )
  with (workdir / "metrics.jsonl").open("a") as file:
    file.write('{"step": 7, "lo')  # a line that the kill tore
  return workdir


def _copy(workdir: Path, tmp_path: Path) -> Path:
  return shutil.copytree(workdir, tmp_path / "run")


def test_killed_run_left_what_it_had(killed):
  assert [step for step, _ in losses(killed)] == [1, 2, 3, 4, 5, 6]
  assert sorted(p.name for p in (killed / "checkpoints").iterdir()) == ["4"]
  assert not (killed / "result.json").exists()


def test_e05_losses_after_resume_are_bit_identical(
  killed, straight, cache, tmp_path
):
  workdir = _copy(killed, tmp_path)
  result = train.run(make_config(data__cache=cache), workdir)
  expected = losses(straight)
  assert [step for step, _ in expected] == list(range(1, 11))
  assert losses(workdir) == expected
  reference = json.loads((straight / "result.json").read_text())
  assert result.validation_loss == reference["validation_loss"]
  assert result.sample == reference["sample"]


def test_e05_f11_new_process_with_another_prng(
  killed, straight, cache, tmp_path, compilation_cache
):
  """The command line in a new process whose default keys are of kind rbg."""
  workdir = _copy(killed, tmp_path)
  subprocess.run(
    [
      sys.executable,
      "-m",
      "experiments.train",
      "--config=configs/tiny.py",
      f"--config.data.cache={cache}",
      f"--workdir={workdir}",
    ],
    check=True,
    env=os.environ
    | {
      "JAX_DEFAULT_PRNG_IMPL": "rbg",
      "JAX_COMPILATION_CACHE_DIR": compilation_cache,
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    },
    cwd=Path(__file__).parents[2],
    stdout=subprocess.DEVNULL,
  )
  assert losses(workdir) == losses(straight)


def test_sigterm_saves_the_step_at_hand(
  straight, cache, tmp_path, monkeypatch, capsys
):
  """Terminated in step 7, which no schedule saves; nothing is done twice."""
  config = make_config(data__cache=cache)
  handler = signal.getsignal(signal.SIGTERM)
  written = metrics.Writer.write

  def write(self, records):
    written(self, records)
    if any(record["step"] == 6 for record in records):
      os.kill(os.getpid(), signal.SIGTERM)

  with monkeypatch.context() as patch:
    patch.setattr(metrics.Writer, "write", write)
    with pytest.raises(SystemExit) as exit:
      errors.explained(train.run)(config, tmp_path)
  assert exit.value.code == 143
  assert capsys.readouterr().err == (
    f"nvfp4: terminated; the checkpoint of step 7 is saved in"
    f" {tmp_path}/checkpoints: the same command continues from it.\n"
  )
  assert signal.getsignal(signal.SIGTERM) == handler
  assert [step for step, _ in losses(tmp_path)] == list(range(1, 8))
  train.run(config, tmp_path)
  assert "continues from step 7" in capsys.readouterr().out
  assert losses(tmp_path) == losses(straight)


# python -m experiments.train, with the SIGINT that background jobs of a shell
# ignore.
_TRAIN = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("experiments.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
  "sent, code, said",
  [
    pytest.param(
      signal.SIGINT,
      130,
      "none: interrupted; no checkpoint is saved yet",
      marks=pytest.mark.slow,  # nightly: SIGTERM takes the same way
    ),
    (signal.SIGTERM, 143, "none: terminated; the checkpoint of step"),
  ],
)
def test_signals_to_the_command_line(
  cache, tmp_path, compilation_cache, sent, code, said
):
  """One line and an exit code, from a process of its own."""
  process = subprocess.Popen(
    [
      sys.executable,
      "-c",
      _TRAIN,
      "--config=configs/tiny.py",
      "--config.recipe=none",
      "--config.train.steps=1000000",
      "--config.train.checkpoint_every=1000000",
      "--config.train.eval_every=1000000",
      f"--config.data.cache={cache}",
      f"--workdir={tmp_path}",
    ],
    env=os.environ
    | {
      "JAX_COMPILATION_CACHE_DIR": compilation_cache,
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    },
    cwd=Path(__file__).parents[2],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    deadline = time.monotonic() + 300
    while not losses(tmp_path):
      assert process.poll() is None, process.stderr.read()
      assert time.monotonic() < deadline
      time.sleep(0.05)
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=60)
  finally:
    process.kill()
  assert process.returncode == code
  assert stderr.startswith(said) and stderr.count("\n") == 1
  saved = [p.name for p in (tmp_path / "checkpoints").iterdir()]
  assert len(saved) == (sent == signal.SIGTERM)


def test_restored_state_is_the_saved_one(killed, cache):
  """D03 after a restore: float32, and equal to what 4 steps give."""
  experiment = train.make_experiment(make_config(data__cache=cache))
  corpus = data.prepare(experiment.config, Path(cache))
  batches = data.training_batches(experiment.config, corpus)
  with checkpoint.Checkpoints(killed / "checkpoints", 2) as saved:
    state, metadata = saved.restore(experiment.shapes, batches)
  assert metadata == {"seed": 0}
  assert int(state.step) == 4
  dtypes = {str(x.dtype) for x in jax.tree.leaves(state)}
  assert dtypes == {"float32", "int32", "bool"}
  again = data.training_batches(experiment.config, corpus)
  for _ in range(4):
    next(again)
  np.testing.assert_array_equal(next(batches), next(again))


def test_f09_checkpoint_holds_plain_numbers(killed):
  """Read back without knowing the state: arrays and no key types."""
  folder = (killed / "checkpoints" / "4" / "state").absolute()
  tree = ocp.StandardCheckpointer().restore(folder)
  leaves = jax.tree.leaves(tree)
  assert len(leaves) > 30
  assert not any(
    jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves
  )
  assert not any(x.dtype == np.uint32 for x in leaves)


def test_finished_run_is_not_repeated(straight, cache, monkeypatch, tmp_path):
  workdir = _copy(straight, tmp_path)
  before = {p: p.stat().st_mtime_ns for p in workdir.rglob("*")}
  monkeypatch.setattr(train, "_train", None)  # would raise
  result = train.run(make_config(data__cache=cache), workdir)
  assert result.steps == 10
  assert before == {p: p.stat().st_mtime_ns for p in workdir.rglob("*")}


@pytest.mark.slow  # nightly: other tests kill earlier
def test_kill_after_the_last_step_loses_nothing(straight, cache, tmp_path):
  """Everything is there but the result: it comes without training."""
  workdir = _copy(straight, tmp_path)
  (workdir / "result.json").unlink()
  before = (workdir / "metrics.jsonl").read_text()
  train.run(make_config(data__cache=cache), workdir)
  assert (workdir / "metrics.jsonl").read_text() == before
  result = json.loads((workdir / "result.json").read_text())
  expected = json.loads((straight / "result.json").read_text())
  for name in ("seconds", "compile_seconds"):
    del result[name], expected[name]
  assert result == expected


def test_event_files_hold_the_losses(straight):
  """TensorBoard's records, read by the format's definition."""
  from tensorboardX.proto import event_pb2

  found = {}
  for path in (straight / "tensorboard").iterdir():
    content, at = path.read_bytes(), 0
    while at < len(content):
      size = int.from_bytes(content[at : at + 8], "little")
      event = event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
      at += 12 + size + 4
      for value in event.summary.value:
        found[value.tag, event.step] = value.simple_value
  for step, loss in losses(straight):
    assert found["loss", step] == np.float32(loss)
  assert ("validation_loss", 10) in found
