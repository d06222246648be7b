"""The consensus head: sums of an encoder's features that plants exchange once,
and the classifier made of them.
"""
