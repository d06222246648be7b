"""The server half of a federation. numpy only: a coordinator's machine needs no torch."""
