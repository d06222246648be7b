"""DAO-VFL: online vertical federated learning of sensors that see other features of the same
products.
"""
