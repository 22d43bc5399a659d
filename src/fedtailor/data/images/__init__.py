"""Readers of published image data sets."""
