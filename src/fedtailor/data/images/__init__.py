"""Data sets of images, and the readers of their publishers' files."""
