"""Whether the MPI takes device pointers, and which device a rank uses.

A wrong guess about pointers is a crash and no exception. So a yes is taken from the caller
(MPICOLL_CUDA_AWARE=1) or from a trial in two processes of their own, and without a sign
that a trial is worth its seconds the answer is no.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mpi4py import MPI

from mpicoll.selection.calibration import cache_file

#: The rank on its node, as launchers have it.
LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
#: Which devices a process may see. Values that show it none bind it to none.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NONE_VISIBLE = ("", "-1", "NoDevFiles")
_TORCH_POOLS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

#: Variables by which a user switches device support of an MPI on, and what says so.
_SWITCHES = {
    "I_MPI_OFFLOAD": ("1", "2"),
    "MPIR_CVAR_ENABLE_GPU": ("1",),
    "MPICH_GPU_SUPPORT_ENABLED": ("1",),
    "MV2_USE_CUDA": ("1",),
}

#: What launchers tell their children; one that starts anew must not see it.
_LAUNCHED = (
    "PMI",
    "PMIX_",
    "PRTE_",
    "HYDI_",
    "HYDRA_",
    "MPI_LOCAL",
    "SLURM_",
    "OMPI_",
    "I_MPI_HYDRA",
)

TRIAL_SECONDS = 60.0
#: What its launcher has to end the ranks of a trial that hangs.
ENDING_SECONDS = 3.0

_TRIAL = """
from mpi4py import MPI
import cupy
comm = MPI.COMM_WORLD
assert comm.size == 2
device = comm.rank % cupy.cuda.runtime.getDeviceCount()
cupy.cuda.Device(device).use()
for count in (1, 1000, 1 << 16, 1 << 22):
    send = cupy.full(count, 1 + comm.rank, cupy.uint8)
    recv = cupy.zeros(count, cupy.uint8)
    cupy.cuda.Device(device).synchronize()
    at = [MPI.buffer.fromaddress(one.data.ptr, count) for one in (send, recv)]
    comm.Sendrecv([at[0], count, MPI.BYTE], 1 - comm.rank, recvbuf=[at[1], count, MPI.BYTE])
    assert bool((recv == 2 - comm.rank).all())
print("takes device pointers")
"""


@cache
def takes_device_pointers() -> bool:
    """Return whether the MPI surely takes device pointers; the first time it may try."""
    return bool(signs()) and _answer(tried)


# -- signs --------------------------------------------------------------------------------------


def signs(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return what speaks for an MPI that takes device pointers."""
    found = [name for name, yes in _SWITCHES.items() if environment.get(name) in yes]
    kinds = _memory_kinds()
    if "cuda" in kinds or "rocm" in kinds:
        found.append(f"mpi_memory_alloc_kinds={kinds}")
    libraries = _loaded()
    for name in ("cuda", "rocm"):
        if _queried(f"MPIX_Query_{name}_support", libraries):
            found.append(f"MPIX_Query_{name}_support")
        found += [path for path in libraries if f"libuct_{name}" in path or "ucx-cu" in path][:1]
    return found


def _memory_kinds() -> str:
    info = MPI.COMM_WORLD.Get_info()
    try:
        return info.Get("mpi_memory_alloc_kinds") or ""
    finally:
        info.Free()


def _loaded() -> list[str]:
    """Return the paths of the libraries in this process."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(line.split(None, 5)[5] for line in lines if ".so" in line))


def _queried(function: str, libraries: list[str]) -> bool:
    """Ask a function of the MPI that is loaded; it loads nothing."""
    for path in libraries:
        if not os.path.basename(path).startswith("libmpi"):
            continue
        try:
            query = getattr(ctypes.CDLL(path, os.RTLD_NOLOAD | os.RTLD_LAZY), function)
        except (OSError, AttributeError):
            continue
        return bool(query() == 1)
    return False


# -- the trial ----------------------------------------------------------------------------------


def tried(launcher: str | None = None, seconds: float = TRIAL_SECONDS) -> bool:
    """Return whether two ranks of their own exchanged device memory, and lived."""
    beside = shutil.which("mpiexec", path=os.path.dirname(sys.executable))
    launcher = launcher or beside or shutil.which("mpiexec")
    if launcher is None:
        return False
    command = [launcher, "-n", "2", sys.executable, "-c", _TRIAL]
    try:
        # A session of its own, so that all of it can be ended: a hung rank outlives mpiexec.
        trial = subprocess.Popen(
            command,
            env=_clean(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    except OSError:
        return False
    with trial:
        try:
            said, _ = trial.communicate(timeout=seconds)
        except BaseException as error:
            _end(trial)  # a hung rank, which holds its output, may outlive its launcher
            if isinstance(error, subprocess.TimeoutExpired):
                return False
            raise
    return trial.returncode == 0 and said.count("takes device pointers") == 2


def _end(trial: subprocess.Popen[str]) -> None:
    """End a trial: its launcher is asked to end the ranks, then what is left is killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(trial.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            trial.wait(ENDING_SECONDS)


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a launcher starts anew; settings of the user's stay."""
    ours = ("OMPI_MCA_", "OMPI_ALLOW_RUN_AS_ROOT")
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(_LAUNCHED)
        or (name.startswith(ours) and not name.startswith(("OMPI_MCA_orte", "OMPI_MCA_ess")))
    }


def _answer(trial: Callable[[], bool], folder: Path | None = None) -> bool:
    """Return the answer of a trial, which one process of a host makes for all, and keeps.

    One that waits in vain for another's goes without.
    """
    try:
        file = _answer_file(folder)
    except RuntimeError:  # there is no home to keep it in
        return trial()
    folder = file.parent
    lock = file.with_suffix(".lock")
    end = time.monotonic() + 1.5 * TRIAL_SECONDS
    while True:
        if (known := _kept(file)) is not None:
            return known
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            if _abandoned(lock) or time.monotonic() > end:
                lock.unlink(missing_ok=True)
                return False
            time.sleep(0.05)
            continue
        except OSError:
            return trial()
        try:
            # Another may have been done between our look and our lock.
            if (known := _kept(file)) is not None:
                return known
            answer = trial()
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(answer), encoding="utf-8")
            part.replace(file)
        finally:
            lock.unlink(missing_ok=True)
        return answer


def kept_answer(folder: Path | None = None) -> bool | None:
    """Return what the trial of this host said in these circumstances, None if there was none."""
    try:
        return _kept(_answer_file(folder))
    except RuntimeError:  # there is no home to keep anything in
        return None


def _answer_file(folder: Path | None) -> Path:
    folder = folder or cache_file().parent
    return folder / f"device-pointers-{_circumstances()}.json"


def _kept(file: Path) -> bool | None:
    """Return the answer that was kept, None if there is none."""
    try:
        return json.loads(file.read_text(encoding="utf-8")) is True
    except (OSError, ValueError):
        return None


def _abandoned(lock: Path) -> bool:
    try:
        return time.time() - lock.stat().st_mtime > 2 * TRIAL_SECONDS
    except OSError:
        return False


def _circumstances() -> str:
    """Return a name for what the answer depends on."""
    switches = {name: os.environ[name] for name in list(os.environ) if _matters(name)}
    what = [
        os.uname().nodename,
        sys.executable,
        MPI.Get_library_version(),
        sorted(switches.items()),
    ]
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def _matters(name: str) -> bool:
    return name in _SWITCHES or name.startswith(("UCX_", "OMPI_MCA_pml", "OMPI_MCA_opal", "MPIR_"))


# -- binding ------------------------------------------------------------------------------------


def local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank on its node by the launcher's variables, None where there is none."""
    return _number(LOCAL_RANKS, environment)


def _number(names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    for name in names:
        value = environment.get(name, "")
        if value.isdigit():
            return int(value)
    return None


def bind_device(comm: MPI.Intracomm | None = None) -> int:
    """Make one device of the node the current one of this rank; return its number.

    Local rank r takes device r modulo the devices that it sees, so that a rank to which the
    launcher shows but one takes that. The local rank is the launcher's, or, with ``comm``,
    that among the ranks of ``comm`` which share memory; the call is then collective. CuPy's
    current device is set, and that of torch where it is loaded.

    Raises RuntimeError where there is no device, or nothing that tells the local rank.
    """
    local = local_rank()
    if comm is not None:
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.Get_rank())
        local = node.Get_rank()
        node.Free()
    if local is None:
        raise RuntimeError(
            f"bind_device: none of {', '.join(LOCAL_RANKS)} is set; pass a communicator"
        )
    import cupy

    number = _chosen(local, _devices(cupy))
    cupy.cuda.Device(number).use()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.set_device(number)
    return number


def _devices(cupy: Any) -> int:
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def device_for(local: int, devices: int) -> int | None:
    """Return the device that local rank ``local`` takes of those it sees, None if it sees none."""
    return local % devices if devices else None


def _chosen(local: int, devices: int) -> int:
    number = device_for(local, devices)
    if number is None:
        seen = {name: os.environ[name] for name in VISIBLE if name in os.environ}
        raise RuntimeError(f"bind_device: this rank sees no device {seen or ''}".rstrip())
    return number


class Obstacle(NamedTuple):
    """A variable that keeps ranks of a node from each other's device memory (CUDA IPC).

    ``binds`` says that it does so by binding ranks to devices: it does no harm where all
    ranks of the node see the same ones nevertheless.
    """

    variable: str
    value: str
    why: str
    binds: bool


def obstacles(
    environment: Mapping[str, str] = os.environ, ranks: int | None = None
) -> list[Obstacle]:
    """Return what keeps ``ranks`` ranks of a node from each other's device memory.

    Without ``ranks``, there are as many as the launcher says.
    """
    ranks = ranks or _number(_LOCAL_SIZES, environment)
    ranks = ranks or _number(("SLURM_NTASKS_PER_NODE",), environment)
    found = []
    for name in VISIBLE:
        value = environment.get(name, "")
        if value not in _NONE_VISIBLE and "," not in value and (ranks or 1) > 1:
            why = (
                "shows one device only: ranks that see different ones can not map each other's "
                "memory; show all devices to all ranks and call mpicoll.bind_device()"
            )
            found.append(Obstacle(name, value, why, binds=True))
    if ranks != 1 and (name := _slurm_binds(environment)):
        why = "makes Slurm bind devices to tasks: --gpu-bind=none shows them to all"
        found.append(Obstacle(name, environment[name], why, binds=True))
    for name in _TORCH_POOLS:
        value = environment.get(name, "")
        if "cudaMallocAsync" in value or "expandable_segments:True" in value:
            why = "makes pools of memory that can not be shared by IPC"
            found.append(Obstacle(name, value, why, binds=False))
    return found


def _slurm_binds(environment: Mapping[str, str]) -> str:
    """Return the variable by which Slurm binds devices to tasks, "" if it does not."""
    bind = environment.get("SLURM_GPU_BIND", "")
    if bind:
        return "" if bind.endswith("none") else "SLURM_GPU_BIND"
    if environment.get("SLURM_GPUS_PER_TASK"):
        return "SLURM_GPUS_PER_TASK"
    # It names processors too, where tasks ask for those.
    return "SLURM_TRES_PER_TASK" if "gpu" in environment.get("SLURM_TRES_PER_TASK", "") else ""


def binding_warnings(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return what keeps the ranks of a node from each other's device memory (CUDA IPC)."""
    return [f"{one.variable}={one.value} {one.why}" for one in obstacles(environment)]
