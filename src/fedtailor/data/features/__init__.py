"""Data sets of features that were computed from audio, video, images, and texts."""
