#!/bin/bash
# Start ranks with the options that this machine needs:   $MPIRUN -n 4 hpctrain train CONFIG.toml
#
# Arguments are those of mpirun. Run-as-root variables are set only for root, oversubscription only where ranks outnumber
# cores, and shared memory alone is used only where all ranks are on this node and the MPI is our own wheel.
set -euo pipefail

ranks=1
previous=
for argument in "$@"; do
    case $previous in -n | -np | --np | -c) ranks=$argument && break ;; esac
    previous=$argument
done
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # GNU's takes these for numbers of cores
hosts=${PBS_NODEFILE:-${LSB_DJOB_HOSTFILE:-}} # a line a slot
nodes=${SLURM_JOB_NUM_NODES:-$(if [ -s "$hosts" ]; then sort -u "$hosts" | wc -l; else echo 1; fi)}
here=$(((ranks + nodes - 1) / nodes))
threads=$((cores / here))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# glibc gives freed memory back to the system and faults it in again, page by page, in every step: 7% of the time
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-1099511627776}
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1073741824}

if [ -n "${HPCTRAIN_LAUNCHER:-}" ]; then
    read -ra launcher <<<"$HPCTRAIN_LAUNCHER"
    exec "${launcher[@]}" "$@"
fi

options=()
if mpirun --version 2>/dev/null | grep -q "Open MPI"; then
    # what a killed mpirun left: with its process id, which will be ours, mpirun says that its listener thread did not start
    rm -rf "${TMPDIR:-/tmp}/ompi.$$"
    if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
    # by itself mpirun binds a rank to one core, whatever its threads; a list of them is for nested loops
    threads=${OMP_NUM_THREADS%%,*}
    if [ "$here" -gt "$cores" ]; then
        options+=(--map-by :OVERSUBSCRIBE --bind-to none)
    elif [ "$((here * threads))" -gt "$cores" ]; then
        options+=(--bind-to none)
    elif [ "$threads" -gt 1 ]; then
        options+=(--map-by "slot:PE=$threads")
    fi
    if [ "${HPCTRAIN_MPI_FOUND:-}" = wheel ]; then
        export OMPI_MCA_osc=^ucx # complains on machines without InfiniBand
        if [ "$nodes" = 1 ] && ! grep -qE -- '--?(hostfile|host|machinefile|H)\b' <<<"$*"; then
            export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm # starts in 0.2 s instead of 1.3
        fi
    fi
fi
exec mpirun "${options[@]}" "$@"
