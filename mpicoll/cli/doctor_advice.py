"""What `mpicoll doctor` finds wrong, but with devices, and what to do. Loads no MPI."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

from mpicoll.cli import launch

KINDS = ("error", "warning", "note")  #: the worst first
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

#: By the name of an MPI: the variable by which a rank that waits gives its core away, a value
#: that does it, and those by which it does not.
_OFF = ("", "0", "false", "f", "no", "n", "off", "disabled")
_YIELDS = {
    "Open MPI": ("OMPI_MCA_mpi_yield_when_idle", "1", _OFF),
    "MPICH": ("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1", _OFF),
    "Intel MPI": ("I_MPI_THREAD_YIELD", "3", ("", "0", "1")),
}


class Advice(NamedTuple):
    """Something wrong: "error" gives wrong worlds or no run, "warning" slow ones."""

    kind: str
    text: str


def advice(
    ranks: int, facts: dict[str, Any], fault: str, environment: Mapping[str, str] = os.environ
) -> list[Advice]:
    """Return what is wrong in a world of ``ranks``; ``fault`` is that of our variables."""
    found = []
    if text := launch.disagreement(ranks, environment):
        found.append(Advice("error", text))
    if fault:
        found.append(Advice("error", fault))
    if text := _source(facts["source"], facts["kernels"]):
        found.append(Advice("warning", text))
    crowded = [node for node in facts["nodes"] if node["oversubscribed"]]
    if crowded:
        found.append(Advice("warning", _crowded(crowded[0], facts["mpi"], environment)))
    each = max(node["ranks"] for node in facts["nodes"])
    if each > 1 and not any(name in environment for name in THREAD_VARIABLES):
        found.append(
            Advice(
                "warning",
                f"{each} ranks a node, and OMP_NUM_THREADS is not set: threads of NumPy's BLAS "
                "may fight with other ranks; OMP_NUM_THREADS=1 is a good start",
            )
        )
    if len({node["ranks"] for node in facts["nodes"]}) > 1:
        found.append(Advice("warning", "the nodes have different numbers of ranks"))
    if ranks == 1 and launch.found(environment) is None:
        found.append(
            Advice("note", "one rank, started alone; more with: mpiexec -n 8 mpicoll doctor")
        )
    return found


def _crowded(node: Mapping[str, Any], mpi: str, environment: Mapping[str, str]) -> str:
    text = f"oversubscribed: {node['ranks']} ranks on {node['cores']} core(s) of {node['name']}. "
    for name, (variable, value, off) in _YIELDS.items():
        if not mpi.startswith(name):
            continue
        given = environment.get(variable, "")
        if given.strip().lower() in off:
            return (
                f"{text}Ranks wait by spinning, so times say little: start fewer ranks, or set "
                f"{variable}={value}"
            )
        return (
            f"{text}Ranks that wait give their core away ({variable}={given}), but times say "
            "little: start fewer ranks"
        )
    return f"{text}Ranks wait by spinning, so times say little: start fewer ranks"


def source_folder(package: Path) -> str:
    """Return the folder of the sources that ``package`` is in, "" where pip installed it."""
    folder = package.resolve().parent
    if not all((folder / name).is_file() for name in ("pyproject.toml", "meson.build")):
        return ""
    try:
        told = json.loads(distribution("mpicoll").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        told = {}
    # In an editable installation that is as it should be.
    return "" if told.get("dir_info", {}).get("editable") else str(folder)


def _source(folder: str, kernels: str) -> str:
    if not folder:
        return ""
    slow = ", and its loops on 16-bit floats are not compiled" * ("not compiled" in kernels)
    return (
        f"this is the source folder {folder}, not what pip installed{slow}: Python looks first "
        "in the folder of the script, or for python -m in the working directory. Run programs "
        "in another folder"
    )
