"""Random texts, tokenizers, shard sizes and sample orders, against plain Python."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from word_tokens import END, by_words

from hpctrain.data import SampleOrder, ShardedTokens, pack
from hpctrain.randomness import RngKey
from hpctrain.shard import split

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
WORDS = ("alpha", "beta", "gamma", "delta")


def packed(folder, documents, tokenizer, shard_tokens):
    files = [Path(folder, f"{number}.txt") for number in range(len(documents))]
    for file, document in zip(files, documents):
        file.write_bytes(document.encode())
    pack([str(file) for file in files], Path(folder, "data.h5"), tokenizer, shard_tokens)
    return ShardedTokens(Path(folder, "data.h5"))


def check_ranges(data, true, numbers):
    """All of it, and a range between any two numbers."""
    assert data.read(0, data.tokens).tolist() == true
    places = sorted(number % (len(true) + 1) for number in numbers)
    for start, stop in zip(places, places[1:]):
        assert data.read(start, stop - start).tolist() == true[start:stop]


@given(st.lists(TEXT, min_size=1, max_size=3), st.integers(12, 100), st.lists(st.integers(0, 10**6), max_size=6))
def test_any_text_comes_back(documents, shard_tokens, numbers):
    with tempfile.TemporaryDirectory() as folder:
        data = packed(folder, documents, None, shard_tokens)
        true = [token for document in documents for token in (*document.encode(), 256)]
        check_ranges(data, true, numbers)
        assert data.tokenizer.decode(data.read(0, data.tokens)) == "".join(documents)


@given(st.data(), st.integers(1, 30), st.lists(st.integers(0, 10**6), max_size=6))
def test_any_ids_come_back(draw, shard_tokens, numbers):
    """Of tokenizers with gaps, some of whose ids need four bytes."""
    ids = draw.draw(st.lists(st.integers(0, 2**17) | st.integers(0, 9), min_size=5, max_size=5, unique=True))
    known = dict(zip((*WORDS, END), ids))
    documents = draw.draw(st.lists(st.lists(st.sampled_from(WORDS), max_size=12), min_size=1, max_size=4))
    with tempfile.TemporaryDirectory() as folder:
        data = packed(folder, [" ".join(document) for document in documents], by_words(known), shard_tokens)
        true = [known[word] for document in documents for word in (*document, END)]
        check_ranges(data, true, numbers)
        assert data.vocabulary == max(ids) + 1
        words = [word for document in documents for word in document]
        assert data.tokenizer.decode(true) == " ".join(words)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 10**9))
def test_every_epoch_holds_each_sample_once(samples, seed, epoch):
    order = SampleOrder(samples, RngKey(seed, "order"))
    assert sorted(order[epoch * samples : (epoch + 1) * samples].tolist()) == list(range(samples))


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 6), st.integers(0, 600), st.integers(1, 5))
def test_no_grid_changes_the_order(samples, batch, replicas, first, steps):
    """What the replicas read of some steps, each in an order of its own making, is one stretch of the sequence."""
    parts = [split(batch, replicas, rank) for rank in range(replicas)]
    orders = [SampleOrder(samples, RngKey(7, "order")) for _ in range(replicas)]
    read = [
        order[start * batch : (start + 1) * batch][part].tolist()
        for start in range(first, first + steps)
        for order, part in zip(orders, parts)
    ]
    whole = SampleOrder(samples, RngKey(7, "order"))[first * batch : (first + steps) * batch]
    assert np.concatenate(read).tolist() == whole.tolist()
