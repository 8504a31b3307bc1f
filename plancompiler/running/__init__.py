"""Sessions: jobs run by ranks as threads, as processes, or as workers of a cluster."""
