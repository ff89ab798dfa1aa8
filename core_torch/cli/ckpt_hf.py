"""``twinshard ckpt export`` and ``ckpt import``: models in the files of Hugging Face."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from core_torch.cli.ckpt_hf_options import CkptExportOptions, CkptImportOptions
from core_torch.cli.run_folder import CONFIG, config_of
from core_torch.config import DataConfig, RunConfig, TrainConfig
from core_torch.config_file import to_toml
from core_torch.errors import EXIT_OK, ConfigError, DataError
from core_torch.report.text import human_bytes, human_count, model_title, one_line


def run(options: Any, words: list[str]) -> int:
    """Exports a run's model, or writes the configuration of a run that begins with one.

    Args:
        options: of one of the two commands.
        words: the run's folder, or the model's.

    Raises:
        TwinshardError: something is missing, damaged, or not computed by Twinshard.
    """
    if isinstance(options, CkptExportOptions):
        return export(options, Path(words[0]))
    assert isinstance(options, CkptImportOptions)
    return import_model(options, Path(words[0]))


def export(options: CkptExportOptions, folder: Path) -> int:
    """Writes the model of a run for transformers, and says what was written."""
    import torch

    from core_torch.checkpoint.commit import TOKENIZER
    from core_torch.checkpoint.sound import find
    from core_torch.checkpoint.stream import saved_model
    from core_torch.data.tokenizer import load_tokenizer
    from core_torch.hf.names import places
    from core_torch.hf.write import write_folder

    config = config_of(folder)
    tokenizer = load_tokenizer(find(folder, options.step) / TOKENIZER)
    vocabulary = config.model.vocabulary or tokenizer.vocabulary
    name = config.train.dtype if options.dtype == "same" else options.dtype
    expected = {n: place.shape for n, place in places(config.model, vocabulary).items()}
    with saved_model(folder, options.step, expected) as read:
        written = write_folder(
            Path(options.out),
            config.model,
            vocabulary,
            read,
            dtype=getattr(torch, name),
            tokenizer=tokenizer,
            max_shard_bytes=options.max_shard_bytes,
        )
    total = human_bytes(sum(path.stat().st_size for path in written))
    print(f"{one_line(options.out)}: {total} in {name}")
    for path in written:
        print(f"  {path.name}")
    return EXIT_OK


def import_model(options: CkptImportOptions, source: Path) -> int:
    """Checks a model's folder and writes RUN/config.toml; the weights stay where they are.

    Raises:
        ConfigError: there is a run already, or config.json asks for what Twinshard does not do.
        CheckpointError: the folder's files are missing, damaged or do not fit each other.
    """
    from core_torch.hf.folder import HfFolder

    target = Path(options.run)
    if (target / CONFIG).exists():
        raise ConfigError(f"{options.run} holds a run already", next="another --run")
    found = HfFolder(source.absolute())
    tokenizer, notes = _tokenizer(found.tokenizer, found.model.vocabulary)
    data = DataConfig()
    config = RunConfig(
        run=options.run,
        model=found.model,
        data=dataclasses.replace(
            data, tokenizer=tokenizer, sequence=min(data.sequence, found.model.context)
        ),
        train=TrainConfig(init=str(found.path)),
    )
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    (target / CONFIG).write_text(to_toml(config), encoding="utf-8")
    model = found.model
    dtype = found.dtype or "a dtype that config.json does not say"
    print(
        f"{one_line(str(source))}: {model_title(model.kind, model.layers, model.dim)}, "
        f"{human_count(found.parameters)} parameters, {model.vocabulary} token ids, in {dtype}"
    )
    for note in [*found.notes, *notes]:
        print(f"  note:   {one_line(note)}")
    print(f"  next:   twinshard train {shlex.quote(str(target / CONFIG))} --data.path TEXT")
    return EXIT_OK


def _tokenizer(path: Path | None, vocabulary: int) -> tuple[str, list[str]]:
    """What data.tokenizer is to be, and what a reader should know about it."""
    from core_torch.data.tokenizer import ByteTokenizer, load_tokenizer

    if path is None:
        name, known = "byte", ByteTokenizer.vocabulary
        notes = ["there is no tokenizer.json: text is read as bytes, unless --data.tokenizer"]
    else:
        try:
            name, known, notes = str(path), load_tokenizer(path).vocabulary, []
        except DataError as error:
            name, known, notes = "byte", ByteTokenizer.vocabulary, [f"{error.what}; bytes instead"]
    if known > vocabulary:
        notes.append(f"the tokenizer has {known} ids, more than the model: name another")
    return name, notes
