"""Readers of patients' data, whose clients are hospitals or regions: heart disease and breast cancer."""
