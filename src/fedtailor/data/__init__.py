"""Federations of clients: named data sets, partitions, downloads, and readers of users' files."""
