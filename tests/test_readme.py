"""Everything a reader might paste from the README runs.

Contract: its Python blocks run in order in one namespace; its first two shell
commands are single lines that CI runs (``.ci/run``); its links exist.
"""

from pathlib import Path
import re

import jax
import numpy as np

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
  return re.findall(rf"^```{language}\n(.*?)^```$", README, re.S | re.M)


def test_python_blocks_run():
  namespace: dict = {}
  assert len(blocks("python")) == 5
  for block in blocks("python"):
    exec(compile(block, "README.md", "exec"), namespace)
  assert np.isfinite(namespace["loss"])
  for grad in jax.tree.leaves(namespace["lean_grads"]):
    assert np.isfinite(grad).all()
  unrotated = namespace["unrotated"]
  assert unrotated.wgrad.lhs.rht is None and unrotated.wgrad.rhs.rht is None
  assert unrotated.fprop == namespace["paper"].fprop
  linear = [r for r in coverage_rows(namespace) if r.path]
  assert {r.fprop for r in linear} == {
    "as written",
    "mxfp8 · mxfp8",
    "nvfp4 · nvfp4 16x16",
  }


def coverage_rows(namespace):
  import fp4jax

  quantized = fp4jax.quantize(namespace["model"].apply, namespace["policy"])
  variables = {"params": namespace["params"]}
  return fp4jax.coverage(quantized, variables, namespace["tokens"]).rows


def test_commands_are_one_line_each():
  commands = blocks("bash")
  assert len(commands) == 2
  assert all(command.count("\n") == 1 for command in commands)
  assert "experiments.compare" in commands[0] and "pytest" in commands[1]


def test_links_exist():
  for target in re.findall(r"\]\(([^)#:]+)\)", README):
    assert (ROOT / target).exists(), target
