"""Archives of data sets: where they are, their download, and the cache of what was read from them."""
