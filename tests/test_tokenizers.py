"""Tokenizer files as they are found: ids with gaps, limits on the length of a text, words that are not known."""

import re

import numpy as np
import pytest
from word_tokens import END, by_words

from hpctrain.data import ShardedTokens, pack
from hpctrain.data.tokenizers import ByteTokenizer, tokenizer_from_option


@pytest.mark.parametrize(
    ("largest", "dtype"), [(40, "uint16"), (65_535, "uint16"), (65_536, "uint32"), (70_000, "uint32")]
)
def test_ids_may_have_gaps(tmp_path, largest, dtype):
    """The vocabulary is the largest id and one, and so is the type that holds all."""
    tokenizer = by_words({"one": 1, "two": 7, END: largest})
    (tmp_path / "text.txt").write_text("one two\ntwo")
    pack([str(tmp_path / "text.txt")], tmp_path / "data.h5", tokenizer)
    data = ShardedTokens(tmp_path / "data.h5")
    assert (data.vocabulary, data.end_of_document) == (largest + 1, largest)
    assert data.read(0, data.tokens).tolist() == [1, 7, 7, largest]
    assert data._index.dtype == dtype
    assert data.tokenizer.decode([1, 2, 7, largest]) == "one two"


def test_ids_outside_the_vocabulary_are_not_stored(tmp_path):
    """Whatever tokenizer is given to `pack`; nothing is left of the packing."""
    (tmp_path / "text.txt").write_text("text")

    class Wrong(ByteTokenizer):
        def encode(self, text):
            return np.array(ids)

    for ids in ([1, 257], [70_000], [-1, 5]):
        with pytest.raises(ValueError, match=re.escape(f"the ids {min(ids)} to {max(ids)}, which must lie below its")):
            pack([str(tmp_path / "text.txt")], tmp_path / "data.h5", Wrong())
    Wrong.vocabulary = 256
    with pytest.raises(ValueError, match="vocabulary must be above its end_of_document = 256, .* got 256"):
        pack([str(tmp_path / "text.txt")], tmp_path / "data.h5", Wrong())
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_file_that_limits_the_length(tmp_path):
    """Of a model's input: a corpus is packed whole all the same, and nothing is added to it."""
    limits = {
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 100}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 9,
            "pad_type_id": 0, "pad_token": END,
        },
    }  # fmt: skip
    assert by_words({"one": 1, END: 9}, **limits).encode("one " * 10).tolist() == [1] * 10


def test_a_word_that_is_not_known(tmp_path):
    (tmp_path / "text.txt").write_text("one three")
    with pytest.raises(ValueError, match="cannot encode a text that starts with 'one three': .*Missing"):
        pack([str(tmp_path / "text.txt")], tmp_path / "data.h5", by_words({"one": 1, END: 2}))


def test_a_sentencepiece_model(tmp_path):
    """It is no text at all."""
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02\n\x0b\n\x04\xff\xfe")
    with pytest.raises(ValueError, match=r"which .*tokenizer.model is not, as it is no UTF-8 text; if it is a Sentenc"):
        tokenizer_from_option(tmp_path / "tokenizer.model")


def test_an_added_token_that_the_model_numbers_otherwise():
    added = {"id": 9, "content": END, "special": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    assert by_words({"one": 1, END: 9}, added_tokens=[added]).end_of_document == 9
    with pytest.raises(ValueError, match=re.escape(f"says that '{END}' is token 9, its model makes it 2")):
        by_words({"one": 1, END: 2}, added_tokens=[added])
