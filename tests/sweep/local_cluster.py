"""A Dask cluster on this machine, run as a script in a process of its own; spoken to over stdin, answers on stdout.

Prints the scheduler's address. ``workers`` prints the process ids of the workers, ``tasks`` how many tasks the
scheduler has; any other line, or none, ends it.
"""

from __future__ import annotations

import os
import sys

from distributed import Client, LocalCluster

if __name__ == "__main__":
    workers, processes = int(sys.argv[1]), sys.argv[2] == "processes"
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=processes,
            protocol="tcp",
            dashboard_address=None,
            silence_logs=50,
        ) as cluster,
        Client(cluster) as client,
    ):
        print(cluster.scheduler_address, flush=True)
        for line in sys.stdin:
            if line == "workers\n":
                print(*client.run(os.getpid).values(), flush=True)
            elif line == "tasks\n":
                print(len(cluster.scheduler.tasks), flush=True)
            else:
                break
