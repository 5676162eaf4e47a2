"""Names under which compiled code shows up in the profiles of torch."""

from __future__ import annotations

__all__ = ["CALL_WAIT"]

CALL_WAIT = "overlap_core::wait_call"
"""Where the host waits for a coalesced call; each wait of the graph is marked, also later ones."""
