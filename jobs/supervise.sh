#!/bin/bash
# Start ranks as jobs/mpirun.sh does, from a batch job that may run out of time:   exec jobs/supervise.sh -n 8 COMMAND
#
# Slurm's warning (#SBATCH --signal=B:USR1@...) reaches only the batch shell. It is passed on to the ranks, which save and
# end with status 85; the job then puts itself back into the queue, to go on where it stopped. Without Slurm it ends with
# status 85, and the same command with --resume continues.
set -uo pipefail

requeue=85 # hpctrain.train.signals

# In the background, as a shell that waits for a program in the foreground handles no signals.
"$(dirname "$0")/mpirun.sh" "$@" &
ranks=$!
for signal in USR1 TERM INT; do
    # shellcheck disable=SC2064 # this signal, this process
    trap "kill -$signal $ranks" "$signal"
done
while true; do
    wait "$ranks"
    status=$?
    # a signal ends the wait, but not the ranks
    if [ "$status" -le 128 ] || ! kill -0 "$ranks" 2>/dev/null; then break; fi
done

if [ "$status" = "$requeue" ]; then
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        echo "supervise.sh: saved; requeueing job $SLURM_JOB_ID"
        scontrol requeue "$SLURM_JOB_ID" && sleep 60 # Slurm ends this job
    else
        echo "supervise.sh: saved; the same command with --resume goes on from there"
    fi
fi
exit "$status"
