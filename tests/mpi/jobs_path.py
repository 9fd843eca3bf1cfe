"""Puts the folder of the jobs on the path: what is imported after this finds their parts."""

from __future__ import annotations

import sys
from pathlib import Path

JOBS = Path(__file__).parents[2] / "jobs"
if str(JOBS) not in sys.path:
    sys.path.append(str(JOBS))
