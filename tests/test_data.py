"""Packing and reading tokens: what goes in comes out, and nothing broken is ever read."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
import word_tokens

from hpctrain import files
from hpctrain.data import SampleOrder, ShardedTokens, pack, shards
from hpctrain.data.chunks import AVAILABLE
from hpctrain.data.corpus import read_text, text_files
from hpctrain.data.index import Index
from hpctrain.data.tokenizers import FileTokenizer
from hpctrain.randomness import RngKey

END = 256


@pytest.fixture
def texts(tmp_path):
    """Three documents, one of them empty, one not ASCII."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("hello\nworld\n")
    (folder / "b.txt").write_text("")
    (folder / "c.md").write_text("Größe ≥ 1\n", encoding="utf-8")
    (folder / "ignored.bin").write_bytes(b"\xff\xfe")
    return folder


def expected_tokens(folder):
    tokens = []
    for name in ("a.txt", "b.txt", "c.md"):
        tokens += [*(folder / name).read_bytes(), END]
    return tokens


@pytest.mark.parametrize("shard_tokens", [1, 5, 12, 10_000])
def test_what_goes_in_comes_out(texts, tmp_path, shard_tokens):
    counts = pack([str(texts)], tmp_path / "data.h5", shard_tokens=shard_tokens)
    tokens = expected_tokens(texts)
    shards = -(-len(tokens) // shard_tokens)
    assert counts == {"files": 3, "documents": 3, "tokens": len(tokens), "shards": shards}
    data = ShardedTokens(tmp_path / "data.h5")
    assert (data.tokens, data.vocabulary, data.end_of_document) == (len(tokens), 257, END)
    assert data.read(0, len(tokens)).tolist() == tokens
    for start in range(len(tokens)):
        for count in (0, 1, 7):
            if start + count <= len(tokens):
                assert data.read(start, count).tolist() == tokens[start : start + count]
    assert data.tokenizer.decode(data.read(14, 14)) == "Größe ≥ 1\n"
    with pytest.raises(IndexError, match=f"tokens {len(tokens)} to {len(tokens) + 1} of {len(tokens)}"):
        data.read(len(tokens), 1)


def test_documents_are_marked(texts, tmp_path):
    pack([str(texts)], tmp_path / "data.h5", shard_tokens=20)
    starts = []
    for number, shard in enumerate(sorted(tmp_path.glob("data-*.h5"))):
        with h5py.File(shard) as file:
            starts += [20 * number + start for start in file["documents"][:]]
    assert starts == [0, 13, 14]


def test_every_dataset_has_a_checksum(texts, tmp_path):
    pack([str(texts)], tmp_path / "data.h5")
    for path in tmp_path.glob("data*.h5"):
        with h5py.File(path) as file:
            assert all(dataset.fletcher32 and dataset.chunks for dataset in file.values())


def flipped(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_no_flipped_bit_is_read(tmp_path):
    """One bit at 200 places of the index and the shard: an error that names the file, or the true tokens."""
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 200)
    pack([str(tmp_path / "text.txt")], tmp_path / "data.h5")
    true = ShardedTokens(tmp_path / "data.h5").read(0, 9001)
    (shard,) = tmp_path.glob("data-*.h5")
    generator = np.random.default_rng(0)
    caught = 0
    for path in (tmp_path / "data.h5", shard):
        for offset in generator.integers(0, path.stat().st_size, 100):
            flipped(path, offset)
            try:
                data = ShardedTokens(tmp_path / "data.h5")
                assert np.array_equal(data.read(0, 9001), true)  # the bit was of no meaning
                data.close()
            except ValueError as error:
                assert str(tmp_path / "data") in str(error)
                caught += 1
            flipped(path, offset)
    assert caught > 50


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index, shard: index.unlink(), "data.h5 does not exist"),
        (lambda index, shard: os.truncate(index, 1000), "data.h5 cannot be opened as HDF5, it may be truncated"),
        (lambda index, shard: index.write_bytes(b""), "data.h5 cannot be opened as HDF5"),
        (lambda index, shard: shard.unlink(), "shard .*data-.* is missing"),
        (lambda index, shard: os.truncate(shard, 2000), "shard .*data-.* has 2000 bytes instead of .* truncated"),
        (lambda index, shard: h5py.File(index, "w").close(), "data.h5 is not an index of packed tokens"),
    ],
)
def test_damage_is_named(texts, tmp_path, damage, message):
    pack([str(texts)], tmp_path / "data.h5")
    (shard,) = tmp_path.glob("data-*.h5")
    damage(tmp_path / "data.h5", shard)
    with pytest.raises(ValueError, match=message):
        ShardedTokens(tmp_path / "data.h5")


def test_a_folder_in_place_of_the_index(tmp_path):
    with pytest.raises(ValueError, match="is no file; restore it, or pack the text again"):
        ShardedTokens(tmp_path)


def test_a_shard_of_another_packing_is_refused(texts, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        pack([str(texts)], tmp_path / name / "data.h5")
    mine, other = (next((tmp_path / name).glob("data-*.h5")) for name in ("one", "two"))
    mine.write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match="belongs to another packing"):
        ShardedTokens(tmp_path / "one" / "data.h5").read(0, 1)


@pytest.mark.parametrize("driver", ["chunks", "sec2"])
def test_shards_may_be_many(texts, tmp_path, monkeypatch, driver):
    """Few are open at a time, those used last; too few files that a process may open are not called corruption."""
    monkeypatch.setattr(shards, "OPEN", 3)
    monkeypatch.setattr(shards, "CHUNKS_AVAILABLE", driver == "chunks")
    counts = pack([str(texts)], tmp_path / "data.h5", shard_tokens=1)
    data = ShardedTokens(tmp_path / "data.h5")
    assert data.driver == driver or h5py.get_config().mpi
    true, limits, open_now = expected_tokens(texts), resource.getrlimit(resource.RLIMIT_NOFILE), open_files()
    for places in (range(counts["tokens"]), [5, 6, 7] * 20, range(counts["tokens"] - 1, -1, -1)):
        for place in places:
            data.will_need(place, 1)
            assert data.read(place, 1).tolist() == [true[place]]
            assert open_files() <= open_now + 3
    data.close()
    assert open_files() == open_now
    monkeypatch.setattr(shards, "OPEN", 1000)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 8, limits[1]))
        with pytest.raises(ValueError, match=r"data-.*.h5 cannot be read: .*[Tt]oo many open files"):
            data.read(0, data.tokens)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        data.close()


@pytest.mark.parametrize("driver", ["chunks", "sec2"])
def test_a_shard_that_is_taken_away(texts, tmp_path, monkeypatch, driver):
    """It is not called corrupt."""
    monkeypatch.setattr(shards, "CHUNKS_AVAILABLE", driver == "chunks")
    pack([str(texts)], tmp_path / "data.h5")
    data = ShardedTokens(tmp_path / "data.h5")
    (shard,) = tmp_path.glob("data-*.h5")
    shard.unlink()
    with pytest.raises(ValueError, match=f"^shard {shard} of {tmp_path}/data.h5 is missing; restore it"):
        data.read(0, 1)


def test_the_shards_used_last_stay_open(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "OPEN", 2)
    pack([str(texts)], tmp_path / "data.h5", shard_tokens=1)
    opened, descriptor = [], ShardedTokens._descriptor
    monkeypatch.setattr(ShardedTokens, "_descriptor", lambda self, n: (opened.append(n), descriptor(self, n))[1])
    data = ShardedTokens(tmp_path / "data.h5")
    if data.driver != "chunks":
        pytest.skip("reads through HDF5")
    for place in (0, 1, 0, 2, 0, 3, 0):
        data.read(place, 1)
    data.close()
    assert opened == [0, 1, 2, 3]


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_a_shards_path_is_built_once(texts, tmp_path, monkeypatch):
    """Of every read it would be a tenth, of a sample of 100 tokens."""
    pack([str(texts)], tmp_path / "data.h5", shard_tokens=5)
    built, name = [], Index.name
    monkeypatch.setattr(Index, "name", lambda self, number: (built.append(number), name(self, number))[1])
    data = ShardedTokens(tmp_path / "data.h5")
    for _ in range(3):
        data.read(0, data.tokens)
        data.will_need(0, data.tokens)
    assert built == [*range(-(-data.tokens // 5))]


def test_all_shards_of_a_packing_share_their_memory(texts, tmp_path):
    """A thousand shards must not take a megabyte each."""
    counts = pack([str(texts)], tmp_path / "data.h5", shard_tokens=1)
    data = ShardedTokens(tmp_path / "data.h5")
    data.read(0, 2)
    tracemalloc.start()
    data.read(0, counts["tokens"])
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 3000 * (counts["tokens"] - 2)


def test_packing_again_replaces_the_old(texts, tmp_path):
    pack([str(texts)], tmp_path / "data.h5", shard_tokens=5)
    pack([str(texts / "a.txt")], tmp_path / "data.h5")
    assert ShardedTokens(tmp_path / "data.h5").tokens == 13
    assert len(list(tmp_path.glob("data*"))) == 2


def test_a_failed_packing_leaves_nothing_and_keeps_the_old(texts, tmp_path):
    pack([str(texts)], tmp_path / "data.h5")
    before = sorted(tmp_path.glob("data*"))
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good" * 300_000 + b"\xff")
    with pytest.raises(ValueError, match=r"bad.txt is not UTF-8 text: byte 1200000 cannot be decoded"):
        pack([str(texts), str(bad)], tmp_path / "data.h5", shard_tokens=1000)
    assert sorted(tmp_path.glob("data*")) == before
    assert ShardedTokens(tmp_path / "data.h5").tokens == len(expected_tokens(texts))


def test_a_killed_packing_leaves_nothing_that_looks_complete(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("0123456789abcde\n" * 2_000_000)
    command = [sys.executable, "-c", "import sys; from hpctrain.cli import main; sys.exit(main(sys.argv[1:]))"]
    arguments = ["pack", str(text), "-o", str(tmp_path / "data.h5"), "--shard-tokens", "100000"]
    job = subprocess.Popen([*command, *arguments])
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("data-*.h5"))) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    job.send_signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    assert not (tmp_path / "data.h5").exists()
    with pytest.raises(ValueError, match="does not exist"):
        ShardedTokens(tmp_path / "data.h5")


def test_packings_at_once(texts, tmp_path, monkeypatch):
    """Jobs that start together find no data and all pack them: each ends well, and what is there is whole."""
    from hpctrain.data import pack as function

    module, output, others = sys.modules[function.__module__], tmp_path / "data.h5", []
    publish = module._publish

    def meanwhile(part, final):
        if final == output and not others:
            others.append(None)
            others[0] = pack([str(texts)], output)
        publish(part, final)

    monkeypatch.setattr(module, "_publish", meanwhile)
    counts = pack([str(texts)], output)
    assert counts == others[0]
    before = sorted(tmp_path.iterdir())
    assert ShardedTokens(output).read(0, counts["tokens"]).tolist() == expected_tokens(texts)
    with pytest.raises(FileExistsError, match="data.h5 exists"):
        pack([str(texts)], output, replace=False)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("links", [True, False])
def test_packings_of_jobs_that_end_at_once(texts, tmp_path, monkeypatch, links):
    """The first counts, also where the file system has no links."""
    output, sync, index = tmp_path / "data.h5", files.sync, []

    def meanwhile(path):
        if str(path).endswith("-index.h5.part"):
            monkeypatch.setattr(files, "sync", sync)
            pack([str(texts)], output, replace=False)
            index.append(output.read_bytes())
        sync(path)

    def link(source, to):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(files, "sync", meanwhile)
    if not links:
        monkeypatch.setattr(os, "link", link)
    with pytest.raises(FileExistsError, match="data.h5 exists"):
        pack([str(texts)], output, replace=False)
    assert index == [output.read_bytes()]
    assert len([*tmp_path.glob("data*")]) == 2  # the index and a shard
    assert ShardedTokens(output).tokens == len(expected_tokens(texts))


def test_the_tokenizer_of_data_that_were_packed_anew(texts, tmp_path):
    """By the same, as jobs that start together do, or by another."""
    output = tmp_path / "data.h5"
    pack([str(texts)], output)
    same, other = ShardedTokens(output), ShardedTokens(output)
    pack([str(texts)], output)
    assert same.tokenizer.vocabulary == END + 1
    pack([str(texts)], output, word_tokens.by_words({word_tokens.END: 0, "no such word": 1}))
    with pytest.raises(ValueError, match="data.h5 was packed anew, by another tokenizer"):
        _ = other.tokenizer


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "no text given"),
        (["nowhere.txt"], "nowhere.txt does not exist; name files, directories or python-stdlib"),
        (["EMPTY"], "holds no text files"),
    ],
)
def test_missing_text_is_refused(tmp_path, sources, message):
    (tmp_path / "EMPTY").mkdir()
    sources = [str(tmp_path / s) if s == "EMPTY" else s for s in sources]
    with pytest.raises(ValueError, match=message):
        pack(sources, tmp_path / "data.h5")


@pytest.mark.parametrize("source", ["/etc/hosts", Path("/etc/hosts")])
def test_one_source_is_no_list(tmp_path, source):
    """Nor are the letters of its name sources, of which / is all there is."""
    with pytest.raises(ValueError, match=r"sources must be a list of .*, got /etc/hosts; write \['/etc/hosts'\]"):
        pack(source, tmp_path / "data.h5")


def test_links_to_folders_are_followed(tmp_path):
    """What is there by several names, or in a loop, is read once."""
    (tmp_path / "corpus/own").mkdir(parents=True)
    (tmp_path / "scratch").mkdir()
    for name in ("corpus/own/a.txt", "scratch/b.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "corpus/far").symlink_to(tmp_path / "scratch")
    (tmp_path / "corpus/near").symlink_to(tmp_path / "corpus/own")
    (tmp_path / "scratch/back").symlink_to(tmp_path / "corpus")
    found = text_files([str(tmp_path / "corpus")])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["corpus/far/b.txt", "corpus/near/a.txt"]


def test_the_standard_library_is_text():
    files = text_files(["python-stdlib"])
    assert len(files) > 100
    assert {f.suffix for f in files} == {".py"}
    assert not any({"test", "site-packages"} & set(f.parts) for f in files)


def test_text_is_read_in_pieces_at_line_ends(tmp_path):
    path = tmp_path / "text.txt"
    text = "".join(f"line {n} ä\n" for n in range(1000)) + "no end"
    path.write_text(text, encoding="utf-8")
    with path.open("rb") as file:
        pieces = list(read_text(file, path, piece=100))
    assert "".join(pieces) == text
    assert len(pieces) > 50
    assert all(piece.endswith("\n") for piece in pieces[:-1])


def test_a_tokenizers_file(texts, tmp_path):
    """Against the library's own encoding."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train([str(texts / "a.txt")], trainer)
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    pack([str(texts / "a.txt")], tmp_path / "data.h5", FileTokenizer(file.read_text()))
    data = ShardedTokens(tmp_path / "data.h5")
    expected = tokenizer.encode((texts / "a.txt").read_text()).ids
    assert data.read(0, data.tokens).tolist() == [*expected, tokenizer.token_to_id("<|endoftext|>")]
    assert data.vocabulary == tokenizer.get_vocab_size()
    with pytest.raises(ValueError, match="bad.json is not a tokenizers JSON file"):
        FileTokenizer("{}", "bad.json")
    with pytest.raises(ValueError, match="has no token to end a document"):
        FileTokenizer(Tokenizer(models.BPE()).to_str())


def test_every_epoch_is_a_shuffle_of_all():
    order = SampleOrder(100, RngKey(3, "order"))
    epochs = [order[100 * e : 100 * (e + 1)].tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert order[50:150].tolist() == epochs[0][50:] + epochs[1][:50]
    assert SampleOrder(100, RngKey(4, "order"))[0:100].tolist() != epochs[0]


def test_driver_is_mpio_exactly_where_h5py_has_it(texts, tmp_path):
    from mpi4py import MPI

    pack([str(texts)], tmp_path / "data.h5")
    data = ShardedTokens(tmp_path / "data.h5", comm=MPI.COMM_SELF)
    assert data.driver == ("mpio" if h5py.get_config().mpi else "chunks" if AVAILABLE else "sec2")
    assert data.read(0, 5).tolist() == list(b"hello")
    assert Path(data.path) == tmp_path / "data.h5"
