"""Tools for comparing the two cores; importable, so that users can run them on their models.

Reading order: ulps and tolerances (what "the same" means), names and the two bridges (how
values travel), codec, pool and rank_main (torch ranks that live as long as the session),
mutants (faults that the comparisons must notice).
"""
