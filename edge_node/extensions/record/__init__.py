"""Records that an auditor can verify offline: of a coordinator, of a line;
and what bundles and models know of them.
"""
