"""What methods are written with: trees, random numbers, models, metrics, and the `Method` contract."""
