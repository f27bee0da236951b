"""A run of a conversion: its processes, workers and working directory, and what of it is done."""
