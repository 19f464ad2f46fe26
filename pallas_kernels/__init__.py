"""Mosaic GPU kernels: quantise, amax, decode, multiply. See README.md."""
