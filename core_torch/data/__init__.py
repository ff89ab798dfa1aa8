"""Text to token batches; NumPy only, no torch.

``sources`` reads documents, ``tokenizer`` turns text into ids and back, ``token_file`` keeps ids
on disk. ``corpus`` prepares a run's own folder, ``preparing`` one for many runs, which
``prepared`` opens. ``batches`` and ``mixture`` say which tokens a rank sees at which step,
``reading`` gives them.
"""
