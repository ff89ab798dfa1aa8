"""Checkpoints: commit, verify, resume, also with another number of shards."""
