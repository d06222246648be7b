"""A simulated GenICam camera: frames become verdicts, and what is missing, wrong,
crashes or hangs is told.
"""

import asyncio
import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from broker_config.protocol.errors import UsageError
from edge.daemon import line_settings
from edge.daemon.service_install import find_needs
from edge.inference.outcomes import Notice, Verdict
from edge_node.extensions.genicam import source as genicam
from tests.support.genicam_simulator import PRODUCER
from tests.support.line_sources import fed, judged_names, opened
from tests.support.programs import LIBPYTHON
from tests.support.waiting import wait_until

pytestmark = pytest.mark.needs(LIBPYTHON)

SLOW = {"AcquisitionFrameRate": 5}  # frames a second
SETTINGS = genicam.Settings(producer=str(PRODUCER), camera="1", features=SLOW)


def table(**others: Any) -> dict[str, Any]:
    return {"kind": "genicam", "producer": str(PRODUCER), "camera": "1", "features": SLOW} | others


def camera_processes() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if is_camera(each)]


def is_camera(process: psutil.Process) -> bool:
    # a zombie, too: another test's that has ended, and that nobody has asked for
    with suppress(psutil.NoSuchProcess):
        return "edge_node.extensions.genicam.genicam_process" in process.cmdline()
    return False


def test_its_service_sees_usb_devices_and_the_network_and_may_read_the_producer(
    tmp_path: Path,
) -> None:
    tables = {"sources": [{"kind": "genicam", "producer": "vendor.cti"}]}
    settings = line_settings.parse(tables, tmp_path / "line.toml")
    options = dict.fromkeys(
        ("bundle", "trust", "watch", "ca", "cert", "key", "output", "state"), None
    )
    needs = find_needs(tmp_path / "line.toml", {**options, "port": 0}, settings, {})
    assert needs.reads == (tmp_path / "vendor.cti",)
    assert needs.cameras == ("char-usb_device",)
    assert needs.interfaces


def test_frames_become_verdicts_named_by_the_camera_and_their_numbers(model, instance):
    names = judged_names(model, instance, table(features=SLOW | {"PixelFormat": "Mono8"}), 3)
    assert names[:3] == ["1#1", "1#2", "1#3"]
    wait_until(lambda: not camera_processes())


def test_only_so_many_frames_are_sent_as_asked(model, instance):
    assert judged_names(model, instance, table(every=5, features={"AcquisitionFrameRate": 50}), 2)[
        :2
    ] == ["1#1", "1#6"]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({"camera": "9"}, "genicam 9 names none, or several, of the cameras 0, 1, 2"),
        (
            {"features": {"PixelFormt": "Mono8"}},
            "genicam 1 has no feature PixelFormt; did you mean 'PixelFormat'?",
        ),
        ({"features": {"PixelFormat": "Mono99"}}, "genicam 1 does not take PixelFormat = 'Mono99'"),
        (
            {"features": {"ComponentSelector": "Range"}},
            "sends the pixel format Coord3D_ABC32f_Planar",
        ),
    ],
)
def test_what_the_camera_cannot_do_is_told_with_a_remedy(model, instance, others, expected):
    assert expected in first_notice(model, instance, table(**others))


def test_one_of_several_cameras_must_be_named(model, instance):
    wanted = table()
    del wanted["camera"]
    assert "genicam viky names none" in first_notice(model, instance, wanted)


def test_a_producer_that_is_no_library_is_told(model, instance, tmp_path):
    (tmp_path / "vendor.cti").write_text("no library")
    assert "cannot load its producer" in first_notice(model, instance, table(producer="vendor.cti"))


def first_notice(model: Any, instance: Any, wanted: dict[str, Any]) -> str:
    async def run() -> str:
        async with fed(model, *opened(instance, wanted)) as outbox:
            [notice] = await outbox.next()
        assert isinstance(notice, Notice)
        return notice.text

    return asyncio.run(run())


def after_harm(model: Any, source: genicam.Genicam, harm: Any) -> list[str]:
    """The notices of a line whose camera's process has come to harm, until images are back."""

    async def run() -> list[str]:
        async with fed(model, source) as outbox:
            await outbox.next()
            harm(camera_processes()[0])
            found: list[Any] = []
            while not (
                any(isinstance(each, Notice) for each in found) and isinstance(found[-1], Verdict)
            ):
                found += await outbox.next()
        return [each.text for each in found if isinstance(each, Notice)]

    return asyncio.run(run())


def test_a_producer_that_crashes_is_told_once_and_started_again(model):
    lost, back = after_harm(model, genicam.Genicam(SETTINGS), psutil.Process.kill)
    assert "ended with -9" in lost
    assert "brings images again" in back


@pytest.mark.slow
def test_a_producer_that_hangs_is_told_once_and_started_again(model):
    hung, back = after_harm(model, genicam.Genicam(SETTINGS, patience=4.0), psutil.Process.suspend)
    assert "hangs in its producer" in hung
    assert "brings images again" in back


def test_a_producer_that_hangs_does_not_delay_the_end(model, instance):
    async def run() -> None:
        async with fed(model, *opened(instance, table())) as outbox:
            await outbox.next()
            camera_processes()[0].suspend()

    asyncio.run(run())
    wait_until(lambda: not camera_processes())


def test_of_triggered_frames_more_wait_and_those_that_are_dropped_are_counted():
    reader = genicam.Reader(
        genicam.Settings(producer="", features={"TriggerMode": "On"}),
        "genicam",
        lambda: None,
        patience=60.0,
    )
    for number in range(1, 11):
        reader._put((number, np.zeros((1, 1, 3), np.uint8)))
    assert [number for number, _ in iter(reader.next, None)] == [*range(3, 11)]
    assert reader.dropped == 2


def test_a_missing_producer_and_a_missing_extra_are_said_at_the_start(instance, monkeypatch):
    with pytest.raises(UsageError, match=r"GenTL.*vendor\.cti"):
        opened(instance, table(producer="vendor.cti"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError) as caught:
        opened(instance, table())
    assert "edge-node[genicam]" in caught.value.remedy


def test_a_path_in_the_settings_starts_at_their_folder(instance, tmp_path):
    (tmp_path / "vendor.cti").touch()
    [source] = opened(instance, {"kind": "genicam", "producer": "vendor.cti"})
    assert source.name == "genicam vendor"
    assert Path(source._settings.producer) == tmp_path / "vendor.cti"
