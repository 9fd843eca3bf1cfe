"""What `mpicoll doctor` says of sources, crowded cores and variables, and how its lines look."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mpicoll.cli import doctor_advice, doctor_page, launch
from mpicoll.cli.doctor_advice import Advice, advice, source_folder


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the launcher that may have started the tests, and the width of its terminal."""
    for _, *variables in launch._LAUNCHERS:
        for variable in variables:
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)


def facts(mpi: str = "MPICH 4.2", ranks: int = 4, cores: int = 2, **more: Any) -> dict[str, Any]:
    node = {"name": "n0", "ranks": ranks, "cores": cores, "oversubscribed": ranks > cores}
    return {"mpi": mpi, "nodes": [node], "source": "", "kernels": "kernels: avx2"} | more


def warnings(found: dict[str, Any], **environment: str) -> str:
    """Return what is said, but of threads, as one text."""
    environment = {"OMP_NUM_THREADS": "1", "PMI_RANK": "0", **environment}
    ranks = found["nodes"][0]["ranks"]
    return "\n".join(text for _, text in advice(ranks, found, "", environment))


# -- crowded cores ------------------------------------------------------------------------

YIELDS = [
    ("Open MPI v5.0.11", "OMPI_MCA_mpi_yield_when_idle", "1"),
    ("MPICH 5.0.2", "MPIR_CVAR_ENABLE_HEAVY_YIELD", "1"),
    ("Intel MPI Library 2021.18.1 for Linux* OS", "I_MPI_THREAD_YIELD", "3"),
]


@pytest.mark.parametrize(("mpi", "variable", "value"), YIELDS)
def test_a_variable_that_is_set_is_not_asked_for(mpi: str, variable: str, value: str) -> None:
    for given in ({}, {variable: "0"}):
        text = warnings(facts(mpi), **given)
        assert text.endswith(f"start fewer ranks, or set {variable}={value}")
    text = warnings(facts(mpi), **{variable: value})
    assert f"give their core away ({variable}={value})" in text
    assert "or set" not in text


@pytest.mark.parametrize("given", ["0", "1", ""])
def test_intel_mpi_gives_its_core_away_from_2_on(given: str) -> None:
    text = warnings(facts("Intel MPI Library 2021"), I_MPI_THREAD_YIELD=given)
    assert text.endswith("or set I_MPI_THREAD_YIELD=3")


NODES = [
    {"name": name, "ranks": ranks, "cores": 4, "oversubscribed": False}
    for name, ranks in (("n0", 2), ("n1", 1))
]
#: Advice by what is wrong: ranks, facts, a fault of a variable, the environment, and words of it.
WRONG: dict[str, tuple[int, dict[str, Any], str, dict[str, str], Advice]] = {
    "fault": (1, facts(ranks=1), "MPICOLL_X?", {"PMI_RANK": "0"}, Advice("error", "MPICOLL_X?")),
    "threads": (2, facts(ranks=2), "", {"PMI_RANK": "0"}, Advice("warning", "OMP_NUM_THREADS=1")),
    "nodes": (
        3,
        facts(nodes=NODES),
        "",
        {"PMI_RANK": "0", "MKL_NUM_THREADS": "1"},
        Advice("warning", "different numbers of ranks"),
    ),
    "alone": (1, facts(ranks=1), "", {}, Advice("note", "started alone")),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_each_fault_has_one_advice(wrong: Any) -> None:
    ranks, found, fault, environment, expected = wrong
    ((kind, text),) = advice(ranks, found, fault, environment)
    assert kind == expected.kind
    assert expected.text in text


def test_an_unknown_mpi_has_no_variable() -> None:
    assert warnings(facts("Other 1.0")).endswith("times say little: start fewer ranks")


def test_nothing_is_said_where_there_are_cores() -> None:
    assert warnings(facts(ranks=2)) == ""


# -- sources ------------------------------------------------------------------------------


class Installed:
    """A distribution of which pip wrote where it comes from."""

    def __init__(self, told: str | None) -> None:
        self.told = told

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.told


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    for name in ("pyproject.toml", "meson.build"):
        (tmp_path / name).touch()
    return tmp_path / "mpicoll"


@pytest.mark.parametrize(
    ("told", "sources"),
    [
        (None, True),
        (json.dumps({"url": "file:///x", "dir_info": {}}), True),
        (json.dumps({"url": "file:///x", "dir_info": {"editable": True}}), False),
    ],
    ids=["from an index", "from a folder", "editable"],
)
def test_the_source_folder_is_known(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, sources: bool
) -> None:
    monkeypatch.setattr(doctor_advice, "distribution", lambda name: Installed(told))
    assert source_folder(checkout) == (str(checkout.parent) if sources else "")
    assert source_folder(checkout / "site-packages" / "mpicoll") == ""


def test_sources_that_are_not_installed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Installed:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor_advice, "distribution", missing)
    assert source_folder(checkout) == str(checkout.parent)


def test_the_source_folder_is_warned_of() -> None:
    compiled = warnings(facts(ranks=1, source="/x"))
    assert compiled.startswith("this is the source folder /x, not what pip installed: ")
    text = warnings(facts(ranks=1, source="/x", kernels="kernels: NumPy (not compiled)"))
    assert "its loops on 16-bit floats are not compiled" in text
    assert text.endswith("Run programs in another folder")


# -- the page -----------------------------------------------------------------------------

LONG = " ".join(["word"] * 60) + " /" + "path" * 40


def page(monkeypatch: pytest.MonkeyPatch, *texts: str, terminal: bool = False) -> list[str]:
    rows = [("short", ""), ("", ""), ("label", texts[0])]
    monkeypatch.setattr(doctor_page, "_rows", lambda *_: iter(rows))
    file = io.StringIO()
    screen = Console(file=file, width=60, force_terminal=terminal, no_color=True, highlight=False)
    doctor_page.show(screen, 1, {}, [], [], [Advice("warning", text) for text in texts])
    return file.getvalue().splitlines()


def test_lines_are_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert page(monkeypatch, LONG, "[bold]") == [
        "short",
        "",
        f"label       {LONG}",
        "",
        f"warning: {LONG}",
        "warning: [bold]",
    ]


@pytest.mark.parametrize(("columns", "launched"), [(150, False), (150, True), (100, True)])
def test_lines_are_as_wide_as_asked(
    monkeypatch: pytest.MonkeyPatch, columns: int, launched: bool
) -> None:
    if columns != 100:
        monkeypatch.setenv("COLUMNS", str(columns))
    if launched:
        monkeypatch.setenv("PMI_RANK", "0")
    lines = page(monkeypatch, LONG)
    assert all(line == line.rstrip() for line in lines)
    words = [line for line in lines if "path" not in line]
    assert columns - 6 < max(map(len, words)) <= columns
    assert sum(LONG.split()[-1] in line for line in lines) == 2  # whole


def test_lines_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = page(monkeypatch, " ".join(["word"] * 60), terminal=True)
    assert len(lines) > 8
