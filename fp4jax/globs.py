"""Globs over the paths of weights: what they match, and what was meant.

``policy`` is built on it; it imports nothing of the package.
"""

from collections.abc import Sequence
import difflib
import functools
import re


@functools.lru_cache(maxsize=1024)
def _regex(glob: str) -> re.Pattern:
  """Compiles a path glob."""
  parts = glob.split("/")
  text = ""
  for i, part in enumerate(parts):
    last = i == len(parts) - 1
    if part == "**":
      text += "(?:[^/]+(?:/[^/]+)*)?" if last else "(?:[^/]+/)*?"
      continue
    piece = re.escape(part)
    piece = piece.replace(r"\{layer\}", r"(?P<layer>\d+)")
    piece = piece.replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    piece = re.sub(
      r"\\\[(.*?)\\\]",
      lambda m: "[" + m.group(1).replace("\\-", "-") + "]",
      piece,
    )
    text += piece
    # "a/**" also matches "a" itself.
    text += "" if last else "(?:/|$)" if parts[i + 1 :] == ["**"] else "/"
  try:
    return re.compile(text)
  except re.error as e:
    raise ValueError(
      f"Rule: path={glob!r} is no valid pattern ({e}); use *, **, [0-2] and"
      " one {layer}."
    ) from e


def matches(glob: str, path: str) -> re.Match | None:
  """The match of a whole path, or None.

  >>> matches("**/blocks_{layer}/**", "params/blocks_3/up/kernel")["layer"]
  '3'
  >>> matches("**/up/**", "params/upper/kernel")
  """
  return _regex(glob).fullmatch(path)


def few(globs: Sequence[str]) -> bool:
  """Whether globs are somebody's own, not a preset's long list."""
  return len(globs) < 4


def suggestion(globs: Sequence[str], paths: Sequence[str]) -> str:
  """A glob that matches, or the paths most like one that does not."""
  near = f"the nearest are {nearest(globs[0], paths)}"
  for core in (glob.strip("*/") for glob in globs if few(globs)):
    for glob in (f"**/{core}/**", f"**/*{core}*/**"):
      if core and any(matches(glob, path) for path in paths):
        return f'did you mean "{glob}"? {near[0].upper()}{near[1:]}'
  return near


def hint(globs: Sequence[str]) -> str:
  """What a pattern in another language takes for a glob, or nothing.

  >>> hint(["params.blocks.0"])
  ' (only {layer} is a placeholder; parts are separated by /)'
  """
  for glob in globs:
    braces = "{" in glob.replace("{layer}", "")
    dots = ".*" in glob or ("." in glob and "/" not in glob)
    if braces or dots:
      return " (only {layer} is a placeholder; parts are separated by /)"
  return ""


def nearest(glob: str, paths: Sequence[str], count: int = 3) -> str:
  """The paths most like a glob, for error messages."""
  plain = re.sub(r"[*?{}\[\]]|layer", "", glob).strip("/")
  paths = list(dict.fromkeys(paths))

  def likeness(path):
    pieces = [*path.split("/"), path]
    return max(
      difflib.SequenceMatcher(None, plain, piece).ratio() for piece in pieces
    )

  best = sorted(paths, key=likeness, reverse=True)[:count]
  return ", ".join(best) if best else "(it has none)"
