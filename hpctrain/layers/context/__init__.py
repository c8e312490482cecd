"""Attention of sequences that are cut over ranks: Ulysses, ring, and both."""
