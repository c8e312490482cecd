"""Models built from grid-parallel layers."""
