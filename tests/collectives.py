"""What travels between the devices of a compiled program."""

import re

KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def collectives(text: str) -> list[str]:
  """What the collectives of a program give, with their kinds.

  >>> text = "%a = (f32[8]{0}, u8[4,2]{1,0}) all-gather-done(%b)"
  >>> collectives(text), collectives("%a = f32[] all-reduce(%b)")
  (['all-gather f32[8]', 'all-gather u8[4,2]'], ['all-reduce f32[]'])
  """
  found = re.findall(rf"= (.*?) ({KINDS})(?:-done)?\(", text)
  return sorted(
    f"{kind} {part}"
    for parts, kind in found
    for part in re.findall(r"\w+\[[\d,]*\]", parts)
  )
