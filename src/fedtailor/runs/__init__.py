"""What a run saves: the `Run` object, its records, its folder on disk, and the checkpoints to resume it from."""
