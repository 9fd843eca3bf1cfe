"""The tables and pictures of a benchmark, from rows that are made up."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.bar import Bar
from rich.console import Console
from rich.text import Text

from mpicoll.cli import bench_bars
from mpicoll.cli.bench_plot import draw
from mpicoll.cli.bench_report import add_rows, conclude, percent, series, table
from mpicoll.cli.main import run

LIMIT = {"one_way": {"rate": 4e9}, "both_ways": {"rate": 2e9}, "memcpy": {"rate": 8e9}}


def _ratio(median: float, verdict: str) -> dict[str, Any]:
    interval = (median / 2, median * 2)
    return {"ratio": {"median": median}, "interval": interval, "verdict": verdict}


def _row(algorithm: str, nbytes: int, busbw: float, **against: Any) -> dict[str, Any]:
    return {
        "collective": "allreduce",
        "bytes": nbytes,
        "algorithm": algorithm,
        "rounds": 7,
        "seconds": {"min": 1e-6, "median": 2e-6, "p99": 3e-6},
        "algbw": busbw / 2,
        "busbw": busbw,
        "limit": "both_ways",
        "share": busbw / 2e9,
        "against": against,
        "fault": "",
    }


def _rows(*rivals: str) -> list[dict[str, Any]]:
    """Return two sizes of two rivals, each twice, and ours."""
    rows = []
    for nbytes in (8, 1 << 20):
        for name in rivals:
            others = {one: _ratio(2.0, "slower") for one in rivals if one != name}
            rows.append(_row(name, nbytes, nbytes * 100, **others))
            noise = others | {name: _ratio(1.1, "same")}
            rows.append(_row(f"{name} again", nbytes, nbytes * 110, **noise))
        ours = {one: _ratio(0.5, "faster") for one in rivals}
        rows.append(_row("auto: ring", nbytes, nbytes * 200, **ours))
    return rows


def _printed(show: Any, *arguments: Any) -> str:
    screen = Console(file=io.StringIO(), width=100, highlight=False)
    show(screen, *arguments)
    text = screen.file.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    return text


@pytest.mark.parametrize("rivals", [(), ("native",), ("native", "gloo")])
def test_table(rivals: tuple[str, ...]) -> None:
    board, rows = table(rivals), _rows(*rivals)
    add_rows(board, rows, rivals)
    text = _printed(lambda screen: screen.print(board))
    assert "again" not in text
    assert [f"/ {rival}" in text for rival in ("native", "gloo")] == [
        rival in rivals for rival in ("native", "gloo")
    ]
    assert text.count("▼ 0.50") == 2 * len(rivals)
    # With one rival there is room for the interval.
    assert text.count("(0.25–1.00)") == (2 if len(rivals) == 1 else 0)
    assert text.count("…") == 0


def test_table_shows_what_is_wrong() -> None:
    rows = _rows("native")
    rows[-1]["fault"] = "rank 1: element 3 is 0, expected 2"
    board = table(["native"])
    add_rows(board, rows, ["native"])
    assert "WRONG auto: ring" in _printed(lambda screen: screen.print(board))
    text = _printed(conclude, rows, ["native"])
    assert "1 MiB auto: ring: rank 1: element 3 is 0, expected 2" in text
    assert "were right" not in text


def test_conclusion_names_the_noise_of_each_rival() -> None:
    text = " ".join(_printed(conclude, _rows("native", "gloo"), ["native", "gloo"]).split())
    assert "were right; 7 rounds" in text
    for rival in ("native", "gloo"):
        assert f"A/A, {rival} against itself: 1.10 to 1.10, 95 % intervals within 0.55" in text


def test_shares_are_short() -> None:
    shares = (0, 0.0009, 0.001, 0.0123, 0.0996, 0.5, 1.204)
    assert [percent(share) for share in shares] == [
        "<0.1%",
        "<0.1%",
        "0.1%",
        "1.2%",
        "10%",
        "50%",
        "120%",
    ]


def test_the_automatic_choice_is_one_series() -> None:
    rows = [_row("auto: ring", 8, 1.0), _row("auto: direct", 16, 2.0), _row("ring", 8, 1.0)]
    assert {name: len(one) for name, one in series(rows).items()} == {"auto": 2, "ring": 1}


# -- the terminal --------------------------------------------------------------------------


def test_axes_of_the_bars() -> None:
    assert bench_bars.decades([2e3, 5e8]) == (3.0, pytest.approx(8.69897))
    assert bench_bars.decades([1e3]) == (3.0, 4.0)
    assert [bench_bars.along(rate, 3.0, 5.0) for rate in (0, 1e2, 1e3, 1e4, 1e5, 1e6)] == [
        0.0,
        0.0,
        0.0,
        0.5,
        1.0,
        1.0,
    ]
    assert bench_bars.octaves([]) == bench_bars.octaves([2.0, 0.5]) == 3.0
    assert bench_bars.octaves([1 / 32, 4.0]) == 5.0


@pytest.mark.parametrize(("ratio", "begin", "end"), [(0.5, 2, 3), (1.0, 3, 3), (4.0, 3, 5)])
def test_a_ratio_starts_in_the_middle(ratio: float, begin: float, end: float) -> None:
    bar = bench_bars._ratio_bar(_ratio(ratio, "same"), 3.0, 32)
    assert isinstance(bar, Bar)
    assert (bar.size, bar.begin, bar.end) == (6, begin, end)
    assert isinstance(bench_bars._ratio_bar(None, 3.0, 32), Text)


@pytest.mark.parametrize("rivals", [(), ("native",), ("native", "gloo")])
def test_bars(rivals: tuple[str, ...]) -> None:
    text = _printed(bench_bars.show, _rows(*rivals), rivals)
    lines = [line for line in text.splitlines() if line.split() and "█" in line]
    assert len(lines) == 2 * (1 + len(rivals))
    assert "again" not in text
    # The longest bar is that of the highest busbw, which is the last line.
    lengths = [line[: 20 + 64 // (1 + len(rivals))].count("█") for line in lines]
    assert lengths[-1] == max(lengths)
    for rival in rivals:
        assert f"/ {rival}" in text


def test_no_bars_where_nothing_is_sent() -> None:
    rows = [_row("auto: ring", 8, 0.0)]
    assert "nothing is sent" in _printed(bench_bars.show, rows, ())
    barrier = _row("auto: dissemination", 8, 1.0) | {"collective": "barrier"}
    assert "nothing is sent" in _printed(bench_bars.show, [barrier], ())


# -- files ---------------------------------------------------------------------------------


def test_png(tmp_path: Path) -> None:
    draw(_rows("native"), ["a line"], tmp_path / "plot.png", ["native"], LIMIT)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("rivals", [(), ("native",), ("native", "gloo")])
def test_panels(rivals: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    # Only the MPI itself has a scan.
    scans = [row | {"collective": "scan"} for row in _rows(*rivals[:1])]
    draw([*_rows(*rivals), *scans], ["a line"], Path("x.png"), rivals, LIMIT)
    panels = drawn[0].axes
    assert len(panels) == 2 * (1 + len(rivals))
    labels = [text.get_text() for text in panels[0].get_legend().get_texts()]
    assert labels == [*rivals, "auto", "limit: both ways"]
    titles = [panel.get_title(loc="left") for panel in panels if panel.axison]
    ratios = [f"time / {rival} (below 1: faster)" for rival in rivals]
    assert titles == ["allreduce", *ratios, "scan", *ratios[:1]]


def test_missing_matplotlib_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mpicoll.cli.launch.found", lambda: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["bench", "allreduce", "--plot", "x.png"]) == 2
    assert "pip install 'mpicoll[plot]'; --plot - does not" in capsys.readouterr().err
