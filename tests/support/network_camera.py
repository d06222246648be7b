"""A camera in the network: a stream of JPEG pictures over HTTP, whose color can be changed."""

import contextlib
import http.server
import io
import threading
import time
from collections.abc import Iterator

from PIL import Image

_PERIOD = 0.02  # seconds between two frames


class NetworkCamera:
    """What it shows, and at which address."""

    def __init__(self) -> None:
        self.url = ""
        self.show((0, 255, 0))

    def show(self, color: tuple[int, int, int]) -> None:
        """All frames from now on are of this color."""
        self.sent = 0  # frames, of this color
        out = io.BytesIO()
        Image.new("RGB", (64, 48), color).save(out, "JPEG")
        self.part = b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%b\r\n" % (
            len(out.getvalue()),
            out.getvalue(),
        )


@contextlib.contextmanager
def network_camera() -> Iterator[NetworkCamera]:
    """A camera that shows green until told otherwise."""
    camera, stop = NetworkCamera(), threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            with contextlib.suppress(OSError):
                while not stop.is_set():
                    self.wfile.write(camera.part)
                    camera.sent += 1
                    time.sleep(_PERIOD)  # as a camera's own rate

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        camera.url = f"http://127.0.0.1:{server.server_port}/stream"
        try:
            yield camera
        finally:
            stop.set()
            server.shutdown()
