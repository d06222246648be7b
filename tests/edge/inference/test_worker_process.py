"""Processes that answer requests: each in its time, whatever one of them does to its process."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edge.inference.worker_process import WorkerEndedError, WorkerProcesses

MODULE = """
import os, signal
from edge.inference.worker_process import serve_requests
def answer(request):
    print("this is no answer", flush=True)
    match request:
        case b"pid": return [b"%d" % os.getpid()]
        case b"secret": return [os.environ.get("EDGE_NODE_PASSWORD", "").encode()]
        case b"hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
            while True: pass
        case b"crash": os.abort()
    return [request[:3], request[3:]]
serve_requests(answer)
"""


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerProcesses]:
    (tmp_path / "answering.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("EDGE_NODE_PASSWORD", "a secret")
    with contextlib.closing(WorkerProcesses("answering")) as found:
        yield found


def test_one_process_answers_all_requests_of_a_thread_whatever_is_printed(
    workers: WorkerProcesses,
) -> None:
    assert workers.ask([b"all ", b"of it"], 10) == b"all of it"
    assert len({workers.ask([b"pid"], 10) for _ in range(3)}) == 1
    assert workers.ask([bytes(1 << 24)], 10) == bytes(1 << 24)


def test_it_gets_no_secret(workers: WorkerProcesses) -> None:
    assert workers.ask([b"secret"], 10) == b""


def test_it_runs_no_file_of_the_folder_in_which_a_command_was_started(
    workers: WorkerProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may be a folder of images, in which others write."""
    images = tmp_path / "images"
    images.mkdir()
    for name in ("answering", "msgspec", "edge", "signal", "struct"):
        (images / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(images)
    assert workers.ask([b"all ", b"of it"], 10) == b"all of it"


def test_threads_have_a_process_each(workers: WorkerProcesses) -> None:
    with ThreadPoolExecutor(2) as threads:
        hanging = threads.submit(workers.ask, [b"hang"], 0.3)
        assert threads.submit(workers.ask, [b"quick"], 10).result() == b"quick"
        with pytest.raises(WorkerEndedError) as late:
            hanging.result()
    assert late.value.is_late


def test_after_a_crash_another_process_answers(workers: WorkerProcesses) -> None:
    first = workers.ask([b"pid"], 10)
    with pytest.raises(WorkerEndedError) as crash:
        workers.ask([b"crash"], 10)
    assert not crash.value.is_late
    second = workers.ask([b"pid"], 10)
    assert second != first
    handle = os.pidfd_open(int(second))
    os.kill(int(second), signal.SIGKILL)
    assert select.select([handle], [], [], 30)[0]
    os.close(handle)
    assert workers.ask([b"still"], 10) == b"still"


def test_it_finishes_what_it_has_in_hand_when_a_service_manager_ends_all_processes(
    workers: WorkerProcesses,
) -> None:
    first = workers.ask([b"pid"], 10)
    os.kill(int(first), signal.SIGTERM)
    assert workers.ask([b"pid"], 10) == first


def test_it_ends_soon_after_its_parent_also_amid_a_request(workers: WorkerProcesses) -> None:
    script = (
        "from edge.inference.worker_process import *; "
        "WorkerProcesses('answering').ask([b'hang'], 0.3)"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        while not (child := children.read_text().split()):
            assert parent.poll() is None
        handle = os.pidfd_open(int(child[0]))
        parent.kill()
    assert select.select([handle], [], [], 30)[0]
    os.close(handle)
