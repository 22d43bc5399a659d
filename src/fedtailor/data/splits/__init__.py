"""Splits of samples into clients: partitions, natural owners, and the user's own lists of indices."""
