#!/bin/bash
# What jobs/weak_scaling.sbatch and jobs/strong_scaling.sbatch have in common, in the environment of jobs/env.sh:
#
#   exec jobs/scaling.sh --weak [CONFIG.toml] ARGUMENTS
#
# Without --ranks the points are 1, 2, 4, ... up to the tasks of the allocation, or the cores.
set -euo pipefail
mode=$1 && shift
config=jobs/scale.toml
if [[ "${1:-}" == *.toml ]]; then config=$1 && shift; fi
if [[ " $* " != *" --ranks"* ]]; then
    most=${SLURM_NTASKS:-$(python3 -IS hpctrain/cores.py | cut -d ' ' -f 1)}
    ranks=1
    for ((next = 2; next <= most; next *= 2)); do ranks=$ranks,$next; done
    set -- --ranks "$ranks" "$@"
fi
exec hpctrain scale "$config" "$mode" "$@"
