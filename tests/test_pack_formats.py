"""What `hpctrain pack` reads: JSON Lines, Parquet, compressed files; documents for validation; what it leaves out."""

import gzip
import importlib
import json
import os
import tracemalloc

import numpy as np
import pytest
import zstandard
from word_tokens import END, by_words

from hpctrain.cli import main
from hpctrain.data import ShardedTokens, documents, pack
from hpctrain.data.corpus import read_text
from hpctrain.data.documents import Fields
from hpctrain.data.encoding import encoded
from hpctrain.data.pack import validation_output

TEXTS = ["first\nof two lines", "zweiter: größer", "x", "the fourth " * 50, "last"]
FIELDS = Fields("text")


def read(path):
    data = ShardedTokens(path)
    return data.read(0, data.tokens).tolist()


@pytest.fixture
def alone(tmp_path):
    """The tokens of the texts, each packed as a file."""
    folder = tmp_path / "alone"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    assert pack([str(folder)], folder / "data.h5")["documents"] == 5
    return read(folder / "data.h5")


def lines(texts=TEXTS):
    return "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)).encode()


def parquet(path):
    arrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tables.write_table(arrow.table({"id": range(5), "text": TEXTS}), path, row_group_size=2)


WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(lines()),
    "a.json": lambda path: path.write_bytes(lines()),
    "a.ndjson": lambda path: path.write_bytes(lines().rstrip(b"\n")),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(TEXTS[:2])) + gzip.compress(lines(TEXTS[2:]))),
    "a.jsonl.zst": lambda path: path.write_bytes(
        b"".join(zstandard.compress(lines(part)) for part in (TEXTS[:2], TEXTS[2:]))
    ),
    "a.parquet": parquet,
}


@pytest.mark.parametrize("name", WRITERS)
def test_records_are_documents(tmp_path, alone, name):
    WRITERS[name](tmp_path / name)
    assert pack([str(tmp_path / name)], tmp_path / "data.h5", fields=FIELDS)["documents"] == 5
    assert read(tmp_path / "data.h5") == alone


def test_few_rows_of_a_table_are_in_memory(tmp_path):
    arrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tables.write_table(arrow.table({"text": ["x" * 10_000] * 2000}), tmp_path / "a.parquet")
    tracemalloc.start()
    count = sum(1 for _ in documents.documents(tmp_path / "a.parquet", FIELDS, print))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 2000
    assert most < 8e6


def test_compressed_text(tmp_path):
    """As plain; without a field, so are JSON lines."""
    for name, content in (("a.txt", "größer\n" * 300_000), ("b.jsonl", lines().decode())):
        (tmp_path / name).write_text(content, encoding="utf-8")
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
        for of in (name, f"{name}.gz"):
            pack([str(tmp_path / of)], tmp_path / f"{of}.h5")
        assert bytes(read(tmp_path / f"{name}.h5")[:-1]).decode() == content
        assert read(tmp_path / f"{name}.gz.h5") == read(tmp_path / f"{name}.h5")


def test_any_number_of_processes_gives_the_same(tmp_path, monkeypatch):
    """Of inputs of several kinds, in batches much smaller than some of them and larger than others."""
    from hpctrain.data import encoding

    monkeypatch.setattr(encoding, "TOGETHER", 1000)
    for number, count in enumerate((300, 1, 40)):
        (tmp_path / f"{number}.jsonl").write_bytes(
            lines([f"text {n} of {number} " * (n % 7 + 1) for n in range(count)])
        )
    (tmp_path / "3.txt").write_text("plain\n" * 1000)
    sources = [str(tmp_path / name) for name in ("0.jsonl", "1.jsonl", "3.txt", "2.jsonl")]
    found = []
    for processes in (1, 2):
        counts = pack(sources, tmp_path / "data.h5", fields=FIELDS, processes=processes, shard_tokens=5000)
        starts = [_documents(path) for path in sorted(tmp_path.glob("data-*.h5"))]
        found.append((counts, read(tmp_path / "data.h5"), starts))
    assert found[0] == found[1]
    assert found[0][0]["documents"] == 342


WORDS = by_words({END: 0, "a": 1, "no such word": 2})


@pytest.mark.parametrize(("tokenizer", "several"), [(None, False), (WORDS, True)], ids=["bytes", "file"])
def test_processes_of_large_inputs(tmp_path, monkeypatch, tokenizer, several):
    """One a core, where encoding takes longer than sending what is encoded."""
    module = importlib.import_module("hpctrain.data.pack")
    asked = []
    monkeypatch.setattr(module, "LARGE", 2)
    monkeypatch.setattr(module, "encoded", lambda pieces, _, n: asked.append(n) or encoded(pieces, _, 1))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(5))
    for text in ("a", "a a"):
        (tmp_path / "text.txt").write_text(text)
        pack([str(tmp_path / "text.txt")], tmp_path / "data.h5", tokenizer, processes=0)
    assert {*asked[: len(asked) // 2]} == {1}
    assert {*asked[len(asked) // 2 :]} == ({5} if several else {1})


def _documents(path):
    import h5py

    with h5py.File(path) as file:
        return file["documents"][:].tolist()


def test_an_error_in_a_process_is_told(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines() + b'{"text": "no end\n')
    for processes in ("1", "2"):
        command = ["pack", str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "d.h5"), "--processes", processes]
        assert main([*command, "--field", "text"]) == 2
        assert f"line 6 of {tmp_path}/a.jsonl is not JSON" in capsys.readouterr().err
    assert list(tmp_path.glob("d*")) == []


def test_what_is_skipped_is_listed(tmp_path, capsys):
    records = [
        {"text": "one"},
        {"txt": "none"},
        ["text"],
        {"text": 3},
        {"text": ""},
        {"text": "two"},
        {"text": "\ud800"},
    ]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text("\n\n".join(map(json.dumps, records)))
    (tmp_path / "in/b.png").write_bytes(b"\0")
    (tmp_path / "in/c.txt").symlink_to("nowhere")
    assert main(["pack", str(tmp_path / "in"), "-o", str(tmp_path / "d.h5"), "--field", "text"]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"skipped, no known suffix of text: {tmp_path}/in/b.png",
        f"skipped, no file: {tmp_path}/in/c.txt",
        f"skipped, no field text: line 3 of {tmp_path}/in/a.jsonl",
        f"skipped, no object: line 5 of {tmp_path}/in/a.jsonl",
        f"skipped, field text is no text: line 7 of {tmp_path}/in/a.jsonl",
        f"skipped, field text is empty: line 9 of {tmp_path}/in/a.jsonl",
        f"skipped, field text has half a surrogate pair, which is no character: line 13 of {tmp_path}/in/a.jsonl",
    ]
    assert "2 documents, 8 tokens" in out
    assert bytes(t for t in read(tmp_path / "d.h5") if t < 256) == b"onetwo"
    (tmp_path / "b.jsonl").write_text('{"text": "a", "prompt": ""}\n{"text": "a", "prompt": "b"}\n{"text": ""}')
    command = ["pack", str(tmp_path / "b.jsonl"), "-o", str(tmp_path / "p.h5"), "--prompt-field", "prompt"]
    assert main([*command, "--field", "text"]) == 0
    out, err = capsys.readouterr()
    assert "1 documents, 3 tokens" in out
    assert err.splitlines() == [
        f"skipped, field prompt is empty: line 1 of {tmp_path}/b.jsonl",
        f"skipped, no field prompt: line 3 of {tmp_path}/b.jsonl",
    ]
    (tmp_path / "none.jsonl").write_text('{"txt": 1}\n' * 8)
    assert main(["pack", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "e.h5"), "--field", "text"]) == 2
    err = capsys.readouterr().err
    assert "there are no documents for" in err
    assert list(tmp_path.glob("e*")) == []


def test_what_is_skipped_is_listed_where_nothing_is_left(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    assert main(["pack", str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "a.h5"), "--field", "txet"]) == 2
    assert f"skipped, no field txet: line 1 of {tmp_path}/a.jsonl\n" in capsys.readouterr().err


NUMBERS = "".join(f"{n} squared is {n * n}\n" for n in range(3000)).encode()


def damaged(compressed):
    half = len(compressed) // 2
    return compressed[:half] + bytes(byte ^ 255 for byte in compressed[half : half + 40]) + compressed[half + 40 :]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_frames_of_zstandard(tmp_path, count):
    """One after the other, longer than what is read at a time; none is an empty text."""
    text = NUMBERS.decode()
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(NUMBERS) * count)
    with documents.opened(tmp_path / "a.txt.zst") as file:
        assert "".join(read_text(file, tmp_path)) == text * count


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt.gz", b"no gzip", "a.txt.gz is not whole gzip"),
        ("a.txt.gz", gzip.compress(b"cut short" * 1000)[:-20], "a.txt.gz is not whole gzip"),
        ("a.txt.gz", gzip.compress("ä".encode("latin-1")), "a.txt.gz is not UTF-8 text: byte 0"),
        ("a.txt.gz", damaged(gzip.compress(NUMBERS)), "a.txt.gz is not whole gzip"),
        ("a.txt.zst", b"no zstd", "a.txt.zst"),
        ("a.txt.zst", zstandard.compress(NUMBERS)[:-20], "a.txt.zst is not whole Zstandard: it ends in the middle of"),
        ("a.txt.zst", zstandard.compress(NUMBERS) * 2 + b"more", "a.txt.zst is not whole Zstandard"),
        ("a.txt.zst", damaged(zstandard.compress(NUMBERS)), "a.txt.zst is not whole Zstandard"),
        ("a.parquet", b"no table", "a.parquet"),
        ("a.jsonl", b'{"text": 1}\n{"te', "line 2 of .*a.jsonl is not JSON"),
        ("a.json", b'{\n "text": "one"\n}', "line 1 of .*a.json is not JSON, as each line of it must be"),
    ],
)
def test_what_is_damaged_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        pack([str(tmp_path / name)], tmp_path / "data.h5", fields=None if name.startswith("a.txt") else FIELDS)
    assert list(tmp_path.glob("data*")) == []


def test_a_field_of_text_is_refused(tmp_path):
    """Nothing would be read of it, and of prompts nothing masked."""
    (tmp_path / "a.txt").write_bytes(lines())
    (tmp_path / "b.txt").write_bytes(lines())
    message = r"fields \(text, id\) are read from JSON Lines and Parquet files, but no file of .*a.txt, .*b.txt ends"
    sources, others = [str(tmp_path / "a.txt")], [str(tmp_path / "b.txt")]
    with pytest.raises(ValueError, match=message):
        pack(sources, tmp_path / "data.h5", fields=Fields("text", "id"), validation_sources=others)
    assert list(tmp_path.glob("data*")) == []


@pytest.mark.parametrize("content", ['{\n  "builder": "json"\n}\n', '[{"text": "one"}]', '[\n  {"text": "one"}\n]'])
def test_a_configuration_beside_the_records(tmp_path, alone, content):
    """As datasets and models have them; named, it is a mistake."""
    folder, skipped = tmp_path / "in", []
    folder.mkdir()
    (folder / "a.json").write_bytes(lines())
    (folder / "dataset_infos.json").write_text(content)
    (folder / "empty.json").write_text("")
    counts = pack([str(folder)], tmp_path / "data.h5", fields=FIELDS, skip=lambda *facts: skipped.append(facts))
    assert (counts["documents"], skipped) == (5, [(f"{folder}/dataset_infos.json", "no JSON Lines")])
    assert read(tmp_path / "data.h5") == alone
    with pytest.raises(ValueError, match=r"^line 1 of .*infos.json is no.*; jq -c '.\[\]' turns an array into lines"):
        pack([str(folder), str(folder / "dataset_infos.json")], tmp_path / "data.h5", fields=FIELDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "-o", "d.h5"], "a name of text is empty"),
        (["/dev/null", "-o", "d.h5"], "/dev/null is neither a file nor a directory"),
        (["a.txt", "-o", ""], "the output must end in .h5"),
        (["a.txt", "-o", "d.h5", "--processes", "-2"], "processes must be at least 1, or 0 for one a core, got -2"),
    ],
)
def test_arguments_that_are_refused(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one")
    assert main(["pack", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.glob("d*")) == []


def test_columns_of_parquet_are_named(tmp_path):
    parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet is a table; say by --field which column has the text"):
        pack([str(tmp_path / "a.parquet")], tmp_path / "data.h5")
    with pytest.raises(ValueError, match="a.parquet has no column content, but id, text"):
        pack([str(tmp_path / "a.parquet")], tmp_path / "data.h5", fields=Fields("content"))


def test_nothing_is_overwritten_unless_told_to(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one")
    command = ["pack", str(tmp_path / "a.txt"), "-o", str(tmp_path / "d.h5")]
    assert main(command) == 0
    (tmp_path / "a.txt").write_text("another")
    assert main(command) == 2
    assert "d.h5 exists; --force takes its place" in capsys.readouterr().err
    assert len(read(tmp_path / "d.h5")) == 4
    assert main([*command, "--force"]) == 0
    assert len(read(tmp_path / "d.h5")) == 8
    (tmp_path / "d.h5").rename(tmp_path / "d-validation.h5")
    assert main([*command, "--validation", str(tmp_path / "a.txt")]) == 2
    assert "d-validation.h5 exists" in capsys.readouterr().err


@pytest.mark.parametrize(("part", "held"), [(0.25, [3, 7]), (0.5, [1, 3, 5, 7, 9]), (0.1, [9]), (0.34, [2, 5, 8])])
def test_a_part_of_the_documents_is_for_validation(tmp_path, part, held):
    texts = [f"text {number}" for number in range(10)]
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    counts = pack([str(tmp_path / "a.jsonl")], tmp_path / "d.h5", fields=FIELDS, validation=part)
    assert (counts["documents"], counts["validation documents"]) == (10 - len(held), len(held))
    for path, numbers in ((tmp_path / "d.h5", set(range(10)) - set(held)), (tmp_path / "d-validation.h5", held)):
        assert bytes(t if t < 256 else 10 for t in read(path)).decode().split("\n")[:-1] == [
            texts[number] for number in sorted(numbers)
        ]
    with pytest.raises(ValueError, match="there are no documents for .*d-validation.h5"):
        pack([str(tmp_path / "a.jsonl")], tmp_path / "d.h5", fields=FIELDS, validation=0.01)
    assert len(read(tmp_path / "d.h5")) == counts["tokens"]


def test_other_files_are_for_validation(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    pack([str(tmp_path / "a.txt")], tmp_path / "d.h5", validation_sources=[str(tmp_path / "b.txt")])
    assert (read(tmp_path / "d.h5"), read(validation_output(tmp_path / "d.h5"))) == ([97, 256], [98, 256])


def test_prompts_are_marked(tmp_path):
    """With the vocabulary added; the end of the document counts."""
    records = [{"q": "1+1?", "a": "2"}, {"q": "", "a": "3"}, {"a": "4"}, {"q": "5", "a": "6"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    skipped = []
    counts = pack(
        [str(tmp_path / "a.jsonl")], tmp_path / "d.h5", fields=Fields("a", "q"),
        skip=lambda place, why: skipped.append(why),
    )  # fmt: skip
    assert (counts["documents"], skipped) == (2, ["field q is empty", "no field q"])
    data = ShardedTokens(tmp_path / "d.h5")
    assert data.masked
    stored = data.read(0, data.tokens)
    assert (stored % 257).tolist() == [*b"1+1?", *b"2", 256, *b"5", *b"6", 256]
    assert (stored < 257).tolist() == [*[False] * 4, True, True, False, True, True]
    assert stored.dtype == np.int64
    with pytest.raises(ValueError, match="needs the field of the completion"):
        Fields("", "q")
