"""`edge-node doctor`: what a broker and this machine offer to a federation, tried out, and what to change."""
