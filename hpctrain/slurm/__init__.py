"""Slurm from a login node: submit a job script, follow its log, list what became of the runs. Starts no MPI."""
