#!/bin/bash
# Start ranks with the options that this machine needs:   $MPIRUN -n 4 hpctrain train CONFIG.toml
#
# Arguments are those of mpirun; any that place ranks, such as --map-by or --bind-to, take the place of ours. A rank is
# bound to as many cores as it has threads: OMP_NUM_THREADS, or its share of the node's cores; the hardware threads of one
# core count once. Ranks move freely where they outnumber the cores, where a rank's cores would lie in two sockets, and
# where this shell may use some cores only (taskset) or has a CPU quota (a container): hpctrain/cores.py.
# Run-as-root variables are set only for root, and shared memory alone is used only where all ranks are on this node and
# the MPI is our own wheel.
set -euo pipefail

here=$(dirname "$0")
ranks=0
placed=
hosts=
hostfile=
placing=" map-by bind-to cpu-set cpu-list rankfile rf N npernode npersocket ppr ppn cpus-per-rank cpus-per-proc "
valued=" x rank-by wd wdir path prefix stdin timeout output output-filename display tune am app personality preload-files \
runtime-options launch-agent dvm-uri memory-alloc-kind with-ft envlist launcher iface mpi "
paired=" mca gmca omca gomca prtemca gprtemca pmixmca gpmixmca env genv "

# Sets the four by the launcher's own options. These end at the program's name; what follows, up to a lone colon, is its.
read_options() {
    local option name value words
    while [ $# -gt 0 ]; do
        option=$1 && shift
        if [ "$option" = : ]; then continue; fi
        if [[ $option != -* ]]; then
            while [ $# -gt 0 ] && [ "$1" != : ]; do shift; done
            continue
        fi
        name=${option#-} && name=${name#-}
        if [[ $name == *=* ]]; then
            value=${name#*=} name=${name%%=*} words=0
        else
            value=${1:-} words=1 # that the value takes
        fi
        case $name in
            n | np | ntasks | c)
                if [ "$name" != c ] || [ -z "${HPCTRAIN_LAUNCHER:-}" ]; then # srun's -c is of cores
                    if ! [[ $value =~ ^[1-9][0-9]*$ ]]; then
                        echo "mpirun.sh: $option must be followed by a number of ranks, got '$value'" >&2
                        exit 2
                    fi
                    ranks=$((ranks + value))
                fi ;;
            H | host | hosts) hosts=$hosts,$value ;;
            f | hostfile | machinefile | default-hostfile) hostfile=$value ;;
            oversubscribe | nooversubscribe | use-hwthread-cpus) placed=1 words=0 ;;
            *)
                if [[ $placing == *" $name "* ]]; then
                    placed=1
                elif [[ $paired == *" $name "* ]]; then
                    words=2
                elif [[ $valued != *" $name "* ]]; then
                    words=0
                fi ;;
        esac
        while [ $# -gt 0 ] && ((words-- > 0)); do shift; done
    done
}

# Prints how many ranks each node that was given takes, a line a node: as named here, or by the batch system.
slots() {
    if [ -n "$hosts" ]; then
        tr ',:' '\n ' <<<"${hosts#,}"
    elif [ -n "$hostfile" ]; then
        sed -e 's/#.*//' -e 's/ slots *= */ /' "$hostfile" | tr ':' ' '
    elif [ -n "${SLURM_TASKS_PER_NODE:-}" ]; then # 2(x3),1
        tr ',(x)' '\n   ' <<<"$SLURM_TASKS_PER_NODE" |
            awk '{ for (i = 0; i < ($2 > 0 ? $2 : 1); i++) print NR "." i, $1 }'
    elif [ -s "${PBS_NODEFILE:-${LSB_DJOB_HOSTFILE:-}}" ]; then # a line a slot
        cat "${PBS_NODEFILE:-$LSB_DJOB_HOSTFILE}"
    fi | awk 'NF { slots[$1] += $2 > 0 ? $2 : 1 } END { for (node in slots) print slots[node] }'
}

# Open MPI does not begin without it, which cron and some containers leave out
if [ -z "${HOME:-}" ]; then
    HOME=$(getent passwd "$(id -u)" | cut -d: -f6) || HOME=
    export HOME=${HOME:-/}
fi

read_options "$@"
# not by a process substitution, which may end after the exec below, as a child of guard.py
counted=$(slots | awk '{ all += $1; if ($1 > most) most = $1 } END { print NR, most + 0, all + 0 }') || true
read -r nodes most total <<<"$counted"
if [ "$ranks" = 0 ]; then ranks=$total; fi # as mpirun itself does
if [ "$nodes" -le 1 ]; then
    local_ranks=$ranks # 0 where neither is known: a rank a core
elif [ "$ranks" -ge "$total" ]; then
    local_ranks=$((most * ((ranks + total - 1) / total)))
elif [ -n "${HPCTRAIN_LAUNCHER:-}" ]; then # srun deals them out
    local_ranks=$(((ranks + nodes - 1) / nodes))
else # mpirun fills node after node
    local_ranks=$((ranks < most ? ranks : most))
fi
threads=${OMP_NUM_THREADS:-}
if [ -n "$threads" ] && ! [[ ${threads%%,*} =~ ^[1-9][0-9]*$ ]]; then
    echo "mpirun.sh: OMP_NUM_THREADS must be a number of threads, got '$threads'" >&2
    exit 2
fi
shared=$(python3 -IS "$here/../hpctrain/cores.py" "$local_ranks" "${threads%%,*}") # a list is for nested loops
read -r _ threads binding <<<"$shared"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
# glibc gives freed memory back to the system and faults it in again, page by page, in every step: 7% of the time
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-1099511627776}
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1073741824}

guard=(python3 -IS "$(dirname "$0")/guard.py") # so that a stop reaches the ranks, rather than killing them
if [ -n "${HPCTRAIN_LAUNCHER:-}" ]; then
    read -ra launcher <<<"$HPCTRAIN_LAUNCHER"
    exec "${guard[@]}" "${launcher[@]}" "$@"
fi

options=()
version=$(mpirun --version 2>/dev/null) || true # not piped: one that closes early fails the command before it
if [[ $version == *"Open MPI"* ]]; then
    guard+=(--block)
    if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
    if [ -z "$placed" ]; then
        case $binding in
            # by itself mpirun binds a rank to one core, whatever its threads
            bound) if [ "$threads" -gt 1 ]; then options+=(--map-by "slot:PE=$threads"); fi ;;
            unbound) options+=(--bind-to none) ;;
            oversubscribed) options+=(--map-by :OVERSUBSCRIBE --bind-to none) ;;
        esac
    fi
    # mpirun sees more cores than an affinity or a quota leaves; ranks that wait must let others run
    if [ "$binding" = oversubscribed ]; then export OMPI_MCA_mpi_yield_when_idle=1; fi
    if [ "${HPCTRAIN_MPI_FOUND:-}" = wheel ]; then
        export OMPI_MCA_osc=^ucx # complains on machines without InfiniBand
        if [ "$nodes" -le 1 ] && [ -z "$hosts$hostfile" ]; then
            export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm # starts in 0.2 s instead of 1.3
        fi
    fi
fi
exec "${guard[@]}" mpirun "${options[@]}" "$@"
