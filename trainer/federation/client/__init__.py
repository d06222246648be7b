"""The client half of a federation: discovery, a node's session, its training thread."""
