"""Recordings of sensors, and the data sets of windows that are cut from them."""
