"""A tokenizer of whole words."""

import json

from hpctrain.data.tokenizers import FileTokenizer

END = "<|endoftext|>"


def by_words(ids, **more):
    """A tokenizer file of whole words, with these ids; END is one of them."""
    end = {"id": ids[END], "content": END, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {"type": "WordLevel", "vocab": ids, "unk_token": "no such word"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    made = {"version": "1.0", **parts, "added_tokens": [end | flags], "pre_tokenizer": {"type": "Whitespace"}}
    return FileTokenizer(json.dumps(made | {"model": model} | more))
