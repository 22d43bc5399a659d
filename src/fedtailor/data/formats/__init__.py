"""Readers of untrusted files, one per format: sizes are checked before memory is allocated, and no code is executed."""
