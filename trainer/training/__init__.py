"""Local training: engines, a node's round without any network, evaluation."""
