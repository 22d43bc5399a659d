"""The public port of the server: the reverse proxy, and the limits of its connections."""
