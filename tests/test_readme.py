"""Everything a reader might paste from the README or the guide runs.

Contract: the Python blocks of a page run in order in one namespace; the first
two shell commands of the README are single lines that CI runs (``.ci/run``);
the sample of a coverage table is of the one that is printed; links exist.
"""

from pathlib import Path
import re

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/guide.md", "docs/performance.md")


def blocks(language: str, page: str = "README.md") -> list[str]:
  text = (ROOT / page).read_text()
  return re.findall(rf"^```{language}\n(.*?)^```$", text, re.S | re.M)


def run(page: str, count: int) -> dict:
  """What a page's blocks define."""
  namespace: dict = {}
  assert len(blocks("python", page)) == count
  for block in blocks("python", page):
    exec(compile(block, page, "exec"), namespace)
  return namespace


def test_the_readme_runs(capsys):
  namespace = run("README.md", 3)
  assert np.isfinite(namespace["loss"])
  for grad in jax.tree.leaves(namespace["lean_grads"]):
    assert np.isfinite(grad).all()
  linear = [r for r in coverage_rows(namespace) if r.path]
  assert {r.fprop for r in linear} == {
    "as written",
    "mxfp8 · mxfp8",
    "nvfp4 · nvfp4 16x16",
  }
  printed = capsys.readouterr().out.splitlines()
  (sample,) = blocks("text")
  for line in sample.splitlines():  # which backend serves goes by device
    assert line in printed or line.startswith("backend "), line


def coverage_rows(namespace):
  import fp4jax

  quantized = fp4jax.quantize(namespace["model"].apply, namespace["policy"])
  variables = {"params": namespace["params"]}
  return fp4jax.coverage(quantized, variables, namespace["tokens"]).rows


def test_the_guide_runs(capsys):
  namespace = run("docs/guide.md", 5)
  assert np.isfinite(namespace["loss"])
  assert "2 of 5 linear layers quantised" in capsys.readouterr().out
  paper, unrotated = namespace["paper"], namespace["unrotated"]
  assert unrotated.wgrad.lhs.rht is None and unrotated.wgrad.rhs.rht is None
  assert unrotated.fprop == paper.fprop
  unclipped = namespace["unclipped"]
  assert unclipped.fprop == paper.fprop
  assert unclipped.dgrad.lhs.scale_guard == unclipped.wgrad.rhs.scale_guard < 1
  assert unclipped.dgrad.rhs == paper.dgrad.rhs
  assert namespace["apply"].policy == namespace["policy"]
  assert namespace["schedule"].at(8200) == namespace["healed"]


def test_commands_are_one_line_each():
  commands = blocks("bash")
  assert len(commands) == 3
  assert all(command.count("\n") == 1 for command in commands)
  assert "experiments.compare" in commands[0] and "pytest" in commands[1]


@pytest.mark.parametrize("page", PAGES)
def test_links_exist(page):
  folder = (ROOT / page).parent
  for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
    assert (folder / target).exists(), target
