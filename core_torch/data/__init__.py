"""Text to token batches; NumPy only, no torch.

``corpus`` reads text and prepares a run's folder, ``tokenizer`` turns text into ids and back,
``token_file`` keeps ids on disk, ``batches`` says which tokens a rank sees at which step.
"""
