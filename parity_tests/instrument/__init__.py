"""``twinshard parity``: reads recorded traces, finds where they part, shows it. Needs no JAX.

Reading order: files (a trace), distances and allowed (how far two events are apart, and how far
they may be), diff (two traces), divergence (the first event over its tolerance), logs (rounds and
bytes side by side), verdict (what to try next), results (one comparison as plain data), terminal,
charts and page (to look at), golden (traces of the reference that lie in the repository).
"""
