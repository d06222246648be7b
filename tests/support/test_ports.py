"""Ports that tests give to their servers."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from tests.support.ports import free_port


def draw(count: int) -> list[int]:
    return [free_port() for _ in range(count)]


def test_no_process_is_given_a_port_twice_nor_one_of_another_process() -> None:
    """Of 120 hundreds four processes need eight: had each drawn them at random, two would often have met."""
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        found = [port for ports in pool.map(draw, [150] * 4) for port in ports]
    assert len(set(found)) == len(found) == 600
