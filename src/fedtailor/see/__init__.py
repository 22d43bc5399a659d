"""Runs to look at: figures, a report, a live page. All of it reads runs' folders; nothing touches training."""
