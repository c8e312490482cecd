"""The file format: an index, and the shards beside it.

    DATA.h5                     the index. It is written last, by a rename: where it exists, the data are complete.
        attributes              format, version, packing, sources, vocabulary, end_of_document, masked, tokens,
                                documents
        tokenizer               bytes of its description
        shards                  name, tokens and bytes of every shard, in order
    DATA-PACKING-00000.h5 …     the shards
        attributes              packing, number
        tokens                  uint16 or uint32, in chunks of CHUNK with a checksum each
        documents               position in this shard of every document that starts here

Every document is followed by the end_of_document token. Where `masked` is 1, tokens that count in no loss (of a prompt)
are stored with the vocabulary added. PACKING is a random name, so that packing again leaves the old
data valid until the new are complete. `sources` tells what was packed (`corpus.fingerprint`). Metadata are checksummed
too (HDF5's "v110" objects). Attributes are integers and texts of fixed length: HDF5 crashes on crafted ones of variable
length.
"""

import numpy as np

FORMAT = "hpctrain tokens"
VERSION = 3  # 1 had texts of variable length in its attributes, 2 had no `sources`
CHUNK = 16 * 1024  # tokens; a sample of a few hundred costs one or two chunks, and each is checked whole
LIBVER = ("v110", "v110")
INDEX_ROW = np.dtype([("name", "S255"), ("tokens", "<i8"), ("bytes", "<i8")])
