"""`edge-node doctor`: tests of a broker and this machine for use in a federation, with remedies."""
