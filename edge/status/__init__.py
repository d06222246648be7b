"""Federations and provisioning from outside: what is known of them, for people and machines."""
