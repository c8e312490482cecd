"""Chunks of a dataset that are read without HDF5: the same numbers, checksums of every size."""

import h5py
import numpy as np
import pytest

from hpctrain.data.chunks import AVAILABLE, Chunks, Scratch


@pytest.mark.skipif(not AVAILABLE, reason="this HDF5 does not tell where chunks lie")
@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_chunks_are_hdf5_s(tmp_path, dtype):
    """Any range of a file that HDF5 wrote, read before and after its chunks were checked; zeros and ones have the odd
    checksums."""
    generator = np.random.default_rng(0)
    true = generator.integers(0, np.iinfo(dtype).max, 20_000, endpoint=True).astype(dtype)
    true[1000:3000], true[4000:6000] = 0, np.iinfo(dtype).max
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=true, chunks=(1000,), fletcher32=True)
    scratch = Scratch(1000, np.dtype(dtype))
    with h5py.File(tmp_path / "a.h5") as file, (tmp_path / "a.h5").open("rb") as raw:
        ranges = [
            (0, 20_000),
            *((start, min(count, 20_000 - start)) for start, count in generator.integers(1, 19_000, (50, 2))),
        ]
        for order in (ranges, reversed(ranges)):
            chunks = Chunks(file["x"], scratch, 2**32)
            for start, count in order:
                out = np.empty(count, np.int64)
                chunks.read(raw.fileno(), start, out)
                assert np.array_equal(out, true[start : start + count])
            chunks.will_need(raw.fileno(), 0, 20_000)
        plain = h5py.File(tmp_path / "b.h5", "w").create_dataset("x", data=true, chunks=(1000,), compression=1)
        with pytest.raises(OSError, match="stored with other filters than a checksum"):
            Chunks(plain, scratch, 2**32)


@pytest.mark.skipif(not AVAILABLE, reason="this HDF5 does not tell where chunks lie")
def test_chunks_that_do_not_follow_each_other(tmp_path):
    """As HDF5 lays them while a file grows; each is checked, also where one before it has been."""
    true = np.arange(2000, dtype="<u2")
    with h5py.File(tmp_path / "a.h5", "w", libver="v110") as file:
        dataset = file.create_dataset("x", (0,), "<u2", maxshape=(None,), chunks=(10,), fletcher32=True)
        for start in range(0, 2000, 100):
            dataset.resize((start + 100,))
            dataset[start:] = true[start : start + 100]
    with h5py.File(tmp_path / "a.h5") as file, (tmp_path / "a.h5").open("r+b") as raw:
        chunks = Chunks(file["x"], Scratch(10, np.dtype("<u2")), 2000)
        assert len(chunks._places) > 1
        out = np.empty(2000, np.int64)
        chunks.read(raw.fileno(), 0, out)
        assert np.array_equal(out, true)
        chunks = Chunks(file["x"], Scratch(10, np.dtype("<u2")), 2000)
        chunks.read(raw.fileno(), 0, out[:10])
        raw.seek(file["x"].id.get_chunk_info(1).byte_offset)
        raw.write(b"\7")
        raw.flush()
        with pytest.raises(OSError, match="chunk 1 fails its checksum"):
            chunks.read(raw.fileno(), 0, out)


@pytest.mark.skipif(not AVAILABLE, reason="this HDF5 does not tell where chunks lie")
@pytest.mark.parametrize("fill", ["random", "largest", "zero", "last"])
@pytest.mark.parametrize("size", [1, 2, 256, 257, 1000, 70_001])
def test_checksums_of_chunks_of_any_size(tmp_path, size, fill):
    """Beside those that HDF5 wrote; any other number in their place is found."""
    numbers = np.random.default_rng(size).integers(0, 65536, 11 * size, np.uint16)
    if fill != "random":
        numbers[:] = {"largest": 65535, "zero": 0, "last": 0}[fill]
        numbers[-1] = 65535 if fill == "largest" else fill == "last"
    with h5py.File(tmp_path / "data.h5", "w") as file:
        dataset = file.create_dataset("tokens", data=numbers, chunks=(size,), fletcher32=True)
        dataset.flush()
        out, scratch = np.empty(len(numbers), np.uint16), Scratch(size, np.dtype("<u2"))
        with (tmp_path / "data.h5").open("r+b") as raw:
            Chunks(dataset, scratch, 2**16).read(raw.fileno(), 0, out)
            assert np.array_equal(out, numbers)
            raw.seek(dataset.id.get_chunk_info(3).byte_offset + 2 * size)
            raw.write(b"\1\2\3\4")
            raw.flush()
            with pytest.raises(OSError, match="chunk 3 fails its checksum"):
                Chunks(dataset, scratch, 2**16).read(raw.fileno(), 0, out)
