"""Train a method on simulated clients: settings, schedule, rounds, evaluation, checkpoints."""
