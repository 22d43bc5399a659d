"""Runs in trackers, each by its own library."""
