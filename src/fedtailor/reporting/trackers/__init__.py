"""Sends runs to experiment trackers: TensorBoard and MLflow."""
