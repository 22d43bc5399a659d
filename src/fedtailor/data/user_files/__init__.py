"""Readers of the user's own clients: folders, data sets of PFLlib, and data sets of Hugging Face."""
