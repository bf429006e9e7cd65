"""Deliberate faults in the domain code, and what is to notice them.

Owns: the list. Each fault replaces one stretch of text that stands exactly once in its file.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Mutant:
    """One fault.

    Attributes:
        name: what is wrong then.
        file: where, from the repository's top.
        old, new: the text that is replaced, and what it becomes.
        tests: what is run first (pytest arguments); if that passes, the swarm is.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


POOL, DEVICE, RANK = "actors/host_pool/pool.py", "actors/worker/device_pool.py", "actors/worker/rank.py"
WORKER, HANDOFF, INDEX = "actors/worker/actor.py", "actors/handoff/actor.py", "actors/router/index.py"
RECENCY = "actors/host_pool/recency.py"
ROUTER_POOL = "actors/router/pool.py"
KERNEL, LINKS = "bus/kernel.py", "actors/host_pool/transfers.py"
FEED, RECOVERY, LINE = "actors/router/feed.py", "actors/router/recovery.py", "actors/router/line.py"

MUTANTS = (
    Mutant(
        "the youngest G2 block goes first",
        RECENCY,
        "return blocks[self._ages[blocks].argsort()]",
        "return blocks[(-self._ages[blocks]).argsort()]",
        "tests/host_pool",
    ),
    Mutant(
        "a G2 chain is touched head first",
        RECENCY,
        "np.arange(youngest, clock, -1)",
        "np.arange(clock + 1, youngest + 1)",
        "tests/host_pool",
    ),
    Mutant(
        "a block whose age has changed is evicted as if it had not",
        RECENCY,
        "            is_valid &= self._ages[oldest] == self._order_ages[start : start + step]\n",
        "",
        "tests/host_pool",
    ),
    Mutant(
        "what is spared loses its place among the oldest",
        RECENCY,
        "            self._next = start\n",
        "            pass\n",
        "tests/host_pool",
    ),
    Mutant(
        "blocks that were added are taken for those touched just before",
        RECENCY,
        "        self._latest = NO_NUMBERS\n        count",
        "        count",
        "tests/host_pool",
    ),
    Mutant(
        "a pin is not taken back",
        POOL,
        "left = book.pins[blocks] - 1\n",
        "left = book.pins[blocks]\n",
        "tests/host_pool",
    ),
    Mutant(
        "a load does not pin",
        POOL,
        "        self._book.pins[blocks] += 1\n",
        "",
        "tests/host_pool",
    ),
    Mutant(
        "a loading block stays evictable",
        POOL,
        "        self._evictable.remove(blocks)\n",
        "",
        "tests/host_pool",
    ),
    Mutant(
        "one block too few is evicted",
        POOL,
        "needed = count - (self.capacity_blocks - self.used_blocks)",
        "needed = count - (self.capacity_blocks - self.used_blocks) - 1",
        "tests/host_pool",
    ),
    Mutant(
        "the removal is announced after the copies that replace it",
        POOL,
        "        self._announce(PoolChange(stored=False, block_hashes=block_hashes))\n",
        "        self._late = PoolChange(stored=False, block_hashes=block_hashes)\n",
        "tests/host_pool",
    ),
    Mutant(
        "a pending block counts as found",
        POOL,
        "wait = bool(states[:matched].min() == PENDING) or ",
        "wait = ",
        "tests/host_pool",
    ),
    Mutant(
        "numbers of blocks in the pool are given to others",
        POOL,
        "        return np.concatenate((self._book.blocks(), *",
        "        return np.concatenate((NO_NUMBERS, *",
        "tests/host_pool",
    ),
    Mutant(
        "numbers of blocks of transfers are given to others",
        POOL,
        "*[transfer.blocks for transfer in self._transfers.values()]",
        "*[transfer.blocks for transfer in []]",
        "tests/host_pool",
    ),
    Mutant(
        "the blocks of a landing store are ordered by their place",
        POOL,
        "self._numbering.sorted_by_hash(blocks) if len(blocks) > 1 else blocks",
        "blocks",
        "tests/host_pool",
    ),
    Mutant(
        "what a store brought is forgotten while a block of it is here",
        POOL,
        "if transfer in known}",
        "if transfer not in known}",
        "tests/host_pool",
    ),
    Mutant(
        "only the first client hears of a change",
        POOL,
        "for client in self._clients.values():\n            client.changes.append(change)",
        "for client in list(self._clients.values())[:1]:\n            client.changes.append(change)",
        "tests/host_pool",
    ),
    Mutant(
        "a store lands as the oldest block",
        RECENCY,
        "np.arange(self._clock + 1, self._clock + 1 + count)",
        "np.arange(-self._clock - count, -self._clock)",
        "tests/host_pool",
    ),
    Mutant(
        "a retired client's loads keep their pins",
        POOL,
        "self._unpin(self._transfers.pop(number))",
        "self._transfers.pop(number)",
        "tests/host_pool",
    ),
    Mutant(
        "the youngest G1 block goes first",
        DEVICE,
        "        self._entries[at:stop] = blocks\n        self._entry_of[blocks] = _counting(at, stop)\n",
        "        self._entries[at:stop] = blocks[::-1]\n        self._entry_of[blocks[::-1]] = _counting(at, stop)\n",
        "tests/worker",
    ),
    Mutant(
        "hits count as room for fresh blocks",
        DEVICE,
        "if missing > 0 and missing > len(self._inactive) - self._inactive.count(hits):",
        "if missing > 0 and missing > len(self._inactive):",
        "tests/worker",
    ),
    Mutant(
        "a canceled reservation keeps its pins",
        DEVICE,
        "        self.release(reservation.hits)\n",
        "",
        "tests/worker",
    ),
    Mutant(
        "a canceled reservation loses its memory",
        DEVICE,
        "        self._set_free(reservation.fresh)\n",
        "",
        "tests/worker",
    ),
    Mutant(
        "blocks that are copied out can be evicted",
        DEVICE,
        "            unused &= ~self._held[blocks]\n",
        "            pass\n",
        "tests/worker",
    ),
    Mutant(
        "a whole prompt is taken from the cache",
        RANK,
        "most = (seq.known - 1) // size",
        "most = seq.known // size",
        "tests/worker tests/oracle/test_oracle.py -k mix",
    ),
    Mutant(
        "what a preemption finds again counts as a hit",
        RANK,
        "if seq.was_admitted or not self._has_host:",
        "if not self._has_host:",
        "tests/worker tests/field/test_field_host_tier.py",
    ),
    Mutant(
        "a prompt of the model's limit is admitted",
        RANK,
        "seq.prompt_tokens >= config.max_model_len_tokens",
        "seq.prompt_tokens > config.max_model_len_tokens",
        "tests/worker tests/oracle/test_oracle.py",
    ),
    Mutant(
        "a pass starts before the copy that it waits for has ended",
        RANK,
        "return max(now_ms, self._fence_ms) if self._has_host else now_ms",
        "return now_ms",
        "tests/worker tests/oracle/test_oracle.py",
    ),
    Mutant(
        "a worker is not woken again after a pass without progress",
        WORKER,
        "                port.retry(_START_PASS, phase=Phase.START)\n",
        "",
        "tests/oracle/test_oracle.py",
    ),
    Mutant(
        "a released source is not told to the router",
        HANDOFF,
        "        del self._handoffs[handoff.number]\n"
        "        yield from self._tell_over(WorkerRole.PREFILL, handoff, port)\n",
        "        del self._handoffs[handoff.number]\n        return\n        yield\n",
        "tests/router",
    ),
    Mutant(
        "a cleared rank keeps its keys in the index of the host tier",
        INDEX,
        "        self.remove(place, tuple(self.hashes(place)))\n",
        "        pass\n",
        "tests/router",
    ),
    Mutant(
        "a run of the device tree loses its end for all places when one of them does",
        INDEX,
        "== block_hash and run.places == bit and not run.children",
        "== block_hash and not run.children",
        "tests/router",
    ),
    Mutant(
        "a change that several ranks tell is applied where the first of them told it",
        ROUTER_POOL,
        "if idx > last[place]:",
        "if idx >= 0:",
        "tests/router",
    ),
    Mutant(
        "lag is ignored",
        KERNEL,
        "due_ms = record.time_ms + self._lag_ms",
        "due_ms = record.time_ms",
        "tests/bus tests/router",
    ),
    Mutant(
        "a message for an earlier phase joins the round at work",
        KERNEL,
        "round_idx = self.round if phase >= self.phase else self.round + 1",
        "round_idx = self.round",
        "tests/bus",
    ),
    Mutant(
        "the end of transfers of one instant goes by number alone",
        POOL,
        "ended.sort(key=lambda item: (item[0], transfers[item[1]].direction, item[1]))",
        "ended.sort(key=lambda item: (item[0], item[1]))",
        "tests/host_pool tests/oracle/test_oracle.py",
    ),
    Mutant(
        "a play's blocks are those of every play",
        "actors/traffic/weka_lowering.py",
        'f"source:{self._source_name}:',
        'f"source:',
        "tests/traffic",
    ),
    Mutant(
        "the lag of a fault is ignored",
        LINE,
        "due_ms += fault.lag_ms\n",
        "due_ms += 0.0\n",
        "tests/faults",
    ),
    Mutant(
        "a gap is not noticed",
        RECOVERY,
        "if self.asking or max(self._announced.values(), default=-1) <= self.last:",
        "if self.asking or not self._held:",
        "tests/faults",
    ),
    Mutant(
        "a snapshot has children before their parents",
        RECOVERY,
        "key=lambda item: (item[1].position, item[0])",
        "key=lambda item: (-item[1].position, item[0])",
        "tests/faults",
    ),
    Mutant(
        "an answer moves the cursor one message too few",
        RECOVERY,
        "self.last = answer.last\n",
        "self.last = answer.last - 1\n",
        "tests/faults",
    ),
    Mutant(
        "a message from before a reset is taken",
        RECOVERY,
        "if epoch < self._epoch or sequence",
        "if sequence",
        "tests/faults",
    ),
    Mutant(
        "a heartbeat that is lost is not repeated",
        FEED,
        "        if not passage.due_ms:\n            self._plan_beat(place)\n\n    def _lose_patience",
        "\n    def _lose_patience",
        "tests/faults",
    ),
    Mutant(
        "router replicas share the draws of a fault",
        FEED,
        "Line(plan.faults, lag_ms, port.stream)",
        'Line(plan.faults, lag_ms, lambda purpose: port._kernel.stream(f"{pool.role.pool_name}:{purpose}"))',
        "tests/faults tests/router",
    ),
    Mutant(
        "a recycled play has the blocks of the one before",
        "actors/traffic/snapshot.py",
        "base, ranks = instance.slot * self._stride,",
        "base, ranks = instance.lane * self._stride,",
        "tests/traffic",
    ),
    Mutant(
        "a lane is given away twice",
        "actors/traffic/agentic.py",
        "        if play.lane is not None and self._queue:\n",
        "        for _ in range(0 if play.lane is None else min(2, len(self._queue))):\n",
        "tests/traffic",
    ),
    Mutant(
        "what warm-up did counts in the profile",
        "scenarios/report.py",
        "        self._ranks = {key: _RankCounts() for key in self._ranks}\n",
        "",
        "tests/report tests/traffic",
    ),
    Mutant(
        "a canceled request keeps its blocks",
        RANK,
        "        self._release_blocks(seq)\n        return seq.load is None",
        "        return seq.load is None",
        "tests/traffic tests/field/test_field_abort.py",
    ),
    Mutant(
        "a canceled hand-off keeps its destination",
        RANK,
        "            self.pool.cancel(reserved[1])\n",
        "            pass\n",
        "tests/traffic",
    ),
    Mutant(
        "what is computed on cleared blocks is cached",
        RANK,
        "            seq.keep_from(tiers)\n",
        "            pass\n",
        "tests/field/test_field_clear.py",
    ),
    Mutant(
        "memory that a clear leaves to copies counts as free",
        POOL,
        "return self._book.used_blocks + self._cleared_blocks",
        "return self._book.used_blocks",
        "tests/host_pool",
    ),
    Mutant(
        "a store is announced with the clear that took it",
        "actors/kv/events.py",
        "            unknown.update(block_hashes)\n",
        "",
        "tests/field/test_field_clear.py tests/host_pool",
    ),
    Mutant(
        "a canceled request that is computed counts as gone",
        "actors/handoff/events.py",
        "return CanceledRequestLeft if end.leaves_later else None",
        "return None",
        "tests/traffic",
    ),
    Mutant(
        "deferred passes go on while the shared pool moves",
        "actors/host_pool/actor.py",
        "                port.recall(but=self._carefree)\n",
        "                pass\n",
        "tests/oracle",
    ),
    Mutant(
        "the pool's timer is not mended for passes that were put off",
        "actors/host_pool/actor.py",
        "at_ms = next_ms - ROUNDING_MS",
        "at_ms = None",
        "tests/host_pool/test_standing_by.py",
    ),
    Mutant(
        "news that a carefree rank takes late has no effect",
        "actors/worker/deferred_passes.py",
        "            rank.end_pass(reply)\n",
        "",
        "tests/oracle",
    ),
    Mutant(
        "a parked retry does not recall deferred turns",
        KERNEL,
        "        if kernel.deferred:\n            kernel.recall()\n        kernel.turn_has_effect",
        "        kernel.turn_has_effect",
        "tests/bus/test_deferred_turns.py",
    ),
    Mutant(
        "a deferred turn of this instant is no effect of its round",
        KERNEL,
        "            self._round_had_effect = True\n\n    def tell_instants",
        "            pass\n\n    def tell_instants",
        "tests/bus/test_deferred_turns.py",
    ),
    Mutant(
        "a retry that stands by is taken as still to come",
        "actors/host_pool/actor.py",
        "asked.append((3, now_ms, order, chain))",
        "asked.append((1, now_ms, order, chain))",
        "tests/host_pool/test_standing_by.py",
    ),
    Mutant(
        "bytes do not move at pass ends that are put off",
        "actors/host_pool/actor.py",
        "            self.pool.advance(time_ms)",
        "            pass",
        "tests/host_pool/test_standing_by.py",
    ),
    Mutant(
        "a number in use is given again",
        "actors/kv/numbers.py",
        "            in_use[numbers[numbers >= 0]] = True\n",
        "            in_use[numbers[numbers >= 0][:1]] = True\n",
        "tests/kv/test_numbers.py",
    ),
    Mutant(
        "a run is made of a hash that has a number",
        "actors/kv/numbers.py",
        "        return hashes[:known]\n",
        "        return hashes\n",
        "tests/kv/test_numbers.py",
    ),
    Mutant(
        "who is blocked is planned past the eviction of a block that it would use",
        "actors/worker/rank.py",
        "passes = run.passes_with(self.pool.blocks_before_eviction_of(head.numbers[:found]))",
        "pass",
        "tests/worker/test_decode_run.py",
    ),
)
