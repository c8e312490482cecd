"""Training loops of other libraries around a model of `ht.parallelize`: one file each, imported by its name.

Each of them believes to be one process: every rank runs the same script with the same batches, the first rank writes
files, and what is written is whole, so that any grid, and one process without this package, goes on with it.
"""
