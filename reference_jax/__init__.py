"""The readable JAX reference: what training must compute, in flat chapters.

Twenty-one chapters, in reading order: mesh, model, data, fsdp, ledger, ddp, exchange, local_sgd,
diloco, streaming, co2, edit, clock, aedit, methods, train, simple_fsdp, manual, tensor_parallel,
trace, handover. Each opens with what you learn in it, its equations, and who communicates what, and
``python -m reference_jax.<chapter>`` shows it in a few seconds on one CPU. docs/reference.md says
how to read them in an afternoon.

They rest on six files of formulas, `adamw`, `schedules`, `sketch`, `sync/penalty`, `sync/outer` and
`sync/wire`, which mirror the files of the same name in core_torch function by function. The other
files say that they are no chapters: shapes of answers, formats on the disk. Nothing here imports
core_torch: an oracle must not share code with what it checks.
"""
