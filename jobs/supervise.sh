#!/bin/bash
# Start ranks as jobs/mpirun.sh does, from a batch job that may run out of time:   exec jobs/supervise.sh -n 8 COMMAND
#
# Slurm's warning (#SBATCH --signal=B:USR1@...) reaches only the batch shell. jobs/guard.py, which this becomes, passes it
# on to the ranks, which save and end with status 85; the job then puts itself back into the queue, to go on where it
# stopped. Without Slurm, and where the job is being ended (SIGTERM, SIGINT, SIGHUP), it ends with status 85, and the same
# command with --resume continues.
HPCTRAIN_REQUEUE=1 exec "$(dirname "$0")/mpirun.sh" "$@"
