"""Contract (J07): importing the runners defines no flag, however often."""

from pathlib import Path
import subprocess
import sys

_SCRIPT = """
from absl import flags, logging
names = ("config", "workdir", "seed", "steps", "log_dir_", "mode", "tasks")
for name in names:
  flags.DEFINE_string(name, "mine", "A common name.")
import importlib
from experiments import train, compare, cloze, evaluate
for module in (train, compare, cloze, evaluate):
  importlib.reload(module)
owners = flags.FLAGS.flags_by_module_dict()
assert not [n for n in owners if "experiments" in n or "fp4jax" in n], owners
flags.FLAGS(["script", "--workdir=theirs"])
assert flags.FLAGS.workdir == "theirs"
"""


def test_j07_imports_define_no_flags():
  outcome = subprocess.run(
    [sys.executable, "-c", _SCRIPT],
    cwd=Path(__file__).parents[2],
    capture_output=True,
    text=True,
  )
  assert outcome.returncode == 0, outcome.stderr


def test_j07_both_runners_define_theirs_beside_those_of_absl():
  """--help of each lists the two flags; nothing clashes on the way."""
  for runner in ("train", "compare"):
    outcome = subprocess.run(
      [sys.executable, "-m", f"experiments.{runner}", "--help"],
      cwd=Path(__file__).parents[2],
      capture_output=True,
      text=True,
    )
    assert "--workdir" in outcome.stdout and "--config" in outcome.stdout
    assert "Error" not in outcome.stderr
