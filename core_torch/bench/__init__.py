"""Benchmarks: a link of given rate and delay, the variants that are compared, what is measured."""
