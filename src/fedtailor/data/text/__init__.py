"""Texts with natural owners: the roles of plays, and the films of reviews."""
