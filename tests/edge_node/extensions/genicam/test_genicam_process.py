"""Pixels of each format as RGB, a camera's features, frames that were lost,
and a camera that is gone.
"""

import importlib
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from broker_config.protocol.errors import EdgeNodeError
from edge_node.extensions.genicam import genicam_process
from edge_node.extensions.genicam.source import Message, Settings
from tests.support.genicam_simulator import PRODUCER
from tests.support.programs import LIBPYTHON

pytestmark = pytest.mark.needs(LIBPYTHON)

DESCRIPTION = """<?xml version="1.0" encoding="utf-8"?>
<RegisterDescription xmlns="http://www.genicam.org/GenApi/Version_1_1" ModelName="M" VendorName="V"
    ToolTip="" StandardNameSpace="None" SchemaMajorVersion="1" SchemaMinorVersion="1" \
SchemaSubMinorVersion="0"
    MajorVersion="1" MinorVersion="0" SubMinorVersion="0" ProductGuid="0" VersionGuid="0">
  <Category Name="Root"><pFeature>TriggerMode</pFeature></Category>
  <Enumeration Name="TriggerMode">
    <EnumEntry Name="Off"><Value>0</Value></EnumEntry><EnumEntry \
Name="On"><Value>1</Value></EnumEntry>
    <Value>0</Value>
  </Enumeration>
  <Float Name="ExposureTime"><Value>10</Value><Max>9000</Max></Float>
  <Integer Name="Gain"><Value>1</Value></Integer>
  <Boolean Name="ReverseX"><Value>false</Value><OnValue>1</OnValue><OffValue>0</OffValue></Boolean>
  <IntReg \
Name="Width"><Address>0</Address><Length>4</Length><AccessMode>RO</AccessMode><pPort>Device</pPort>
    <Sign>Unsigned</Sign><Endianess>LittleEndian</Endianess></IntReg>
  <Port Name="Device"/>
</RegisterDescription>"""


@pytest.fixture
def node_map() -> Any:
    """The features of a camera that is not connected."""
    # not where there is no shared library of Python
    genapi = importlib.import_module("genicam.genapi")
    found = genapi.NodeMap()
    found.load_xml_from_string(DESCRIPTION)
    return found


def rgb(name: str, *values: int, width: int = 1, bits: int = 8) -> list[int]:
    array = np.array(values, np.uint8 if bits == 8 else np.uint16)
    return genicam_process.to_rgb(name, array, 1, width).ravel().tolist()


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
def test_of_gray_values_the_upper_eight_bits_count(bits):
    assert (
        rgb(f"Mono{bits}", 200 << (bits - 8), 2 ** (bits - 8), width=2, bits=bits)
        == [200] * 3 + [1] * 3
    )


def test_colors_come_in_their_order_and_padding_is_left_out():
    assert rgb("RGB8", 1, 2, 3, 99) == [1, 2, 3]
    assert rgb("BGR8", 1, 2, 3, 99) == [3, 2, 1]
    assert rgb("RGBa8", 1, 2, 3, 99) == [1, 2, 3]
    assert rgb("BGRa8", 1, 2, 3, 99) == [3, 2, 1]


@pytest.mark.parametrize("bits", [8, 12])
@pytest.mark.parametrize("pattern", ["RG", "GR", "GB", "BG"])
def test_a_mosaic_shows_the_color_that_its_pixels_saw(pattern, bits):
    letters = {"RG": "RGGB", "GR": "GRBG", "GB": "GBRG", "BG": "BGGR"}[pattern]
    color = {"R": 200, "G": 100, "B": 50}
    cell = np.array(
        [color[letter] << (bits - 8) for letter in letters], np.uint8 if bits == 8 else np.uint16
    )
    mosaic = np.tile(cell.reshape(2, 2), (4, 4))
    seen = genicam_process.to_rgb(f"Bayer{pattern}{bits}", mosaic.ravel(), 8, 8)
    assert seen[2:-2, 2:-2].reshape(-1, 3).tolist() == [[200, 100, 50]] * 16


@pytest.mark.parametrize("name", ["Mono12Packed", "Mono10p", "YUV422_8", "Coord3D_ABC32f"])
def test_other_formats_are_refused_with_those_that_are_not(name):
    with pytest.raises(EdgeNodeError, match=f"pixel format {name}") as caught:
        genicam_process.check_format(name)
    assert "PixelFormat under features" in caught.value.remedy


def test_features_of_each_type_are_written(node_map):
    wanted = {"TriggerMode": "On", "ExposureTime": 5000.5, "Gain": 7, "ReverseX": True}
    genicam_process.set_features(node_map, wanted)
    assert {name: node_map.get_node(name).value for name in wanted} == wanted


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"TriggerMod": "On"}, "has no feature TriggerMod"),
        ({"TriggerMode": "Yes"}, "does not take TriggerMode = 'Yes': .* the value is invalid"),
        ({"ExposureTime": 1e6}, "does not take ExposureTime = 1000000.0: .* 9000"),
        ({"Root": 1}, "does not take Root = 1"),
    ],
)
def test_a_feature_that_the_camera_does_not_have_or_take_is_named(node_map, features, expected):
    with pytest.raises(EdgeNodeError, match=expected) as caught:
        genicam_process.set_features(node_map, features)
    assert "thrown in" not in caught.value.what
    assert caught.value.remedy


def test_a_camera_that_does_not_answer_or_stays_silent_is_gone(node_map):
    with pytest.raises(EdgeNodeError, match="answer"):
        genicam_process.check_alive(node_map, silent=0)
    with pytest.raises(EdgeNodeError, match="no frames") as caught:
        genicam_process.check_alive(SimpleNamespace(), silent=11)
    assert 'TriggerMode = "On"' in caught.value.remedy


def test_frames_that_the_camera_could_not_deliver_are_counted_and_keep_their_numbers():
    stop = threading.Event()
    found: list[Message] = []

    def send(message: Message, _: object = None) -> None:
        found.append(message)
        if len(found) >= 3:
            time.sleep(0.5)  # in which the buffers of the producer, 8, are filled, sooner or later
        if found[-1].lost:
            stop.set()

    settings = Settings(producer=str(PRODUCER), camera="2", features={"AcquisitionFrameRate": 200})
    reading = threading.Thread(target=genicam_process.acquire, args=(settings, send, stop))
    reading.start()
    reading.join()
    assert found[-1].lost > 0
    assert found[-1].number == len(found) + sum(message.lost for message in found)
