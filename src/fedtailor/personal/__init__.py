"""Clients' own models, to use: as modules, on new samples, as files for other programs."""
