"""Training loops of other libraries around a model of `ht.parallelize`: one file each, imported by its name.

Each of them takes a replica for one process: every rank runs the same script, the ranks of a replica with the same
batches, the first rank writes files, and what is written is whole, so that any grid, and one process without this
package, goes on with it.
"""
