"""Figures, the HTML report, the live dashboard, and trackers. They read run folders and never affect training."""
