"""Named random streams: what they depend on, and what they do not."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g2sim.bus.drivers import InlineDriver
from g2sim.bus.kernel import Kernel, Port
from g2sim.bus.streams import RandomStream

SEEDS = st.integers(0, 2**64 - 1)
NAMES = st.text(max_size=20).map(lambda text: f"actor:{text}")
patient = settings(deadline=None)  # the machine is shared


def draws(stream: RandomStream, count: int = 4) -> list[Any]:
    return [*(stream.unit() for _ in range(count)), *(stream.below(1000) for _ in range(count))]


@pytest.mark.parametrize("limit", [0, -1])
def test_below_refuses_a_limit_that_leaves_nothing_to_draw(limit: int) -> None:
    with pytest.raises(ValueError):
        RandomStream(0, "a:b").below(limit)


@patient
@given(SEEDS, NAMES, SEEDS, NAMES)
def test_streams_are_equal_if_and_only_if_seed_and_name_are(
    seed: int, name: str, other_seed: int, other_name: str
) -> None:
    assert draws(RandomStream(seed, name)) == draws(RandomStream(seed, name))
    if seed != other_seed:
        assert draws(RandomStream(seed, name)) != draws(RandomStream(other_seed, name))
    if name != other_name:
        assert draws(RandomStream(seed, name)) != draws(RandomStream(seed, other_name))


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_close_seeds_and_digits_that_move_between_seed_and_name_give_other_streams(seed: int) -> None:
    mine = draws(RandomStream(seed, "1:x"))
    assert mine != draws(RandomStream(seed + 1, "1:x"))
    assert mine != draws(RandomStream(seed * 10 + 1, ":x"))


def test_a_kernel_gives_one_stream_per_name_whatever_the_order_in_which_they_are_asked_for() -> None:
    forth, back = Kernel(seed=5), Kernel(seed=5)
    names = ["router:ties", "router:placement", "wire:loss"]
    for name in names:
        forth.stream(name)
    for name in reversed(names):
        back.stream(name)
    for name in names:
        assert forth.stream(name) is forth.stream(name)
        assert draws(forth.stream(name)) == draws(back.stream(name)) == draws(RandomStream(5, name))


def test_draws_of_one_stream_do_not_shift_another() -> None:
    kernel = Kernel(seed=5)
    draws(kernel.stream("router:ties"), 100)
    assert draws(kernel.stream("wire:loss")) == draws(RandomStream(5, "wire:loss"))


def test_an_actors_stream_is_named_after_the_actor_and_the_purpose() -> None:
    class Dice:
        def receive(self, message: Any, port: Port) -> None:
            port.stream("throw").below(6)

        def waiting(self) -> tuple[str, ...]:
            return ()

    kernel = Kernel(seed=5)
    for name in ("left", "right"):
        kernel.post(kernel.register(name, Dice()), "go", 0, 0.0)
    InlineDriver(kernel).run()
    assert {name: stream.draws for name, stream in kernel.streams.items()} == {"left:throw": 1, "right:throw": 1}


def test_draws_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    """Fresh processes with other PYTHONHASHSEEDs draw what this one draws."""
    code = (
        "from g2sim.bus.streams import RandomStream\n"
        "stream = RandomStream(7, 'router:ties')\n"
        "print(repr([stream.unit(), stream.below(1000), stream.draws, stream.fingerprint()]))"
    )
    stream = RandomStream(7, "router:ties")
    here = repr([stream.unit(), stream.below(1000), stream.draws, stream.fingerprint()])
    for hash_seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
        )
        assert done.stdout.strip() == here


def test_draws_are_what_they_were_when_this_test_was_written() -> None:
    """A golden: a change of generator or seeding makes every recorded run another run."""
    stream = RandomStream(7, "router:ties")
    assert [stream.unit(), stream.below(1000), stream.below(2**40), stream.fingerprint()] == [
        0.35067023034921885,
        78,
        278798874074,
        9623342646784915590,
    ]


@patient
@given(st.lists(st.one_of(st.none(), st.integers(1, 2**40)), max_size=30))
def test_each_draw_counts_once_and_lies_in_its_range(limits: list[int | None]) -> None:
    """However many bits the generator takes for it."""
    stream = RandomStream(3, "a:b")
    for number, limit in enumerate(limits, 1):
        if limit is None:
            assert 0.0 <= stream.unit() < 1.0
        else:
            assert 0 <= stream.below(limit) < limit
        assert stream.draws == number


def test_the_fingerprint_tells_equal_histories_from_others_and_is_not_counted() -> None:
    def after(*limits: int, seed: int = 3) -> int:
        stream = RandomStream(seed, "a:b")
        for limit in limits:
            stream.below(limit)
        print_ = stream.fingerprint()
        assert stream.draws == len(limits)
        assert 0 <= print_ < 2**64
        return print_

    assert after() == after()
    assert after(10, 10) == after(10, 10)
    assert len({after(), after(10), after(10, 10), after(seed=4)}) == 4
