"""Contract: a mistake is one sentence on stderr and exit code 2.

It says what, got, needed and how to fix it; nothing is half-written, and what
was there stays. Everything but the command line itself is tested in process.
"""

import errno
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys

import jax
from ml_collections import ConfigDict
import pytest

from configs import base
from experiments import checkpoint
from experiments import compare
from experiments import config as config_lib
from experiments import data
from experiments import errors
from experiments import files
from experiments import train
import fp4jax
from tests.experiments.helpers import losses
from tests.experiments.helpers import make_config

ROOT = Path(__file__).parents[2]


def _refused(capsys, config, workdir, command=train.command) -> str:
  """The sentence, after checking how it came."""
  with pytest.raises(SystemExit) as exit:
    errors.explained(command)(config, workdir)
  assert exit.value.code == 2
  sentence = capsys.readouterr().err
  assert sentence.startswith("error: ") and sentence.count("\n") == 1
  assert "Traceback" not in sentence
  return sentence


@pytest.mark.parametrize(
  "fields, words",
  [
    ({"recipe": "fp3"}, "config.recipe='fp3'; needed one of none, bf16"),
    ({"policy__name": "x"}, "config.policy.name='x'; needed one of nemo"),
    ({"policy__first": -1}, "first=-1"),
    ({"policy__first": 3}, "the policy quantises nothing"),
    ({"policy__name": "last_fraction", "policy__fraction": 1.5}, "1.5"),
    ({"data__vocab": 256}, "config.data.vocab=256 is too small"),
    ({"data__path": "/does/not/exist"}, "/does/not/exist does not exist"),
    ({"data__sequence": 100_000}, "shorter than one sequence of 100001"),
    ({"data__validation_fraction": 0.0}, "leaves no text to validate"),
    ({"model__heads": 3}, "config.model.d=32 is no multiple"),
    ({"model__heads": 32}, "an odd size"),
    ({"model__kv_heads": 0}, "config.model.kv_heads=0; needed more than 0"),
    ({"model__activation": "gelu"}, "needed one of relu2, swiglu"),
    ({"train__steps": 0}, "config.train.steps=0; needed more than 0"),
    ({"train__accumulate": 3}, "config.train.batch=4 is no multiple"),
    ({"optimizer__warmup_fraction": 1.0}, "warmup_fraction=1.0; needed"),
    ({"optimizer__schedule": "step"}, "needed one of cosine, wsd"),
    ({"seed": -1}, "config.seed=-1"),
    ({"data__vocab": 10**11}, "vocab=100000000000; needed a number below"),
    ({"train__batch": 2**40}, "batch=1099511627776; needed a number below"),
    ({"optimizer__peak_lr": float("inf")}, "peak_lr=inf; needed a finite"),
    ({"optimizer__weight_decay": float("nan")}, "weight_decay=nan; needed"),
    ({"optimizer__weight_decay": -0.1}, "weight_decay=-0.1; needed at least 0"),
    ({"optimizer__b2": 2.0}, "b2=2.0; needed at least 0 and below 1"),
    ({"optimizer__eps": -1.0}, "eps=-1.0; needed more than 0"),
    ({"model__rope_base": 0.0}, "rope_base=0.0; needed more than 0"),
    (
      {"optimizer__schedule": "wsd", "optimizer__warmup_fraction": 0.9},
      "warmup_fraction=0.9 and config.optimizer.decay_fraction=0.2 are more",
    ),
  ],
)
def test_bad_configuration_writes_nothing(capsys, tmp_path, fields, words):
  sentence = _refused(capsys, make_config(**fields), tmp_path / "new")
  assert words in sentence
  assert not (tmp_path / "new").exists()


@pytest.mark.skipif(
  jax.devices()[0].platform == "gpu", reason="a GPU has cuDNN attention"
)
def test_cudnn_needs_a_gpu(capsys, tmp_path):
  config = make_config(model__attention="cudnn")
  sentence = _refused(capsys, config, tmp_path / "new")
  assert "'cudnn' needs an NVIDIA GPU, and the device is 'cpu'" in sentence


@pytest.mark.parametrize("command", [train.command, compare.command])
def test_folders_below_a_file(capsys, tmp_path, command):
  file = tmp_path / "file"
  file.write_text("mine")
  sentence = _refused(capsys, make_config(), file / "new", command)
  assert f"--workdir={file / 'new'}: {file} is a file" in sentence
  config = make_config(data__cache=str(file))
  sentence = _refused(capsys, config, tmp_path / "new", command)
  assert f"config.data.cache={file}: {file} is a file" in sentence
  assert not (tmp_path / "new").exists() and file.read_text() == "mine"


@pytest.mark.parametrize("command", [train.command, compare.command])
def test_what_a_run_writes_is_no_text_of_the_next(capsys, tmp_path, command):
  """A workdir or a cache inside the folder of the text."""
  text = tmp_path / "text"
  text.mkdir()
  (text / "a.txt").write_text("one sentence\n" * 1000)
  config = make_config(data__path=str(text))
  sentence = _refused(capsys, config, text / "runs" / "new", command)
  assert "lies inside config.data.path" in sentence and ".runs" in sentence
  config = make_config(data__path=str(text), data__cache=str(text / "cache"))
  sentence = _refused(capsys, config, tmp_path / "new", command)
  assert "config.data.cache=" in sentence and "lies inside" in sentence
  assert [p.name for p in text.iterdir()] == ["a.txt"]
  assert not (tmp_path / "new").exists()
  data.check_apart(str(text), text / ".runs", "--workdir")  # is not read
  data.check_apart(str(text / "a.txt"), text / "runs", "--workdir")


def test_binary_file_is_refused_by_name(capsys, tmp_path):
  (tmp_path / "model.bin").write_bytes(b"\0\1\2")
  config = make_config(data__path=str(tmp_path / "model.bin"))
  sentence = _refused(capsys, config, tmp_path / "new")
  assert "model.bin is binary" in sentence
  assert not (tmp_path / "new").exists()


def test_unknown_and_missing_fields_of_a_file():
  extra = ConfigDict(base.get_config().to_dict())
  extra.train.stepz = 3
  with pytest.raises(errors.UserError, match="config.train.stepz is no field"):
    config_lib.check(extra)
  missing = ConfigDict(base.get_config().to_dict())
  del missing.train["steps"]
  with pytest.raises(errors.UserError, match="config.train.steps is missing"):
    config_lib.check(missing)


@pytest.mark.parametrize("command", [train.command, compare.command])
def test_recipe_that_the_backend_cannot_do(
  capsys, tmp_path, monkeypatch, command
):
  def refuse(recipe, *_):
    if recipe.quantises:
      raise fp4jax.UnsupportedError(f"no {recipe.name} here; use bf16.")

  monkeypatch.setattr(fp4jax.backends, "check", refuse)
  sentence = _refused(capsys, make_config(), tmp_path / "new", command)
  assert sentence == "error: no nvfp4 here; use bf16.\n"
  assert not (tmp_path / "new").exists()


def _snapshot(folder: Path) -> dict[Path, bytes]:
  return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_workdir_of_another_experiment_is_left_alone(capsys, compared, cache):
  workdir = compared.workdir / "runs" / "nvfp4"
  before = _snapshot(workdir)
  config = make_config(data__cache=cache, seed=1, train__steps=20)
  sentence = _refused(capsys, config, workdir)
  assert "holds another experiment: its config.seed is 0, not 1" in sentence
  assert "(and 1 more differ)" in sentence
  assert _snapshot(workdir) == before


def test_comparison_of_another_experiment_is_left_alone(
  capsys, compared, cache
):
  before = _snapshot(compared.workdir)
  config = make_config(data__cache=cache, model__d=64)
  sentence = _refused(capsys, config, compared.workdir, compare.command)
  assert "config.model.d is 32, not 64" in sentence
  assert _snapshot(compared.workdir) == before


def test_comparison_with_other_recipes_is_of_the_same_experiment(
  capsys, compared, cache
):
  """No run in common, but the report would be replaced."""
  before = _snapshot(compared.workdir)
  config = make_config(
    data__cache=cache, train__steps=20, compare__recipes="fp8,mxfp8"
  )
  sentence = _refused(capsys, config, compared.workdir, compare.command)
  assert "config.train.steps is 10, not 20" in sentence
  assert _snapshot(compared.workdir) == before


def test_runs_and_comparisons_do_not_share_a_workdir(
  capsys, compared, cache, tmp_path
):
  before = _snapshot(compared.workdir)
  sentence = _refused(capsys, compared.config, compared.workdir)
  assert "holds a comparison; give another" in sentence
  single = compared.workdir / "runs" / "bf16"
  sentence = _refused(capsys, compared.config, single, compare.command)
  assert "holds a single run; give another" in sentence
  assert _snapshot(compared.workdir) == before


@pytest.mark.parametrize(
  "command",
  [pytest.param(train.command, marks=pytest.mark.slow), compare.command],
)
def test_another_text_is_another_experiment(capsys, tmp_path, command):
  """Files added after an interruption: tokens would change their meaning."""
  text, workdir = tmp_path / "text", tmp_path / "run"
  text.mkdir()
  (text / "a.txt").write_text("one sentence\n" * 1000)
  config = make_config(
    recipe="none", data__path=str(text), compare__recipes="none"
  )
  run = train.run if command is train.command else compare.run
  run(config, workdir)
  name = "runs/none/result.json" if run is compare.run else "result.json"
  (workdir / name).unlink()  # As if it had been killed.
  (text / "b.txt").write_text("another one\n" * 1000)
  before = _snapshot(workdir)
  capsys.readouterr()
  sentence = _refused(capsys, config, workdir, command)
  assert "holds a run on another text" in sentence
  assert "1 documents, 13,000 characters" in sentence
  assert "2 documents, 25,000 characters" in sentence
  assert _snapshot(workdir) == before
  (text / "b.txt").unlink()
  run(config, workdir)
  assert (workdir / name).exists()


def test_workdir_that_is_a_file(capsys, tmp_path):
  path = tmp_path / "file"
  path.write_text("mine")
  assert "is a file" in _refused(capsys, make_config(), path)
  assert path.read_text() == "mine"


def test_disk_too_small_is_said_before_anything_is_written(
  capsys, tmp_path, monkeypatch
):
  usage = shutil.disk_usage(tmp_path)
  monkeypatch.setattr(
    files.shutil, "disk_usage", lambda _: usage._replace(free=1000)
  )
  sentence = _refused(capsys, make_config(), tmp_path / "new")
  assert "0.0 MB are free, but checkpoints need" in sentence
  assert not (tmp_path / "new").exists()


def test_disk_that_fills_up_loses_no_checkpoint(
  capsys, tmp_path, cache, monkeypatch, compared
):
  """Full at step 8: step 4 is there, and the same command goes on from it."""
  config = make_config(recipe="none", data__cache=cache)
  real = checkpoint.ocp.CheckpointManager.save

  def save(self, step, *args, **kwargs):
    if step == 8:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return real(self, step, *args, **kwargs)

  with monkeypatch.context() as patch:
    patch.setattr(checkpoint.ocp.CheckpointManager, "save", save)
    sentence = _refused(capsys, config, tmp_path)
  assert "no space left for the checkpoint of step 8" in sentence
  assert "continues from step 4" in sentence
  train.run(config, tmp_path)
  assert losses(tmp_path) == losses(compared.workdir / "runs" / "none")


def test_file_that_does_not_fit_leaves_the_old_one(tmp_path, monkeypatch):
  path = tmp_path / "result.json"
  files.write(path, "old")

  def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(files.os, "replace", full)
  with pytest.raises(OSError, match="No space"):
    files.write(path, "new")
  assert path.read_text() == "old"
  assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_other_exceptions_keep_their_traceback():
  """A bug must not look like a user's mistake."""

  def broken():
    raise ValueError("a bug")

  with pytest.raises(ValueError, match="a bug"):
    errors.explained(broken)()
  with pytest.raises(FileNotFoundError):
    errors.explained(open)("/does/not/exist")


def test_run_that_stays_non_finite_stops(capsys, tmp_path, cache):
  """A learning rate of 1e30 makes every later loss NaN."""
  config = make_config(
    recipe="none",
    data__cache=cache,
    optimizer__peak_lr=1e30,
    train__max_skips=3,
  )
  sentence = _refused(capsys, config, tmp_path)
  assert "was not finite in" in sentence and "peak_lr" in sentence
  assert len(losses(tmp_path)) < 10
  assert not (tmp_path / "result.json").exists()


@pytest.mark.slow  # nightly: two runs for a sentence
def test_validation_loss_that_is_not_finite_is_said(capsys, tmp_path, cache):
  """Training went on, so there is a result, and it says what it is."""
  config = make_config(
    data__cache=cache,
    optimizer__peak_lr=1e38,
    train__max_skips=100,
    compare__recipes="none,bf16",
  )
  compare.command(config, tmp_path)
  assert "Final validation loss: none not finite" in capsys.readouterr().out
  results = json.loads((tmp_path / "results.json").read_text())
  assert results["runs"]["bf16"]["validation_loss"] is None
  assert results["runs"]["bf16"]["gap_percent"] is None
  assert "not finite" in (tmp_path / "report.html").read_text()
  compare.command(config, tmp_path)  # from the finished runs
  assert "Final validation loss: none not finite" in capsys.readouterr().out
  config.recipe = "none"
  train.command(config, tmp_path / "runs" / "none")
  assert "validation loss not finite," in capsys.readouterr().out


@pytest.mark.parametrize(
  "arguments, words",
  [
    (["--config.train.stepz=3"], "did you mean train.steps"),
    (["--config.trian.steps=3"], "--config.trian.steps: the configuration"),
    (["--config.train.steps=many"], "invalid literal"),
    (["--unknown=1"], "Unknown command line flag"),
    (["--config=configs/absent.py"], "absent.py: there is no such file"),
    (["steps=3"], "'steps=3' is no flag"),
  ],
)
def test_command_line(tmp_path, arguments, words):
  outcome = subprocess.run(
    [
      sys.executable,
      "-m",
      "experiments.train",
      "--config=configs/tiny.py",
      f"--workdir={tmp_path / 'new'}",
      *arguments,
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert outcome.returncode == 2
  assert words in outcome.stderr
  assert outcome.stderr.startswith("error: ")
  assert outcome.stderr.count("\n") == 1
  assert not (tmp_path / "new").exists()
