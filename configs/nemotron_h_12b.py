"""The 12B hybrid that the NVFP4 paper trains.

Claim: none of ours: the model's shape and the policy, to count and to lower.
Command: python -m experiments.train --config=configs/nemotron_h_12b.py \
  --workdir=DIR
Expected: not run. It has never been trained with this code; a test counts its
  parameters and quantised layers by shapes alone. The paper's own run, of 10 T
  tokens, ends slightly more than 1.5 % above the loss of its FP8 baseline.
Cost: not measured; parameters, gradients and moments alone are 197 GB, and the
  runner keeps them on one device.

References:
  NVIDIA, arXiv 2509.25149, section 3 and appendix A; the sizes of Mamba-2 are
  those of the published model's configuration (128 heads of 80).
"""

from configs import base


def get_config():
  """28 Mamba-2, 28 feed-forward, 6 attention; first 2 and last 8 in BF16."""
  config = base.get_config()
  config.policy.first = 2
  config.policy.last = 8
  config.model.name = "hybrid"
  config.model.pattern = "M-M-M-M*-" * 6 + "M-" * 4
  config.model.d = 5120
  config.model.heads = 40
  config.model.kv_heads = 8
  config.model.ffn = 20480
  config.model.mamba_head = 80
  config.model.mamba_state = 128
  config.model.mamba_groups = 8
  config.model.mamba_conv = 4
  config.model.mamba_chunk = 128
  config.model.mamba_expand = 2
  config.model.remat = True
  config.data.vocab = 131072
  config.data.sequence = 8192
  config.optimizer.schedule = "wsd"
  config.optimizer.peak_lr = 4.5e-4
  config.optimizer.final_lr_fraction = 0.01
  config.optimizer.decay_fraction = 0.2
  config.train.batch = 736
  return config
