"""Contract: the Vision Transformer is its formula, scanned as unrolled.

The runner trains it as it trains language models: the same bits for the same
seed, after a resume too; the BF16 policy changes none; NVFP4 stays close. What
is quantised is the blocks' linear layers alone.
"""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import vit as vit_config
from experiments import compare
from experiments import errors
from experiments import metrics
from experiments import models
from experiments import report
from experiments import state as state_lib
from experiments import train
import fp4jax
from tests.experiments.helpers import losses
from tests.experiments.helpers import make_vit

RECIPES = ("none", "bf16", "nvfp4")
LINEARS = {
  *(f"attention/{name}/kernel" for name in ("q", "k", "v", "out")),
  *(f"ffn/{name}/kernel" for name in ("up", "down")),
}


def _images(count: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).integers(
    0, 256, (count, 16, 16, 3), np.uint8
  )


def _initialised(config):
  """The model, and parameters of which none is 0."""
  model = models.from_config(config)
  shapes = jax.eval_shape(model.init, jax.random.key(0), _images(1))
  rng = np.random.default_rng(1)
  draw = lambda x: jnp.array(rng.normal(0, 0.3, x.shape), jnp.float32)
  return model, jax.tree.map(draw, shapes)["params"]


def _linear(x, layer):
  return x @ layer["kernel"] + layer["bias"]


def _norm(x, layer):
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6)
  return x * layer["scale"] + layer["bias"]


def _attention(x, layer, heads):
  """One key and value head for all queries."""
  b, t, d = x.shape
  q = _linear(x, layer["q"]).reshape(b, t, heads, -1)
  k, v = _linear(x, layer["k"]), _linear(x, layer["v"])
  scores = np.einsum("bqhs,bks->bhqk", q, k) / math.sqrt(d // heads)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  y = np.einsum("bhqk,bks->bqhs", weights, v).reshape(b, t, d)
  return _linear(y, layer["out"])


def _oracle(params, images, patch, heads):
  """The formula in float64, patch by patch."""
  p = jax.tree.map(np.float64, params)
  n = images.shape[1] // patch
  pixels = images / 127.5 - 1
  cut = [
    pixels[:, patch * i : patch * (i + 1), patch * j : patch * (j + 1)]
    for i in range(n)
    for j in range(n)
  ]
  flat = np.stack([c.reshape(len(images), -1) for c in cut], 1)
  x = _linear(flat, p["patch_embed"]) + p["positions"]
  for i in range(3):
    block = p[f"blocks_{i}"]
    normed = _norm(x, block["attention_norm"])
    x = x + _attention(normed, block["attention"], heads)
    h = _linear(_norm(x, block["ffn_norm"]), block["ffn"]["up"])
    cubic = math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)
    h = h * (1 + np.tanh(cubic)) / 2
    x = x + _linear(h, block["ffn"]["down"])
  return _linear(_norm(x, p["norm"]).mean(1), p["head"])


def test_model_is_its_formula():
  config = make_vit(model__scan=False, model__dtype="float32")
  model, params = _initialised(config)
  got = jax.jit(model.apply)({"params": params}, _images(5))
  assert got.shape == (5, 10) and got.dtype == jnp.float32
  expected = _oracle(params, _images(5), patch=4, heads=2)
  # Float32 sums of at most 64 terms, a dozen layers deep.
  np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
  "remat",
  [False, pytest.param(True, marks=pytest.mark.slow)],  # nightly: the same
)
def test_scanned_and_unrolled_are_the_same_function(remat):
  """The value, and the gradients of all parameters."""
  unrolled, params = _initialised(
    make_vit(model__scan=False, model__dtype="float32")
  )
  scanned = models.from_config(
    make_vit(model__remat=remat, model__dtype="float32")
  )
  stacked = _stacked(params)

  def run(model, params):
    logits = lambda p: model.apply({"params": p}, _images(4))
    f = lambda p: jnp.mean(jnp.square(logits(p)))
    return jax.jit(jax.value_and_grad(f))(params)

  value, grads = run(unrolled, params)
  got, got_grads = run(scanned, stacked)
  np.testing.assert_allclose(got, value, rtol=1e-5)
  expected = jax.tree.leaves(_stacked(grads))
  for a, b in zip(expected, jax.tree.leaves(got_grads), strict=True):
    # Float32 sums in another order.
    atol = 1e-5 * float(jnp.abs(a).max())
    np.testing.assert_allclose(b, a, rtol=1e-3, atol=atol)


def _stacked(params):
  """The tree of a scanned stack, of that of three blocks."""
  rest = {k: v for k, v in params.items() if not k.startswith("blocks_")}
  blocks = [params[f"blocks_{i}"] for i in range(3)]
  return rest | {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *blocks)}


def test_every_block_of_a_scan_begins_with_its_own_numbers():
  """And one seed gives one model, in float32."""
  init = jax.jit(models.from_config(make_vit()).init)
  params, again, other = (init(jax.random.key(i), None) for i in (0, 0, 1))
  jax.tree.map(np.testing.assert_array_equal, params, again)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
  name = lambda tree: tree["params"]["blocks"]["ffn"]["up"]["kernel"]
  kernels = np.stack([name(params), name(other)])
  assert kernels.shape == (2, 3, 32, 64)
  assert float(kernels.std()) == pytest.approx(0.02, rel=0.05)
  assert len(np.unique(kernels)) > 0.99 * kernels.size


def _rows(config):
  experiment = train.make_experiment(config)
  variables = {"params": experiment.shapes.params}
  inputs, _ = jax.eval_shape(experiment.loss.split, experiment.micro_batch)
  return fp4jax.coverage(experiment.apply, variables, inputs).rows


@pytest.mark.parametrize("scan", [False, True])
def test_coverage_names_the_blocks_linear_layers(scan):
  """Unrolled by name, scanned by the layer's index."""
  config = make_vit(model__scan=scan, policy__first=0, policy__last=1)
  linears = [row for row in _rows(config) if row.path]
  quantised = {row.path for row in linears if row.quantised}
  kept = {row.path for row in linears if not row.quantised}
  heads = {"params/patch_embed/kernel", "params/head/kernel"}
  if scan:
    assert quantised == {f"params/blocks/{name}" for name in LINEARS}
    layers = {row.layers for row in linears if row.quantised}
    assert layers == {(0, 1)}
    assert kept == quantised | heads
  else:
    names = lambda i: {f"params/blocks_{i}/{name}" for name in LINEARS}
    assert quantised == names(0) | names(1)
    assert kept == names(2) | heads


def test_size_of_the_configuration():
  config = vit_config.get_config()
  rows = [row for row in _rows(config) if row.path]
  params = jax.tree.leaves(train.make_experiment(config).shapes.params)
  assert sum(math.prod(x.shape) for x in params) == 7_437_770
  assert len(rows) == 38
  assert sum(row.quantised for row in rows) == 24


@pytest.mark.slow  # nightly: test_state, on images
def test_micro_batches_add_up_to_the_batch():
  config = make_vit(recipe="none", model__dtype="float32", model__layers=1)
  experiment = train.make_experiment(config)
  batch = {"images": _images(8), "labels": np.arange(8, dtype=np.int32)}
  params = jax.jit(experiment.initialise)().params

  def run(accumulate):
    f = lambda params: state_lib.gradients(
      experiment.loss, params, batch, jax.random.key(0), accumulate
    )
    return jax.jit(f)(params)

  (whole, grads), (parts, got) = run(1), run(2)
  np.testing.assert_allclose(parts, whole, rtol=1e-6)
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(got), strict=True):
    # Float32 sums over the batch in two parts.
    atol = 1e-5 * float(jnp.abs(a).max()) + 1e-9
    np.testing.assert_allclose(b, a, rtol=1e-4, atol=atol)


def test_accuracy_is_the_share_of_labels_that_are_likeliest():
  logits = jnp.array([[0, 2, 1], [5, 0, 0], [0, 0, 1]], jnp.float32)
  loss = state_lib.ImageLoss(lambda variables, images, fp4_key: logits)
  batch = {"images": None, "labels": jnp.array([1, 2, 2])}
  measured = loss.measures({}, batch)
  assert float(measured["validation_accuracy"]) == pytest.approx(2 / 3)
  expected = -np.mean(
    [jax.nn.log_softmax(logits[i])[label] for i, label in enumerate([1, 2, 2])]
  )
  assert float(measured["validation_loss"]) == pytest.approx(expected, rel=1e-6)


# Sixteen images, all of them in every step.
FEW = {
  "data__path": "shapes:count=16",
  "data__validation_fraction": 0.5,
  "train__batch": 16,
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
  """The model as written, under the BF16 policy, and under NVFP4."""
  workdir = tmp_path_factory.mktemp("images")
  config = make_vit(compare__recipes=",".join(RECIPES), **FEW)
  return compare.run(config, workdir), workdir


def test_bf16_policy_is_bit_identical_to_the_unquantised_model(compared):
  plain, policy, nvfp4 = (
    losses(compared[1] / "runs" / name) for name in RECIPES
  )
  assert plain == policy and len(plain) == 10
  assert nvfp4[0][1] != plain[0][1]


def test_runs_learn_and_nvfp4_is_close(compared):
  comparison, workdir = compared
  for run in comparison.runs:
    _, values = run.series("loss")
    assert values[-1] < values[0] - 0.25
    _, plain = comparison.baseline.series("loss")
    np.testing.assert_allclose(values, plain, rtol=0.01)
    result = run.result
    records = metrics.read(workdir / "runs" / result.recipe / "metrics.jsonl")
    measured = [r for r in records if "validation_loss" in r]
    assert [r["step"] for r in measured] == [5, 10]
    assert measured[-1]["validation_loss"] == result.validation_loss
    assert measured[-1]["validation_accuracy"] == result.validation_accuracy
    assert math.log(8) < result.unigram_entropy < math.log(10)
    assert result.tokens == 10 * 16 * 16
  assert 0 < abs(comparison.gap(comparison.runs[2])) < 3


def test_results_hold_what_applies(compared):
  comparison, workdir = compared
  results = json.loads((workdir / "results.json").read_text())
  for name, run in results["runs"].items():
    assert "sample" not in run and run["validation_accuracy"] >= 0
    content = json.loads((workdir / "runs" / name / "result.json").read_text())
    added = {key: run[key] for key in ("gap_percent", "curves")}
    assert content | added == run
  page = (workdir / "report.html").read_text()
  assert "accuracy %" in page and "nats an image" in page
  assert "label entropy of the training images" in page
  assert "Samples" not in page and "token is" not in page
  text = report.summary(comparison)
  assert "sample of" not in text and "accuracy %" in text


def test_command_says_the_accuracy(compared, capsys):
  """Of the finished run, which is read back whole."""
  comparison, workdir = compared
  config = make_vit(data__cache=str(workdir / "data"), **FEW)
  train.command(config, workdir / "runs" / "nvfp4")
  result = comparison.runs[2].result
  said = capsys.readouterr().out
  assert f"accuracy {result.validation_accuracy:.2%}, label entropy" in said
  assert "sample" not in said


@pytest.mark.slow  # nightly: test_resume, on images
def test_resumed_run_is_the_run_that_was_not_killed(compared, tmp_path: Path):
  """Killed at step 7, whose steps since checkpoint 4 come again, bit by bit."""
  config = make_vit(**FEW)
  straight = losses(compared[1] / "runs" / "nvfp4")
  with pytest.MonkeyPatch.context() as patch:
    written = metrics.Writer.write

    def write(self, records):
      written(self, records)
      if any(record["step"] >= 6 for record in records):
        raise KeyboardInterrupt

    patch.setattr(metrics.Writer, "write", write)
    with pytest.raises(errors.Stopped, match="checkpoint of step 4 is saved"):
      train.run(config, tmp_path)
  assert losses(tmp_path) == straight[:6]
  result = train.run(config, tmp_path)
  assert losses(tmp_path) == straight
  uninterrupted = compared[0].runs[2].result
  assert result.validation_loss == uninterrupted.validation_loss
  assert result.validation_accuracy == uninterrupted.validation_accuracy
