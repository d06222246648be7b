"""`python -m edge_node` is `edge-node`."""

from edge_node.cli.main import main

if __name__ == "__main__":
    main()
