"""Experiments: training and comparing recipes on real text."""
