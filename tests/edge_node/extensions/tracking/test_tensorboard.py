"""Event files are read back as TensorBoard reads them."""

import resource
import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from broker_config.protocol.errors import EdgeNodeError
from edge_node.extensions.tracking.tensorboard import TensorBoard
from tests.support.plants import FEDERATION, draw, run
from tests.support.tracked_run import BEGIN, END, RUN, SETTINGS, round_events
from trainer.progress import ignore
from trainer.progress.trackers import Point, Run, track


def read(folder: Path) -> EventAccumulator:
    """A run's folder, all of its files."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return found


def scalars(found: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(each.step, each.value) for each in found.Scalars(tag)]


def test_metrics_and_settings_are_there_also_of_a_run_that_was_suspended(tmp_path: Path) -> None:
    for events in ([*BEGIN, *round_events(1, 0.5)], [*BEGIN, *round_events(2, 0.75), *END]):
        with track({"tensorboard": str(tmp_path)}, ignore) as report:
            for event in events:
                report(event)
    found = read(tmp_path / f"steel-{RUN}")
    assert scalars(found, "accuracy/plant-1") == [(1, 0.5), (2, 0.75)]
    assert scalars(found, "round/seconds") == [(1, 2.5), (2, 2.5)]
    about = found.PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(about[metadata.SESSION_START_INFO_TAG])
    told = {
        name: getattr(each, str(each.WhichOneof("kind"))) for name, each in start.hparams.items()
    }
    assert told == SETTINGS
    assert metadata.SESSION_END_INFO_TAG in about


def test_after_a_full_disk_the_file_goes_on_where_it_was_whole(tmp_path: Path) -> None:
    board = TensorBoard(str(tmp_path))
    board.begin(Run("steel", RUN, SETTINGS))
    board.record([Point("accuracy/plant-1", 0.5, 1, 0.0)])
    [file] = (tmp_path / f"steel-{RUN}").iterdir()
    limits, before = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            board.record([Point("accuracy/plant-1", 0.75, 2, 0.0)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    board.record([Point("accuracy/plant-1", 0.75, 2, 0.0)])
    assert scalars(read(file.parent), "accuracy/plant-1") == [(1, 0.5), (2, 0.75)]


def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EdgeNodeError, match="file"):
        TensorBoard(str(tmp_path / "file" / "runs"))


@pytest.mark.slow
def test_a_simulation_is_tracked_by_an_option(tmp_path: Path) -> None:
    images = draw(tmp_path / "images", 40, 0)
    done = run(
        "simulate",
        "--data",
        images,
        "--nodes",
        2,
        "--samples",
        6,
        *FEDERATION,
        "--quiet",
        "--weights",
        "none",
        "--track",
        f"tensorboard={tmp_path / 'runs'}",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "runs").iterdir()
    found = read(folder)
    tags = found.Tags()["scalars"]
    nodes = sorted(tag.partition("/")[2] for tag in tags if tag.startswith("accuracy/"))
    assert len(nodes) == 2
    assert [step for step, _ in scalars(found, f"accuracy/{nodes[0]}")] == [2]
    start = metadata.parse_session_start_info_plugin_data(
        found.PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
    )
    assert start.hparams["model"].string_value == "small"
    assert start.hparams["seed"].number_value == 7
    assert start.hparams["training.learning_rate"].number_value > 0
