"""Llama models in the files of Hugging Face's ``transformers``: config.json and safetensors.

``config`` translates settings, ``names`` tensors, ``folder`` reads a
model's folder, ``write`` makes one. Nothing here needs ``transformers``.
"""
