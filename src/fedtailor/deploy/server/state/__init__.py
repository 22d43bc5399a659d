"""What an operator sees of a running federation: its state, its metrics, and its health check."""
