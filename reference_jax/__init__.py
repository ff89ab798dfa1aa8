"""The readable JAX reference: what training must compute, in flat chapters.

Reading order: mesh, model, data, adamw, schedules, fsdp, ddp, sync/penalty, sync/outer,
local_sgd, diloco, edit, ledger, train. Every chapter opens with what you learn in it, and
``python -m reference_jax.<chapter>`` shows it in a few seconds on one CPU device.

`sync/penalty`, `sync/outer`, `adamw` and `schedules` mirror the files of the same name in
core_torch function by function. Nothing here imports core_torch: an oracle must not share
code with what it checks.
"""
