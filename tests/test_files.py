"""Whether a file is there, and how long it is: an error is never taken for a no; files that come at once."""

import os
import tracemalloc

import pytest

from hpctrain import files
from hpctrain.data.corpus import text_files


def test_nothing_there_is_no_error(tmp_path):
    (tmp_path / "file").write_text("content")
    for name in ("none", "none/below", "file/below"):
        assert files.status(tmp_path / name) is None
        assert files.regular(tmp_path / name) is None
        assert not files.is_folder(tmp_path / name)


def test_what_is_there(tmp_path):
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    told = {name: files.regular(tmp_path / name) for name in (".", "pipe", "file", "link")}
    assert {name: found and found.st_size for name, found in told.items()} == {
        ".": None, "pipe": None, "file": 7, "link": 7,
    }  # fmt: skip
    assert files.is_folder(tmp_path)
    assert not files.is_folder(tmp_path / "link")


@pytest.mark.parametrize("look", [files.status, files.regular, files.is_folder])
def test_what_cannot_be_told_is_an_error(tmp_path, look):
    """Path.exists says no to these from Python 3.14 on, and to the first one always."""
    (tmp_path / "loop").symlink_to("loop")
    for name in ("loop", "x" * 300):
        with pytest.raises(OSError, match="symbolic links|File name too long"):
            look(tmp_path / name)


def test_a_file_that_is_too_long_is_not_read(tmp_path):
    path = tmp_path / "long"
    path.write_bytes(b"12345")
    assert files.read_bounded(path, 5) == b"12345"
    os.truncate(path, 1 << 30)
    tracemalloc.start()
    with pytest.raises(ValueError, match="long is longer than the 5 bytes"):
        files.read_bounded(path, 5)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_draft_takes_its_place_or_goes(tmp_path):
    """What a killed process left of one is in nobody's way, and in no other draft."""
    out = tmp_path / "out"
    (out / files.DRAFT).mkdir(parents=True)
    (out / files.DRAFT / "old").touch()
    files.check_free(out)
    with pytest.raises(ZeroDivisionError), files.draft(out) as draft:
        (draft / "new").touch()
        raise ZeroDivisionError
    assert list(out.iterdir()) == []
    with files.draft(out) as draft:
        (draft / "new").touch()
        files.place(draft, out, last="new")
    assert [path.name for path in out.iterdir()] == ["new"]
    for place in (out, out / "new"):
        with pytest.raises(ValueError, match=f"{place} exists and is not an empty folder; choose another"):
            files.check_free(place)


def test_a_folder_of_texts_that_cannot_be_listed(tmp_path, monkeypatch):
    """What lies in it must not be missing from a corpus without a word."""
    (tmp_path / "locked").mkdir()
    for name in ("a.txt", "locked/b.txt"):
        (tmp_path / name).write_text("text")
    assert [path.name for path in text_files([str(tmp_path)])] == ["a.txt", "b.txt"]
    scandir = os.scandir

    def refused(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(PermissionError, match="locked"):
        text_files([str(tmp_path)])


def test_a_file_is_replaced_or_stays(tmp_path, monkeypatch):
    """Of a link, that which it leads to; what is no file is written to."""
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    link.symlink_to("file")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="Bad file descriptor"):
        patched.setattr(files, "sync", lambda path: os.close(-1))
        files.replace(link, "new")
    assert path.read_text() == "old"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link"]
    files.replace(link, "new")
    assert path.read_text() == "new"
    assert link.is_symlink()
    files.replace(tmp_path / os.devnull, "nowhere")
