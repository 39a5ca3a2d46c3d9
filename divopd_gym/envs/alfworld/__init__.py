"""ALFWorld: household tasks in text, from the benchmark's games or in houses made on the spot."""
