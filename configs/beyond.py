"""Recipes beyond the paper's on the small hybrid.

Claim: some of them come closer to BF16 than the paper's.
Command: python -m experiments.compare --config=configs/beyond.py \
  --config.data.path=CORPUS --workdir=DIR
Corpus: as configs/transformer.py.
Expected: docs/results.md.
Cost: docs/results.md; made for one GPU.
"""

from configs import hybrid


def get_config():
  """configs/hybrid.py under each recipe."""
  config = hybrid.get_config()
  config.compare.recipes = ",".join(
    (
      "bf16",
      "nvfp4",
      "nvfp4_fp8_exact",
      "nvfp4_four_over_six",
      "nvfp4_weights_1x16",
      "nvfp4_scale_guard",
      "nvfp4_row_scale",
      "nvfp4_ms_eden",
      "nvfp4_quartet_ii",
    )
  )
  return config
