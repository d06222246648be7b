"""Event files for TensorBoard: one folder a run,
with its metrics as scalars and its settings as hyperparameters.
"""

import contextlib
import io
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import (
    HParamsPluginData,
    SessionEndInfo,
    SessionStartInfo,
)
from tensorboard.summary.writer.record_writer import RecordWriter

from broker_config.storage import disk
from trainer.progress.trackers import Point, Run


class TensorBoard:
    """Writes event files below a folder.

    Without TensorFlow, and without torch, which a coordinator may not have.
    """

    def __init__(self, folder: str):
        """EdgeNodeError if nothing can be written there."""
        self._folder = Path(folder)
        self._path = Path()
        disk.check_writable(self._folder)
        self.remedy = f"make room on the disk of {folder}, and let this user write there"

    def begin(self, run: Run) -> None:
        """A further file of a run that goes on is shown as one with those before."""
        folder = self._folder / f"{run.federation}-{run.id}"
        folder.mkdir(parents=True, exist_ok=True)
        self._path = (
            folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        )
        start = SessionStartInfo(group_name=run.id, start_time_secs=time.time())
        for name, value in run.settings.items():
            match value:
                case bool():
                    start.hparams[name].bool_value = value
                case str():
                    start.hparams[name].string_value = value
                case _:
                    start.hparams[name].number_value = value
        self._append(
            [
                Event(wall_time=time.time(), file_version="brain.Event:2"),
                _about_run(
                    metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=start)
                ),
            ]
        )

    def record(self, points: Sequence[Point]) -> None:
        """Append scalars."""
        self._append(
            [
                Event(
                    wall_time=each.time,
                    step=each.round,
                    summary=Summary(value=[Summary.Value(tag=each.name, simple_value=each.value)]),
                )
                for each in points
            ]
        )

    def end(self, *, finished: bool) -> None:
        """A run that is suspended has no end yet."""
        if finished:
            end = SessionEndInfo(status=Status.STATUS_SUCCESS, end_time_secs=time.time())
            self._append(
                [_about_run(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end))]
            )

    def _append(self, events: Sequence[Event]) -> None:
        """All of them or none: behind half a record a reader finds nothing."""
        records = io.BytesIO()
        writer = RecordWriter(records)
        for event in events:
            writer.write(event.SerializeToString())
        size = self._path.stat().st_size if self._path.exists() else 0
        try:
            with self._path.open("ab") as file:
                file.write(records.getvalue())
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self._path, size)
            raise


def _about_run(tag: str, data: HParamsPluginData) -> Event:
    """As TensorBoard's own function makes it, whose module needs TensorFlow."""
    value = Summary.Value(
        tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR
    )
    return Event(wall_time=time.time(), summary=Summary(value=[value]))
