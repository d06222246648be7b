"""`edge-node` whose coordinator cuts its broadcasts into small chunks,
so that those of tests have many.
"""

from edge_node.cli.main import main
from trainer.federation.server.coordinator import process as coordinator

CHUNK = 16 * 1024  # bytes

if __name__ == "__main__":
    coordinator.CHUNK = CHUNK
    main()
