"""The paper's ablations on the small hybrid, and healing.

Claim: without random Hadamard transform, stochastic rounding, square blocks of
  weights or BF16 blocks the loss is worse; stochastic rounding in the forward
  pass, and rotations of other products, do harm; healing recovers the loss.
Command: python -m experiments.compare --config=configs/ablations.py \
  --config.data.path=CORPUS --workdir=DIR
Corpus: as configs/transformer.py.
Expected: docs/results.md.
Cost: docs/results.md; made for one GPU.
"""

from configs import hybrid


def get_config():
  """configs/hybrid.py, with one thing changed at a time."""
  config = hybrid.get_config()
  heal = "nvfp4+policy.heal.fraction=0.18"
  config.compare.recipes = ",".join(
    (
      "bf16",
      "nvfp4",
      "nvfp4_no_rht",
      "nvfp4_no_sr",
      "nvfp4_weights_1x16",
      "nvfp4+policy.first=0+policy.last=0",
      heal,
      f"{heal}+policy.heal.gemms=forward",
      f"{heal}+policy.heal.gemms=backward",
      "nvfp4_sr_activations",
      "nvfp4_sr_weights",
      "nvfp4_rht_fprop",
      "nvfp4_rht_dgrad",
      "nvfp4_rht_4",
      "nvfp4_rht_128",
      "nvfp4_rht_unsigned",
    )
  )
  return config
