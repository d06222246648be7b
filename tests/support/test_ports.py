"""Ports that tests give to their servers."""

import multiprocessing
import socket
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.support.ports import HOST, free_port


def draw(count: int) -> list[int]:
    return [free_port() for _ in range(count)]


def test_no_process_is_given_a_port_twice_nor_one_of_another_process() -> None:
    """A process keeps each hundred that it has gone through, not the last one alone."""
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        found = [port for ports in pool.map(draw, [250] * 4) for port in ports]
        assert len(set(found)) == len(found) == 1000
        for first in {port // 100 * 100 for port in found}:
            with (
                socket.socket(type=socket.SOCK_DGRAM) as other,
                pytest.raises(OSError, match="in use"),
            ):
                other.bind((HOST, first))
