"""What launchers put into the environment: rank and number of ranks before MPI starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

#: Seconds between a last message and the end of the job: launchers drop what is still under way.
LAST_WORD = 1.0


class Launch(NamedTuple):
    """What a launcher said: its name, this process's rank, how many it started."""

    name: str
    rank: int
    size: int | None


# A launcher that runs inside another's job (mpiexec in a Slurm step) comes first.
_LAUNCHERS = (
    ("Open MPI's mpiexec", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec (MVAPICH)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("mpiexec (PMI)", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("a PMIx launcher", "PMIX_RANK", "PMIX_SIZE"),
    ("mpiexec (PALS)", "PALS_RANKID", "PALS_SIZE"),
)


_REMEDY = (
    "Start with the mpiexec of the MPI that mpi4py loads, or let mpi4py load that of the "
    "launcher (MPI4PY_LIBMPI, LD_LIBRARY_PATH, or mpi4py built for it)"
)


def found(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return what the launcher said, or None where the program was started alone."""
    for name, rank, size in _LAUNCHERS:
        if name == "srun" and "SLURM_STEP_NUM_TASKS" not in environment:
            continue
        if environment.get(rank, "").isdigit():
            total = environment.get(size, "")
            return Launch(name, int(environment[rank]), int(total) if total.isdigit() else None)
    return None


def speaks() -> bool:
    """Whether this process is the one that prints."""
    launch = found()
    return launch is None or launch.rank == 0


def disagreement(world_size: int, environment: Mapping[str, str] = os.environ) -> str:
    """Return what to say where the launcher started ranks that do not see each other."""
    launch = found(environment)
    if launch is None or launch.size is None or launch.size == world_size or world_size != 1:
        return ""
    return (
        f"your launcher and your mpi4py disagree: {launch.size} singletons were started by "
        f"{launch.name}, each a world of its own. {_REMEDY}"
        + ("; with srun, try another --mpi (srun --mpi=list)" if launch.name == "srun" else "")
    )


def mismatch(vendor: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return what to say where the MPI that was loaded can't start under the launcher."""
    if "OMPI_COMM_WORLD_SIZE" not in environment or vendor == "Open MPI":
        return ""
    return (
        f"your launcher and your mpi4py disagree: Open MPI's mpiexec started "
        f"{environment['OMPI_COMM_WORLD_SIZE']} ranks, and mpi4py loads {vendor}. {_REMEDY}"
    )
