"""How many connections the process can hold: each takes two file descriptors, its own and the engine's.

Nothing here fails: a limit that cannot be raised is told, and the gateway takes fewer connections, so
that it never comes to a point where none can be accepted and none be made.
"""

from __future__ import annotations

import resource

# Libraries, listening sockets, the admin server's threads, idle engine connections, counting calls.
RESERVED = 256
PER_CONNECTION = 2


def raise_limit(connections: int) -> int:
    """Raise the limit of open files as far as it goes, or `connections` need. Returns what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = connections * PER_CONNECTION + RESERVED
    # Above the hard limit only a privileged process gets, and up to the hard one any.
    for wanted in ((enough, max(enough, hard)), (hard, hard)):
        if _number(soft) >= enough:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, wanted)
        except (ValueError, OSError):
            continue
        soft = wanted[0]
    return _number(soft)


def carried(limit: int) -> int:
    """Client connections that fit into `limit` open files; at least 1."""
    return max(1, (limit - RESERVED) // PER_CONNECTION)


def warning(wanted: int, limit: int) -> str | None:
    """What to tell the operator where `limit` open files are too few for `wanted` connections."""
    fit = carried(limit)
    if fit >= wanted:
        return None
    needed = wanted * PER_CONNECTION + RESERVED
    return (
        f"the system lets this process open {limit} files, which carries {fit} client connections, not "
        f"--max-connections {wanted}. Raise the hard limit to {needed} (ulimit -Hn {needed}; in a systemd "
        f"unit LimitNOFILE={needed}), or lower --max-connections. Until then {fit} are taken."
    )


def _number(limit: int) -> int:
    return 2**31 if limit == resource.RLIM_INFINITY else limit
