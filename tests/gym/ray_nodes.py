"""A Ray cluster on this machine in a process of its own; obeys "add" and "lose" on its standard input, ends with it."""

import contextlib
import os
import sys

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import psutil  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

SMALL = {"object_store_memory": 80 * 1024**2}


def lose(cluster, node):
    """End a node as a power cut does: Ray alone would leave its actors a moment longer."""
    (raylet,) = node.all_processes["raylet"]
    actors = psutil.Process(raylet.process.pid).children(recursive=True)
    cluster.remove_node(node, allow_graceful=False)
    for process in actors:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(actors, 10)


def main():
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **SMALL}
    )
    print(cluster.address, cluster.head_node.node_id, flush=True)
    second = None
    for line in sys.stdin:
        if line.strip() == "add" and second is None:
            second = cluster.add_node(num_cpus=8, resources={"second": 8}, **SMALL)
            cluster.wait_for_nodes(60)
        elif line.strip() == "lose" and second is not None:
            lose(cluster, second)
            second = None
        print(second.node_id if second is not None else "none", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
