"""Mosaic GPU kernels: quantise, amax, decode. See README.md."""
