"""The dashboard: a local web page that shows, compares, starts and stops runs (`fedtailor live`)."""
