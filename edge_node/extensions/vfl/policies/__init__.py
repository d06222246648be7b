"""Policies for the number of local iterations of each sensor in a round: latency model,
rules, trained agents.
"""
