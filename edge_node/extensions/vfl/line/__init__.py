"""The vertical model in effect: sensors embed each product as it comes,
the head predicts from what has arrived.
"""
