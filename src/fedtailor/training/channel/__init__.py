"""The channel from clients to server: payload size, compression, differential privacy, and leak checks."""
