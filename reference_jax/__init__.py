"""The readable JAX reference: what training must compute, in flat chapters.

Seventeen chapters, in reading order: mesh, model, data, fsdp, ledger, ddp, exchange, local_sgd,
diloco, streaming, co2, edit, clock, aedit, methods, train, simple_fsdp. Each opens with what you
learn in it, its equations, and who communicates what, and ``python -m reference_jax.<chapter>``
shows it in a few seconds on one CPU.

They rest on five files of formulas, `adamw`, `schedules`, `sync/penalty`, `sync/outer` and
`sync/wire`, which mirror the files of the same name in core_torch function by function. Nothing
here imports core_torch: an oracle must not share code with what it checks.
"""
