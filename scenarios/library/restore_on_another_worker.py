"""A prompt computed on one worker is restored by the other from the shared host pool.

Teaches: a block can be used only when its copy to the pool has ended. A request that comes while it is under way waits
for it, and then for its own copy back; both waits are in its time to first token.
"""

from g2sim.actors.host_pool.events import LoadFinished, StoreLanded
from g2sim.scenarios.script import ScriptedCluster

SCENARIO = {
    "engine": {
        "mode": "aggregated",
        "workers": {
            "aggregated": {
                "parallelism": {"replicas": 2},
                "kv_cache": {
                    "block_size": 16,
                    "bytes_per_token": 131072,
                    "capacity": {"type": "fixed", "blocks": 64},
                    "host_offload": {
                        "scope": "cluster_shared",
                        "num_host_blocks": 256,
                        "d2h_bandwidth_gbps": 1.0,
                        "h2d_bandwidth_gbps": 1.0,
                    },
                },
                "timing": {"type": "fixed", "prefill_ms": 20.0, "decode_ms": 8.0},
            }
        },
    },
    "router": {"policy": "round_robin"},
}


async def scenario(cluster: ScriptedCluster) -> None:
    prompt = [1, 2, 3, 4]

    first = cluster.submit(prompt)
    await first.end()

    # The copy to the pool begins when the pass has ended; whoever comes now waits for it.
    soon = cluster.submit([*prompt, 5])
    stored = await cluster.event(StoreLanded)
    loaded = await cluster.event(LoadFinished)
    await soon.end()
    assert soon.row["first_admission_host_reused_input_tokens"] == 4 * cluster.block_size_tokens
    assert soon.row["arrival_time_ms"] < stored.ended_ms < loaded.ended_ms <= soon.row["first_admit_ms"]

    # Filled up with other prompts, the first worker has only the pool left to find it in.
    for filler in range(2):
        await cluster.submit([1000 * (filler + 1) + block for block in range(63)]).end()
    await cluster.sleep(1000.0)
    left = cluster.cached(prompt, worker=0)
    assert left.device < len(prompt)
    assert left.device + left.host == len(prompt)
