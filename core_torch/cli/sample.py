"""``twinshard sample``: text from the model of a run, in this process."""

from pathlib import Path

import torch

from core_torch.checkpoint.commit import TOKENIZER, latest
from core_torch.checkpoint.export import load_model
from core_torch.cli.options import SampleOptions
from core_torch.cli.run_folder import config_of
from core_torch.data.tokenizer import Tokenizer, load_tokenizer
from core_torch.errors import EXIT_OK, CheckpointError, ConfigError
from core_torch.models import Model, generate
from core_torch.report.text import sanitise


def run(options: SampleOptions, words: list[str]) -> int:
    """Prints the prompt and what the model says after it.

    Args:
        options: what to write.
        words: the run's folder.

    Raises:
        TwinshardError: no run, nothing committed yet, or files that do not fit each other.
    """
    folder = Path(words[0])
    config = config_of(folder, build=options.build)
    commit = latest(folder)
    if commit is None:
        raise CheckpointError(
            f"{folder} has no committed step",
            likely="the run has not come that far",
            next="train on; --checkpoint.every N commits on the way",
        )
    tokenizer = load_tokenizer(commit / TOKENIZER)
    model = load_model(folder, config, tokenizer.vocabulary)
    print(sanitise(options.prompt + continue_text(model, tokenizer, options)))
    return EXIT_OK


def continue_text(model: Model, tokenizer: Tokenizer, options: SampleOptions) -> str:
    """What the model says after the prompt, without the prompt.

    Raises:
        ConfigError: the tokenizer makes no token of the prompt.
    """
    ids = torch.from_numpy(tokenizer.encode(options.prompt)).to(torch.int64)
    if not len(ids):
        raise ConfigError(f"prompt: the tokenizer makes no token of {options.prompt!r}")
    longer = generate(
        model,
        ids,
        count=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    return tokenizer.decode(longer[len(ids) :].numpy())
