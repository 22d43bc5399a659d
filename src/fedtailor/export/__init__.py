"""Personal models outside of training: load them as modules, export them to files, and predict with them."""
