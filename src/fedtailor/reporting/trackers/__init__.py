"""Sends runs to experiment trackers: TensorBoard, MLflow, and W&B."""
