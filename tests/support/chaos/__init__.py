"""Federations of real processes in which whatever can be killed is killed,
and what must come out of them all the same.

`python -m tests.support.chaos` runs one; `make chaos` runs those that prove the promise.
"""
