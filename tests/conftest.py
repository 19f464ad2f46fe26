"""What must be set before JAX starts."""

import os

# Simulated warpgroups wait for each other inside XLA's thread pool, which holds
# as many threads as this names, or else as there are cores.
os.environ.setdefault("NPROC", "16")
