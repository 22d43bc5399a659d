"""Real federations on Flower: the same methods between machines. Needs the extra `flower`."""
