"""Mosaic GPU kernels. None yet: the reference backend serves every device."""
