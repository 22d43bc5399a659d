"""Compare finished runs: statistics, verdicts in words, and tables."""
