"""Text to token ids and back: bytes by default, or a Hugging Face `tokenizers` file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np


class ByteTokenizer:
    """A token a byte of UTF-8; id 256 ends a document.

    >>> ByteTokenizer().encode("né").tolist(), ByteTokenizer().decode([110, 195, 169, 256])
    ([110, 195, 169], 'né')
    """

    description = "bytes"
    vocabulary = 257
    end_of_document = 256
    end = "<|endoftext|>"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def tokens(self) -> dict[str, int]:
        """The number of each, as text that stands for a byte."""
        return self.huggingface()["model"]["vocab"]

    def huggingface(self) -> dict:
        """The same as a tokenizers JSON file: GPT-2's letters for bytes, and no merges."""
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        letters = dict.fromkeys(range(256)) | {byte: chr(byte) for byte in printable}
        others = iter(range(256, 512))
        vocabulary = {letter or chr(next(others)): byte for byte, letter in letters.items()}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        end = {"id": self.end_of_document, "content": self.end, "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        model = {"type": "BPE", "vocab": vocabulary | {self.end: self.end_of_document}, "merges": []}
        parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
        return {"version": "1.0", **parts, "added_tokens": [end | flags], "pre_tokenizer": level, "decoder": level,
                "model": model}  # fmt: skip


class FileTokenizer:
    """A tokenizer.json of Hugging Face's `tokenizers`. It must have one of END's tokens to end documents.

    Attributes: `description`, the JSON; `vocabulary`, the largest id and one; `end_of_document`, and `end`, its text.

    Raises:
        ValueError: when the file is no tokenizer, lacks such a token, or contradicts itself about an id.
    """

    END = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

    def __init__(self, description: str, name: str = "tokenizer"):
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ValueError("tokenizer files need the tokenizers package: install hpctrain[tokenizers]") from error
        try:
            self._tokenizer = Tokenizer.from_str(description)
        except BaseException as error:  # the library raises bare Exception, and panics, which are not even that
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise ValueError(f"{name} is not a tokenizers JSON file: {error}") from error
        for token in json.loads(description).get("added_tokens") or ():
            content, declared = token["content"], token["id"]
            found = self._tokenizer.token_to_id(content)
            if found != declared:  # the library numbers it anew, and is silent
                raise ValueError(f"{name} says that {content!r} is token {declared}, its model makes it {found}")
        # a model's tokenizer may be set to cut a text to the model's length, or to fill it up
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.description = description
        # ids may have gaps, so that the largest is not their number
        self.vocabulary = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        numbers = {token: self._tokenizer.token_to_id(token) for token in self.END}
        known = {token: number for token, number in numbers.items() if number is not None}
        if not known:
            raise ValueError(f"{name} has no token to end a document; add one of {', '.join(self.END)}")
        self.end, self.end_of_document = next(iter(known.items()))

    def encode(self, text: str) -> np.ndarray:
        try:
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
        except BaseException as error:  # likewise; of a word that it does not know, among others
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise ValueError(f"the tokenizer cannot encode a text that starts with {text[:40]!r}: {error}") from error

    def huggingface(self) -> dict:
        return json.loads(self.description)

    def tokens(self) -> dict[str, int]:
        """The number of each."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


Tokenizer = ByteTokenizer | FileTokenizer


def tokenizer_from_description(description: str, name: str = "tokenizer") -> Tokenizer:
    return ByteTokenizer() if description == "bytes" else FileTokenizer(description, name)


def tokenizer_from_option(option: str | os.PathLike) -> Tokenizer:
    """ "bytes", or the path of a tokenizer file. Raises ValueError where there is none, or as `FileTokenizer`."""
    if option == "bytes":
        return ByteTokenizer()
    try:
        return FileTokenizer(Path(option).read_text(encoding="utf-8"), name=str(option))
    except OSError as error:
        raise ValueError(f'data.tokenizer must be "bytes" or a tokenizers JSON file: {error}') from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f'data.tokenizer must be "bytes" or a tokenizers JSON file, which {option} is not, as it is no UTF-8 text; '
            "if it is a SentencePiece model, transformers writes its tokenizer.json: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        ) from error
