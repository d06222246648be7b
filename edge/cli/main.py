"""The forwarding of `python -m edge.cli.main`, which systemd units of version 0.1 call."""

from edge_node.cli.main import main

if __name__ == "__main__":
    main()
