"""How transfers share bandwidth: worked examples, equal shares, and what both rules keep to.

Sizes in the examples are in MB and rates in MB/ms; 1 GB/s is 1 MB/ms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from g2sim.actors.host_pool.transfers import (
    Direction,
    FairLinks,
    FifoLanes,
    Job,
    Link,
    ShareRule,
    Transport,
    bytes_per_ms,
    equal_share,
    max_min,
)
from g2sim.bus.errors import InvariantViolation

MB = 1_000_000
D2H, H2D = Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE
BOTH = pytest.mark.parametrize("rule", [max_min, equal_share])

RATES = st.sampled_from([0.3, 0.5, 1.0, 1.3, 1.7, 2.0, 3.0, 7.0, 32.0, math.inf]).map(lambda rate: rate * MB)
FINITE_RATES = RATES.filter(math.isfinite)


class Transfer:
    """A load: ``client`` moves ``size_mb`` from ``at_ms`` on, over a link of ``link`` MB/ms."""

    def __init__(self, client: int, link: float, size_mb: float, at_ms: float = 0.0, latency_ms: float = 0.0) -> None:
        self.client = client
        self.link = Link(d2h_bytes_per_ms=link * MB, h2d_bytes_per_ms=link * MB, latency_ms=latency_ms)
        self.size_bytes = round(size_mb * MB)
        self.at_ms = at_ms


def fair(rule: ShareRule, pool: float) -> FairLinks:
    return FairLinks(pool * MB, pool * MB, rule)


def ends(links: Transport, transfers: Sequence[Transfer], *, extra: int = 0, direction: Direction = H2D) -> list[float]:
    """When each transfer ends; the transport is looked at when something happens, ``extra`` more times each."""
    done: dict[int, float] = {}
    waiting = sorted(enumerate(transfers), key=lambda item: item[1].at_ms)
    while len(done) < len(transfers):
        next_ms = links.next_event_ms()
        start_ms = waiting[0][1].at_ms if waiting else math.inf
        now_ms = min(math.inf if next_ms is None else next_ms, start_ms)
        assert math.isfinite(now_ms)
        for _ in range(1 + extra):
            done |= {number: end_ms for end_ms, number in links.advance(now_ms)}
        while waiting and waiting[0][1].at_ms == now_ms:
            number, one = waiting.pop(0)
            links.submit(number, one.client, one.link, direction, one.size_bytes, now_ms, now_ms)
            if extra:
                done |= {number: end_ms for end_ms, number in links.advance(now_ms)}
    return [done[number] for number in range(len(transfers))]


def jobs(*clients: tuple[float, int]) -> list[Job]:
    """Moving jobs: one (link [bytes/ms], number of jobs) a client."""
    return [
        Job(10 * client + k, client, H2D, 0.0, MB, link) for client, (link, n) in enumerate(clients) for k in range(n)
    ]


# -- refused


@BOTH
def test_a_transfer_that_cannot_move_stops_the_run(rule: ShareRule) -> None:
    """A link of 0 bytes/ms is an error that names transfer, client and rate, not a transfer that never ends."""
    with pytest.raises(InvariantViolation, match=r"transfer 0 of client 3 moves at 0\.0 bytes/ms"):
        ends(fair(rule, 1.0), [Transfer(3, 0.0, 1.0)])


@BOTH
def test_a_removed_transfer_never_ends(rule: ShareRule) -> None:
    """After remove() the transfer is not reported, and nothing is due."""
    links = fair(rule, 1.0)
    links.submit(0, 0, Transfer(0, 1.0, 1.0).link, H2D, MB, 0.0, 0.0)
    links.remove(0)
    assert links.next_event_ms() is None
    assert links.advance(10.0) == []


# -- max-min, worked by hand


def test_no_redistribution_is_where_the_rules_part() -> None:
    """Link 0.6, pool 1.2, two loads of 2 MB on client 0 and one on client 1, all at 200.

    Equal shares: client 0's get min(0.3, 0.4) each, client 1's min(0.6, 0.4) -> 205; then 0.5 MB are left at 0.3.
    Max-min: client 0's link allows 0.3 each; of the pool 1.2 - 0.6 = 0.6 is left for client 1, and its link takes all:
    200 + 2 / 0.6. Client 0's are bound by their link throughout: 200 + 2 / 0.3.
    """
    three = [Transfer(0, 0.6, 2.0, 200.0), Transfer(0, 0.6, 2.0, 200.0), Transfer(1, 0.6, 2.0, 200.0)]
    assert ends(fair(equal_share, 1.2), three) == [206.66666666666666, 206.66666666666666, 205.0]
    got = ends(fair(max_min, 1.2), three)
    assert got == pytest.approx([200 + 20 / 3, 200 + 20 / 3, 200 + 10 / 3], rel=1e-14)
    assert got[2] < 205.0


def test_two_unequal_links() -> None:
    """Links 1 and 4, pool 3. Client 0 (1 MB) is bound by its link: 1, so client 1 (4 MB) gets 2 until 1.0.

    Then client 1 is alone with its last 2 MB at min(4, 3) = 3: 1 + 2/3. With equal shares it has 1.5 and 2.5 MB left.
    """
    two = [Transfer(0, 1.0, 1.0), Transfer(1, 4.0, 4.0)]
    assert ends(fair(max_min, 3.0), two) == pytest.approx([1.0, 1 + 2 / 3], rel=1e-15)
    assert ends(fair(equal_share, 3.0), two) == pytest.approx([1.0, 1 + 2.5 / 3], rel=1e-15)


def test_filling_goes_on_level_by_level() -> None:
    """Links 1, 2 and 10, pool 6: rates 1, 2, 3 (each level leaves the rest to those above it).

    Sizes 1, 4, 6: client 0 ends at 1. Then client 1 (2 MB left) has its link's 2, client 2 (3 MB left) the other 4 of
    the pool: it ends at 1.75. Client 1 had its link all the time: 2.
    """
    three = [Transfer(0, 1.0, 1.0), Transfer(1, 2.0, 4.0), Transfer(2, 10.0, 6.0)]
    assert max_min(jobs((1.0, 1), (2.0, 1), (10.0, 1)), 6.0) == [1.0, 2.0, 3.0]
    assert ends(fair(max_min, 6.0), three) == [1.0, 2.0, 1.75]


def test_unequal_links_and_several_jobs_a_client() -> None:
    """Links 2 (two jobs), 6 and 6, pool 9: 1 and 1, then (9 - 2) / 2 = 3.5 each.

    Sizes 1 and 3, 3.5, 10.5. At 1.0 the first job of client 0 and client 1's end. Client 0's other job (2 MB left) now
    has the whole link, 2, and ends at 2. Client 2 (7 MB left) could have 9 - 2 = 7, its link allows 6: 1 MB is left at
    2.0, still at 6: 2 + 1/6.
    """
    four = [Transfer(0, 2.0, 1.0), Transfer(0, 2.0, 3.0), Transfer(1, 6.0, 3.5), Transfer(2, 6.0, 10.5)]
    assert max_min(jobs((2.0, 2), (6.0, 1), (6.0, 1)), 9.0) == [1.0, 1.0, 3.5, 3.5]
    assert ends(fair(max_min, 9.0), four) == pytest.approx([1.0, 2.0, 1.0, 2 + 1 / 6], rel=1e-15)


def test_a_freed_share_is_handed_out_at_the_instant_it_is_freed() -> None:
    """Links 4, pool 4, sizes 2, 4 and 8 MB at 0, and 3 MB more on client 0 at 2.5.

    4/3 each. Client 0 ends at 1.5; the others (2 and 6 MB left) have 2 each from then on. At 2.5 client 1 ends, and
    client 0's new 3 MB share with client 2's last 4 MB: 2 each. At 4.0 client 0 ends; 1 MB is left at 4: 4.25.
    """
    four = [Transfer(0, 4.0, 2.0), Transfer(1, 4.0, 4.0), Transfer(2, 4.0, 8.0), Transfer(0, 4.0, 3.0, 2.5)]
    assert ends(fair(max_min, 4.0), four) == pytest.approx([1.5, 2.5, 4.25, 4.0], rel=1e-14)


def test_shares_go_by_job_not_by_client_where_only_the_pool_binds() -> None:
    """Unlimited links, pool 4, three jobs of client 0 and one of client 1: 1 each."""
    assert max_min(jobs((math.inf, 3), (math.inf, 1)), 4.0) == [1.0] * 4


@pytest.mark.parametrize(
    ("clients", "pool", "expected"),
    [
        ([(math.inf, 1), (1.0, 1)], 3.0, [2.0, 1.0]),
        ([(math.inf, 2), (1.0, 2)], 3.0, [1.0, 1.0, 0.5, 0.5]),
        ([(math.inf, 1), (4.0, 1)], 3.0, [1.5, 1.5]),
        ([(2.0, 2), (3.0, 1)], math.inf, [1.0, 1.0, 3.0]),
        ([(math.inf, 2), (3.0, 1)], math.inf, [math.inf, math.inf, 3.0]),
    ],
)
def test_unlimited_links_and_pools(clients: list[tuple[float, int]], pool: float, expected: list[float]) -> None:
    """An unlimited link takes what finite ones leave; an unlimited pool binds nobody."""
    assert max_min(jobs(*clients), pool) == expected


@BOTH
def test_unlimited_transfers_end_where_they_begin(rule: ShareRule) -> None:
    """With nothing that limits them, transfers end at the instant they may move, whoever else moves."""
    two = [Transfer(0, math.inf, 5.0, 1.0), Transfer(1, math.inf, 5.0, 1.0, latency_ms=0.5), Transfer(2, 2.0, 1.0, 1.0)]
    assert ends(fair(rule, math.inf), two) == [1.0, 1.5, 1.5]


# -- both rules, on the reference's examples (g1-g2-cache.md 5.3)


@BOTH
@pytest.mark.parametrize(
    ("pool", "transfers", "expected"),
    [
        (1.0, [Transfer(0, 1.0, 2.0, 200.0), Transfer(1, 1.0, 2.0, 201.0)], [203.0, 204.0]),
        (1.5, [Transfer(0, 1.0, 2.0, 200.0), Transfer(1, 1.0, 2.0, 201.0)], [202.33333333333334, 203.33333333333334]),
        (
            1.0,
            [Transfer(0, 1.0, 2.0, 200.0, latency_ms=0.75), Transfer(1, 1.0, 2.0, 201.0, latency_ms=0.75)],
            [203.75, 204.75],
        ),
        (80.0, [Transfer(client, 32.0, 32.0, 200.0) for client in range(4)], [201.6] * 4),
        (80.0, [Transfer(client, 32.0, 32.0, 200.0) for client in range(2)], [201.0] * 2),
        (math.inf, [Transfer(0, 1.0, 2.0, 200.0), Transfer(0, 1.0, 2.0, 200.5)], [203.5, 204.0]),
        (1.3, [Transfer(0, 1.7, 2.0, 200.0)], [201.53846153846155]),
    ],
    ids=["one_pool", "three_halves", "latency", "four_32_80", "two_32_80", "one_rank", "odd"],
)
def test_the_examples_that_the_reference_ran(
    rule: ShareRule, pool: float, transfers: list[Transfer], expected: list[float]
) -> None:
    """No share is idle in these, so both rules give the recorded times to the last bit."""
    assert ends(fair(rule, pool), transfers) == expected


@BOTH
def test_a_transfer_in_its_latency_takes_no_share(rule: ShareRule) -> None:
    """Pool 1, 2 MB each at 0, the second with latency 1: the first moves alone until 1, then half each.

    The first has 1 MB left at 0.5: 3. The second then has 1 MB left, alone: 4.
    """
    assert ends(fair(rule, 1.0), [Transfer(0, 1.0, 2.0), Transfer(1, 1.0, 2.0, latency_ms=1.0)]) == [3.0, 4.0]


@BOTH
def test_directions_do_not_disturb_each_other(rule: ShareRule) -> None:
    """A store and a load of one client at once both have the whole link and the whole pool of their direction."""
    links = FairLinks(1.0 * MB, 2.0 * MB, rule)
    link = Link(d2h_bytes_per_ms=1.0 * MB, h2d_bytes_per_ms=2.0 * MB, latency_ms=0.0)
    links.submit(0, 0, link, D2H, 2 * MB, 0.0, 0.0)
    links.submit(1, 0, link, H2D, 2 * MB, 0.0, 0.0)
    assert links.advance(5.0) == [(1.0, 1), (2.0, 0)]


# -- properties

CLIENTS = st.lists(st.tuples(RATES, st.integers(min_value=1, max_value=4)), min_size=1, max_size=6)
SCHEDULES = st.lists(
    st.tuples(
        st.integers(min_value=0, max_value=3),
        st.sampled_from([0.25, 1.0, 2.0, 3.5]),
        st.sampled_from([0.0, 0.5, 1.0, 1.25]),
        st.sampled_from([0.0, 0.75]),
    ),
    min_size=1,
    max_size=7,
)


@BOTH
@given(clients=CLIENTS, pool=RATES)
def test_rates_are_conserved(rule: ShareRule, clients: list[tuple[float, int]], pool: float) -> None:
    """All jobs together never exceed the pool, those of a client never its link; every job moves."""
    moving = jobs(*clients)
    rates = rule(moving, pool)
    assert min(rates) > 0.0
    assert sum(rates) <= pool * (1 + 1e-12)
    for client, (link, _) in enumerate(clients):
        mine = [rate for job, rate in zip(moving, rates, strict=True) if job.client == client]
        assert sum(mine) <= link * (1 + 1e-12)


def exact_max_min(clients: list[tuple[float, int]], pool: float) -> list[Fraction]:
    """The water level at which min(link / jobs, level) over all jobs uses up the pool, in exact numbers."""
    own = [Fraction(link) / n for link, n in clients]
    demand = sum(Fraction(link) for link, _ in clients)
    if demand <= Fraction(pool):
        return [share for share, (_, n) in zip(own, clients, strict=True) for _ in range(n)]
    for top in sorted(own):  # the level lies below ``top`` once those under it and the rest at ``top`` exceed the pool
        below = sum(Fraction(clients[c][0]) for c, share in enumerate(own) if share < top)
        above = sum(n for share, (_, n) in zip(own, clients, strict=True) if share >= top)
        if below + above * top >= Fraction(pool):
            level = (Fraction(pool) - below) / above
            break
    return [min(share, level) for share, (_, n) in zip(own, clients, strict=True) for _ in range(n)]


@given(
    clients=st.lists(st.tuples(FINITE_RATES, st.integers(min_value=1, max_value=4)), min_size=1, max_size=6),
    pool=FINITE_RATES,
)
def test_max_min_equals_the_exact_water_level(clients: list[tuple[float, int]], pool: float) -> None:
    """Progressive filling in floats is within rounding of max-min fairness worked out in fractions."""
    assert max_min(jobs(*clients), pool) == pytest.approx([float(r) for r in exact_max_min(clients, pool)], rel=1e-12)


@given(link=RATES, clients=st.integers(1, 6), each=st.integers(1, 4), pool=RATES)
def test_equal_links_and_job_counts_give_equal_shares(link: float, clients: int, each: int, pool: float) -> None:
    """Where all clients are alike no share is idle, and max_min is equal_share bit for bit."""
    moving = jobs(*[(link, each)] * clients)
    assert max_min(moving, pool) == equal_share(moving, pool)


@given(clients=CLIENTS, pool=RATES)
@example(clients=[(0.3, 3), (0.1, 1)], pool=0.4)
def test_where_no_share_is_idle_the_rules_agree(clients: list[tuple[float, int]], pool: float) -> None:
    """All bound by their links, or all by the pool: max_min is equal_share bit for bit."""
    share = pool / sum(n for _, n in clients)
    assume(all(link / n <= share for link, n in clients) or all(link / n >= share for link, n in clients))
    moving = jobs(*clients)
    assert max_min(moving, pool) == equal_share(moving, pool)


@given(schedule=SCHEDULES, limits=st.sampled_from([(1.7, math.inf), (math.inf, 1.3), (1.7, 1.3), (1.3, 1.7)]))
def test_whole_schedules_agree_where_no_share_is_idle(
    schedule: list[tuple[int, float, float, float]], limits: tuple[float, float]
) -> None:
    """With an unlimited pool, unlimited links, or one client only, all end times are equal bit for bit."""
    link, pool = limits
    alone = math.isfinite(link) and math.isfinite(pool)
    transfers = [Transfer(0 if alone else client, link, size, at, lat) for client, size, at, lat in schedule]
    assert ends(fair(max_min, pool), transfers) == ends(fair(equal_share, pool), transfers)


@BOTH
@given(schedule=SCHEDULES, links=st.lists(st.sampled_from([0.6, 1.0, 4.0, math.inf]), min_size=4, max_size=4))
def test_looking_again_at_an_event_changes_nothing(
    rule: ShareRule, schedule: list[tuple[int, float, float, float]], links: list[float]
) -> None:
    """Extra advance() calls at instants at which something happens leave every end time as it is, bit for bit."""
    transfers = [Transfer(client, links[client], size, at, lat) for client, size, at, lat in schedule]
    assert ends(fair(rule, 1.2), transfers) == ends(fair(rule, 1.2), transfers, extra=2)


@given(schedule=SCHEDULES)
def test_no_transfer_waits_longer_with_max_min_alone(schedule: list[tuple[int, float, float, float]]) -> None:
    """The last of all transfers never ends later with max_min than with equal shares (within rounding)."""
    transfers = [Transfer(client, 0.6, size, at, lat) for client, size, at, lat in schedule]
    assert max(ends(fair(max_min, 1.2), transfers)) <= max(ends(fair(equal_share, 1.2), transfers)) * (1 + 1e-12)


# -- private lanes


@pytest.mark.parametrize("direction", [D2H, H2D])
def test_private_transfers_take_turns(direction: Direction) -> None:
    """5.3 example 5: one lane of 1 MB/ms, 2 MB at 200 and at 200.5: one after the other, 202 and 204."""
    two = [Transfer(0, 1.0, 2.0, 200.0), Transfer(0, 1.0, 2.0, 200.5)]
    assert ends(FifoLanes(), two, direction=direction) == [202.0, 204.0]


def test_private_latency_runs_while_another_transfer_moves() -> None:
    """5.1: latency 0.75 from 0 and 0.5: the first ends at 2.75; the second was ready at 1.25 and goes on at once."""
    two = [Transfer(0, 1.0, 2.0, 0.0, 0.75), Transfer(0, 1.0, 2.0, 0.5, 0.75)]
    assert ends(FifoLanes(), two) == [2.75, 4.75]


def test_private_lanes_are_one_for_each_direction() -> None:
    """A load does not wait for a store, an unlimited transfer ends where it begins, and the end is told at once."""
    lanes, link = FifoLanes(), Transfer(0, 1.0, 2.0).link
    assert lanes.submit(0, 0, link, D2H, 2 * MB, 0.0, 0.0) == 2.0
    assert lanes.submit(1, 0, link, H2D, 1 * MB, 0.0, 0.0) == 1.0
    unlimited = Transfer(0, math.inf, 2.0, latency_ms=0.25).link
    assert lanes.submit(2, 0, unlimited, H2D, 2 * MB, 0.0, 0.5) == 1.0
    assert sorted(lanes.advance(1.0)) == [(1.0, 1), (1.0, 2)]
    assert lanes.next_event_ms() == 2.0


def test_bandwidth_is_decimal_and_0_is_unlimited() -> None:
    """1 GB/s is 1e6 bytes a millisecond; a bandwidth of 0 is no limit."""
    assert bytes_per_ms(1.0) == 1e6
    assert bytes_per_ms(0.0) == math.inf
