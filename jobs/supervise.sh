#!/bin/bash
# Start ranks as jobs/mpirun.sh does, from a batch job that may run out of time:   exec jobs/supervise.sh -n 8 COMMAND
#
# Slurm's warning (#SBATCH --signal=B:USR1@...) reaches only the batch shell. It is passed on to the ranks, which save and
# end with status 85; the job then puts itself back into the queue, to go on where it stopped. Without Slurm, and where
# the job is being ended (SIGTERM, SIGINT), it ends with status 85, and the same command with --resume continues.
set -uo pipefail

requeue=85 # hpctrain.train.signals

# In the background, as a shell that waits for a program in the foreground handles no signals.
"$(dirname "$0")/mpirun.sh" "$@" &
ranks=$!
ending=
for signal in USR1 TERM INT; do
    # shellcheck disable=SC2064 # this signal, this process
    trap "[ $signal = USR1 ] || ending=$signal; kill -$signal $ranks 2>/dev/null" "$signal"
done
while true; do
    wait "$ranks"
    status=$?
    # a signal ends the wait, but not the ranks
    if [ "$status" -le 128 ] || ! kill -0 "$ranks" 2>/dev/null; then break; fi
done
# where it reached both, the ranks may have ended with a status that nobody has asked for yet; otherwise this is 127
wait "$ranks" 2>/dev/null
last=$?
if [ "$last" != 127 ]; then status=$last; fi

if [ "$status" = "$requeue" ]; then
    job=${SLURM_JOB_ID:-}
    # of an array this may be the number of the whole
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
    if [ -n "$job" ] && [ -z "$ending" ]; then
        echo "supervise.sh: saved; requeueing job $job"
        scontrol requeue "$job" && sleep 60 # Slurm ends this job
    else # a cancelled job (SIGTERM) is not to come back
        echo "supervise.sh: saved; the same command with --resume goes on from there"
    fi
fi
exit "$status"
