"""What a run will take on a cluster that is not here: arithmetic alone, without torch."""
