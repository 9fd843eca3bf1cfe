"""Write algorithms.md from the docstrings of the builders; a test holds the file to it."""

from __future__ import annotations

import inspect
from pathlib import Path

from mpicoll.algorithms import Algorithm, every

HEAD = """# Algorithms

Made from the docstrings by `python docs/reference/make_algorithms.py`. P is the number of ranks,
N the bytes of the vector on one rank, or of all blocks together (barrier: its one byte), S the
number of segments, R the radix; `lg` is log2 P rounded up, `fl` rounded down, `odd` is 1 unless P
is a power of two. Steps and bytes are the most that any rank has, for blocks of equal length; a
test counts them from the schedules.
`order` is explained in [reductions and order](../explanation/order.md).
"""


def section(algorithm: Algorithm) -> str:
    """Return the text of one algorithm."""
    notes = []
    if algorithm.collective in ("allreduce", "exscan", "reduce", "reduce_scatter", "scan"):
        notes.append(f"order: {algorithm.order}")
    if algorithm.segmented:
        notes.append("heeds `segment=`")
    if algorithm.uniform:
        notes.append("equal counts only")
    doc = inspect.getdoc(algorithm.build) or ""
    body = doc.replace("\nSteps:", "\n- Steps:").replace("\nSent:", "\n- Bytes sent:")
    return f"### {algorithm.name}\n\n{body}\n" + (f"\n({'; '.join(notes)})\n" if notes else "")


def text() -> str:
    """Return the whole page."""
    parts = [HEAD]
    collective = ""
    for algorithm in every():
        if algorithm.collective != collective:
            collective = algorithm.collective
            parts.append(f"## {collective}\n")
        parts.append(section(algorithm))
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_name("algorithms.md").write_text(text(), encoding="utf-8")
