"""Certificates, members and their kits, signatures, the broker's access list, trust."""
