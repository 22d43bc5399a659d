"""Grids of settings: which there are, carrying them out and going on, which are best."""
