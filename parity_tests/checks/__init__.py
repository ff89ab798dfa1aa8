"""Comparisons of the two cores as plain functions, which tests and mutant tests call."""
