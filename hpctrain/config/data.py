"""Options of the data."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain import choices
from hpctrain.config.option import option


@dataclass
class DataConfig:
    path: str = option("", "the index that `hpctrain pack` wrote; with data.text, where to pack to")
    text: list[str] = option(
        [],
        'files, directories or "python-stdlib" (the default without data.path), packed on first use; the text that a '
        "file names does not count where data.path is an override",
    )
    mixture: list[list] = option(
        [], 'in place of them several packed sources and their weights, as [["code.h5", 0.7], ["text.h5", 0.3]]: each '
        "batch is of all, in this proportion; metrics tell the epochs of each", check=choices.check_mixture,
    )  # fmt: skip
    validation_path: str = option("", "packed data to validate on, in place of a part that is held out")
    documents: str = option(
        "packed",
        "packed: tokens attend to all before them in the sequence; masked: to those of their own document alone, where "
        "learned positions start, and what follows its end counts in no loss",
        choices=choices.DOCUMENTS,
    )
    tokenizer: str = option("bytes", '"bytes" or a Hugging Face tokenizers JSON file; only for packing')
    validation: float = option(0.05, "part of the samples of each source that is held out", above=0, below=1)
