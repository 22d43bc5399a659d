"""Base classes and mathematics that several methods share."""
