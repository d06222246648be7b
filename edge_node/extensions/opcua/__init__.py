"""OPC UA: verdicts written to a server's nodes, and images taken when one of them changes."""
