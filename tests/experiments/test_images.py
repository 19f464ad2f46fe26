"""Contract: labelled images follow from the seed and the index, or a file.

Labels are balanced, shapes are what their formulas' areas say, no class is told
by its mean picture alone. A file's images come as they are, or are refused in
words. Batches come once an epoch each, and an iterator goes on where it was.
"""

import collections
import dataclasses
import math

import jax
import numpy as np
import pytest

from experiments import config as config_lib
from experiments import errors
from experiments import images
from tests.experiments.helpers import make_vit

DRAWN = images.Shapes(size=16, count=1000, seed=3)


def _stack(examples, indices=None):
  chosen = range(len(examples)) if indices is None else indices
  return jax.tree.map(lambda *x: np.stack(x), *[examples[i] for i in chosen])


def test_an_image_follows_from_seed_and_index():
  """Whatever was drawn before it, and however many there are."""
  example = DRAWN[7]
  assert example["images"].shape == (16, 16, 3)
  assert example["images"].dtype == np.uint8
  again = dataclasses.replace(DRAWN, count=20)[7]
  np.testing.assert_array_equal(again["images"], example["images"])
  assert again["labels"] == example["labels"]
  for other in (
    dataclasses.replace(DRAWN, seed=4)[7],
    dataclasses.replace(DRAWN, stream=1)[7],
    DRAWN[8],
  ):
    assert (other["images"] != example["images"]).mean() > 0.9


def test_labels_are_balanced_and_in_no_period():
  labels = DRAWN.labels
  assert labels.dtype == np.int32
  np.testing.assert_array_equal(
    np.sort(labels.reshape(-1, 10), 1), np.tile(np.arange(10), (100, 1))
  )
  every_tenth = np.bincount(labels[::10], minlength=10)
  assert every_tenth.min() > 0
  # Of NumPy's promised streams, so these hold with every version.
  assert labels[8:22].tolist() == [7, 8, 9, *range(9), 8, 9]


def _star_area():
  """Ten triangles between the radii 1 and 0.42, a fifth of π apart."""
  return 5 * 0.42 * math.sin(math.pi / 5)


def _lens(r, s, d):
  """What two discs of radii r, s at distance d share."""
  a = math.acos((d * d + r * r - s * s) / (2 * d * r))
  b = math.acos((d * d + s * s - r * r) / (2 * d * s))
  return r * r * (a - math.sin(2 * a) / 2) + s * s * (b - math.sin(2 * b) / 2)


AREAS = {
  "disc": math.pi * 0.9**2,
  "ring": math.pi * (0.9**2 - 0.5**2),
  "square": 1.5**2,
  "frame": 1.5**2 - 0.9**2,
  "triangle": 3 * math.sqrt(3) / 4,
  "plus": 2 * (1.9 * 0.6) - 0.6**2,
  "star": _star_area(),
  "crescent": math.pi * 0.9**2 - _lens(0.9, 0.75, 0.5),
  "bar": 2 * 0.5,
  "half disc": math.pi * 0.9**2 / 2
  + 0.1 * math.sqrt(0.9**2 - 0.1**2)
  + 0.9**2 * math.asin(0.1 / 0.9),
}


@pytest.mark.parametrize("name", images.SHAPES)
def test_shapes_have_the_area_of_their_formula(name):
  """And distances are such, so that edges are a pixel wide."""
  step = 1 / 250
  axis = (np.arange(600) + 0.5) * step - 1.2
  x, y = np.meshgrid(axis, axis)
  x, y = x + 0.3 * y, y - 0.3 * x  # turned, lest edges follow rows of points
  distance = images.SHAPES[name](x, y)
  step *= math.sqrt(1.09)
  area = np.sum(distance < 0) * step**2
  assert area == pytest.approx(AREAS[name], rel=2e-3)
  assert distance[np.hypot(x, y) > 1.1].min() > 0
  slopes = [np.abs(np.diff(distance, axis=i)) / step for i in (0, 1)]
  assert max(slope.max() for slope in slopes) < 1 + 1e-9
  steepest = np.hypot(slopes[0][:, 1:], slopes[1][1:])
  assert np.median(steepest) == pytest.approx(1, abs=0.01)


def test_what_does_not_tell_the_class_varies():
  """Colours, places, sizes, noise; a class's mean picture is of little use."""
  train = _stack(DRAWN)
  for label in range(10):
    mine = train["images"][train["labels"] == label]
    assert mine.mean((1, 2)).std(0).min() > 25  # of 255
  means = np.stack(
    [train["images"][train["labels"] == i].mean(0) for i in range(10)]
  )
  test = _stack(dataclasses.replace(DRAWN, stream=1, count=500))
  gaps = test["images"][:, None].astype(float) - means
  nearest = np.square(gaps).sum((2, 3, 4)).argmin(1)
  assert np.mean(nearest == test["labels"]) < 0.3


def test_noise_has_mean_0_and_variance_1():
  n = 64
  random = np.random.Philox(key=[1, 2]).random_raw(n * n * 3 // 4)
  noise = images._noise(random, n).ravel()
  # Of a triangular distribution the kurtosis is 2.4: the error of a variance.
  assert abs(noise.mean()) < 4 / math.sqrt(noise.size)
  assert abs(noise.var() - 1) < 4 * math.sqrt(1.4 / noise.size)
  assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 4 / math.sqrt(n * n)


def test_configuration_gives_the_shapes():
  config = make_vit(data__path="shapes:count=1000,seed=3")
  found = images.read(config)
  assert found.train == DRAWN
  assert len(found.validation) == 50
  assert found.validation.stream != DRAWN.stream
  assert found.unigram_entropy == pytest.approx(math.log(10))
  assert found.identity == images.read(config).identity
  assert found.identity["images"] == 1050
  for fields in (
    {"data__path": "shapes:count=1000,seed=4"},
    {"data__path": "shapes:count=1001,seed=3"},
    {"data__validation_fraction": 0.1},
    {"data__image": 20},
  ):
    fields = {"data__path": "shapes:count=1000,seed=3"} | fields
    other = images.read(make_vit(**fields))
    assert other.identity["hash"] != found.identity["hash"]


def test_other_images_are_another_experiment(tmp_path):
  """A file that changed after an interruption, or another version of NumPy."""
  config = make_vit()
  identity = images.read(config).identity
  config_lib.save(config, identity, tmp_path)
  config_lib.check_text(config, identity, tmp_path)
  with pytest.raises(errors.UserError, match=r"on other images: .* 420 images"):
    config_lib.check_text(config, identity | {"hash": "0"}, tmp_path)


def _random(seed, *shape):
  return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def _saved(tmp_path, **arrays) -> str:
  np.savez(tmp_path / "file.npz", **arrays)
  return str(tmp_path / "file.npz")


def test_grey_images_as_keras_distributes_mnist(tmp_path):
  x, y = _random(0, 30, 16, 16), (np.arange(30) % 10).astype(np.uint8)
  path = _saved(tmp_path, x_train=x[:20], y_train=y[:20], x_test=x, y_test=y)
  found = images.read(make_vit(data__path=path))
  assert len(found.train) == 20 and len(found.validation) == 30
  example = found.train[13]
  assert example["images"].shape == (16, 16, 3)
  for colour in range(3):
    np.testing.assert_array_equal(example["images"][..., colour], x[13])
  assert example["labels"] == 3 and example["labels"].dtype == np.int32
  assert found.unigram_entropy == pytest.approx(math.log(10))


def test_images_and_labels_are_split(tmp_path):
  x, y = _random(0, 40, 16, 16, 3), np.arange(40)[:, None] % 4
  path = _saved(tmp_path, images=x, labels=y)
  found = images.read(make_vit(data__path=path))  # holds 5 % out
  both = [_stack(found.train), _stack(found.validation)]
  assert [len(part["labels"]) for part in both] == [38, 2]
  np.testing.assert_array_equal(both[1]["images"], x[[19, 39]])
  kept = np.delete(np.arange(40), [19, 39])
  np.testing.assert_array_equal(both[0]["images"], x[kept])
  np.testing.assert_array_equal(both[0]["labels"], y[kept, 0])


X, Y = np.zeros((40, 16, 16), np.uint8), np.zeros(40, int)


@pytest.mark.parametrize(
  "arrays, fields, words",
  [
    ({"pixels": X}, {}, "holds pixels; needed x_train"),
    ({"x_train": X, "y_train": Y}, {}, "holds x_train, y_train; needed"),
    ({"images": X / 1, "labels": Y}, {}, r"images is float64\[40, 16, 16\]"),
    ({"images": X, "labels": Y}, {"data__image": 28}, "data.image=28"),
    ({"images": X, "labels": Y / 1}, {}, r"labels is float64\[40\]"),
    ({"images": X, "labels": Y[:3]}, {}, r"labels is int64\[3\].* 40 images"),
    ({"images": X, "labels": Y + 10}, {}, "from 10 to 10; needed 0 to 9"),
    ({"images": X[:3], "labels": Y[:3]}, {}, "3 images are too few"),
    ({"images": np.array([None])}, {}, "is no .npz of numbers"),
  ],
)
def test_files_that_hold_no_images_are_refused(tmp_path, arrays, fields, words):
  path = _saved(tmp_path, **arrays)
  with pytest.raises(errors.UserError, match=words):
    images.read(make_vit(data__path=path, **fields))


@pytest.mark.parametrize(
  "fields, words",
  [
    ({"data__path": ""}, "'' holds no images.*'shapes:'"),
    ({"data__path": "markov:"}, "'markov:' holds no images"),
    ({"data__path": "/absent.npz"}, "absent.npz does not exist"),
    ({"data__path": "shapes:size=3"}, "'size=3'; needed count, seed"),
    ({"data__path": "shapes:count=0"}, "count=0; needed more than 0"),
    ({"data__path": "shapes:seed=4294967296"}, "below 2\\*\\*32"),
    ({"data__classes": 12}, "classes=12, but .* has 10"),
    ({"model__patch": 5}, "image=16 is no multiple of config.model.patch=5"),
    ({"model__qk_norm": False}, "is a field of the model 'transformer'"),
  ],
)
def test_what_cannot_be_meant_is_refused(fields, words):
  with pytest.raises(errors.UserError, match=words):
    config = make_vit(**fields)
    config_lib.check(config)
    images.read(config)


def _batches(config, count, state=None):
  iterator = images.training_batches(config, images.read(config))
  if state is not None:
    iterator.set_state(state)
  found = [next(iterator) for _ in range(count)]
  return found, iterator.get_state()


def test_batches_come_once_an_epoch_and_go_on_where_they_were():
  config = make_vit(data__path="shapes:count=24", train__batch=8)
  batches, _ = _batches(config, 6)
  assert batches[0]["images"].shape == (8, 16, 16, 3)
  assert batches[0]["images"].dtype == np.uint8
  assert batches[0]["labels"].shape == (8,)
  assert batches[0]["labels"].dtype == np.int32
  epochs = [
    collections.Counter(x.tobytes() for b in part for x in b["images"])
    for part in (batches[:3], batches[3:])
  ]
  assert epochs[0] == epochs[1] and set(epochs[0].values()) == {1}
  assert any(
    np.any(a["images"] != b["images"])
    for a, b in zip(batches[:3], batches[3:], strict=True)
  )
  first, state = _batches(config, 2)
  rest, _ = _batches(config, 4, state)
  jax.tree.map(np.testing.assert_array_equal, [*first, *rest], batches)


def test_validation_batches_are_fixed_and_of_all_classes():
  config = make_vit(
    data__path="shapes:count=2000", train__batch=10, train__eval_batches=5
  )
  found = images.read(config)
  batches = images.validation_batches(config, found)
  again = images.validation_batches(config, found)
  jax.tree.map(np.testing.assert_array_equal, batches, again)
  labels = np.concatenate([batch["labels"] for batch in batches])
  assert len(batches) == 5 and len(labels) == 50
  assert set(labels) == set(range(10))
