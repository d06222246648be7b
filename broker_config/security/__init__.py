"""Security of a federation: certificates, member registry, kits, signatures, access list,
trust files.
"""
