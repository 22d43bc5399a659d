"""Real data: data sets, partitions, downloads and a user's own folder."""
