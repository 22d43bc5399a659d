"""What users ask for: experiment files, command-line flags, sweeps, deployments, and resuming a run from its folder."""
