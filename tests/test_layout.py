"""Layout: imports go one way, and the library needs only what it declares.

Contract (design.md section 4): jax <- pallas_kernels <- fp4jax <- configs <-
experiments <- tests; no cycles; no private JAX; the library reads neither flags
nor the environment.
"""

import ast
from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("pallas_kernels", "fp4jax", "configs", "experiments", "tests")
RUNTIME = {"jax", "jaxlib", "flax", "optax", "chex", "absl", "numpy"}
FILES = [p for name in ORDER for p in sorted((ROOT / name).rglob("*.py"))]


def imported(path: Path) -> list[str]:
  """Dotted names that a file imports, ``from a import b`` as ``a.b``."""
  names = []
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import"
      names += [f"{node.module}.{alias.name}" for alias in node.names]
  return names


def test_there_is_something_to_check():
  assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
  package = path.relative_to(ROOT).parts[0]
  later = ORDER[ORDER.index(package) + 1 :]
  names = imported(path)
  assert not [n for n in names if n.split(".")[0] in later]
  assert not [n for n in names if "._src" in n]


def test_library_has_no_import_cycle():
  graph = {}
  for path in sorted((ROOT / "fp4jax").glob("*.py")):
    if path.stem == "__init__":
      continue
    targets = {
      n.split(".")[1] for n in imported(path) if n.startswith("fp4jax.")
    }
    graph[path.stem] = targets & {
      p.stem for p in (ROOT / "fp4jax").glob("*.py")
    }

  done: set[str] = set()
  while len(done) < len(graph):
    ready = {n for n, t in graph.items() if n not in done and t <= done}
    assert ready, f"cycle among {sorted(set(graph) - done)}"
    done |= ready


def test_library_reads_no_flags_and_no_environment():
  for name in ("fp4jax", "pallas_kernels"):
    for path in (ROOT / name).rglob("*.py"):
      text = path.read_text()
      assert "environ" not in text and "getenv" not in text, path
      assert "flags" not in " ".join(imported(path)), path


def test_library_imports_only_its_runtime_dependencies():
  """In a process where everything else is hidden, ``import fp4jax`` works."""
  allowed = sorted(RUNTIME)
  for path in (ROOT / "fp4jax").rglob("*.py"):
    for name in imported(path):
      top = name.split(".")[0]
      assert (
        top in RUNTIME
        or top in sys.stdlib_module_names
        or top in ("fp4jax", "pallas_kernels")
      ), f"{path} imports {name}, not among {allowed}"
  # Flax itself needs orbax and rich.
  hidden = (
    "grain",
    "matplotlib",
    "ml_collections",
    "tensorboardX",
    "tokenizers",
  )
  script = "import sys\n"
  script += "\n".join(f"sys.modules[{m!r}] = None" for m in hidden)
  script += "\nimport fp4jax\nprint(fp4jax.__version__)"
  done = subprocess.run(
    [sys.executable, "-c", script], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
