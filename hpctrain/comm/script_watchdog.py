"""The watchdog of scripts of one's own, which have no configuration."""

from __future__ import annotations

import os

from hpctrain.comm.watchdog import Watchdog
from hpctrain.grid import Grid


def start_watchdog(grid: Grid) -> None:
    """Watch a grid of a script of one's own, unless it is watched: HPCTRAIN_WATCHDOG seconds, 600 where that is not
    set; 0 is never. Collective; the first rank's setting is that of all, as some launchers leave the environment of
    other nodes alone.

    Raises:
        ValueError: on every rank, for something else than a number of seconds.
    """
    given = grid.comm.bcast(os.environ.get("HPCTRAIN_WATCHDOG", "600"))
    try:
        limit = float(given)
    except ValueError:
        limit = -1.0
    if not limit >= 0:
        raise ValueError(f"HPCTRAIN_WATCHDOG must be a number of seconds, or 0 for no watchdog, got {given!r}")
    if limit and grid.size > 1 and grid.transport.watchdog is None:
        Watchdog(grid, limit)
