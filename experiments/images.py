"""Labelled images: shapes drawn by formulas without a file, or an .npz.

``config.data.path = "shapes:count=50000,seed=0"`` (both may be left out) stands
for images of ten shapes. Image i is a function of the seed and i alone. The
label says which shape; where, how large, how much turned, in which colour, on
which darker background and under how much noise is random.

``config.data.path = "FILE.npz"`` is a file of arrays ``x_train``, ``y_train``,
``x_test`` and ``y_test``, as Keras distributes MNIST and CIFAR, or of
``images`` and ``labels``, of which the runner then holds out a fraction. Images
are [n, s, s] or [n, s, s, 1 or 3] uint8, labels [n] or [n, 1] integers.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
import hashlib
import math
from pathlib import Path
from typing import Any
import zipfile

from ml_collections import ConfigDict
import numpy as np

from experiments import data
from experiments import errors
from experiments import synthetic

PREFIX = "shapes:"
_NAMES = ("count", "seed")
_HASHED = 100  # drawn images that the hash is of
_RANDOM = 19  # random numbers of an image but for its noise
_TRAIN, _VALIDATION = 0, 1
_PICTURES, _LABELS = 0, 2  # what random numbers are for, beside the former


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images:
  """Labelled images.

  Attributes:
    train: a sequence of {"images": [s, s, 3] uint8, "labels": [] int32}.
    validation: likewise, of other images.
    unigram_entropy: of the training labels, nats: what a model that does not
      look at the images cannot go below.
    identity: what tells them from others, as JSON reads it back.
  """

  train: Any
  validation: Any
  unigram_entropy: float
  identity: dict


def is_shapes(path: str) -> bool:
  """Whether ``config.data.path`` stands for drawn shapes."""
  return path.startswith(PREFIX)


def check(config: ConfigDict) -> None:
  """Raises ``UserError`` for data that are no images; reads no file."""
  path = config.data.path
  if is_shapes(path):
    parse(path, config.data.image)
    if config.data.classes != len(SHAPES):
      raise errors.UserError(
        f"config.data.classes={config.data.classes}, but"
        f" config.data.path={path!r} has {len(SHAPES)};"
        f" set config.data.classes={len(SHAPES)}."
      )
  elif Path(path).suffix != ".npz":
    raise errors.UserError(
      f"config.data.path={path!r} holds no images, and"
      f" config.model.name={config.model.name!r} reads such; give {PREFIX!r},"
      " which are drawn, or a file .npz."
    )


def read(config: ConfigDict) -> Images:
  """The images of a configuration.

  Raises:
    UserError: there are none, or they cannot be used.
  """
  check(config)
  if is_shapes(config.data.path):
    return _drawn(config)
  return _loaded(config)


def _drawn(config: ConfigDict) -> Images:
  train = parse(config.data.path, config.data.image)
  held_out = max(1, round(config.data.validation_fraction * train.count))
  validation = dataclasses.replace(train, count=held_out, stream=_VALIDATION)
  digest = hashlib.sha256(repr((train, validation)).encode())
  for i in range(min(_HASHED, train.count)):
    digest.update(train[i]["images"].tobytes())
  return _images(train, validation, digest)


def _images(train, validation, digest) -> Images:
  return Images(
    train=train,
    validation=validation,
    unigram_entropy=data.unigram_entropy(train.labels),
    identity={
      "hash": digest.hexdigest()[:16],
      "images": len(train) + len(validation),
    },
  )


# Shapes: signed distances, at most about 1 from the centre, negative inside.


def _polygon(corners: Sequence[tuple[float, float]]) -> Callable:
  """A convex polygon, its corners counter-clockwise."""
  points = np.array(corners)
  edges = np.roll(points, -1, 0) - points
  normals = np.stack([edges[:, 1], -edges[:, 0]], -1)
  normals /= np.linalg.norm(normals, axis=-1, keepdims=True)
  offsets = np.sum(normals * points, -1)
  return lambda x, y: np.max(
    [a * x + b * y - c for (a, b), c in zip(normals, offsets, strict=True)], 0
  )


def _box(width: float, height: float) -> Callable:
  return lambda x, y: np.maximum(abs(x) - width, abs(y) - height)


def _disc(x, y):
  return np.hypot(x, y) - 0.9


def _plus(x, y):
  return np.minimum(_box(0.95, 0.3)(x, y), _box(0.3, 0.95)(x, y))


def _star(x, y):
  """Five points: straight from radius 1 to radius 0.42 and back."""
  radius, fifth = np.hypot(x, y), math.pi / 5
  angle = abs((np.arctan2(y, x) + fifth) % (2 * fifth) - fifth)
  inner, sine = 0.42, math.sin(fifth)
  ex, ey = inner * math.cos(fifth) - 1, inner * sine
  px, py = radius * np.cos(angle) - 1, radius * np.sin(angle)
  return (px * ey - py * ex) / math.hypot(ex, ey)


def _crescent(x, y):
  return np.maximum(_disc(x, y), 0.75 - np.hypot(x - 0.5, y))


_square = _box(0.75, 0.75)
_triangle = _polygon(
  [(math.cos(a), math.sin(a)) for a in 2 * math.pi * np.arange(3) / 3]
)

SHAPES = {
  "disc": _disc,
  "ring": lambda x, y: abs(np.hypot(x, y) - 0.7) - 0.2,
  "square": _square,
  "frame": lambda x, y: abs(_square(x, y) + 0.15) - 0.15,
  "triangle": _triangle,
  "plus": _plus,
  "star": _star,
  "crescent": _crescent,
  "bar": _box(1.0, 0.25),
  "half disc": lambda x, y: np.maximum(_disc(x, y), -x - 0.1),
}
"""The ten classes, and the signed distance of a point to each shape's edge."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
  """Drawn images, each as it is asked for.

  Attributes:
    size: side of the images in pixels.
    count: number of images.
    seed: of all that is random.
    stream: images of different streams are independent.
  """

  size: int
  count: int = 50_000
  seed: int = 0
  stream: int = _TRAIN

  def __post_init__(self):
    if not 0 < self.count < 2**31:
      raise errors.UserError(
        f"config.data.path: count={self.count}; needed more than 0 and less"
        " than 2**31."
      )
    if not 0 <= self.seed < 2**32:
      raise errors.UserError(
        f"config.data.path: seed={self.seed}; needed at least 0 and below"
        " 2**32."
      )

  @functools.cached_property
  def labels(self) -> np.ndarray:
    """[count] int32; any ten neighbours from a multiple of ten are all ten.

    Which of them is first is random, lest every tenth image be of one class.
    """
    n = len(SHAPES)
    first = self._random(_LABELS, 0, -(-self.count // n)) >> 40
    labels = (first[:, None] + np.arange(n, dtype=np.uint64)) % n
    return labels.ravel()[: self.count].astype(np.int32)

  def __len__(self) -> int:
    return self.count

  def __getitem__(self, index) -> dict[str, np.ndarray]:
    """Returns: "images", [size, size, 3] uint8, and "labels", [] int32."""
    i, s = int(index), self.size
    label = self.labels[i]
    random = self._random(_PICTURES, i, _RANDOM + math.ceil(3 * s * s / 4))
    u = (random[:_RANDOM] >> 11) * 2.0**-53
    x, y = _pixels(s)
    shape = list(SHAPES.values())[label]
    picture = _paint(_background(x, y, u[:11]), x, y, shape, u[11:18])
    picture = picture + (0.02 + 0.1 * u[18]) * _noise(random[_RANDOM:], s)
    pixels = np.rint(255 * np.clip(picture, 0, 1)).astype(np.uint8)
    return {"images": pixels, "labels": label}

  def _random(self, purpose: int, index: int, count: int) -> np.ndarray:
    """[count] uint64; NumPy promises the same from every version."""
    stream = (purpose + self.stream) << 32
    return np.random.Philox(key=[self.seed, stream + index]).random_raw(count)


@functools.cache
def _pixels(size: int) -> Sequence[np.ndarray]:
  """Twice [s, s]: x and y of the pixels' centres, between 0 and 1."""
  axis = (np.arange(size) + 0.5) / size
  return np.meshgrid(axis, axis)


def _background(x, y, u):
  """[s, s, 3]: one dark colour into another, and grey stripes."""
  angle, stripes = 2 * math.pi * u[0], 2 * math.pi * u[1]
  along = 0.5 + (x - 0.5) * math.cos(angle) + (y - 0.5) * math.sin(angle)
  across = x * math.cos(stripes) + y * math.sin(stripes)
  wave = 0.5 * np.sin(2 * math.pi * ((2 + 6 * u[2]) * across + u[3]))
  one = 0.6 * u[4:7]
  two = np.clip(one + 0.5 * (u[7:10] - 0.5), 0, 1)
  mixed = one + along[..., None] * (two - one)
  return mixed + 0.25 * u[10] * wave[..., None]


def _paint(picture, x, y, shape, u):
  """The picture with a lighter shape in it, its edge a pixel wide."""
  beneath = picture.mean((0, 1))
  ink = beneath + (0.45 + 0.55 * u[:3]) * (1 - beneath)
  radius = 0.25 + 0.15 * u[3]
  margin = 0.8 * radius  # so little of it is cut off
  cx, cy = margin + (1 - 2 * margin) * u[4:6]
  angle = math.pi / 3 * (u[6] - 0.5)
  sin, cos = math.sin(angle), math.cos(angle)
  dx, dy = (x - cx) / radius, (y - cy) / radius
  distance = shape(cos * dx + sin * dy, cos * dy - sin * dx)
  opacity = np.clip(0.5 - distance * radius * len(x), 0, 1)[..., None]
  return picture + opacity * (ink - picture)


def _noise(random, size):
  """[s, s, 3] of mean 0 and variance 1; each the sum of two random bytes."""
  pieces = random.astype("<u8").view("<u2")[: size * size * 3]
  triangular = (pieces & 255).astype(float) + (pieces >> 8) - 255
  deviation = math.sqrt((256**2 - 1) / 6)
  return triangular.reshape(size, size, 3) / deviation


def parse(path: str, size: int) -> Shapes:
  """The training images that ``config.data.path`` stands for.

  Args:
    path: ``shapes:name=value,...``.
    size: ``config.data.image``.

  Raises:
    UserError: a name or value cannot be used.
  """
  return Shapes(size=size, **synthetic.numbers(path, PREFIX, _NAMES))


# Files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrays:
  """Images that are there.

  Attributes:
    images: [n, s, s, 1 or 3] uint8.
    labels: [n] int32.
  """

  images: np.ndarray
  labels: np.ndarray

  def __len__(self) -> int:
    return len(self.labels)

  def __getitem__(self, index) -> dict[str, np.ndarray]:
    """Returns: "images", [s, s, 3] uint8, and "labels", [] int32."""
    image = self.images[int(index)]
    colours = np.broadcast_to(image, (*image.shape[:2], 3))
    return {"images": colours, "labels": self.labels[int(index)]}

  def __repr__(self) -> str:
    return f"Arrays(images={self.images.shape})"


def _loaded(config: ConfigDict) -> Images:
  path = Path(config.data.path)
  if not path.is_file():
    raise errors.UserError(
      f"config.data.path={path} does not exist; give a file .npz, or"
      f" {PREFIX!r}, images that are drawn."
    )
  try:
    with np.load(path, allow_pickle=False) as file:
      arrays = {name: file[name] for name in file.files}
  except (ValueError, zipfile.BadZipFile) as error:
    raise errors.UserError(
      f"config.data.path={path} is no .npz of numbers ({error}); write one with"
      " numpy.savez(path, images=..., labels=...)."
    ) from error
  pairs = [("x_train", "y_train"), ("x_test", "y_test")]
  if not all(name in arrays for pair in pairs for name in pair):
    pairs = [("images", "labels")]
  if not all(name in arrays for pair in pairs for name in pair):
    raise errors.UserError(
      f"config.data.path={path} holds {', '.join(sorted(arrays)) or 'nothing'};"
      " needed x_train, y_train, x_test and y_test, or images and labels."
    )
  parts = [_part(config, arrays, *pair) for pair in pairs]
  if len(parts) == 1:
    parts = _split(parts[0], config.data.validation_fraction)
  train, validation = parts
  digest = hashlib.sha256()
  for part in parts:
    digest.update(part.images.tobytes() + part.labels.tobytes())
  return _images(train, validation, digest)


def _part(config: ConfigDict, arrays: dict, x: str, y: str) -> Arrays:
  """Two arrays of a file, after checking them."""
  path, size = config.data.path, config.data.image
  images, labels = arrays[x], arrays[y]
  if images.ndim == 3:
    images = images[..., None]
  if labels.ndim == 2 and labels.shape[1] == 1:
    labels = labels[:, 0]
  fits = images.ndim == 4 and images.shape[1:3] == (size, size)
  if not fits or images.shape[3] not in (1, 3) or images.dtype != np.uint8:
    raise errors.UserError(
      f"config.data.path={path}: {x} is {arrays[x].dtype}"
      f"{list(arrays[x].shape)}; needed uint8 [n, s, s] or [n, s, s, 1 or 3]"
      f" with s = config.data.image={size}; change that, or the file."
    )
  whole = np.issubdtype(labels.dtype, np.integer)
  if not whole or labels.shape != images.shape[:1] or not len(labels):
    raise errors.UserError(
      f"config.data.path={path}: {y} is {arrays[y].dtype}"
      f"{list(arrays[y].shape)}; needed an integer for each of the"
      f" {len(images)} images of {x}, at least one; change the file."
    )
  if labels.min() < 0 or labels.max() >= config.data.classes:
    raise errors.UserError(
      f"config.data.path={path}: {y} is from {labels.min()} to {labels.max()};"
      f" needed 0 to {config.data.classes - 1}; set config.data.classes."
    )
  return Arrays(images=images, labels=labels.astype(np.int32))


def _split(all_images: Arrays, fraction: float) -> list[Arrays]:
  """Every n-th image is for validation, n = 1 / fraction."""
  n = max(2, round(1 / fraction))
  held_out = np.arange(len(all_images)) % n == n - 1
  if not held_out.any():
    raise errors.UserError(
      f"config.data.path: {len(all_images)} images are too few to hold every"
      f" {n}th out; give more, or a larger config.data.validation_fraction."
    )
  return [
    Arrays(images=all_images.images[mask], labels=all_images.labels[mask])
    for mask in (~held_out, held_out)
  ]


# Batches


def training_batches(config: ConfigDict, images: Images):
  """Endless batches, every epoch in a new order.

  "images" is [batch, s, s, 3] uint8 and "labels" [batch] int32. As
  ``data.training_batches``.
  """
  return data.endless_batches(config, images.train)


def validation_batches(config: ConfigDict, images: Images) -> list[dict]:
  """The same batches every time, spread over all held-out images."""
  return data.spread_batches(config, images.validation)
