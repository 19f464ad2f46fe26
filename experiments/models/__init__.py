"""Models that experiments train."""
